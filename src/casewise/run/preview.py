"""The one slice that a person should look at, small enough to travel between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.records import Case, Mask


@dataclass(frozen=True, eq=False)
class Preview:
    """An image slice as 8-bit greys or colors, and the masks there."""

    image: NDArray[np.uint8]  # (rows, columns) or (rows, columns, 3)
    source: Mask
    adapted: Mask
    deployed: Mask
    slice: int | None  # which slice of a volume it is


def preview_of(case: Case, source: Mask, adapted: Mask, deployed: Mask) -> Preview:
    """The slice that adaptation changed most; where it changed nothing, the one with the most foreground."""
    if source.ndim == 2:
        flat = case.image[:, 0] if case.image.ndim == 4 else case.image  # a volume of one slice
        return Preview(_greys(flat), source, adapted, deployed, None if case.image.ndim < 4 else 0)
    changed = (source != adapted).sum(axis=(1, 2))
    weight = changed if changed.any() else (source > 0).sum(axis=(1, 2))
    number = int(np.argmax(weight))
    image = case.image[:, number] if case.image.shape[1:] == source.shape else np.zeros((1, *source.shape[1:]))
    return Preview(_greys(image), source[number], adapted[number], deployed[number], number)


def _greys(image: NDArray[Any]) -> NDArray[np.uint8]:
    """(channel, rows, columns) to 8 bits: three byte channels are colors, else the first, 1st to 99th percentile."""
    if image.shape[0] == 3 and image.dtype == np.uint8:
        return np.ascontiguousarray(np.moveaxis(image, 0, -1))
    first = np.asarray(image[0], np.float32)
    low, high = np.percentile(first, (1, 99))
    return np.asarray(np.clip((first - low) / max(high - low, 1e-6), 0, 1) * 255, np.uint8)
