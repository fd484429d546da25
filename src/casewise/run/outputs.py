"""Where a prediction folder keeps things, and writes that are whole or not there.

OUT/<case>.nii.gz                     the deployed mask (or .png)
OUT/casewise/<case>.json              the case's entry: written last, so it vouches for the rest
OUT/casewise/source/<case>.nii.gz     M0, where something else was deployed
OUT/casewise/candidates/<case>/       every candidate, when asked for
OUT/casewise/overlays/<case>.png      M0, adapted, edits, deployed
OUT/audit.jsonl  OUT/summary.json  OUT/report.html
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from casewise.archive.layout import sync_folder

TEMPORARY = ".writing-"


@dataclass(frozen=True)
class Layout:
    """Paths of a prediction folder."""

    out: Path
    ending: str  # of the masks

    @property
    def audit(self) -> Path:
        """The audit log."""
        return self.out / "audit.jsonl"

    def mask(self, case_id: str) -> Path:
        """The deployed mask."""
        return self.out / f"{case_id}{self.ending}"

    def entry(self, case_id: str) -> Path:
        """What was decided, and why."""
        return self.out / "casewise" / f"{case_id}.json"

    def source(self, case_id: str) -> Path:
        """M0 where it was not deployed."""
        return self.out / "casewise" / "source" / f"{case_id}{self.ending}"

    def candidates(self, case_id: str) -> Path:
        """The folder of all candidates."""
        return self.out / "casewise" / "candidates" / case_id

    def overlay(self, case_id: str) -> Path:
        """The picture for a person."""
        return self.out / "casewise" / "overlays" / f"{case_id}.png"

    def forget(self, case_id: str) -> None:
        """Remove everything of a case, the entry first: an old output never stands in for a failed new one."""
        for path in (self.entry(case_id), self.mask(case_id), self.source(case_id), self.overlay(case_id)):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.candidates(case_id), ignore_errors=True)

    def sweep(self) -> None:
        """Remove what killed writers left behind."""
        for path in self.out.rglob(f"{TEMPORARY}*"):
            path.unlink(missing_ok=True)


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` make a temporary file with the same ending, then fsync and rename: whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        write(temporary)
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Bytes, whole or not there."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_whole(path, write)
