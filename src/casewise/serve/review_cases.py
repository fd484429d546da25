"""What a reviewer can look at: a folder's cases with the masks that are there, whatever kind of folder it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from casewise.core.records import Mask, Signals


@dataclass(frozen=True)
class ReviewCase:
    """One case before its masks are opened; nothing here needed a label."""

    id: str
    about: str  # sha256 of what a review would be about: another output has another one
    status: str = "done"  # done, fallback or failed
    group: str | None = None
    action: str | None = None  # rollback, keep, shrink, gate; None where nothing was decided
    reason: str = ""
    error: str = ""
    warnings: tuple[str, ...] = ()
    coordinate: str | None = None
    value: float | None = None
    cut_low: float | None = None
    cut_high: float | None = None
    states: tuple[str, ...] = ()  # adapted states whose masks are there, "1", "2", "2~0.5"
    adapted: str | None = None  # the one that is shown first: the deepest plain one
    signals: Signals = field(default_factory=dict)  # of the adapted state
    inputs: Mapping[str, str] = field(default_factory=dict)  # sha256 of each image file by name
    has_deployed: bool = False
    flagged: bool = False  # by the policy: a person should look
    quality: float | None = None  # estimate of the deployed mask's metric, without a label
    quality_low: float | None = None  # lower bound of it

    @property
    def has_masks(self) -> bool:
        """Whether there is anything to look at."""
        return self.status != "failed"


@dataclass(frozen=True, eq=False)
class Masks:
    """The masks of one case on one grid; None where a mask is not there."""

    source: Mask
    adapted: Mask | None
    deployed: Mask | None
    spacing_mm: tuple[float, ...] | None  # one for each axis


class Reviewable(Protocol):
    """A prediction folder or an archive."""

    @property
    def path(self) -> Path:
        """The folder."""
        ...

    @property
    def kind(self) -> str:
        """What to call it on the page."""
        ...

    @property
    def min_area(self) -> int:
        """Voxels that a region needs to count (B4)."""
        ...

    @property
    def cases(self) -> Mapping[str, ReviewCase]:
        """Every case by id."""
        ...

    @property
    def audit(self) -> Path | None:
        """The audit log that also gets every decision; None where reviews.jsonl is the only log."""
        ...

    def about(self, case_id: str) -> str:
        """:attr:`ReviewCase.about` as it is on disk now."""
        ...

    def masks(self, case_id: str, state: str | None) -> Masks:
        """The masks, with ``state`` as the adapted one."""
        ...

    def drops(self, case_id: str, state: str) -> Mapping[int, float] | Mask | None:
        """Entropy drops of the adapted state: by region number, or of every voxel; None where unknown (L2)."""
        ...

    def overlay(self, case_id: str) -> Path | None:
        """A picture that prediction drew."""
        ...


def state_order(name: str) -> tuple[int, float]:
    """Sorts "1", "2", "2~0.5", "10" as steps, not as text."""
    step, _, shrink = name.partition("~")
    return int(step), float(shrink or 0)


def deepest(states: tuple[str, ...]) -> str | None:
    """The deepest state that is not shrunk, else the deepest."""
    plain = [name for name in states if "~" not in name]
    return max(plain or states, key=state_order, default=None)


def number_or_none(value: Any) -> float | None:
    """A float of a JSON number; None for everything else, booleans too."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
