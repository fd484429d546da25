"""Slices as PNGs: an image windowed to 8 bits, and three masks in the three channels of one picture."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
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
from casewise.serve.review_cases import Masks, ReviewCase

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
