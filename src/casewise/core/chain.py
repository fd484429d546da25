"""An append-only log that shows later changes, for audits, exposures and reviews.

Each line is a JSON object that holds the hash of the line before it and its own,
``hash = sha256(previous + canonical JSON of the rest)``. An edit, a removal in the middle or another order breaks the
chain. Cutting lines off the end cannot be seen from the log alone; keep :attr:`Chain.tip` elsewhere for that
(``casewise predict --set report=FILE`` does).

Appending takes a lock, so several processes may share a log, and ends with fsync. A killed process may leave an
incomplete line: readers skip it, and the next writer removes it and appends a line that says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from casewise.core.durable import file_lock, text_sha256
from casewise.core.errors import DamagedArchive
from casewise.core.formats import json_text, parsed_json

BEGINNING = "0" * 64
TORN = "torn-line-removed"
_OF_EVERY_LINE = ("event", "time", "previous", "hash")
_OF_TEXTS = frozenset({"files", "to_do", "labels", "compared"})  # lists of texts, or texts by name
_BLOCK = 4096  # bytes; a line and the one before it mostly fit


@dataclass(frozen=True)
class Chain:
    """The hash-chained log at a path; the file need not exist yet."""

    path: Path

    def append(self, event: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Append one line, sync it to disk, and return it."""
        with file_lock(self.path) as file:
            previous, torn = _tail(file, self.path)
            if torn:
                previous = _write(file, previous, TORN, {"bytes": torn})["hash"]
            return _write(file, previous, event, facts)

    def lines(self) -> list[dict[str, Any]]:
        """Return every finished line, oldest first; check :attr:`problems` before trusting them."""
        found = (_parsed(text) for text in self._content()[0])
        return [line for line in found if line is not None]

    @property
    def problems(self) -> list[str]:
        """Problems of the complete lines; empty if the chain is intact."""
        problems: list[str] = []
        previous = BEGINNING
        for number, text in enumerate(self._content()[0], start=1):
            line = _parsed(text)
            if line is None:
                return [*problems, f"{self.path.name} line {number} is not a line of a hash-chained log"]
            if line["previous"] != previous:
                problems.append(
                    f"{self.path.name} line {number} does not follow line {number - 1}: removed, added or moved"
                )
            if line["hash"] != line_hash(line):
                problems.append(f"{self.path.name} line {number} was edited")
            previous = line["hash"]
        return problems

    @property
    def torn(self) -> bool:
        """True if a killed writer left an incomplete line at the end."""
        return bool(self._content()[1])

    def since(self, started: str, finished: str) -> tuple[list[dict[str, Any]], bool]:
        """The lines of the last run, and whether it finished.

        Args:
            started: Event with which a run begins.
            finished: Event with which a run ends.

        Returns:
            The lines from the last ``started`` on; none and True where no run began.
        """
        lines = self.lines()
        begun = [place for place, line in enumerate(lines) if line.get("event") == started]
        last = lines[begun[-1] :] if begun else []
        return last, not last or any(line.get("event") == finished for line in last)

    @property
    def tip(self) -> tuple[int, str]:
        """Number of finished lines and the last hash, to be kept elsewhere."""
        lines = self.lines()
        return len(lines), lines[-1]["hash"] if lines else BEGINNING

    def _content(self) -> tuple[list[bytes], bytes]:
        """Return the finished lines and the incomplete rest."""
        content = self.path.read_bytes() if self.path.is_file() else b""
        whole, newline, rest = content.rpartition(b"\n")
        return (whole.split(b"\n") if newline else []), rest


def line_hash(line: Mapping[str, Any]) -> str:
    """Return the hash of a line, from its content and the hash of the line before it."""
    rest = {name: value for name, value in line.items() if name not in ("hash", "previous")}
    return text_sha256(f"{line['previous']}{json_text(rest, sort_keys=True)}")


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Return a line whose fields have the types that readers rely on, else None."""
    try:
        line = parsed_json(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or not all(isinstance(line.get(name), str) for name in _OF_EVERY_LINE):
        return None
    fits = isinstance(line.get("choice", ""), str) and all(_are_texts(line[name]) for name in _OF_TEXTS & set(line))
    return line if fits else None


def _are_texts(value: Any) -> bool:
    parts = (*value, *value.values()) if isinstance(value, dict) else value
    return isinstance(value, dict | list) and all(isinstance(part, str) for part in parts)


def _write(file: BinaryIO, previous: str, event: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    line = {"event": event, "time": now, **facts, "previous": previous}
    line["hash"] = line_hash(line)
    file.write(json_text(line, sort_keys=True).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())
    return line


def _tail(file: BinaryIO, path: Path) -> tuple[str, int]:
    """Return the last hash and the number of bytes that were removed from an unfinished line.

    Only the end of the file is read, so the cost does not depend on the length of the log.
    """
    size = begin = file.seek(0, os.SEEK_END)
    content = b""
    while begin and content.count(b"\n") < 2:
        begin = max(0, size - max(_BLOCK, 2 * len(content)))
        file.seek(begin)
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    lines = whole.splitlines()
    last = _parsed(lines[-1]) if lines else {"hash": BEGINNING}
    if last is None:
        raise DamagedArchive(
            f"{path} does not end with a line of a hash-chained log; move or restore the file and try again"
        )
    torn = len(content) - len(whole)
    if torn:
        file.truncate(size - torn)
    return last["hash"], torn
