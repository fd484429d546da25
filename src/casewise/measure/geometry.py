"""Shape of each region: box, centroid, boundary, compactness, distance to the largest (M5-M7)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from casewise.measure.masks import Flags, Floats
from casewise.measure.regions import Regions


def region_shapes(found: Regions, spacing: Floats | None = None) -> dict[str, NDArray[Any]]:
    """Measure every region that was kept; one row per region, in the order of the component numbers.

    Distances are Euclidean between centroids, 0 for the largest region: in voxels, and in mm with a spacing (M7).
    """
    number = np.flatnonzero(found.kept)
    area = found.sizes[number]
    where = np.unravel_index(found.voxels, found.shape)

    def by_axis(measured: Any) -> NDArray[Any]:
        if not number.size:
            return np.empty((0, len(where)))
        return np.stack([np.reshape(measured(at, found.number, number), -1) for at in where], axis=1)

    centroid = by_axis(ndimage.mean).astype(np.float64)
    apart = centroid - centroid[np.argmax(area)] if number.size else centroid
    inner = np.bincount(found.number[_interior(found)], minlength=found.sizes.size)[number]
    boundary = area - inner  # S: voxels with a face neighbor outside the region, or on the border of the volume (M6)
    in_mm = np.full(len(apart), np.nan) if spacing is None else np.linalg.norm(apart * spacing, axis=1)
    return {
        "number": number,
        "area": area,
        "box_low": by_axis(ndimage.minimum).astype(np.int64),
        "box_high": by_axis(ndimage.maximum).astype(np.int64) + 1,
        "centroid": centroid,
        "boundary": boundary,
        "compactness": area / boundary.astype(np.float64) ** 2,  # A / S^2 (M6)
        "distance": np.linalg.norm(apart, axis=1),
        "distance_mm": in_mm,
    }


def _interior(found: Regions) -> Flags:
    """Voxels of D whose face neighbors are all in D, hence in the same region."""
    inside = np.ones(found.area, bool)
    for axis, at in enumerate(np.unravel_index(found.voxels, found.shape)):
        stride = int(np.prod(found.shape[axis + 1 :]))
        for step, border in ((-stride, 0), (stride, found.shape[axis] - 1)):
            near = found.voxels + step
            place = np.searchsorted(found.voxels, near).clip(max=found.area - 1)
            inside &= (at != border) & (found.voxels[place] == near)
    return inside
