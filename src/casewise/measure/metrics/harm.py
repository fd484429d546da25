"""Harm: which regions of an edit made the mask worse (B5-B7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.text import brief
from casewise.measure.geometry import region_shapes
from casewise.measure.masks import Floats, Integers, checked_masks, checked_spacing, flat_values
from casewise.measure.regions import Connectivity, Regions, regions_of

VERDICTS = ("beneficial", "neutral", "harmful")


@dataclass(frozen=True, eq=False, repr=False)
class Harm:
    """Result of :func:`harm`; ha + ba + neutral_scored + unscored = 1 unless D is empty."""

    __repr__ = brief

    ha: float  # share of D in regions with more errors after than before (B6)
    ba: float  # share of D in regions with fewer (B7)
    neutral_scored: float  # share of D in regions with as many (B7)
    unscored: float  # share of D in components below min_area (B7)
    regions: int
    delta: float
    area: int
    voxel_harm: float  # |{x in D : source right, adapted wrong}| / |D|: the companion without min_area (S25)
    found: Regions = field(repr=False)
    worse: Integers = field(repr=False)  # of each component: voxels made wrong minus voxels made right
    spacing: Floats | None

    @cached_property
    def table(self) -> NDArray[np.void]:
        """One row per region: number, area, box_low, box_high (half-open), centroid, boundary, compactness, distance
        (centroids, to the largest, in voxels), distance_mm (NaN without a spacing), verdict, share of |D|."""
        shapes = region_shapes(self.found, self.spacing)
        verdict = np.array(VERDICTS)[np.sign(self.worse[shapes["number"]]) + 1]
        columns = {**shapes, "verdict": verdict, "share": shapes["area"] / max(self.area, 1)}
        table = np.empty(len(verdict), [(name, values.dtype, values.shape[1:]) for name, values in columns.items()])
        for name, values in columns.items():
            table[name] = values
        return table

    def rows(self) -> list[dict[str, Any]]:
        """Return the table as dictionaries, for JSON or a data frame."""
        names = self.table.dtype.names or ()
        return [{name: row[name].tolist() for name in names} for row in self.table]


def harm(
    source: Any,
    adapted: Any,
    label: Any,
    *,
    min_area: int = 16,
    foreground: bool = True,
    ignore: int | None = None,
    spacing_mm: Sequence[float] | None = None,
    min_area_mm: float | None = None,
    connectivity: Connectivity = "face",
) -> Harm:
    r"""Measure how much of an edit made the mask worse, and how much made it better (B5-B7).

    The edit D is the set of voxels where ``source`` and ``adapted`` differ. A region of D is harmful if more of its
    voxels are wrong in ``adapted`` than in ``source``, beneficial if fewer, neutral if as many. Harmful accepted area
    is the harmful share of the edit:

    .. math:: HA = \sum_{R_j\ \text{harmful}} |R_j| \,/\, |D|, \qquad HA = 0 \text{ if } D = \emptyset

    D counts all changed voxels, also those in components below ``min_area``.

    Args:
        source: Mask of the frozen model, integer labels of shape ``(*space)``.
        adapted: Mask that would replace it, same shape.
        label: True mask, same shape.
        min_area: Smallest component, in voxels, that is judged.
        foreground: Compare ``label > 0`` only; False compares every class.
        ignore: Label value whose voxels belong to D but are never wrong (B15).
        spacing_mm: Size of a voxel, one number per axis.
        min_area_mm: Smallest region in mm2 or mm3; replaces ``min_area`` and needs ``spacing_mm``.
        connectivity: ``"face"`` neighbors (4 in 2-D, 6 in 3-D) or ``"full"`` (8 and 26).

    Returns:
        Harmful, beneficial, neutral and unscored shares of the edit; they add up to 1 unless nothing changed.

    Raises:
        BadInput: If the masks differ in shape or are not label masks.

    Example:
        >>> before = np.zeros((4, 8), np.uint8)
        >>> after, label = before.copy(), before.copy()
        >>> after[0, :6] = after[2, :2] = label[0, :2] = label[2, :2] = 1
        >>> found = harm(before, after, label, min_area=1)
        >>> found.ha, found.ba, found.table["verdict"].tolist()
        (0.75, 0.25, ['harmful', 'beneficial'])
    """
    source, adapted, label = checked_masks(source=source, adapted=adapted, label=label)
    found = regions_of(
        source, adapted, min_area=min_area, foreground=foreground, connectivity=connectivity,
        min_area_mm=min_area_mm, spacing_mm=spacing_mm,
    )  # fmt: skip
    spacing = None if spacing_mm is None else checked_spacing(spacing_mm, source.ndim)
    lost, won = _judged(source, adapted, label, found.voxels, foreground=foreground, ignore=ignore)
    change = np.bincount(found.number, weights=lost.view(np.int8) - won.view(np.int8), minlength=found.sizes.size)
    return _summary(found, change.astype(np.int64), made_wrong=int(np.count_nonzero(lost)), spacing=spacing)


def _judged(
    source: Any, adapted: Any, label: Any, voxels: Integers, *, foreground: bool, ignore: int | None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which voxels of D were right before, and which are right now (B5, B15)."""
    before, after, truth = (flat_values(mask, voxels) for mask in (source, adapted, label))
    valid = np.ones(voxels.size, bool) if ignore is None else truth != ignore
    if foreground:
        before, after, truth = before > 0, after > 0, truth > 0
    return valid & (before == truth), valid & (after == truth)


def _summary(found: Regions, worse: Integers, *, made_wrong: int, spacing: Floats | None) -> Harm:
    area = found.area
    scored = np.where(found.kept, found.sizes, 0)
    counted = {sign: int(scored[np.sign(worse) == sign].sum()) for sign in (-1, 0, 1)}
    whole = area or 1  # D empty: every share is 0 (B6)
    return Harm(
        ha=counted[1] / whole, ba=counted[-1] / whole, neutral_scored=counted[0] / whole,
        unscored=(area - sum(counted.values())) / whole, regions=int(found.kept.sum()),
        delta=area / math.prod(found.shape), area=area, voxel_harm=made_wrong / whole, found=found, worse=worse,
        spacing=spacing,
    )  # fmt: skip
