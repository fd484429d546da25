"""Distances between the surfaces of a mask and a label: 95th percentile and mean (M9). Foreground is binarized.

A surface voxel is a foreground voxel with a background face neighbor, as in MedPy and MONAI.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist

from casewise.measure.masks import Floats, Integers, bounding_box, checked_masks, checked_spacing, on_host

NEAR = 4  # voxels of the smallest spacing
PARTS = (slice(0, 8), slice(8, None))


def surface_distances(mask: Any, label: Any, *, spacing_mm: Sequence[float] | None = None) -> Floats:
    """Measure the distance of every surface voxel of mask and of label to the surface of the other.

    Args:
        mask: Predicted mask; foreground is binarized.
        label: True mask, same shape.
        spacing_mm: Size of a voxel, one number per axis; without it distances are in voxels.

    Returns:
        The distances of both directions; NaN alone if mask or label is empty.

    Raises:
        BadInput: If the shapes differ, or the spacing has another number of axes.

    Example:
        >>> mask, label = np.zeros((3, 9), bool), np.zeros((3, 9), bool)
        >>> mask[1, 1], label[1, 5] = True, True
        >>> surface_distances(mask, label).tolist()
        [4.0, 4.0]
    """
    mask, label = checked_masks(mask=mask, label=label)
    spacing = checked_spacing(spacing_mm, mask.ndim)
    sides = ((on_host(side) > 0).view(np.uint8) for side in (mask, label))
    return distances_by_label(*sides, tuple(spacing.tolist())).get(1, np.array([np.nan]))


def distances_by_label(mask: NDArray[Any], label: NDArray[Any], spacing: tuple[float, ...]) -> dict[int, Floats]:
    """Return the surface distances of each label that both masks hold; the masks have one unsigned integer type.

    Most surface voxels lie on the other surface or beside it, so the offsets around a voxel are tried first, the
    nearest before the others, for all labels at once; only voxels farther away are searched for in the whole surface.
    """
    around, lengths = _offsets(spacing)
    edge = np.maximum(around.max(axis=0), 1).tolist()
    box = bounding_box(mask | label)
    shape = tuple(side.stop - side.start + 2 * more for side, more in zip(box, edge, strict=True))
    steps = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    surfaces = []
    for inside in (mask, label):
        there = np.zeros(shape, mask.dtype)
        there[tuple(slice(more, -more) for more in edge)] = inside[box]
        surfaces.append(_keep_surface(there.reshape(-1), steps))
    voxels = [np.flatnonzero(there != 0) for there in surfaces]
    labels = [there[at] for there, at in zip(surfaces, voxels, strict=True)]
    held = np.intersect1d(*(np.flatnonzero(np.bincount(of)) for of in labels)).tolist()
    apart = []
    for at, of, other, at_other, of_other in (
        (voxels[0], labels[0], surfaces[1], voxels[1], labels[1]),
        (voxels[1], labels[1], surfaces[0], voxels[0], labels[0]),
    ):
        distances = np.zeros(at.size)
        left = np.flatnonzero(other[at] != of)
        for part in PARTS:
            hit = other[at[left, None] + (around[part] @ steps)] == of[left, None]
            first = hit.argmax(axis=1)
            near = hit[np.arange(left.size), first]
            distances[left[near]] = lengths[part][first[near]]
            left = left[~near]
        for c in np.intersect1d(held, of[left]).tolist():
            far = left[of[left] == c]
            here, there = (np.stack(np.unravel_index(some, shape), 1) for some in (at[far], at_other[of_other == c]))
            distances[far] = _far(here, there, np.array(spacing))
        apart.append(distances)
    return {c: np.concatenate([found[of == c] for found, of in zip(apart, labels, strict=True)]) for c in held}


@lru_cache(maxsize=64)
def _offsets(spacing: tuple[float, ...]) -> tuple[Integers, Floats]:
    """Return every offset within a ball of ``NEAR`` voxels, the nearest first, and its length."""
    far = [range(-int(NEAR * min(spacing) / size), int(NEAR * min(spacing) / size) + 1) for size in spacing]
    around = np.array(list(product(*far)))
    lengths = np.sqrt(((around * spacing) ** 2).sum(axis=1))
    order = np.argsort(lengths, kind="stable")
    order = order[(lengths[order] > 0) & (lengths[order] <= NEAR * min(spacing))]
    return around[order], lengths[order]


def _keep_surface(labels: NDArray[Any], steps: Sequence[int]) -> NDArray[Any]:
    """Set all but the voxels with a face neighbor of another label to 0."""
    kept = np.zeros(labels.size, bool)
    for step in steps:
        differ = labels[step:] != labels[:-step]
        kept[step:] |= differ
        kept[:-step] |= differ
    labels *= kept
    return labels


def _far(here: Integers, there: Integers, spacing: Floats) -> Floats:
    """Return the distance of each point to the nearest one there."""
    places, wide = there * spacing, NEAR * spacing.min()
    cubes = np.unique(here * spacing // wide, axis=0, return_index=True)[1]
    if cubes.size <= 16:  # one point of each cube: the nearest of the others is at most two diagonals farther from it
        apart = cdist(here[cubes] * spacing, places)
        kept = (apart <= apart.min(axis=1, keepdims=True) + 2 * wide * len(spacing) ** 0.5).any(axis=0)
        there, places = there[kept], places[kept]
    nearest = cKDTree(places, compact_nodes=False, balanced_tree=False).query(here * spacing)[1]
    return np.asarray(np.sqrt((((here - there[nearest]) * spacing) ** 2).sum(axis=1)))


def hd95(mask: Any, label: Any, *, spacing_mm: Sequence[float] | None = None) -> float:
    """Return the 95th percentile of the distances between surface voxels, both directions together (MedPy 0.5.2; M9).

    Args:
        mask: Predicted mask; foreground is binarized.
        label: True mask, same shape.
        spacing_mm: Size of a voxel, one number per axis; without it distances are in voxels.

    Returns:
        The distance in mm (voxels without a spacing), or NaN if mask or label is empty.

    Raises:
        BadInput: If the shapes differ.

    Example:
        >>> mask, label = np.zeros((3, 9), bool), np.zeros((3, 9), bool)
        >>> mask[1, 1], label[1, 5] = True, True
        >>> hd95(mask, label, spacing_mm=(1.0, 0.5))
        2.0
    """
    return float(np.percentile(surface_distances(mask, label, spacing_mm=spacing_mm), 95))


def assd(mask: Any, label: Any, *, spacing_mm: Sequence[float] | None = None) -> float:
    """Return the average symmetric surface distance: the mean of the distances of both directions, as in MedPy 0.5.2.

    Args:
        mask: Predicted mask; foreground is binarized.
        label: True mask, same shape.
        spacing_mm: Size of a voxel, one number per axis; without it distances are in voxels.

    Returns:
        The distance in mm (voxels without a spacing), or NaN if mask or label is empty.

    Raises:
        BadInput: If the shapes differ.

    Example:
        >>> mask, label = np.zeros((3, 9), bool), np.zeros((3, 9), bool)
        >>> mask[1, 1], label[1, 5] = True, True
        >>> assd(mask, label)
        4.0
    """
    return float(surface_distances(mask, label, spacing_mm=spacing_mm).mean())
