"""Label files as they really are: floats that mean integers, greys that mean classes, ids that mean other ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import BadInput
from casewise.core.records import Mask
from casewise.data.datasets.located import Found, volume_of
from casewise.data.pictures import read_picture

WHOLE = 1e-3  # a float label this near to a whole number is that number


def whole_label(path: Path, *, frame: int | None = None) -> Mask:
    """A label volume of any dtype; floats are rounded, and refused where they are not whole numbers."""
    voxels: Mask = volume_of(path, frame).voxels
    if np.issubdtype(voxels.dtype, np.integer):
        return voxels
    if not np.isfinite(voxels).all() or np.abs(voxels - np.rint(voxels)).max(initial=0) > WHOLE:
        raise BadInput(f"{path.name} holds values that are not whole numbers; it is not a label")
    return np.rint(voxels).astype(np.int32)


def grey(path: Path) -> NDArray[np.uint8]:
    """A grey picture as (rows, columns) of 0..255, also when it was stored as bits, a palette or equal colors."""
    colors = read_picture(path)
    values: NDArray[np.uint8] = colors[0]
    if (colors != values).any():
        raise BadInput(f"{path.name} is colored; a mask holds one grey value a pixel")
    return values


def check_values(label: Mask, allowed: int, name: str) -> Mask:
    """Refuse labels outside 0..allowed."""
    if label.size and not (label.min() >= 0 and label.max() <= allowed):
        raise BadInput(f"{name} holds labels {label.min()} to {label.max()}; 0 to {allowed} were expected")
    return label


# What the fundus datasets share: classes, and the grey code of REFUGE that others took over.

FUNDUS_CLASSES = ("background", "disc rim", "cup")


def cup_and_rim(values: Mask) -> Mask:
    """REFUGE's greys 0 cup, 128 rim, 255 background as 2, 1, 0: cup at most 100, disc at most 150.

    >>> cup_and_rim(np.array([0, 128, 255])).tolist()
    [2, 1, 0]
    """
    return ((values <= 150).astype(np.uint8) + (values <= 100)).astype(np.uint8)


def grey_label(found: Found) -> Mask:
    """The label of a case whose mask is in REFUGE's grey code."""
    return cup_and_rim(grey(found.labels[0]))
