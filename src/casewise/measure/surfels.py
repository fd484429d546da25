r"""How much surface lies at a corner where 2x2 (2x2x2) voxels meet: the elements of DeepMind's surface Dice.

The voxels around a corner that are inside form groups of face neighbors. Of a set and its complement the smaller one
is taken (they share one surface), and each group adds the flat pieces through the midpoints of the cut edges. With
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

from functools import lru_cache
from itertools import product

import numpy as np

from casewise.measure.masks import Flags, Floats

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
