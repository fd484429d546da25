"""A log that is only appended to, and that shows when somebody did otherwise: for audits, exposures and reviews.

Each line is a JSON object that holds the hash of the line before it and its own,
``hash = sha256(previous + canonical JSON of the rest)``. An edit, a removal in the middle or another order breaks the
chain. Cutting lines off the end cannot be seen from the log alone; keep :attr:`Chain.tip` elsewhere for that
(``casewise predict --report`` does).

Appending takes a lock, so several processes may share a log, and ends with fsync. A process that was killed while it
wrote leaves half a line: readers pass over it, and the next writer cuts it off and says so in a line of its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from casewise.core.durable import text_sha256
from casewise.core.errors import DamagedArchive
from casewise.core.formats import json_text

BEGINNING = "0" * 64
TORN = "torn-line-removed"
_BLOCK = 4096  # bytes; a line and the one before it mostly fit


@dataclass(frozen=True)
class Chain:
    """The hash-chained log at a path; the file need not exist yet."""

    path: Path

    def append(self, event: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Append one line, durably, and return it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            _lock(file)
            previous, torn = _tail(file, self.path)
            if torn:
                previous = _write(file, previous, TORN, {"bytes": torn})["hash"]
            return _write(file, previous, event, facts)

    def lines(self) -> list[dict[str, Any]]:
        """Every finished line that is a JSON object, oldest first; see :attr:`problems` before trusting them."""
        found = (_parsed(text) for text in self._content()[0])
        return [line for line in found if line is not None]

    @property
    def problems(self) -> list[str]:
        """What is wrong with the finished lines; empty where each follows from the one before."""
        problems: list[str] = []
        previous: str | None = None
        for number, text in enumerate(self._content()[0], start=1):
            line = _parsed(text)
            if line is None or not isinstance(line.get("hash"), str) or not isinstance(line.get("previous"), str):
                return [*problems, f"{self.path.name} line {number} is not a line of a hash-chained log"]
            if line["previous"] not in (_BEGINNINGS if previous is None else (previous,)):
                problems.append(
                    f"{self.path.name} line {number} does not follow line {number - 1}: removed, added or moved"
                )
            if line["hash"] != line_hash(line):
                problems.append(f"{self.path.name} line {number} was edited")
            previous = line["hash"]
        return problems

    @property
    def torn(self) -> bool:
        """Whether a killed writer left half a line at the end."""
        return bool(self._content()[1])

    @property
    def tip(self) -> tuple[int, str]:
        """Number of finished lines and the last hash, to be kept elsewhere."""
        lines = self.lines()
        return len(lines), str(lines[-1]["hash"]) if lines else BEGINNING

    def _content(self) -> tuple[list[bytes], bytes]:
        """The finished lines, and what follows the last of them."""
        content = self.path.read_bytes() if self.path.is_file() else b""
        whole, newline, rest = content.rpartition(b"\n")
        return (whole.split(b"\n") if newline else []), rest


def line_hash(line: Mapping[str, Any]) -> str:
    """The hash that a line should have, from its own content and the hash of the line before it."""
    rest = {name: value for name, value in line.items() if name not in ("hash", "previous")}
    if "event" not in line:  # an exposure ledger of casewise 0.1
        return text_sha256(json_text({**rest, "previous": line["previous"]}, sort_keys=True))
    return text_sha256(f"{line['previous']}{json_text(rest, sort_keys=True)}")


_BEGINNINGS = (BEGINNING, "")  # the second one began the exposure ledgers of casewise 0.1


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _write(file: BinaryIO, previous: str, event: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    line = {"event": event, "time": now, **facts, "previous": previous}
    line["hash"] = line_hash(line)
    file.write(json_text(line, sort_keys=True).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())
    return line


def _tail(file: BinaryIO, path: Path) -> tuple[str, int]:
    """The last hash, after cutting off a line that was never finished; and how many bytes that were.

    Read from the end, so that a line costs the same however long the log is.
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
    if last is None or not isinstance(last.get("hash"), str):
        raise DamagedArchive(
            f"{path} does not end with a line of a hash-chained log; move the file away, or restore it, and try again"
        )
    torn = len(content) - len(whole)
    if torn:
        file.truncate(size - torn)
    return last["hash"], torn


if sys.platform == "win32":
    import msvcrt

    def _lock(file: BinaryIO) -> None:
        """Wait until nobody else appends; closing the file gives the lock back."""
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)

else:
    import fcntl

    def _lock(file: BinaryIO) -> None:
        """Wait until nobody else appends; closing the file gives the lock back."""
        fcntl.flock(file, fcntl.LOCK_EX)
