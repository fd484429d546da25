"""Compare a new mask with an old one of the same case: the change of each label and, with a true label, whether it
improved.

Each mask is scanned once or twice, eight bytes at a time; everything after that works on the runs of the foreground and
on the voxels that differ, whatever the volume around them. All labels go through one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import BadInput
from casewise.measure.changes import NAN, Comparison, LabelChange, Regression
from casewise.measure.masks import Flags, Floats, Integers, checked_masks, checked_spacing, least_voxels, on_host
from casewise.measure.metrics.harm import harm
from casewise.measure.metrics.overlap import VOID, dice_of_counts, miou_of_counts
from casewise.measure.metrics.surface import distances_by_label
from casewise.measure.pieces import LabelPieces, pieces_of
from casewise.measure.regions import Regions, changed_voxels, components, regions_of
from casewise.measure.runs import Runs

Surfaces = Literal["none", "moved", "all"]
"""Which surface distances: none; between old and new where a label moved; also HD95 of both to the label."""
LISTED = 20  # regions that became worse, listed with their boxes; the largest of a case


def comparison(
    old: Any,
    new: Any,
    label: Any = None,
    *,
    spacing_mm: Sequence[float] | None = None,
    min_area: int = 16,
    foreground: bool = False,
    ignore: int | None = None,
    classes: Sequence[int] | None = None,
    metric: str = "dice",
    surfaces: Surfaces = "moved",
    zero_is_label: bool = False,
) -> Comparison:
    """Compare the new mask of a case with its old one, and both with the label if there is one.

    Any change of a label counts, also from one foreground label to another, unless ``foreground``. ``classes`` narrows
    the labels (others become background in all masks). Distances are in mm with ``spacing_mm``, in voxels without.
    ``zero_is_label``: every voxel has a label, as in street scenes where 0 is the road; there is no background then.

    >>> old = np.zeros((5, 8), np.uint8)
    >>> old[0:5, 0:5] = 1
    >>> new = old.copy()
    >>> new[2, 2], new[0, 7] = 0, 1
    >>> found = comparison(old, new, min_area=1)
    >>> found.changed, found.regions, found.warnings
    (2, 2, ('label 1: 1 hole, 4.0 % of it', 'label 1: 1 piece gained, 4.0 % of it'))
    """
    if metric not in ("dice", "miou"):
        raise BadInput(f"the metric must be dice or miou, got {metric!r}")
    if surfaces not in ("none", "moved", "all"):
        raise BadInput(f"surfaces must be 'none', 'moved' or 'all', got {surfaces!r}")
    named = {"old": old, "new": new} | ({} if label is None else {"label": label})
    whole = [_compact(name, on_host(mask)) for name, mask in zip(named, checked_masks(**named), strict=True)]
    spacing = None if spacing_mm is None else tuple(checked_spacing(spacing_mm, whole[0].ndim).tolist())
    if zero_is_label:
        if foreground:
            raise BadInput("foreground=True needs a background; with zero_is_label every voxel is foreground")
        whole = [mask.astype(np.uint16) + 1 for mask in whole]  # 0 is nothing from here on, and nothing is 0
        ignore = (VOID if metric == "miou" else None) if ignore is None else ignore
        ignore = None if ignore is None else ignore + 1
        classes = None if classes is None else [label + 1 for label in classes]
    if classes is not None:
        kept = {name: [*classes, *((ignore,) if name == "label" and ignore is not None else ())] for name in named}
        pairs = zip(named, whole, strict=True)
        whole = [np.where(np.isin(mask, kept[name]), mask, mask.dtype.type(0)) for name, mask in pairs]
    least = least_voxels(min_area, axes=whole[0].ndim)
    same = np.result_type(*whole)
    masks = [np.ascontiguousarray(mask, same) for mask in whole]
    pair = MaskPair(masks[0], masks[1], masks[2] if len(masks) == 3 else None, spacing, least, ignore)
    found = _overall(pair, foreground=foreground, metric=metric)
    labels = _labels(pair, surfaces=surfaces)
    return replace(
        found, labels=tuple(replace(row, label=row.label - 1) for row in labels) if zero_is_label else labels
    )


def _compact(name: str, mask: NDArray[Any]) -> NDArray[Any]:
    """Return the labels in the smallest integer type."""
    if mask.dtype == np.bool_:
        return mask.view(np.uint8)
    if mask.dtype == np.uint8:
        return mask
    largest = int(mask.max())
    if largest >= 2**16:
        raise BadInput(f"labels must be at most {2**16 - 1}, got {largest} in {name}; give classes, not instances")
    return mask.astype(np.uint8 if largest < 256 else np.uint16)


def _overall(pair: MaskPair, *, foreground: bool, metric: str) -> Comparison:
    change = foreground_change(pair) if foreground else pair.change
    found = change.found
    before, after, _ = pair.at_changes
    old = pair.held[0]
    covered = int(old[1:].sum()) + int(np.count_nonzero((before == 0) & (after != 0)))
    plain = Comparison(
        voxels=pair.old.size, changed=found.area, changed_share=found.area / covered if covered else 0.0,
        regions=int(found.kept.sum()), largest=int(found.sizes.max(initial=0)), labels=(),
        spacing_known=pair.spacing is not None, voxel_ml=pair.voxel_ml, metric=metric,
    )  # fmt: skip
    return plain if pair.label is None else _with_harm(plain, pair, change)


def _with_harm(plain: Comparison, pair: MaskPair, change: Change) -> Comparison:
    scores = _metrics(pair, plain.metric)
    found, worse, area = change.found, change.worse, max(change.found.area, 1)
    return replace(
        plain, labelled=True, metric_old=scores[0], metric_new=scores[1], ha=float(change.ha[0]),
        ba=float(change.ba[0]), unscored=int(found.sizes[~found.kept].sum()) / area, made_wrong=change.made_wrong,
        made_right=change.made_wrong - int(worse.sum()), regressions=_regressions(found, worse, pair.voxel_ml),
    )  # fmt: skip


def _dice_by_label(pair: MaskPair) -> tuple[Floats, Floats]:
    """Dice of old and of new, label by label; NaN for background and for labels that the label lacks (A10)."""
    t = pair.tally
    absent = (t.label == 0) | (np.arange(t.label.size) == 0)
    with np.errstate(invalid="ignore"):
        old, new = 2 * t.right_old / (t.old + t.label), 2 * t.right_new / (t.new + t.label)
    return np.where(absent, NAN, old), np.where(absent, NAN, new)


def _metrics(pair: MaskPair, metric: str) -> tuple[float, float]:
    """Mean Dice (A10) or mean IoU (A11) of old and of new."""
    if metric == "miou" and pair.ignore is None:
        pair = replace(pair, ignore=VOID)
    t, of_counts = pair.tally, dice_of_counts if metric == "dice" else miou_of_counts
    return of_counts(t.right_old, t.old, t.label), of_counts(t.right_new, t.new, t.label)


def _regressions(found: Regions, worse: Integers, voxel_ml: float | None) -> tuple[Regression, ...]:
    """The largest harmful regions, with their boxes."""
    harmful = np.flatnonzero(found.kept & (worse > 0))
    harmful = harmful[np.argsort(-found.sizes[harmful], kind="stable")][:LISTED]
    sizes = found.sizes[harmful]
    rank = np.full(found.sizes.size, LISTED)
    rank[harmful] = np.arange(harmful.size)
    of = rank[found.number]
    order = np.argsort(of, kind="stable")[: int(sizes.sum())]  # the voxels of one region after another
    where = np.stack(np.unravel_index(found.voxels[order], found.shape))
    begin = np.cumsum(sizes) - sizes
    low, high = (edge.reduceat(where, begin, axis=1).T.tolist() for edge in (np.minimum, np.maximum))
    ml = [None if voxel_ml is None else size * voxel_ml for size in sizes.tolist()]
    listed = zip(sizes.tolist(), worse[harmful].tolist(), low, high, ml, strict=True)
    return tuple(Regression(n, bad, tuple(a), tuple(at + 1 for at in b), own) for n, bad, a, b, own in listed)


def _labels(pair: MaskPair, *, surfaces: Surfaces) -> tuple[LabelChange, ...]:
    """One row for each foreground label that any of the masks holds."""
    in_old, in_new, changed = pair.held
    there = (in_old + in_new > 0) if pair.label is None else (in_old + in_new + pair.tally.label > 0)
    there[0] = False
    if pair.ignore is not None and pair.ignore < there.size and not (in_old + in_new)[pair.ignore]:
        there[pair.ignore] = False
    counted = {name: counts.tolist() for name, counts in _piece_counts(pair).items()}
    dice = None if pair.label is None else _dice_by_label(pair)
    ml = pair.voxel_ml
    rows = []
    for c in np.flatnonzero(there).tolist():
        more: dict[str, Any] = {}
        if ml is not None:
            more |= {"volume_old_ml": int(in_old[c]) * ml, "volume_new_ml": int(in_new[c]) * ml}
        if dice is not None:
            more |= {"dice_old": float(dice[0][c]), "dice_new": float(dice[1][c])}
            truth = int(pair.tally.label[c])
            more |= {"voxels_label": truth, "volume_label_ml": None if ml is None else truth * ml}
            more |= {"ha": float(pair.change.ha[c]), "ba": float(pair.change.ba[c])}
        pieces = {name: counts[c] for name, counts in counted.items()}
        row = LabelChange(c, int(in_old[c]), int(in_new[c]), int(changed[c]), **pieces, **more)
        rows.append(row)
    return tuple(_with_surfaces(pair, rows, surfaces))


def _piece_counts(pair: MaskPair) -> dict[str, Integers]:
    """Count pieces and holes of each label in old and new, and those without a counterpart."""
    before, after = pair.pieces
    old, new = pair.old.reshape(-1), pair.new.reshape(-1)

    def differ(voxels: Integers) -> Flags:
        return np.asarray(old[voxels] != new[voxels])

    lost, gained = (found.within(differ(found.runs.first), differ) for found in (before, after))

    def count(of: Integers, which: Flags) -> Integers:
        return np.bincount(of[which], minlength=pair.values)

    def largest(found: LabelPieces, of: Integers, which: Flags) -> Integers:
        most = np.zeros(pair.values, np.int64)
        np.maximum.at(most, of[which], found.sizes[which])
        return most

    holes_gained, holes_lost = _alone(after, before), _alone(before, after)
    return {
        "components_old": count(before.value, before.value > 0),
        "components_new": count(after.value, after.value > 0),
        "components_gained": count(after.value, gained),
        "components_lost": count(before.value, lost),
        # A hole between several labels is a hole of none of them; it is seen as their change of volume.
        "holes_old": count(before.hole_of, before.hole_of > 0),
        "holes_new": count(after.hole_of, after.hole_of > 0),
        "holes_gained": count(after.hole_of, holes_gained),
        "holes_lost": count(before.hole_of, holes_lost),
        "largest_gained": largest(after, after.value, gained),
        "largest_lost": largest(before, before.value, lost),
        "largest_hole": largest(after, after.hole_of, holes_gained),
    }


def _alone(found: LabelPieces, other: LabelPieces) -> Flags:
    """True for pieces that are holes and touch no hole of the same label in the other mask."""
    holes: Flags = found.hole_of > 0
    if not holes.any() or not (other.hole_of > 0).any():
        return holes
    voxels, mine = found.voxels_of(holes)
    run = np.searchsorted(other.runs.first, voxels, side="right") - 1
    met = (run >= 0) & (other.runs.last[run] >= voxels)
    met &= other.hole_of[other.owner[run]] == found.hole_of[mine]
    alone = holes.copy()
    alone[mine[met]] = False
    return alone


def _with_surfaces(pair: MaskPair, rows: Sequence[LabelChange], surfaces: Surfaces) -> Iterator[LabelChange]:
    if surfaces == "none":
        yield from rows
        return
    nothing, steps = np.array([NAN]), pair.spacing or (1.0,) * pair.old.ndim
    moved = distances_by_label(pair.old, pair.new, steps) if pair.changed.size else {}
    before, after = (
        {} if surfaces == "moved" or pair.label is None else distances_by_label(mask, pair.label, steps)
        for mask in (pair.old, pair.new)
    )
    for row in rows:
        apart = moved.get(row.label, nothing) if row.changed else np.array([0.0 if row.voxels_old else NAN])
        row = replace(row, shift_hd95=float(np.percentile(apart, 95)), shift_assd=float(apart.mean()))
        if surfaces == "all" and pair.label is not None:
            old, new = (float(np.percentile(found.get(row.label, nothing), 95)) for found in (before, after))
            row = replace(row, hd95_old=old, hd95_new=new)
        yield row


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

    @property
    def voxel_ml(self) -> float | None:
        """Volume of a voxel in ml; None without a spacing, and for pictures."""
        if self.spacing is None or self.old.ndim == 2:
            return None
        return float(np.prod(self.spacing)) / 1000

    @cached_property
    def pieces(self) -> tuple[LabelPieces, LabelPieces]:
        """Pieces of the old and of the new mask."""
        old, new = pieces_of(self.old, self.new)
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

    The change of each label is appended to D as a further volume, with an empty layer between them. A voxel that
    changes from one label to another lies in the volumes of both.
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
