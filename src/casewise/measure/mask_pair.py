"""Two masks of one case and its label, with the counts that several measurements share.

Each mask is scanned once or twice, eight bytes at a time; everything after that works on the runs of the foreground and
on the voxels that differ, whatever the volume around them. All labels go through one pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.measure.masks import Floats, Integers, bounding_box
from casewise.measure.metrics.harm import harm
from casewise.measure.pieces import Enclosure, LabelPieces, pieces_of
from casewise.measure.regions import Regions, changed_voxels, components, regions_of
from casewise.measure.runs import Runs


@dataclass(frozen=True)
class Tally:
    """Voxels by label: in old, in new, in the label, and right in old and in new; ignored voxels are left out."""

    old: Integers
    new: Integers
    label: Integers
    right_old: Integers
    right_new: Integers


@dataclass(frozen=True, eq=False)
class MaskPair:
    """The masks of a case, with cached results that several measurements share."""

    old: NDArray[Any]
    new: NDArray[Any]
    label: NDArray[Any] | None
    spacing: tuple[float, ...] | None
    least: int
    ignore: int | None
    holes: Enclosure

    @property
    def voxel_ml(self) -> float | None:
        """Volume of a voxel in ml; None without a spacing, and for pictures."""
        if self.spacing is None or self.old.ndim == 2:
            return None
        return float(np.prod(self.spacing)) / 1000

    @cached_property
    def pieces(self) -> tuple[LabelPieces, LabelPieces]:
        """Pieces of the old and of the new mask."""
        old, new = pieces_of(self.old, self.new, within=self.holes)
        return old, new

    @cached_property
    def values(self) -> int:
        """One more than the largest label."""
        held = [int(found.value.max(initial=0)) for found in self.pieces]
        return 1 + max(*held, int(self.at(self.errors, self.label).max(initial=0)) if self.label is not None else 0)

    @staticmethod
    def at(voxels: Integers, mask: NDArray[Any]) -> NDArray[Any]:
        """Return the values of a mask at some voxels."""
        return mask.reshape(-1)[voxels]

    @cached_property
    def changed(self) -> Integers:
        """Flat indices of the voxels whose label differs."""
        return changed_voxels(self.old, self.new, foreground=False)

    @cached_property
    def errors(self) -> Integers:
        """Flat indices of the voxels where the old mask differs from the label."""
        return changed_voxels(self.old, self.label, foreground=False)

    @cached_property
    def at_changes(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
        """Old, new and label where old and new differ."""
        truth = None if self.label is None else self.at(self.changed, self.label)
        return self.at(self.changed, self.old), self.at(self.changed, self.new), truth

    def count(self, labels: NDArray[Any]) -> Integers:
        """Return how often each label occurs."""
        return np.bincount(labels, minlength=self.values)

    @cached_property
    def held(self) -> tuple[Integers, Integers, Integers]:
        """Voxels of each label in old, in new, and in exactly one of the two."""
        before = self.pieces[0]
        old = np.bincount(before.value, before.sizes, minlength=self.values).astype(np.int64)
        old[0] = self.old.size - old[1:].sum()
        gone, come = (self.count(labels) for labels in self.at_changes[:2])
        return old, old - gone + come, gone + come

    @cached_property
    def tally(self) -> Tally:
        """Counts against the label, computed from the voxels where the old mask is wrong or that changed."""
        assert self.label is not None
        wrong, truth = (self.at(self.errors, mask) for mask in (self.old, self.label))
        before, after, there = self.at_changes
        assert there is not None
        whole = self.held[0]
        in_old, in_label = whole.copy(), whole - self.count(wrong) + self.count(truth)
        right_old = whole - self.count(wrong)
        if self.ignore is not None and self.ignore < self.values:
            # Ignored voxels hold any label in the old mask: another one, among the errors, or by chance the same.
            in_old -= self.count(wrong[truth == self.ignore])
            in_old[self.ignore] = self.count(wrong)[self.ignore]
            in_label[self.ignore] = right_old[self.ignore] = 0
            valid = there != self.ignore
            before, after, there = before[valid], after[valid], there[valid]
        in_new = in_old - self.count(before) + self.count(after)
        right_new = right_old - self.count(before[before == there]) + self.count(after[after == there])
        return Tally(in_old, in_new, in_label, right_old, right_new)

    @cached_property
    def change(self) -> Change:
        """The regions of the change and of every label's change, judged where there is a label."""
        return _change_of(self)

    @cached_property
    def box(self) -> tuple[slice, ...]:
        """The smallest box around the foreground of all masks."""
        covered = self.old | self.new
        return bounding_box(covered if self.label is None else covered | self.label)


@dataclass(frozen=True, eq=False)
class Change:
    """Regions of D, and HA and BA: of the whole, and of each label against everything else (None without a label)."""

    found: Regions
    worse: Integers  # of each component of D: voxels made wrong minus voxels made right; 0 without a label
    made_wrong: int
    ha: Floats  # by label; entry 0 is the whole
    ba: Floats


def _change_of(pair: MaskPair) -> Change:
    """Find and judge the regions of D and of the change of every label, in one labelling.

    Each label's change is a set of voxels of its own, and lies behind D as if it were a further volume, with an empty
    layer between them; a voxel that changes from one label to another lies in both.
    """
    voxels, shape = pair.changed, pair.old.shape
    before, after, truth = pair.at_changes
    if truth is None:
        found = components(voxels, shape, min_area=pair.least)
        nothing = np.full(pair.values, np.nan)
        return Change(found, np.zeros(found.sizes.size, np.int64), 0, nothing, nothing)
    both = np.empty(2 * voxels.size, before.dtype)
    both[::2], both[1::2] = before, after
    order = np.argsort(both, kind="stable")[int(np.count_nonzero(both == 0)) :]  # by label, within it in C order
    which, plane = order >> 1, both[order].astype(np.int64)
    apart = (shape[0] + 1) * int(np.prod(shape[1:]))
    stacked = np.concatenate([voxels, voxels[which] + plane * apart])
    every = components(stacked, (pair.values * (shape[0] + 1), *shape[1:]), min_area=pair.least)
    lost, won = before == truth, after == truth
    sign = np.where((after[which] == plane) == (truth[which] == plane), -1, 1)  # old or new is right about this label
    if pair.ignore is not None:
        valid = truth != pair.ignore
        lost, won, sign = lost & valid, won & valid, sign * valid[which]
    signs = np.concatenate([lost.view(np.int8) - won.view(np.int8), sign])
    worse = np.bincount(every.number, weights=signs, minlength=every.sizes.size).astype(np.int64)
    of = every.runs.first // apart  # of each run: 0 for D, or the label
    label_of = np.zeros(every.sizes.size, np.int64)
    label_of[every.owner] = of
    areas = np.bincount(np.concatenate([[0], plane]), minlength=pair.values)
    areas[0] = voxels.size
    ha, ba = (
        np.bincount(label_of[side], every.sizes[side], minlength=pair.values) / np.maximum(areas, 1)
        for side in (every.kept & (worse > 0), every.kept & (worse < 0))
    )
    runs = int(np.searchsorted(of, 1))
    amount = int(np.count_nonzero(label_of == 0))
    mine = Runs(shape, every.runs.first[:runs], every.runs.last[:runs], every.runs.begin[:runs])
    found = Regions(mine, voxels, every.owner[:runs], every.sizes[:amount], pair.least)
    return Change(found, worse[:amount], int(np.count_nonzero(lost)), ha, ba)


def foreground_change(pair: MaskPair) -> Change:
    """The change of foreground against background alone."""
    if pair.label is None:
        found = regions_of(pair.old, pair.new, min_area=pair.least, foreground=True)
        return Change(found, np.zeros(found.sizes.size, np.int64), 0, np.zeros(1), np.zeros(1))
    judged = harm(pair.old, pair.new, pair.label, min_area=pair.least, foreground=True, ignore=pair.ignore)
    made_wrong = round(judged.voxel_harm * judged.area)
    return Change(judged.found, judged.worse, made_wrong, np.array([judged.ha]), np.array([judged.ba]))
