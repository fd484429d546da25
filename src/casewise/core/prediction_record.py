"""The record of one predicted case: the decision, the reason, and hashes of the files.

It is stored as ``OUT/casewise/CASE.json``, as :mod:`casewise.core.formats` writes JSON: an infinite cut is "inf".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from casewise.core.errors import BadInput, Mismatch
from casewise.core.json_records import from_plain
from casewise.core.records import DONE, FAILED, FALLBACK, Decision, Signals, check_case_id

SCHEMA = 2
STATUSES = (DONE, FALLBACK, FAILED)
REVIEW = "review"  # event of reviews.jsonl: a person's decision on a case
REGIONS_LISTED = 50  # changed regions in the entry of a case, the largest first
CALIBRATED, OUTSIDE, NO_GO = "calibration case", "not covered by the labelled cases", "NO-GO"
"""Words in the notes of a case that no certificate covers."""


@dataclass(frozen=True)
class ContractFinding:
    """One property of an image that differs from the training images."""

    level: str  # "warning" or "refusal"
    what: str  # "spacing", "axes", "intensity", "orientation"
    message: str


@dataclass(frozen=True)
class PredictedCase:
    """One case of a prediction folder."""

    case: str
    status: str  # done, fallback (M0 replaced a failure) or failed (there is no output)
    decision: Decision | None = None  # None where there is no output
    candidate: str = ""  # name of the deployed state: "M0", "step 2", "mean"; with several ladders "tent: step 2"
    names: Mapping[str, str] = field(default_factory=dict)  # name of every candidate, by state: "13" is the "mean"
    name: str = ""  # name of the file, in any script; the id is made from it
    error: str | None = None
    error_kind: str | None = None  # class name of the error
    group: str | None = None
    outputs: Mapping[str, str] = field(default_factory=dict)  # sha256 of each file, by its path in the folder
    inputs: Mapping[str, str] = field(default_factory=dict)  # sha256 of each image file, by name
    contract: tuple[ContractFinding, ...] = ()
    notes: tuple[str, ...] = ()  # reasons why no promise holds: a calibration case, a forced no-go, a void certificate
    certificate: Mapping[str, Any] | None = None  # the promise in short, and whether an alarm made it void
    signals: Mapping[str, Signals] = field(default_factory=dict)  # by state: "0", "1", "2~0.5"
    diagnostics: tuple[Mapping[str, float], ...] = ()
    appearance: Mapping[str, float] = field(default_factory=dict)  # appearance of the image for the model
    changed: float | None = None  # voxels of the written mask that differ from M0, divided by M0's foreground
    regions: tuple[Mapping[str, Any], ...] = ()  # the largest of these voxels' regions, as on the review page
    volumes: Mapping[str, float] = field(default_factory=dict)  # by label number: ml, or voxels without a spacing
    measures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # declared measures: value, low, high, why
    no_interval: str = ""  # why measures of this case have no interval
    timing: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""  # sha256 of all that the output depends on besides the image
    model: str = ""  # sha256 of the source weights
    policy: Mapping[str, Any] = field(default_factory=dict)  # name, calibration_id, no_go (a sentence or null)
    seed: int = 0
    device: str = ""
    trusted_checkpoint: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        check_case_id(self.case)
        if self.status not in STATUSES:
            raise BadInput(f"the status of a case must be {', '.join(STATUSES)}, got {self.status!r}")
        for name in self.outputs:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise BadInput(f"case {self.case} names an output outside its folder: {name!r}")

    @property
    def is_done(self) -> bool:
        """True if the case was decided by the policy."""
        return self.status == DONE

    @property
    def lowest_quality(self) -> float:
        """Lower bound of the estimated quality, to sort by: a case without an estimate comes first."""
        low = None if self.decision is None else self.decision.quality_low
        return -1.0 if low is None else low

    @property
    def has_output(self) -> bool:
        """True if the case has a mask."""
        return self.status != FAILED

    @property
    def action(self) -> str | None:
        """Action of the decision; None without output."""
        return None if self.decision is None else self.decision.action.value

    @property
    def uncovered(self) -> str | None:
        """First reason why no certificate covers this case; None if there is none."""
        return next((note for sign in (CALIBRATED, OUTSIDE) for note in self.noted(sign)), None)

    @property
    def reason(self) -> str:
        """Reason of the decision; without the bound of the quality where the labels do not cover the case."""
        said = "" if self.decision is None else self.decision.reason
        return re.split("; (?:flagged: its )?quality ", said)[0] if self.uncovered else said

    def noted(self, sign: str) -> tuple[str, ...]:
        """Return the notes with this sign about the case itself."""
        return tuple(note for note in self.notes if sign in note and not note.startswith(NO_GO))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Findings of the input contract, and reasons why no promise covers the case."""
        return (*(finding.message for finding in self.contract), *self.notes)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "decision": None if self.decision is None else self.decision.as_dict()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> PredictedCase:
        """Invert :meth:`as_dict`; refuse another schema."""
        if plain.get("schema") != SCHEMA:
            raise Mismatch(f"the entry has schema {plain.get('schema')!r}, this casewise reads {SCHEMA}; predict again")
        decision = None if not plain.get("decision") else Decision.from_dict(plain["decision"])
        return from_plain(
            cls, {**plain, "decision": decision}, "the JSON file of a predicted case", "predict the case again"
        )
