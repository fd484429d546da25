"""Distances between the surfaces of a mask and a label: 95th percentile and mean (M9). Foreground is binarized.

A surface voxel is a foreground voxel with a background face neighbor, as in MedPy and MONAI.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import ndimage
from scipy.spatial import cKDTree

from casewise.measure.masks import Flags, Floats, bounding_box, checked_masks, checked_spacing, on_host


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
    mask, label = on_host(mask) > 0, on_host(label) > 0
    if not (mask.any() and label.any()):
        return np.array([np.nan])
    box = bounding_box(mask | label)
    first, second = (inside[box] & ~ndimage.binary_erosion(inside[box]) for inside in (mask, label))
    return np.concatenate([_distances(first, second, spacing), _distances(second, first, spacing)])


def _distances(surface: Flags, other: Flags, spacing: Floats) -> Floats:
    """Distance of each voxel to the nearest of the other surface; most voxels mostly lie on it and need no search."""
    points = np.argwhere(surface)
    away = np.flatnonzero(~other[surface])
    distances = np.zeros(len(points))
    if away.size:
        there = np.argwhere(other)
        nearest = cKDTree(there * spacing, compact_nodes=False, balanced_tree=False).query(points[away] * spacing)[1]
        distances[away] = np.sqrt((((points[away] - there[nearest]) * spacing) ** 2).sum(axis=1))
    return distances


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
