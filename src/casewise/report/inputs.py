"""The image that a case was segmented from, for the input column of the pictures (fig:acdc-qual-supp)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import BadInput, Mismatch
from casewise.data.folders import CaseFiles, list_cases
from casewise.data.nifti import read_volume
from casewise.data.pictures import ENDINGS, read_picture
from casewise.render.masks import Pixels

Images = Mapping[str, CaseFiles]


def images_of(folder: Path) -> Images:
    """The images of a folder by case id, in nnU-Net's or plain naming; none is opened."""
    return {files.id: files for files in list_cases(folder)}


def input_plane(images: Images, case_id: str, shape: tuple[int, ...], index: int | None) -> Pixels:
    """The plane that is shown, in 8 bits: a slice of a volume's first channel, or a picture in its colors."""
    if case_id not in images:
        raise BadInput(f"the image folder has no case {case_id}; name files as they were named when recorded")
    path = images[case_id].images[0]
    is_picture = path.name.lower().endswith(ENDINGS)
    image = np.moveaxis(read_picture(path), 0, -1) if is_picture else read_volume(path).voxels
    space = image.shape[:2] if is_picture else image.shape
    if _without_ones(space) != _without_ones(shape):
        raise Mismatch(f"{path.name} has shape {space}, its mask {shape}; give the images that were recorded")
    if is_picture:
        return np.ascontiguousarray(image)
    volume = image.reshape(shape)
    return _windowed(volume if index is None else volume[index])


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A volume of one slice lies where a picture lies."""
    return tuple(length for length in shape if length > 1)


def _windowed(plane: NDArray[Any]) -> Pixels:
    """0..255 between the slice's 1st and 99th percentile; what is not finite becomes black."""
    finite = plane[np.isfinite(plane)]
    low, high = np.percentile(finite, (1, 99)) if finite.size else (0.0, 1.0)
    shown = np.clip((np.nan_to_num(plane.astype(float), nan=low) - low) / max(high - low, 1e-12), 0, 1)
    return np.asarray(np.rint(255 * shown), np.uint8)
