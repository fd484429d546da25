"""Distances between the surfaces of a mask and its label: measured once, reduced many times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import ndimage
from scipy.spatial import cKDTree

from casewise.core.brief import brief
from casewise.measure.masks import Flags, Floats, Integers, checked_masks, checked_spacing, on_host
from casewise.measure.surfels import neighborhood_codes, surfel_sizes


@dataclass(frozen=True, eq=False)
class Distances:
    """For every element of one surface the distance to the other surface, and how much surface the element is."""

    from_mask: Floats
    from_label: Floats
    mask_sizes: Floats
    label_sizes: Floats


@dataclass(frozen=True, eq=False, repr=False)
class Gaps:
    """A binarized mask and label, cropped to what they cover together; distances are found when first asked for.

    Two surfaces are in use, and a metric names its own: *voxels* (foreground with a background face neighbor, MedPy
    and MONAI) and *surfels* (corners where inside meets outside, weighted by their area, DeepMind).
    """

    __repr__ = brief

    mask: Flags
    label: Flags
    spacing: Floats

    @property
    def mask_empty(self) -> bool:
        """Whether the mask has no foreground."""
        return not self.mask.any()

    @property
    def label_empty(self) -> bool:
        """Whether the label has no foreground."""
        return not self.label.any()

    @cached_property
    def voxels(self) -> Distances:
        """Between surface voxels, each counting one."""
        mask, label = (inside & ~ndimage.binary_erosion(inside) for inside in (self.mask, self.label))
        return _between(mask, label, np.ones(mask.shape), np.ones(label.shape), self.spacing)

    @cached_property
    def surfels(self) -> Distances:
        """Between corners of the voxel grid on either surface, each counting its area (3-D) or length (2-D)."""
        sizes = surfel_sizes(tuple(self.spacing.tolist()))
        everywhere = len(sizes) - 1
        mask, label = neighborhood_codes(self.mask), neighborhood_codes(self.label)
        mask_border, label_border = ((code != 0) & (code != everywhere) for code in (mask, label))
        return _between(mask_border, label_border, sizes[mask], sizes[label], self.spacing)


def _between(mask: Flags, label: Flags, mask_sizes: Floats, label_sizes: Floats, spacing: Floats) -> Distances:
    if not (mask.any() and label.any()):
        nothing = np.empty(0)
        return Distances(nothing, nothing, mask_sizes[mask], label_sizes[label])
    to_label = _distances(np.argwhere(mask), label, spacing)
    to_mask = _distances(np.argwhere(label), mask, spacing)
    return Distances(to_label, to_mask, mask_sizes[mask], label_sizes[label])


def _distances(points: Integers, surface: Flags, spacing: Floats) -> Floats:
    """Distance of each point to the nearest of a surface; points on it are not looked up, and most often most are."""
    away = np.flatnonzero(~surface[tuple(points.T)])
    distances = np.zeros(len(points))
    if away.size:
        there = np.argwhere(surface)
        nearest = cKDTree(there * spacing, compact_nodes=False, balanced_tree=False).query(points[away] * spacing)[1]
        distances[away] = np.sqrt((((points[away] - there[nearest]) * spacing) ** 2).sum(axis=1))
    return distances


def surface_gaps(mask: Any, label: Any, *, spacing_mm: Sequence[float] | None = None) -> Gaps:
    """Prepare the surfaces of mask and label (binarized to foreground) for hd95, assd and surface_dice (M9).

    Distances are in mm with ``spacing_mm``, one number an axis in the mask's order, and in voxels without.

    >>> mask, label = np.zeros((5, 9), bool), np.zeros((5, 9), bool)
    >>> mask[1:4, 1:4] = label[1:4, 2:5] = True
    >>> surface_gaps(mask, label).voxels.from_mask.max()
    np.float64(1.0)
    """
    mask, label = checked_masks(mask=mask, label=label)
    spacing = checked_spacing(spacing_mm, mask.ndim)
    mask, label = on_host(mask) > 0, on_host(label) > 0
    box = _box(mask | label)
    return Gaps(np.ascontiguousarray(mask[box]), np.ascontiguousarray(label[box]), spacing)


def _box(covered: Flags) -> tuple[slice, ...]:
    """The smallest box around everything that is covered; a single voxel where nothing is."""
    sides = []
    for axis in range(covered.ndim):
        others = tuple(other for other in range(covered.ndim) if other != axis)
        hit = np.flatnonzero(covered.any(axis=others))
        sides.append(slice(int(hit[0]), int(hit[-1]) + 1) if hit.size else slice(0, 1))
    return tuple(sides)
