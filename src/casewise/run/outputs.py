"""Where a prediction folder keeps things.

OUT/<case>.nii.gz                     the deployed mask (or .png)
OUT/casewise/<case>.json              the case's entry: written last, so it vouches for the rest
OUT/casewise/source/<case>.nii.gz     M0, where something else was deployed
OUT/casewise/candidates/<case>/       every candidate, when asked for
OUT/casewise/overlays/<case>.png      M0, adapted, edits, deployed
OUT/audit.jsonl  OUT/summary.json  OUT/report.html
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path


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
