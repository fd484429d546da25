"""What a reviewer can look at: a folder's cases with the masks that are there, whatever kind of folder it is.

Cases come worst first, without a label: no output, M0 after a failure, flagged cases, then by quality, else by risk.
The regions of an edit are listed with size, kind of change, entropy drop, share deployed and place. Raw labels are
compared, as the region gate does (L1), so a change of class is listed too.

Slices as PNGs: an image windowed to 8 bits, and three masks in the three channels of one picture.
"""

from __future__ import annotations

import io
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from casewise.core.durable import file_sha256
from casewise.core.errors import BadInput, Mismatch
from casewise.core.records import Mask, Signals
from casewise.data import nifti, pictures
from casewise.data.folders import CaseFiles, list_cases
from casewise.judge.controllers.region_gate import gate_regions
from casewise.render.masks import Classes


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
    states: tuple[str, ...] = ()  # adapted states whose masks are there, "1", "2~0.5", "tent:1", "deployed"
    adapted: str | None = None  # the one that is shown first: what is deployed, else the deepest plain one
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
    def classes(self) -> Classes:
        """What the masks hold, and whether label 0 is background."""
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


DEPLOYED = "deployed"
"""The name of a deployed mask that is no saved candidate: one composed of pieces, or one whose step was not saved."""


def state_order(name: str) -> tuple[str, int, float]:
    """Sorts "1", "2", "2~0.5", "10" as steps, not as text; "tent:1", of another ladder, after them."""
    ladder, _, state = name.rpartition(":")
    step, _, shrink = state.partition("~")
    return ladder, int(step), float(shrink or 0)


def shown_first(states: tuple[str, ...]) -> str | None:
    """What is deployed, where that is no candidate; else the deepest plain state of the deployed ladder."""
    if DEPLOYED in states:
        return DEPLOYED
    own = [name for name in states if ":" not in name] or list(states)
    plain = [name for name in own if "~" not in name]
    return max(plain or own, key=state_order, default=None)


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


Pixels = NDArray[np.uint8]
WINDOWS = ("whole", "near")
"""1st to 99th percentile of the whole image, or of the box around the masks (soft tissue of a CT)."""
Where = tuple[int, int] | None
"""Axis and number of a slice; None for a picture, which has only one."""
MARGIN = 12
SAMPLED = 2**20


@dataclass(frozen=True)
class Images:
    """The images that the cases were made from, by case id; empty where no folder was given."""

    files: Mapping[str, CaseFiles]

    @classmethod
    def of(cls, folder: Path | None) -> Images:
        """Images in nnU-Net's or plain naming."""
        return cls({} if folder is None else {files.id: files for files in list_cases(folder)})

    def channels(self, case_id: str) -> int:
        """Number of image files; 0 where there is no image."""
        return len(self.files[case_id].images) if case_id in self.files else 0

    def problem(self, case: ReviewCase) -> str | None:
        """Why the image of a case cannot be shown; None where it can."""
        if not self.files:
            return "no images: start with --images DIR to see them under the masks"
        if case.id not in self.files:
            return f"the image folder has no case {case.id}"
        for path in self.files[case.id].images:
            if case.inputs and case.inputs.get(path.name) != file_sha256(path):
                return f"{path.name} is not the image that was segmented (its hash differs), so it is not shown"
        return None

    def read(self, case: ReviewCase, channel: int, window: str, masks: Masks) -> Pixels:
        """One channel in 8 bits: (*space), or (rows, columns, 3) for a color picture."""
        problem = self.problem(case)
        if problem is not None:
            raise Mismatch(problem)
        path = self.files[case.id].images[channel]
        if path.name.lower().endswith(pictures.ENDINGS):
            shown: Pixels = np.ascontiguousarray(np.moveaxis(pictures.read_picture(path), 0, -1))
            space = shown.shape[:2]
        else:
            voxels = nifti.read_volume(path).voxels
            space = voxels.shape
            if space == masks.source.shape:
                shown = windowed(voxels, window, masks)
        if space != masks.source.shape:
            raise Mismatch(f"{path.name} has shape {space}, its mask {masks.source.shape}; give the original images")
        return shown


def windowed(voxels: NDArray[Any], window: str, masks: Masks) -> Pixels:
    """Voxels to 0..255 between two percentiles; what is not finite becomes 0."""
    if window not in WINDOWS:
        raise BadInput(f"a window is one of {', '.join(WINDOWS)}, got {window!r}")
    part = voxels[_box(masks)] if window == "near" else voxels
    sample = part.reshape(-1)[:: max(1, part.size // SAMPLED)].astype(np.float64)
    sample = sample[np.isfinite(sample)]
    low, high = np.percentile(sample, (1, 99)) if sample.size else (0.0, 1.0)
    scale = 255.0 / max(high - low, 1e-12)
    shown = np.empty(voxels.shape, np.uint8)
    for row in range(len(voxels)):  # slice by slice: no second copy of the volume in floats
        shown[row] = np.nan_to_num(np.clip(np.rint((voxels[row] - low) * scale), 0, 255))
    return shown


def _box(masks: Masks) -> tuple[slice, ...]:
    """The box around the foreground of every mask with a margin; everything where there is no foreground."""
    present = masks.source > 0
    for mask in (masks.adapted, masks.deployed):
        if mask is not None:
            present = present | (mask > 0)
    if not present.any():
        return tuple(slice(None) for _ in present.shape)
    found = []
    for axis in range(present.ndim):
        places = np.flatnonzero(present.any(axis=tuple(other for other in range(present.ndim) if other != axis)))
        found.append(slice(max(0, int(places[0]) - MARGIN), int(places[-1]) + MARGIN + 1))
    return tuple(found)


def mask_slice(masks: Masks, where: Where) -> bytes:
    """A PNG whose red, green and blue are the labels of M0, adapted and deployed; M0 where a mask is not there.

    Labels above 255 begin again at 1: colors repeat, boundaries between neighbors stay.
    """
    source = plane(masks.source, where)
    others = [source if mask is None else plane(mask, where) for mask in (masks.adapted, masks.deployed)]
    return png(np.stack([_bytes(mask) for mask in (source, *others)], axis=-1))


def _bytes(mask: Mask) -> Pixels:
    whole = mask.astype(np.int64)
    return np.where(whole > 0, (whole - 1) % 255 + 1, 0).astype(np.uint8)


def plane(values: NDArray[Any], where: Where) -> NDArray[Any]:
    """One slice of a volume, or the picture itself."""
    return values if where is None else np.take(values, where[1], axis=where[0])


def png(pixels: NDArray[Any]) -> bytes:
    """Pixels as a PNG, packed lightly: it travels inside one machine."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
