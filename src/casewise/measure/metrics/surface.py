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
    mask, label = ((on_host(side) > 0).view(np.uint8) for side in (mask, label))
    return distances_by_label(mask, label, tuple(spacing.tolist())).get(1, np.array([np.nan]))


def distances_by_label(mask: NDArray[Any], label: NDArray[Any], spacing: tuple[float, ...]) -> dict[int, Floats]:
    """Return the surface distances of each label that both masks hold; the masks have one unsigned integer type."""
    box = bounding_box(mask | label)
    edge = [max(1, int(NEAR * min(spacing) / size)) for size in spacing]
    first, second = (_surface(inside[box], edge) for inside in (mask, label))
    of_first, to_second = _distances(first, second, spacing)
    of_second, to_first = _distances(second, first, spacing)
    held = [set(np.flatnonzero(np.bincount(of)).tolist()) for of in (of_first, of_second)]
    return {c: np.concatenate([to_second[of_first == c], to_first[of_second == c]]) for c in sorted(held[0] & held[1])}


def _surface(inside: NDArray[Any], edge: Sequence[int]) -> NDArray[Any]:
    """Return the labels of the voxels with a face neighbor of another label, 0 elsewhere, with an edge around them."""
    labels = np.zeros([side + 2 * more for side, more in zip(inside.shape, edge, strict=True)], inside.dtype)
    labels[tuple(slice(more, -more) for more in edge)] = inside
    flat, kept = labels.reshape(-1), np.zeros(labels.size, bool)
    for stride in labels.strides:
        step = stride // labels.itemsize
        differ = flat[step:] != flat[:-step]
        kept[step:] |= differ
        kept[:-step] |= differ
    flat *= kept
    return labels


@lru_cache(maxsize=64)
def _offsets(spacing: tuple[float, ...]) -> tuple[Integers, Floats]:
    """Return every offset within a ball of ``NEAR`` voxels but 0, the nearest first, and its length."""
    far = [int(NEAR * min(spacing) / size) for size in spacing]
    around = np.array(list(product(*(range(-most, most + 1) for most in far))))
    lengths = np.sqrt(((around * spacing) ** 2).sum(axis=1))
    order = np.argsort(lengths, kind="stable")[1 : int((lengths <= NEAR * min(spacing)).sum())]
    return around[order], lengths[order]


def _distances(mine: NDArray[Any], other: NDArray[Any], spacing: tuple[float, ...]) -> tuple[Integers, Floats]:
    """Return the label of each surface voxel, and its distance to the other surface of this label.

    Most voxels lie on the other surface or beside it: the nearest offsets are tried first, for all labels at once.
    """
    at = np.flatnonzero(mine != 0)
    of, there = mine.reshape(-1)[at], other.reshape(-1)
    distances = np.zeros(at.size)
    left = np.flatnonzero(there[at] != of)
    around, lengths = _offsets(spacing)
    steps = around @ (np.array(mine.strides) // mine.itemsize)
    for part in (slice(0, 4), *(slice(k, k + 32) for k in range(4, len(steps), 32))):  # a ball holds at least 8
        hit = there[at[left, None] + steps[part]] == of[left, None]
        first = hit.argmax(axis=1)
        near = hit[np.arange(left.size), first]
        distances[left[near]] = lengths[part][first[near]]
        left = left[~near]
    for c in np.unique(of[left]).tolist():
        far = left[of[left] == c]
        here, whole = (np.unravel_index(found, mine.shape) for found in (at[far], np.flatnonzero(there == c)))
        distances[far] = _far(np.stack(here, 1), np.stack(whole, 1), spacing)
    return of, distances


def _far(here: Integers, there: Integers, spacing: tuple[float, ...]) -> Floats:
    """Return the distance of each point to the nearest one there."""
    if not there.size:
        return np.full(len(here), np.nan)
    places, wide = there * spacing, NEAR * min(spacing)
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
