"""Fragmentation: how much of the mask adaptation changed, and into how many pieces. No label needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from casewise.measure.masks import count_foreground
from casewise.measure.regions import Connectivity, Regions, regions_of
from casewise.measure.signals import of_masks


@dataclass(frozen=True)
class Fragmentation:
    """The difference D of two masks in numbers; undefined shares are None."""

    regions: int  # n_reg: components of at least min_area voxels (C1)
    delta: float  # |D| / |Omega| (B2)
    area: int  # |D|
    effective_regions: float  # (sum |R|)^2 / sum |R|^2 over all components; 0 if D is empty (S4)
    largest_share: float | None  # max |R| / |D| (S4)
    singleton_share: float | None  # share of D in components of one voxel (O5)
    delta_foreground: float | None  # |D| / |foreground of M0| (S4)
    largest: int  # voxels of the largest component (O5)

    def as_signals(self) -> dict[str, float | None]:
        """Return the fields by signal name."""
        return {name: None if value is None else float(value) for name, value in asdict(self).items()}


def fragmentation(
    source: Any,
    adapted: Any,
    *,
    min_area: int = 16,
    foreground: bool = True,
    connectivity: Connectivity = "face",
    min_area_mm: float | None = None,
    spacing_mm: Sequence[float] | None = None,
) -> Fragmentation:
    r"""Measure how much of a mask changed, and into how many pieces, without a label (B1-B4).

    With D the voxels where the masks differ, R_1 ... R_m its connected components and tau the smallest region,

    .. math:: \delta = |D| / |\Omega|, \quad n_{reg} = \#\{j : |R_j| \ge \tau\}, \quad
              N_{eff} = (\sum_j |R_j|)^2 / \sum_j |R_j|^2, \quad f_1 = \max_j |R_j| / |D|

    Args:
        source: Mask of the frozen model, integer labels of shape ``(*space)``.
        adapted: Mask that would replace it, same shape.
        min_area: Smallest component, in voxels, that counts as a region (driving scenes: 200).
        foreground: Compare ``label > 0`` only; False compares every class.
        connectivity: ``"face"`` neighbors (4 in 2-D, 6 in 3-D) or ``"full"`` (8 and 26).
        min_area_mm: Smallest region in mm2 or mm3; replaces ``min_area`` and needs ``spacing_mm``.
        spacing_mm: Size of a voxel, one number per axis.

    Returns:
        Regions, changed share, changed voxels and the shape of the change; undefined shares are None.

    Raises:
        BadInput: If the masks differ in shape or are not label masks.

    Example:
        >>> import numpy as np
        >>> before = np.zeros((3, 8), np.uint8)
        >>> after = before.copy()
        >>> after[0, :6] = after[2, 7] = 1
        >>> found = fragmentation(before, after, min_area=2)
        >>> found.regions, found.area, round(found.effective_regions, 3), found.largest
        (1, 7, 1.324, 6)
    """
    found = regions_of(
        source, adapted, min_area=min_area, foreground=foreground, connectivity=connectivity,
        min_area_mm=min_area_mm, spacing_mm=spacing_mm,
    )  # fmt: skip
    return summary(found, foreground_voxels=count_foreground(source))


def summary(found: Regions, *, foreground_voxels: int) -> Fragmentation:
    """Return the fragmentation of regions that were already found."""
    area, sizes = found.area, found.sizes
    largest = int(sizes.max()) if area else 0
    return Fragmentation(
        regions=int(found.kept.sum()), delta=area / math.prod(found.shape), area=area,
        effective_regions=area**2 / float(sizes @ sizes) if area else 0.0,
        largest_share=largest / area if area else None,
        singleton_share=int((sizes == 1).sum()) / area if area else None,
        delta_foreground=area / foreground_voxels if foreground_voxels else None, largest=largest,
    )  # fmt: skip


def edit_signals(source: Any, adapted: Any, **measure: Any) -> dict[str, float | None]:
    """Return every signal of two masks: fragmentation, with its options ``measure``, and those of ``SIGNALS``."""
    return {**fragmentation(source, adapted, **measure).as_signals(), **of_masks(source, adapted)}
