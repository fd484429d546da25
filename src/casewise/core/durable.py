"""Atomic writing of files, locks, and hashes of files."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, overload

from casewise.core.formats import json_text

TEMPORARY = ".writing-"
FORGOTTEN_S = 24 * 3600.0  # age from which a temporary file of another machine counts as abandoned
_HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:8]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path with the same ending; its file replaces ``path`` at the end of the block.

    After a crash or a power failure the file has either the old or the new content, never a part of it. The folder is
    made where it is missing. After an error the old content stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep_once(path.parent, "")
    temporary = path.with_name(f"{TEMPORARY}{_HOST}-{os.getpid()}-{uuid.uuid4().hex}-{path.name}")
    try:
        yield temporary
        with temporary.open("rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file by these bytes atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value: Any, *, indent: int | None = 1, sort_keys: bool = False) -> None:
    """Replace a file by a value as strict JSON, atomically."""
    text = json_text(value, indent=indent, sort_keys=sort_keys, default=dict)
    write_durably(path, f"{text}\n".encode())


def sweep(folder: Path, below: str = "**/") -> None:
    """Remove temporary files of killed writers; files of living writers stay, also those of other machines."""
    for path in folder.glob(f"{below}{TEMPORARY}*"):
        if not _is_written(path):
            with suppress(OSError):  # of another user
                path.unlink()


_sweep_once = functools.cache(sweep)


def _is_written(path: Path) -> bool:
    """True if a process of this machine, or a recent one of another machine, may still write this file."""
    host, _, rest = path.name.removeprefix(TEMPORARY).partition("-")
    process = rest.partition("-")[0]
    if not process.isdigit():
        return False
    if host == _HOST:
        return is_alive(int(process))
    try:
        return time.time() - path.stat().st_mtime < FORGOTTEN_S
    except FileNotFoundError:
        return False


def is_alive(process: int) -> bool:
    """True if a process of this machine is running."""
    if sys.platform == "win32":
        return True  # there, asking ends the process
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@overload
def file_lock(path: Path, *, wait: Literal[True] = True) -> AbstractContextManager[BinaryIO]: ...


@overload
def file_lock(path: Path, *, wait: Literal[False]) -> AbstractContextManager[BinaryIO | None]: ...


@contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[Any]:
    """Hold a file for this process alone, from the beginning to the end of the block.

    The lock belongs to the open file, so it ends with the process, even where that is killed.

    Args:
        path: The file; it is made, with its folder, where it is missing.
        wait: Wait until no other process holds the file.

    Returns:
        The open file; None without ``wait`` where another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        yield file if _locked(file, wait) else None


if sys.platform == "win32":
    import msvcrt

    def _locked(file: BinaryIO, wait: bool) -> bool:
        file.seek(0)
        while True:
            try:
                msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
            except OSError:
                if not wait:
                    return False
            else:
                return True

else:
    import fcntl

    def _locked(file: BinaryIO, wait: bool) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder durable; Windows has no such call and needs none."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a stamp that changes if a file is replaced or edited; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def text_sha256(text: str) -> str:
    """sha256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def json_sha256(value: Any) -> str:
    """sha256 of a value's strict JSON with its keys in order: the same value has the same hash in every process."""
    return text_sha256(json_text(value, sort_keys=True, default=dict))
