"""Shape of each region, from runs: box, centroid, boundary, distance to the largest (M5-M7)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from casewise.measure.masks import Floats, Integers
from casewise.measure.regions import Regions
from casewise.measure.runs import Contacts, Runs, face_contacts


@dataclass(frozen=True, eq=False)
class RegionShapes:
    """One row per region (a kept component), in the order of ``number``."""

    number: Integers  # component number
    area: Integers  # voxels
    low: Integers  # (region, axis): first index inside the box
    high: Integers  # (region, axis): first index beyond the box
    centroid: Floats  # (region, axis): mean index
    boundary: Integers  # S: voxels with a face neighbor outside the region, or on the border of the volume (M6)

    @property
    def compactness(self) -> Floats:
        """A / S^2 (M6)."""
        return self.area / self.boundary.astype(np.float64) ** 2

    def distance_to_largest(self, spacing: Floats | None = None) -> Floats:
        """Euclidean distance between centroids, 0 for the largest itself; voxels, or mm with a spacing (M7)."""
        if not self.area.size:
            return np.empty(0)
        apart = self.centroid - self.centroid[np.argmax(self.area)]
        return np.asarray(np.linalg.norm(apart if spacing is None else apart * spacing, axis=1))


def geometry_of(found: Regions) -> RegionShapes:
    """Measure every region that was kept."""
    number = np.flatnonzero(found.kept)
    area = found.sizes[number]
    if not number.size:
        nowhere = np.empty((0, len(found.shape)), np.int64)
        return RegionShapes(number, area, nowhere, nowhere, nowhere.astype(np.float64), area)
    order, cuts = _by_region(found)
    low, high, centroid = _extents(found.runs, order, cuts)
    inner = np.bincount(found.number[_interior(found)], minlength=found.sizes.size)[number]
    return RegionShapes(number, area, low, high, centroid / area[:, None], area - inner)


def boxes_of(found: Regions) -> tuple[Integers, Integers]:
    """Half-open boxes [low, high) of every region that was kept, (region, axis) each; nothing else is measured."""
    if not found.kept.any():
        nowhere = np.empty((0, len(found.shape)), np.int64)
        return nowhere, nowhere
    low, high, _ = _extents(found.runs, *_by_region(found))
    return low, high


def _by_region(found: Regions) -> tuple[Integers, Integers]:
    """The runs of kept components, region after region, and where each region begins among them."""
    runs = np.flatnonzero(found.kept[found.owner])
    owner = found.owner[runs].astype(np.min_scalar_type(found.sizes.size))  # 16 bits sort by radix
    order = np.argsort(owner, kind="stable")
    return runs[order], np.flatnonzero(np.diff(owner[order].astype(np.int64), prepend=-1))


def _extents(runs: Runs, order: Integers, cuts: Integers) -> tuple[Integers, Integers, Floats]:
    """Half-open boxes [low, high) and the sum of voxel indices of every region, axis by axis."""
    lengths = runs.lengths[order]
    low, high, total = [], [], []
    for axis, first in enumerate(np.unravel_index(runs.first[order], runs.shape)):
        last = first + lengths - 1 if axis == len(runs.shape) - 1 else first
        low.append(np.minimum.reduceat(first, cuts))
        high.append(np.maximum.reduceat(last, cuts) + 1)
        total.append(np.add.reduceat((first + last) * lengths, cuts) / 2)
    return np.stack(low, axis=1), np.stack(high, axis=1), np.stack(total, axis=1)


def _interior(found: Regions) -> Integers:
    """Positions in the voxel list whose face neighbors are all in D, hence in the same region: R minus its boundary.

    Every contact of two runs covers a stretch of both; a voxel inside its run that is covered from all sides is inside.
    """
    runs = found.runs
    stretches = [pair for contacts in found.touching or face_contacts(runs) for pair in _stretches(runs, contacts)]
    begins, ends = (
        np.bincount(np.concatenate(side), minlength=found.area + 1) for side in zip(*stretches, strict=True)
    )
    covered = np.cumsum(begins[:-1] - ends[:-1])
    covered[runs.begin] = covered[runs.begin + runs.lengths - 1] = 0
    return np.flatnonzero(covered == 2 * (len(runs.shape) - 1))


def _stretches(runs: Runs, contacts: Contacts) -> list[tuple[Integers, Integers]]:
    """Return the interval of each contact in the later and the earlier run: half-open stretches of positions in the
    voxel list."""
    later, earlier = contacts.later, contacts.earlier
    low = np.maximum(runs.first[later], runs.first[earlier] + contacts.shift)
    length = np.minimum(runs.last[later], runs.last[earlier] + contacts.shift) - low + 1
    in_later = runs.begin[later] + low - runs.first[later]
    in_earlier = runs.begin[earlier] + low - contacts.shift - runs.first[earlier]
    return [(in_later, in_later + length), (in_earlier, in_earlier + length)]
