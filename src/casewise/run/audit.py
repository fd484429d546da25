"""An audit log that is only appended to, and that shows when somebody did otherwise.

Each line holds the hash of the line before it and its own: ``hash = sha256(previous + canonical JSON of the rest)``. An
edit, a removal in the middle or another order breaks the chain. Cutting lines off the end cannot be seen from the log
alone, so the number of lines and the last hash are also in ``--report run.json``; keep that elsewhere.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from casewise.core.strict_json import json_text

BEGINNING = "0" * 64
_BLOCK = 4096  # bytes; a line and the one before it mostly fit


def append_event(path: Path, event: str, facts: Mapping[str, Any]) -> str:
    """Append one line under a lock, fsync it, and return its hash; the torn last line of a killed run is cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        previous, torn = _tail(file)
        if torn:
            previous = _write(file, previous, "torn-line-removed", {"bytes": torn})
        return _write(file, previous, event, facts)


def _write(file: BinaryIO, previous: str, event: str, facts: Mapping[str, Any]) -> str:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    rest = {"event": event, "time": now, **facts}
    digest = chained(previous, rest)
    line = json_text({**rest, "previous": previous, "hash": digest}, sort_keys=True)
    file.write(line.encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())
    return digest


def chained(previous: str, rest: Mapping[str, Any]) -> str:
    """sha256 of the previous hash and this line's own content."""
    return hashlib.sha256((previous + json_text(dict(rest), sort_keys=True)).encode()).hexdigest()


def _tail(file: BinaryIO) -> tuple[str, int]:
    """The last hash, after cutting off a line that was never finished; and how many bytes that were.

    Read from the end, so a line costs the same however long the log is.
    """
    size = begin = file.seek(0, os.SEEK_END)
    content = b""
    while begin and content.count(b"\n") < 2:
        begin = max(0, size - max(_BLOCK, 2 * len(content)))
        file.seek(begin)
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    torn = len(content) - len(whole)
    if torn:
        file.truncate(size - torn)
    lines = whole.splitlines()
    return (str(json.loads(lines[-1])["hash"]) if lines else BEGINNING), torn


def verify_audit(path: Path) -> list[str]:
    """What is wrong with a log; an empty list where every line follows from the one before."""
    problems: list[str] = []
    previous = BEGINNING
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            content = json.loads(line)
            found, before = content.pop("hash"), content.pop("previous")
        except (ValueError, KeyError, AttributeError):
            return [*problems, f"{path.name} line {number} is not an audit line"]
        if before != previous:
            problems.append(f"{path.name} line {number} does not follow line {number - 1}: removed, added or moved")
        if chained(before, content) != found:
            problems.append(f"{path.name} line {number} was edited")
        previous = found
    return problems


def last_hash(path: Path) -> tuple[int, str]:
    """Number of lines and the last hash, to be kept elsewhere."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return len(lines), str(json.loads(lines[-1])["hash"]) if lines else BEGINNING
