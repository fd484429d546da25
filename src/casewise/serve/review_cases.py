"""What a reviewer can look at: a folder's cases with the masks that are there, whatever kind of folder it is.

Cases come worst first, without a label: no output, M0 after a failure, flagged cases, then by quality, else by risk.
The regions of an edit are listed with size, kind of change, entropy drop, share deployed and place. Raw labels are
compared, as the region gate does (L1), so a change of class is listed too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from casewise.core.records import Mask, Signals
from casewise.judge.controllers.region_gate import gate_regions


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


TIERS = {"failed": 0, "fallback": 1}
RANKED = ("delta_foreground", "delta", "regions")
"""Signals to rank by, the first that every case has: shares before counts, so that image size does not decide (S4)."""


def position(case: ReviewCase) -> float | None:
    r"""Where the routing value lies between the policy's cut-points: 0 at cut_low, 1 and more is rolled back (E6).

    .. math:: r = (u - c_{low}) / (c_{high} - c_{low})
    """
    if case.value is None or case.cut_low is None or case.cut_high is None or case.cut_high <= case.cut_low:
        return None
    return (case.value - case.cut_low) / (case.cut_high - case.cut_low)


def risks(cases: Iterable[ReviewCase]) -> dict[str, float | None]:
    """A number by case id, higher is riskier; None where nothing was measured.

    One minus the lower bound of the quality where every case with a mask has one. Else the position between the
    cut-points where every measured case has one, so that groups with cut-points of their own compare; else
    the share of the cohort whose edit is smaller.
    """
    cases = list(cases)
    if cases and all(case.quality_low is not None for case in cases if case.status not in TIERS):
        return {case.id: None if case.quality_low is None else 1 - case.quality_low for case in cases}
    measured = [case for case in cases if case.signals]
    places = {case.id: position(case) for case in measured}
    if measured and all(place is not None for place in places.values()):
        return {case.id: places.get(case.id) for case in cases}
    return {case.id: rank for case, rank in zip(cases, _ranks(cases), strict=True)}


def worst_first(cases: Mapping[str, ReviewCase]) -> list[str]:
    """Case ids in the order in which a person should look at them."""
    found = risks(cases.values())

    def key(case_id: str) -> tuple[int, bool, float, str]:
        risk = found[case_id]
        tier = TIERS.get(cases[case_id].status, 2 if cases[case_id].flagged else 3)
        return tier, risk is None, -(risk or 0.0), case_id

    return sorted(cases, key=key)


def _ranks(cases: list[ReviewCase]) -> list[float | None]:
    for name in RANKED:
        values = [case.signals.get(name) for case in cases]
        if all(value is not None for value, case in zip(values, cases, strict=True) if case.signals) and any(
            value is not None for value in values
        ):
            break
    known = sorted(value for value in values if value is not None)
    return [None if value is None else bisect_left(known, value) / len(known) for value in values]


LISTED = 200

Drops = Mapping[int, float] | NDArray[Any] | None
"""Entropy of M0 minus entropy of the adapted mask: by region number, or of every voxel."""


def listed_regions(masks: Masks, *, min_area: int, drops: Drops = None) -> dict[str, Any]:
    """Regions of M0 against adapted: those that became less sure first where that is known, else the largest first."""
    if masks.adapted is None:
        return {"area": 0, "total": 0, "crumbs": 0, "regions": []}
    found = gate_regions(masks.source, masks.adapted, min_area=min_area)
    order = np.argsort(found.number, kind="stable")
    groups = np.split(found.voxels[order], np.cumsum(found.sizes)[:-1]) if found.area else []
    kept = np.flatnonzero(found.kept)
    rows = [
        _row(number, groups[component], masks, found.area, _drop(drops, number, groups[component]))
        for number, component in enumerate(kept)
    ]
    rows.sort(key=lambda row: (row["drop"] is None, row["drop"] or 0.0, -row["voxels"]))
    return {
        "area": found.area,
        "total": len(rows),
        "crumbs": int(found.sizes[~found.kept].sum()),
        "regions": rows[:LISTED],
    }


def _drop(drops: Drops, number: int, voxels: NDArray[np.int64]) -> float | None:
    if drops is None:
        return None
    if isinstance(drops, Mapping):
        return drops.get(number)
    mean = float(np.mean(drops.reshape(-1)[voxels]))
    return mean if np.isfinite(mean) else None


def _row(number: int, voxels: NDArray[np.int64], masks: Masks, area: int, drop: float | None) -> dict[str, Any]:
    assert masks.adapted is not None
    source, adapted = masks.source.reshape(-1)[voxels], masks.adapted.reshape(-1)[voxels]
    places = np.unravel_index(voxels, masks.source.shape)
    return {
        "number": number,
        "voxels": len(voxels),
        "share": len(voxels) / area,
        "added": int(((source == 0) & (adapted != 0)).sum()),
        "removed": int(((source != 0) & (adapted == 0)).sum()),
        "relabeled": int(((source != 0) & (adapted != 0)).sum()),
        "drop": drop,
        "deployed": _deployed(masks.deployed, voxels, adapted),
        "box": [[int(axis.min()), int(axis.max())] for axis in places],
        "at": [int(np.bincount(axis).argmax()) for axis in places],  # the slice of each axis that shows most of it
    }


def _deployed(deployed: Mask | None, voxels: NDArray[np.int64], adapted: NDArray[Any]) -> float | None:
    """The share of the region that is deployed; None where nothing was decided."""
    return None if deployed is None else float((deployed.reshape(-1)[voxels] == adapted).mean())


def changes_by_slice(masks: Masks) -> list[list[int]]:
    """For each axis, how many voxels of each slice changed; M0's foreground where nothing did."""
    adapted = masks.source if masks.adapted is None else masks.adapted
    changed = masks.source != adapted
    if not changed.any() and masks.deployed is not None:
        changed = masks.source != masks.deployed
    weight = changed if changed.any() else masks.source > 0
    axes = range(weight.ndim)
    return [weight.sum(axis=tuple(other for other in axes if other != axis)).tolist() for axis in axes]
