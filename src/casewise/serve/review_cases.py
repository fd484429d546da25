"""Cases that a reviewer can look at: their order, the regions of an edit, and slices as PNGs.

Cases come worst first, without a label: no output, M0 after a failure, flagged cases, then by the lower bound of the
estimated quality, else by the size of the edit. Regions compare raw labels, as the region gate does (L1), so a change
of class is listed too.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from casewise.core.durable import file_sha256
from casewise.core.errors import BadInput, Mismatch
from casewise.core.records import Mask
from casewise.data import nifti, pictures
from casewise.data.folders import CaseFiles, list_cases
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
    states: Mapping[str, str] = field(default_factory=dict)  # names of adapted masks that are there, by state
    adapted: str | None = None  # the state that is shown first: the deployed one, else the last
    edit: float | None = None  # voxels that it changes, by M0's foreground
    inputs: Mapping[str, str] = field(default_factory=dict)  # sha256 of each image file by name
    flagged: bool = False  # by the policy: a person should look
    quality: float | None = None  # estimate of the deployed mask's metric, without a label
    quality_low: float | None = None  # lower bound of it

    @property
    def has_masks(self) -> bool:
        """True if there is anything to look at."""
        return self.status != "failed"


@dataclass(frozen=True, eq=False)
class Masks:
    """The masks of one case on one grid; None where a mask is not there."""

    source: Mask
    adapted: Mask | None
    deployed: Mask
    spacing_mm: tuple[float, ...] | None  # one for each axis


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


def worst_first(cases: Mapping[str, ReviewCase]) -> list[str]:
    """Return case ids in the order in which a person should look at them."""
    tiers = {"failed": 0, "fallback": 1}
    estimated = any(case.quality_low is not None for case in cases.values())

    def key(case_id: str) -> tuple[int, float, str]:
        case = cases[case_id]
        low = -1.0 if case.quality_low is None else case.quality_low  # an unknown quality comes first
        return tiers.get(case.status, 2 if case.flagged else 3), low if estimated else -(case.edit or 0.0), case_id

    return sorted(cases, key=key)


LISTED = 200


def listed_regions(masks: Masks, *, min_area: int) -> dict[str, Any]:
    """List the regions where M0 and the adapted mask differ, the largest first."""
    if masks.adapted is None:
        return {"area": 0, "total": 0, "crumbs": 0, "regions": []}
    found = gate_regions(masks.source, masks.adapted, min_area=min_area)
    order = np.argsort(found.number, kind="stable")
    groups = np.split(found.voxels[order], np.cumsum(found.sizes)[:-1]) if found.area else []
    rows = [_row(number, groups[component], masks) for number, component in enumerate(np.flatnonzero(found.kept))]
    rows.sort(key=lambda row: -row["voxels"])
    return {
        "area": found.area,
        "total": len(rows),
        "crumbs": int(found.sizes[~found.kept].sum()),
        "regions": rows[:LISTED],
    }


def _row(number: int, voxels: NDArray[np.int64], masks: Masks) -> dict[str, Any]:
    assert masks.adapted is not None
    source, adapted = masks.source.reshape(-1)[voxels], masks.adapted.reshape(-1)[voxels]
    places = np.unravel_index(voxels, masks.source.shape)
    return {
        "number": number,
        "voxels": len(voxels),
        "added": int(((source == 0) & (adapted != 0)).sum()),
        "removed": int(((source != 0) & (adapted == 0)).sum()),
        "relabeled": int(((source != 0) & (adapted != 0)).sum()),
        "deployed": float((masks.deployed.reshape(-1)[voxels] == adapted).mean()),
        "box": [[int(axis.min()), int(axis.max())] for axis in places],
        "at": [int(np.bincount(axis).argmax()) for axis in places],  # the slice of each axis that shows most of it
    }


def changes_by_slice(masks: Masks) -> list[list[int]]:
    """For each axis, how many voxels of each slice changed; M0's foreground where nothing did."""
    adapted = masks.source if masks.adapted is None else masks.adapted
    changed = masks.source != adapted
    if not changed.any():
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
    present = (masks.source > 0) | (masks.deployed > 0)
    if masks.adapted is not None:
        present = present | (masks.adapted > 0)
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
    adapted = source if masks.adapted is None else plane(masks.adapted, where)
    return png(np.stack([_bytes(mask) for mask in (source, adapted, plane(masks.deployed, where))], axis=-1))


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
