"""A new mask against an old one of the same case: what changed, label by label; and, with a label, for better or worse.

Each mask is scanned once or twice, eight bytes at a time; everything after that works on the runs of the foreground and
on the voxels that differ, whatever the volume around them. All labels go through one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from casewise.core.brief import brief
from casewise.core.errors import BadInput
from casewise.measure.geometry import boxes_of
from casewise.measure.masks import Flags, Floats, Integers, checked_masks, checked_spacing, least_voxels, on_host
from casewise.measure.metrics.harm import harm
from casewise.measure.metrics.overlap import VOID
from casewise.measure.metrics.surface import assd, hd95, surface_gaps
from casewise.measure.pieces import Enclosure, Pieces, pieces_of
from casewise.measure.regions import Regions, changed_voxels, components, regions_of
from casewise.measure.runs import Runs

Surfaces = Literal["none", "moved", "all"]
"""Which surface distances: none; between old and new where a label moved; also HD95 of both to the label."""

NOTABLE = 0.01  # pieces and holes below this share of their label are counted, but nobody is asked to look at them
_DISAGREE = 0.5  # 1 - Dice between old and new above which a label is hardly the same thing
LISTED = 20  # regions that became worse, listed with their boxes; the largest of a case
NAN = float("nan")


@dataclass(frozen=True)
class LabelChange:
    """One label of one case, old and new. None: not asked for, or no label was given; NaN: undefined here."""

    label: int
    voxels_old: int
    voxels_new: int
    changed: int  # voxels that are this label in exactly one of the two
    components_old: int
    components_new: int
    components_gained: int  # pieces of the new mask that touch nothing of this label in the old one
    components_lost: int
    gained_voxels: int  # voxels of gained pieces
    lost_voxels: int
    holes_old: int
    holes_new: int
    holes_gained: int  # holes of the new mask that touch no hole of this label in the old one
    holes_lost: int
    largest_gained: int = 0  # voxels of the largest piece gained, of the largest lost, of the largest hole gained
    largest_lost: int = 0
    largest_hole: int = 0
    volume_old_ml: float | None = None  # None without a spacing, and in pictures
    volume_new_ml: float | None = None
    shift_hd95: float | None = None  # between the old and the new surface, mm or voxels; NaN if one is empty
    shift_assd: float | None = None
    dice_old: float | None = None
    dice_new: float | None = None
    ha: float | None = None
    ba: float | None = None
    hd95_old: float | None = None
    hd95_new: float | None = None

    @property
    def drift(self) -> float:
        """(new - old) / old in voxels, with its sign; NaN where the old mask has none of this label."""
        return (self.voxels_new - self.voxels_old) / self.voxels_old if self.voxels_old else NAN

    @property
    def drift_ml(self) -> float | None:
        """New minus old volume."""
        if self.volume_old_ml is None or self.volume_new_ml is None:
            return None
        return self.volume_new_ml - self.volume_old_ml

    def share(self, voxels: int) -> float:
        """Voxels by those of this label, in the mask that holds more of it; 0 if neither holds any."""
        return voxels / max(self.voxels_old, self.voxels_new, 1)

    @property
    def suspicion(self) -> float:
        """How much of this label a person should look at, in [0, 1]: the largest piece gained or lost or hole gained,
        as a share of the label and from ``NOTABLE`` on; 1 - agreement, where that is more than a half; 1 for a label
        that came or went."""
        if not self.voxels_old or not self.voxels_new:
            return float(self.voxels_old != self.voxels_new)
        largest = self.share(max(self.largest_gained, self.largest_lost, self.largest_hole))
        apart = 1 - self.agreement
        return max(min(largest, 1.0) if largest >= NOTABLE else 0.0, apart if apart > _DISAGREE else 0.0)

    @property
    def agreement(self) -> float:
        """Dice between old and new; NaN if both are empty."""
        both = self.voxels_old + self.voxels_new
        return (both - self.changed) / both if both else NAN

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**vars(self), "drift": self.drift, "drift_ml": self.drift_ml, "agreement": self.agreement}


@dataclass(frozen=True)
class Regression:
    """A region of the change with more wrong voxels than before: where it is and how large."""

    voxels: int
    worse: int  # voxels made wrong minus voxels made right
    low: tuple[int, ...]  # first index inside its box, per axis of the mask
    high: tuple[int, ...]  # first index beyond it
    ml: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The new mask of one case against the old one; the fields after ``labels`` need a label and are None without."""

    voxels: int  # of the whole mask
    changed: int  # |D|: voxels whose label differs (foreground from background only, if asked so)
    changed_share: float  # changed voxels by those that are foreground in old or new; 0 if there are none
    regions: int  # components of D of at least min_area voxels
    largest: int  # voxels of the largest component of D
    labels: tuple[LabelChange, ...]
    spacing_known: bool = False
    labelled: bool = False
    metric: str = "dice"
    metric_old: float | None = None
    metric_new: float | None = None
    ha: float | None = None
    ba: float | None = None
    neutral_scored: float | None = None
    unscored: float | None = None
    made_wrong: int | None = None  # voxels right in the old mask and wrong in the new one
    made_right: int | None = None
    regressions: tuple[Regression, ...] = field(default=())  # the largest harmful regions
    harmful_regions: int | None = None

    __repr__ = brief

    @property
    def delta(self) -> float:
        """Changed voxels by all voxels."""
        return self.changed / self.voxels

    @property
    def change(self) -> float:
        """metric(new) - metric(old); NaN without a label."""
        if self.metric_old is None or self.metric_new is None:
            return NAN
        return self.metric_new - self.metric_old

    @property
    def worse_voxels(self) -> float | None:
        """Share of the changed voxels that were right and are wrong now; None without a label."""
        return None if self.made_wrong is None else self.made_wrong / max(self.changed, 1)

    @property
    def suspicion(self) -> float:
        """That of its most suspicious label; 0 where there is nothing to look at. Needs no label."""
        return max((row.suspicion for row in self.labels), default=0.0)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should look at, in words; needs no label."""
        return self.warned()

    def warned(self, names: Mapping[int, str] | None = None) -> tuple[str, ...]:
        """The same with names for labels."""
        return tuple(word for row in self.labels if row.suspicion for word in _warnings(row, names or {}))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, properties included."""
        return {
            **vars(self),
            "labels": [row.as_dict() for row in self.labels],
            "regressions": [
                {**vars(region), "low": [*region.low], "high": [*region.high]} for region in self.regressions
            ],
            "delta": self.delta,
            "change": self.change,
            "worse_voxels": self.worse_voxels,
            "warnings": list(self.warnings),
        }


def label_name(label: int, names: Mapping[int, str]) -> str:
    """What a label is called where there is room: its name and number, or its number alone.

    >>> label_name(1, {1: "LV"}), label_name(2, {1: "LV"})
    ('LV (1)', 'label 2')
    """
    return f"{names[label]} ({label})" if label in names else f"label {label}"


def _warnings(row: LabelChange, names: Mapping[int, str]) -> list[str]:
    name, found = label_name(row.label, names), []
    if not row.voxels_new:
        return [f"{name} is gone"]
    if not row.voxels_old:
        return [f"{name} is new"]
    for count, largest, one, many in (
        (row.holes_gained, row.largest_hole, "hole", "holes"),
        (row.components_lost, row.largest_lost, "piece lost", "pieces lost"),
        (row.components_gained, row.largest_gained, "piece gained", "pieces gained"),
    ):
        if row.share(largest) >= NOTABLE:
            said = f"1 {one}, " if count == 1 else f"{count} {many}, the largest "
            found.append(f"{name}: {said}{100 * row.share(largest):.1f} % of it")
    if row.changed and row.agreement < 1 - _DISAGREE:
        found.append(f"{name}: old and new share only {row.agreement:.2f} (Dice)")
    return found


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
    holes: Enclosure = "volume",
    zero_is_label: bool = False,
) -> Comparison:
    """Compare the new mask of a case with its old one, and both with the label where there is one.

    Any change of a label counts, also from one foreground label to another, unless ``foreground``. ``classes`` narrows
    the labels (others become background in all masks). Distances are in mm with ``spacing_mm``, in voxels without.
    ``zero_is_label``: every voxel has a label, as in street scenes where 0 is the road; there is no background then.

    >>> old = np.zeros((1, 5, 8), np.uint8)
    >>> old[0, 0:5, 0:5] = 1
    >>> new = old.copy()
    >>> new[0, 2, 2], new[0, 0, 7] = 0, 1
    >>> found = comparison(old, new, min_area=1, holes="slice")
    >>> found.changed, found.regions, found.warnings
    (2, 2, ('label 1: 1 hole, 4.0 % of it', 'label 1: 1 piece gained, 4.0 % of it'))
    """
    if metric not in ("dice", "miou"):
        raise BadInput(f"the metric is dice or miou, got {metric!r}")
    if surfaces not in ("none", "moved", "all"):
        raise BadInput(f"surfaces are 'none', 'moved' or 'all', got {surfaces!r}")
    if holes not in ("volume", "slice"):
        raise BadInput(f"holes are enclosed within the 'volume' or within a 'slice', got {holes!r}")
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
        whole = [_narrowed(mask, kept[name]) for name, mask in zip(named, whole, strict=True)]
    least = least_voxels(min_area, axes=whole[0].ndim)
    same = np.result_type(*whole)
    masks = [np.ascontiguousarray(mask, same) for mask in whole]
    case = _Case(masks[0], masks[1], masks[2] if len(masks) == 3 else None, spacing, least, ignore, holes)
    found = _overall(case, foreground=foreground, metric=metric)
    labels = _labels(case, surfaces=surfaces)
    return replace(
        found, labels=tuple(replace(row, label=row.label - 1) for row in labels) if zero_is_label else labels
    )


@dataclass(frozen=True)
class _Tally:
    """Voxels by label: in old, in new, in the label, and right in old and in new; ignored voxels are left out."""

    old: Integers
    new: Integers
    label: Integers
    right_old: Integers
    right_new: Integers


@dataclass(frozen=True, eq=False)
class _Case:
    """The masks of a case, and what is found once and read by several measurements."""

    old: NDArray[Any]
    new: NDArray[Any]
    label: NDArray[Any] | None
    spacing: tuple[float, ...] | None
    least: int
    ignore: int | None
    holes: Enclosure

    @property
    def voxel_ml(self) -> float | None:
        """Millilitres of a voxel; None without a spacing, and in pictures, which have no volume."""
        if self.spacing is None or self.old.ndim == 2:
            return None
        return float(np.prod(self.spacing)) / 1000

    @cached_property
    def pieces(self) -> tuple[Pieces, Pieces]:
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
        """A mask's values at some voxels."""
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

    def counted(self, labels: NDArray[Any]) -> Integers:
        """How often each label occurs."""
        return np.bincount(labels, minlength=self.values)

    @cached_property
    def held(self) -> tuple[Integers, Integers, Integers]:
        """Voxels of each label in old, in new, and in exactly one of the two."""
        before = self.pieces[0]
        old = np.bincount(before.value, before.sizes, minlength=self.values).astype(np.int64)
        old[0] = self.old.size - old[1:].sum()
        gone, come = (self.counted(labels) for labels in self.at_changes[:2])
        return old, old - gone + come, gone + come

    @cached_property
    def tally(self) -> _Tally:
        """Counts against the label, from the voxels where the old mask is wrong and from those that changed alone."""
        assert self.label is not None
        wrong, truth = (self.at(self.errors, mask) for mask in (self.old, self.label))
        before, after, there = self.at_changes
        assert there is not None
        whole = self.held[0]
        in_old, in_label = whole.copy(), whole - self.counted(wrong) + self.counted(truth)
        right_old = whole - self.counted(wrong)
        if self.ignore is not None and self.ignore < self.values:
            # Ignored voxels hold any label in the old mask: another one, among the errors, or by chance the same.
            in_old -= self.counted(wrong[truth == self.ignore])
            in_old[self.ignore] = self.counted(wrong)[self.ignore]
            in_label[self.ignore] = right_old[self.ignore] = 0
            valid = there != self.ignore
            before, after, there = before[valid], after[valid], there[valid]
        in_new = in_old - self.counted(before) + self.counted(after)
        right_new = right_old - self.counted(before[before == there]) + self.counted(after[after == there])
        return _Tally(in_old, in_new, in_label, right_old, right_new)

    @cached_property
    def change(self) -> _Change:
        """The regions of the change and of every label's change, judged where there is a label."""
        return _change_of(self)

    @cached_property
    def box(self) -> tuple[slice, ...]:
        """The smallest box around the foreground of all masks."""
        return _box([mask for mask in (self.old, self.new, self.label) if mask is not None])


@dataclass(frozen=True, eq=False)
class _Change:
    """Regions of D, and HA and BA: of the whole, and of each label against everything else (None without a label)."""

    found: Regions
    worse: Integers  # of each component of D: voxels made wrong minus voxels made right; 0 without a label
    made_wrong: int
    ha: Floats  # by label; entry 0 is the whole
    ba: Floats


def _change_of(case: _Case) -> _Change:
    """One labelling for D and for the change of every label.

    Each label's change is a set of voxels of its own, and lies behind D as if it were a further volume, with an empty
    layer between them; a voxel that changes from one label to another lies in both.
    """
    voxels, shape = case.changed, case.old.shape
    before, after, truth = case.at_changes
    if truth is None:
        found = components(voxels, shape, min_area=case.least)
        nothing = np.full(case.values, NAN)
        return _Change(found, np.zeros(found.sizes.size, np.int64), 0, nothing, nothing)
    both = np.empty(2 * voxels.size, before.dtype)
    both[::2], both[1::2] = before, after
    order = np.argsort(both, kind="stable")[int(np.count_nonzero(both == 0)) :]  # by label, within it in C order
    which, plane = order >> 1, both[order].astype(np.int64)
    apart = (shape[0] + 1) * int(np.prod(shape[1:]))
    stacked = np.concatenate([voxels, voxels[which] + plane * apart])
    every = components(stacked, (case.values * (shape[0] + 1), *shape[1:]), min_area=case.least)
    lost, won = before == truth, after == truth
    sign = np.where((after[which] == plane) == (truth[which] == plane), -1, 1)  # old or new is right about this label
    if case.ignore is not None:
        valid = truth != case.ignore
        lost, won, sign = lost & valid, won & valid, sign * valid[which]
    signs = np.concatenate([lost.view(np.int8) - won.view(np.int8), sign])
    worse = np.bincount(every.number, weights=signs, minlength=every.sizes.size).astype(np.int64)
    of = every.runs.first // apart  # of each run: 0 for D, or the label
    label_of = np.zeros(every.sizes.size, np.int64)
    label_of[every.owner] = of
    areas = np.bincount(np.concatenate([[0], plane]), minlength=case.values)
    areas[0] = voxels.size
    ha, ba = (
        np.bincount(label_of[side], every.sizes[side], minlength=case.values) / np.maximum(areas, 1)
        for side in (every.kept & (worse > 0), every.kept & (worse < 0))
    )
    runs = int(np.searchsorted(of, 1))
    amount = int(np.count_nonzero(label_of == 0))
    mine = Runs(shape, every.runs.first[:runs], every.runs.last[:runs], every.runs.begin[:runs])
    found = Regions(mine, voxels, every.owner[:runs], every.sizes[:amount], case.least)
    return _Change(found, worse[:amount], int(np.count_nonzero(lost)), ha, ba)


def _compact(name: str, mask: NDArray[Any]) -> NDArray[Any]:
    """The same labels in the fewest bytes that hold them."""
    if mask.dtype == np.bool_:
        return mask.view(np.uint8)
    if mask.dtype == np.uint8:
        return mask
    largest = int(mask.max())
    if largest >= 2**16:
        raise BadInput(f"labels are at most {2**16 - 1}, got {largest} in {name}; give semantic labels, not instances")
    return mask.astype(np.uint8 if largest < 256 else np.uint16)


def _narrowed(mask: NDArray[Any], kept: Sequence[int]) -> NDArray[Any]:
    return np.where(np.isin(mask, kept), mask, mask.dtype.type(0))


def _box(masks: Sequence[NDArray[Any]]) -> tuple[slice, ...]:
    """The smallest box around the foreground of all masks; one voxel where there is none."""
    covered = masks[0]
    for mask in masks[1:]:
        covered = covered | mask
    rows = np.bitwise_or.reduce(_words(covered), axis=-1) != 0  # a flag for each row of the volume
    sides = []
    for axis in range(rows.ndim):
        others = tuple(other for other in range(rows.ndim) if other != axis)
        sides.append(_side(rows.any(axis=others) if others else rows))
    inner = covered[tuple(sides)].reshape(-1, covered.shape[-1])
    return (*sides, _side(np.bitwise_or.reduce(inner, axis=0) != 0))


def _words(mask: NDArray[Any]) -> NDArray[Any]:
    """The mask seen as words of eight bytes where its rows are whole words: faster to reduce."""
    fits = mask.flags.c_contiguous and mask.shape[-1] * mask.itemsize % 8 == 0
    return mask.view(np.uint64) if fits else mask


def _side(hit: Flags) -> slice:
    where = np.flatnonzero(hit)
    return slice(int(where[0]), int(where[-1]) + 1) if where.size else slice(0, 1)


def _overall(case: _Case, *, foreground: bool, metric: str) -> Comparison:
    change = _foreground_change(case) if foreground else case.change
    found = change.found
    before, after, _ = case.at_changes
    old = case.held[0]
    covered = int(old[1:].sum()) + int(np.count_nonzero((before == 0) & (after != 0)))
    plain = Comparison(
        voxels=case.old.size,
        changed=found.area,
        changed_share=found.area / covered if covered else 0.0,
        regions=int(found.kept.sum()),
        largest=int(found.sizes.max(initial=0)),
        labels=(),
        spacing_known=case.spacing is not None,
        metric=metric,
    )
    return plain if case.label is None else _with_harm(plain, case, change)


def _foreground_change(case: _Case) -> _Change:
    """The change of foreground against background alone."""
    if case.label is None:
        found = regions_of(case.old, case.new, min_area=case.least, foreground=True)
        return _Change(found, np.zeros(found.sizes.size, np.int64), 0, np.zeros(1), np.zeros(1))
    judged = harm(case.old, case.new, case.label, min_area=case.least, foreground=True, ignore=case.ignore)
    made_wrong = round(judged.voxel_harm * judged.area)
    return _Change(judged.found, judged.worse, made_wrong, np.array([judged.ha]), np.array([judged.ba]))


def _with_harm(plain: Comparison, case: _Case, change: _Change) -> Comparison:
    scores = _dice_means(case) if plain.metric == "dice" else _mean_ious(case)
    found, worse, area = change.found, change.worse, max(change.found.area, 1)
    return replace(
        plain,
        labelled=True,
        metric_old=scores[0],
        metric_new=scores[1],
        ha=float(change.ha[0]),
        ba=float(change.ba[0]),
        neutral_scored=int(found.sizes[found.kept & (worse == 0)].sum()) / area,
        unscored=int(found.sizes[~found.kept].sum()) / area,
        made_wrong=change.made_wrong,
        made_right=change.made_wrong - int(worse.sum()),
        regressions=_regressions(found, worse, case.voxel_ml),
        harmful_regions=int(np.count_nonzero(found.kept & (worse > 0))),
    )


def _dice_by_label(case: _Case) -> tuple[Floats, Floats]:
    """Dice of old and of new, label by label; NaN for background and for labels that the label lacks (A10)."""
    t = case.tally
    absent = (t.label == 0) | (np.arange(t.label.size) == 0)
    with np.errstate(invalid="ignore"):
        old, new = 2 * t.right_old / (t.old + t.label), 2 * t.right_new / (t.new + t.label)
    return np.where(absent, NAN, old), np.where(absent, NAN, new)


def _dice_means(case: _Case) -> tuple[float, float]:
    old, new = (values[~np.isnan(values)] for values in _dice_by_label(case))
    return (float(old.mean()), float(new.mean())) if old.size else (NAN, NAN)


def _mean_ious(case: _Case) -> tuple[float, float]:
    """Mean IoU of old and of new over the labels that mask or label hold, background included (A11)."""
    t = (case if case.ignore is not None else replace(case, ignore=VOID)).tally
    scores = []
    for mask, right in ((t.old, t.right_old), (t.new, t.right_new)):
        union = mask + t.label - right
        there = union > 0
        scores.append(float(np.mean(right[there] / union[there])) if there.any() else NAN)
    return scores[0], scores[1]


def _regressions(found: Regions, worse: Integers, voxel_ml: float | None) -> tuple[Regression, ...]:
    """The largest harmful regions, with their boxes."""
    harmful = np.flatnonzero(found.kept & (worse > 0))
    if not harmful.size:
        return ()
    listed = harmful[np.argsort(-found.sizes[harmful], kind="stable")][:LISTED]
    low, high = boxes_of(found)
    row = np.cumsum(found.kept) - 1  # boxes are those of the components that were kept
    return tuple(
        Regression(
            int(found.sizes[number]),
            int(worse[number]),
            tuple(low[row[number]].tolist()),
            tuple(high[row[number]].tolist()),
            None if voxel_ml is None else int(found.sizes[number]) * voxel_ml,
        )
        for number in listed.tolist()
    )


def _labels(case: _Case, *, surfaces: Surfaces) -> tuple[LabelChange, ...]:
    """One row for each foreground label that any of the masks holds."""
    in_old, in_new, changed = case.held
    there = (in_old + in_new > 0) if case.label is None else (in_old + in_new + case.tally.label > 0)
    there[0] = False
    if case.ignore is not None and case.ignore < there.size and not (in_old + in_new)[case.ignore]:
        there[case.ignore] = False
    counted = {name: counts.tolist() for name, counts in _piece_counts(case).items()}
    dice = None if case.label is None else _dice_by_label(case)
    ml = case.voxel_ml
    rows = []
    for c in np.flatnonzero(there).tolist():
        more: dict[str, Any] = {}
        if ml is not None:
            more |= {"volume_old_ml": int(in_old[c]) * ml, "volume_new_ml": int(in_new[c]) * ml}
        if dice is not None:
            more |= {"dice_old": float(dice[0][c]), "dice_new": float(dice[1][c])}
            more |= {"ha": float(case.change.ha[c]), "ba": float(case.change.ba[c])}
        pieces = {name: counts[c] for name, counts in counted.items()}
        row = LabelChange(c, int(in_old[c]), int(in_new[c]), int(changed[c]), **pieces, **more)
        rows.append(_with_surfaces(case, row, surfaces))
    return tuple(rows)


def _piece_counts(case: _Case) -> dict[str, Integers]:
    """Pieces and holes of each label in old and new, and those that have no counterpart."""
    before, after = case.pieces
    old, new = case.old.reshape(-1), case.new.reshape(-1)

    def differ(voxels: Integers) -> Flags:
        return np.asarray(old[voxels] != new[voxels])

    lost, gained = (found.within(differ(found.runs.first), differ) for found in (before, after))

    def count(of: Integers, which: Flags, weights: Integers | None = None) -> Integers:
        counts = np.bincount(of[which], None if weights is None else weights[which], minlength=case.values)
        return counts.astype(np.int64)

    def largest(found: Pieces, of: Integers, which: Flags) -> Integers:
        most = np.zeros(case.values, np.int64)
        np.maximum.at(most, of[which], found.sizes[which])
        return most

    holes_gained, holes_lost = _alone(after, before), _alone(before, after)
    return {
        "components_old": count(before.value, before.value > 0),
        "components_new": count(after.value, after.value > 0),
        "components_gained": count(after.value, gained),
        "components_lost": count(before.value, lost),
        "gained_voxels": count(after.value, gained, after.sizes),
        "lost_voxels": count(before.value, lost, before.sizes),
        # A hole between several labels is a hole of none of them; it is seen as their change of volume.
        "holes_old": count(before.hole_of, before.hole_of > 0),
        "holes_new": count(after.hole_of, after.hole_of > 0),
        "holes_gained": count(after.hole_of, holes_gained),
        "holes_lost": count(before.hole_of, holes_lost),
        "largest_gained": largest(after, after.value, gained),
        "largest_lost": largest(before, before.value, lost),
        "largest_hole": largest(after, after.hole_of, holes_gained),
    }


def _alone(found: Pieces, other: Pieces) -> Flags:
    """Which pieces are holes that touch no hole of the same label in the other mask."""
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


def _with_surfaces(case: _Case, row: LabelChange, surfaces: Surfaces) -> LabelChange:
    if surfaces == "none":
        return row
    old, new = case.old[case.box] == row.label, case.new[case.box] == row.label
    if row.changed:
        gaps = surface_gaps(old, new, spacing_mm=case.spacing)
        row = replace(row, shift_hd95=hd95(gaps), shift_assd=assd(gaps))
    else:
        still = 0.0 if row.voxels_old else NAN
        row = replace(row, shift_hd95=still, shift_assd=still)
    if surfaces == "moved" or case.label is None:
        return row
    truth = case.label[case.box] == row.label
    before = hd95(surface_gaps(old, truth, spacing_mm=case.spacing))
    after = hd95(surface_gaps(new, truth, spacing_mm=case.spacing)) if row.changed else before
    return replace(row, hd95_old=before, hd95_new=after)
