r"""Agreement of surfaces: 95th percentile and mean distance, surface Dice, boundary IoU (M9). Foreground is binarized.

Each metric takes a mask and a label, or the :class:`~casewise.measure.metrics.surface.Gaps` that were measured once:

    gaps = surface_gaps(mask, label, spacing_mm=(10.0, 1.25, 1.25))
    hd95(gaps), assd(gaps), surface_dice(gaps, tolerance_mm=2.0)

Surface Dice uses the surface elements of DeepMind's package: each corner where 2x2 (2x2x2) voxels meet has an area. The
inside voxels around a corner form groups of face neighbors. Of a set and its complement the smaller one is taken (they
share one surface), and each group adds the flat pieces through the midpoints of the cut edges. With
:math:`p_i` the area of a voxel's face across axis i and :math:`|p|` its norm, in 3-D:

    one voxel                  a triangle                      |p| / 8
    two along axis a           a rectangle                     |p without a| / 2
    three across axis a        a triangle and a trapezoid      p_a / 2 + 3 |p| / 8
    four across axis a         a rectangle                     p_a
    one and its 3 neighbors    a hexagon                       3 |p| / 4
    a chain over axes a, b, c  four triangles                  |p| / 2 + |p without a| / 4 + |p without c| / 4

Equal to the lookup table of Nikolov et al. (2018, arXiv 1809.04430) for all 256 neighborhoods, which a test checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, Literal

import numpy as np
from scipy import ndimage
from scipy.spatial import cKDTree

from casewise.core.errors import BadInput
from casewise.core.text import brief
from casewise.measure.masks import Flags, Floats, Integers, bounding_box, checked_masks, checked_spacing, on_host
from casewise.measure.metrics.overlap import value_if_empty

Corner = tuple[int, ...]


def neighborhood_codes(mask: Flags) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """At each corner of the voxel grid, which of the voxels around it are inside: one bit a voxel."""
    padded = np.pad(mask, 1).view(np.uint8)
    codes = np.zeros([length + 1 for length in mask.shape], np.uint8)
    for bit, corner in enumerate(product((0, 1), repeat=mask.ndim)):
        part = tuple(slice(start, start + length + 1) for start, length in zip(corner, mask.shape, strict=True))
        codes |= padded[part] << np.uint8(bit)
    return codes


@lru_cache(maxsize=64)
def surfel_sizes(spacing_mm: tuple[float, ...]) -> Floats:
    """Surface (3-D: mm2, 2-D: mm) of every code of :func:`neighborhood_codes`."""
    corners = list(product((0, 1), repeat=len(spacing_mm)))
    size_of = _length if len(spacing_mm) == 2 else _area
    sizes = np.zeros(1 << len(corners))
    for code in range(len(sizes)):
        inside = {corner for bit, corner in enumerate(corners) if code >> bit & 1}
        smaller = inside if 2 * len(inside) <= len(corners) else set(corners) - inside
        sizes[code] = sum(size_of(group, np.array(spacing_mm)) for group in _groups(smaller))
    return sizes


def _groups(corners: set[Corner]) -> list[list[Corner]]:
    """Split a set of corners of the unit cube into groups of face neighbors."""
    groups: list[list[Corner]] = []
    rest = set(corners)
    while rest:
        group = [rest.pop()]
        for member in group:  # grows while it is walked
            near = {corner for corner in rest if _apart(member, corner) == 1}
            rest -= near
            group += sorted(near)
        groups.append(group)
    return groups


def _apart(one: Corner, other: Corner) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def _length(group: list[Corner], spacing: Floats) -> float:
    """2-D: the line that cuts off one voxel, or two along an axis."""
    if len(group) == 1:
        return float(np.linalg.norm(spacing)) / 2
    return float(spacing[int(np.argmax(np.ptp(group, axis=0)))])


def _area(group: list[Corner], spacing: Floats) -> float:
    """3-D: the pieces listed at the top of this file."""
    faces = np.prod(spacing) / spacing
    whole = float(np.linalg.norm(faces))
    across = np.flatnonzero(np.ptp(group, axis=0) == 0)  # axes along which the group has one layer only
    if len(group) == 1:
        return whole / 8
    if len(group) == 2:
        return float(np.linalg.norm(faces[across])) / 2
    if across.size:
        flat = float(faces[across[0]])
        return flat if len(group) == 4 else flat / 2 + 3 * whole / 8
    if any(sum(_apart(member, other) == 1 for other in group) == 3 for member in group):
        return 3 * whole / 4
    return whole / 2 + sum(float(np.linalg.norm(np.delete(faces, axis))) for axis in _end_axes(group)) / 4


def _end_axes(chain: list[Corner]) -> list[int]:
    """The axes of the first and the last link of a chain of four corners."""
    axes = []
    for member in chain:
        near = [other for other in chain if _apart(member, other) == 1]
        if len(near) == 1:
            axes.append(int(np.argmax(np.abs(np.subtract(member, near[0])))))
    return axes


@dataclass(frozen=True, eq=False)
class Distances:
    """For every element of one surface the distance to the other surface, and how much surface the element is."""

    from_mask: Floats
    from_label: Floats
    mask_sizes: Floats
    label_sizes: Floats


@dataclass(frozen=True, eq=False, repr=False)
class Gaps:
    """A binarized mask and label, cropped to their common bounding box; distances are computed when first needed.

    Two surfaces are in use, and a metric names its own: *voxels* (foreground with a background face neighbor, MedPy
    and MONAI) and *surfels* (corners where inside meets outside, weighted by their area, DeepMind).
    """

    __repr__ = brief

    mask: Flags
    label: Flags
    spacing: Floats

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
    """Measure the surfaces of mask and label once, for hd95, assd and surface_dice (M9).

    Args:
        mask: Predicted mask; foreground is binarized.
        label: True mask, same shape.
        spacing_mm: Size of a voxel, one number per axis; without it distances are in voxels.

    Returns:
        An object that hd95, assd and surface_dice take in place of mask and label.

    Raises:
        BadInput: If the shapes differ, or the spacing has another number of axes.

    Example:
        >>> mask, label = np.zeros((5, 9), bool), np.zeros((5, 9), bool)
        >>> mask[1:4, 1:4] = label[1:4, 2:5] = True
        >>> hd95(surface_gaps(mask, label))
        1.0
    """
    mask, label = checked_masks(mask=mask, label=label)
    spacing = checked_spacing(spacing_mm, mask.ndim)
    mask, label = on_host(mask) > 0, on_host(label) > 0
    box = bounding_box(mask | label)
    return Gaps(np.ascontiguousarray(mask[box]), np.ascontiguousarray(label[box]), spacing)


Directed = Literal["pooled", "max"]


def hd95(
    mask: Any, label: Any = None, *, spacing_mm: Sequence[float] | None = None, directed: Directed = "pooled"
) -> float:
    """Return the 95th percentile of the distances between surface voxels (M9).

    Args:
        mask: Predicted mask (foreground is binarized), or the result of :func:`surface_gaps`.
        label: True mask; None if ``mask`` is the result of :func:`surface_gaps`.
        spacing_mm: Size of a voxel, one number per axis; without it distances are in voxels.
        directed: ``"pooled"`` takes both directions together, as MedPy 0.5.2 does; ``"max"`` takes the larger of the
            two percentiles, as MONAI does.

    Returns:
        The distance in mm (voxels without a spacing), or NaN if mask or label is empty.

    Raises:
        BadInput: If the shapes differ or ``directed`` is unknown.

    Example:
        >>> mask, label = np.zeros((3, 9), bool), np.zeros((3, 9), bool)
        >>> mask[1, 1], label[1, 5] = True, True
        >>> hd95(mask, label, spacing_mm=(1.0, 0.5))
        2.0
    """
    if directed not in ("pooled", "max"):
        raise BadInput(f"directed must be 'pooled' (MedPy) or 'max' (MONAI), got {directed!r}")
    gaps = _gaps(mask, label, spacing_mm)
    if (value := _if_empty("hd95", gaps)) is not None:
        return value
    there, back = gaps.voxels.from_mask, gaps.voxels.from_label
    if directed == "pooled":
        return float(np.percentile(np.concatenate([there, back]), 95))
    return float(max(np.percentile(there, 95), np.percentile(back, 95)))


def assd(mask: Any, label: Any = None, *, spacing_mm: Sequence[float] | None = None) -> float:
    """Return the average symmetric surface distance: the mean of the distances of both directions, as in MedPy 0.5.2.

    Args:
        mask: Predicted mask (foreground is binarized), or the result of :func:`surface_gaps`.
        label: True mask; None if ``mask`` is the result of :func:`surface_gaps`.
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
    gaps = _gaps(mask, label, spacing_mm)
    if (value := _if_empty("assd", gaps)) is not None:
        return value
    return float(np.concatenate([gaps.voxels.from_mask, gaps.voxels.from_label]).mean())


def surface_dice(
    mask: Any, label: Any = None, *, tolerance_mm: float, spacing_mm: Sequence[float] | None = None
) -> float:
    r"""Return the share of both surfaces within a tolerance of the other (Nikolov et al. 2018, arXiv 1809.04430).

    .. math:: \frac{|\{s \in S_m : d(s, S_y) \le t\}| + |\{s \in S_y : d(s, S_m) \le t\}|}{|S_m| + |S_y|}

    over surface elements at the corners of the voxel grid, weighted by their area: DeepMind's surface-distance 0.1.

    Args:
        mask: Predicted mask (foreground is binarized), or the result of :func:`surface_gaps`.
        label: True mask; None if ``mask`` is the result of :func:`surface_gaps`.
        tolerance_mm: Accepted distance, in mm, or in voxels without a spacing.
        spacing_mm: Size of a voxel, one number per axis; without it distances are in voxels.

    Returns:
        The share, 0 if only one of both is empty, NaN if both are.

    Raises:
        BadInput: If the shapes differ or the tolerance is negative.

    Example:
        >>> mask, label = np.zeros((5, 9), bool), np.zeros((5, 9), bool)
        >>> mask[1:4, 1:4] = label[1:4, 2:5] = True
        >>> surface_dice(mask, label, tolerance_mm=1)
        1.0
    """
    if not tolerance_mm >= 0:
        raise BadInput(f"tolerance_mm must be 0 or more, got {tolerance_mm!r}; give the allowed gap in millimeters")
    gaps = _gaps(mask, label, spacing_mm)
    if (value := _if_empty("surface_dice", gaps)) is not None:
        return value
    found = gaps.surfels
    near_label = found.mask_sizes[found.from_mask <= tolerance_mm].sum()
    near_mask = found.label_sizes[found.from_label <= tolerance_mm].sum()
    return float((near_label + near_mask) / (found.mask_sizes.sum() + found.label_sizes.sum()))


def boundary_iou(mask: Any, label: Any, *, width: int | None = None) -> float:
    """Return the IoU of the inner bands of mask and label (Cheng et al. 2021, arXiv 2103.16562).

    A band holds the foreground voxels within ``width`` steps of the background; diagonal steps count one, and
    everything beyond the image is background.

    Args:
        mask: Predicted mask; foreground is binarized.
        label: True mask, same shape.
        width: Width of the band in voxels; default: 2 % of the diagonal, at least one.

    Returns:
        The IoU, 0 if only one of both is empty, NaN if both are.

    Raises:
        BadInput: If the shapes differ or the width is below one.

    Example:
        >>> mask, label = np.zeros((5, 9), bool), np.zeros((5, 9), bool)
        >>> mask[1:4, 1:4] = label[1:4, 2:5] = True
        >>> round(boundary_iou(mask, label, width=1), 3)
        0.333
    """
    mask, label = (on_host(array) > 0 for array in checked_masks(mask=mask, label=label))
    steps = max(1, round(0.02 * math.hypot(*mask.shape))) if width is None else width
    if steps < 1:
        raise BadInput(f"width must be a whole number of voxels, at least 1, got {width!r}")
    value = value_if_empty("boundary_iou", mask_empty=not mask.any(), label_empty=not label.any())
    if value is not None:
        return value
    band, label_band = _band(mask, steps), _band(label, steps)
    return float(np.count_nonzero(band & label_band) / np.count_nonzero(band | label_band))


def _band(inside: Flags, steps: int) -> Flags:
    """Foreground within so many steps of the background."""
    core = (slice(1, -1),) * inside.ndim
    depth = ndimage.distance_transform_cdt(np.pad(inside, 1), metric="chessboard")[core]
    return np.asarray(inside & (depth <= steps))


def _gaps(mask: Any, label: Any, spacing_mm: Sequence[float] | None) -> Gaps:
    if not isinstance(mask, Gaps):
        return surface_gaps(mask, label, spacing_mm=spacing_mm)
    if label is not None or spacing_mm is not None:
        raise BadInput("surface gaps already include label and spacing; pass only the gaps, or mask and label")
    return mask


def _if_empty(metric: str, gaps: Gaps) -> float | None:
    return value_if_empty(metric, mask_empty=not gaps.mask.any(), label_empty=not gaps.label.any())
