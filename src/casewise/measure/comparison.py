"""A new mask against an old one of the same case: what changed, label by label; and, with a label, for better or worse.

Everything that needs a whole mask happens in the box that old, new and label cover together, so the cost is one scan of
memory plus the size of the organ, whatever the volume around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from casewise.core.brief import brief
from casewise.core.errors import BadInput
from casewise.measure.difference import changed_voxels
from casewise.measure.masks import Flags, Floats, Integers, checked_masks, checked_spacing, least_voxels, on_host
from casewise.measure.metrics.harm import Harm, harm
from casewise.measure.metrics.overlap import VOID
from casewise.measure.metrics.surface import assd, hd95
from casewise.measure.pieces import Enclosure, Pieces, padded, padded_index, pieces_of
from casewise.measure.regions import components, regions_of
from casewise.measure.surfaces import surface_gaps

Surfaces = Literal["none", "moved", "all"]
"""Which surface distances: none; between old and new where a label moved; also HD95 of both to the label."""

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

    @property
    def agreement(self) -> float:
        """Dice between old and new; NaN if both are empty."""
        both = self.voxels_old + self.voxels_new
        return (both - self.changed) / both if both else NAN

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "drift": self.drift, "drift_ml": self.drift_ml, "agreement": self.agreement}


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
    def warnings(self) -> tuple[str, ...]:
        """What a person should look at, in words; needs no label."""
        return tuple(word for row in self.labels for word in _warnings(row))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, properties included."""
        plain = asdict(self)
        plain["labels"] = [row.as_dict() for row in self.labels]
        return {**plain, "delta": self.delta, "change": self.change, "warnings": list(self.warnings)}


def _warnings(row: LabelChange) -> list[str]:
    name, found = f"label {row.label}", []
    if row.voxels_old and not row.voxels_new:
        return [f"{name} is gone"]
    if row.voxels_new and not row.voxels_old:
        return [f"{name} is new"]
    for count, one, many in (
        (row.holes_gained, "hole", "holes"),
        (row.components_lost, "piece lost", "pieces lost"),
        (row.components_gained, "piece gained", "pieces gained"),
    ):
        if count:
            found.append(f"{name}: {count} {one if count == 1 else many}")
    if row.changed and row.agreement < _DISAGREE:
        found.append(f"{name}: old and new share only {row.agreement:.2f} (Dice)")
    return found


_DISAGREE = 0.5  # below this Dice between old and new a label is hardly the same thing


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
) -> Comparison:
    """Compare the new mask of a case with its old one, and both with the label where there is one.

    Any change of a label counts, also from one foreground label to another, unless ``foreground``. ``classes`` narrows
    the labels (others become background in all masks). Distances are in mm with ``spacing_mm``, in voxels without.

    >>> old = np.zeros((1, 5, 8), np.uint8)
    >>> old[0, 0:5, 0:5] = 1
    >>> new = old.copy()
    >>> new[0, 2, 2], new[0, 0, 7] = 0, 1
    >>> found = comparison(old, new, min_area=1, holes="slice")
    >>> found.changed, found.regions, found.warnings
    (2, 2, ('label 1: 1 hole', 'label 1: 1 piece gained'))
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
    if classes is not None:
        kept = {name: [*classes, *((ignore,) if name == "label" and ignore is not None else ())] for name in named}
        whole = [_narrowed(mask, kept[name]) for name, mask in zip(named, whole, strict=True)]
    box = _box(whole)
    masks = [np.ascontiguousarray(mask[box]) for mask in whole]
    least = least_voxels(min_area, axes=whole[0].ndim)
    case = _Case(masks[0], masks[1], masks[2] if len(masks) == 3 else None, spacing, least, ignore, whole[0].size)
    found = _overall(case, tuple(side.start for side in box), foreground=foreground, metric=metric)
    return replace(found, labels=_labels(case, surfaces=surfaces, holes=holes))


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
    """The masks of a case within their common box."""

    old: NDArray[Any]
    new: NDArray[Any]
    label: NDArray[Any] | None
    spacing: tuple[float, ...] | None
    least: int
    ignore: int | None
    size: int  # voxels of the whole mask

    @property
    def voxel_ml(self) -> float | None:
        """Millilitres of a voxel; None without a spacing, and in pictures, which have no volume."""
        if self.spacing is None or self.old.ndim == 2:
            return None
        return float(np.prod(self.spacing)) / 1000

    @cached_property
    def values(self) -> int:
        """One more than the largest label."""
        return 1 + max(int(mask.max()) for mask in (self.old, self.new, self.label) if mask is not None)

    @cached_property
    def changed(self) -> Integers:
        """Flat indices of the voxels whose label differs."""
        return changed_voxels(self.old, self.new, foreground=False)

    def at_changes(self, mask: NDArray[Any]) -> NDArray[Any]:
        """A mask's values where old and new differ."""
        return mask.reshape(-1)[self.changed]

    @cached_property
    def pieces_old(self) -> Pieces:
        """Pieces of the old mask, with one layer of background around the box."""
        return pieces_of(padded(self.old))

    @cached_property
    def held(self) -> tuple[Integers, Integers, Integers]:
        """Voxels of each label in old, in new, and in exactly one of the two."""
        old = np.bincount(self.pieces_old.value, self.pieces_old.sizes, minlength=self.values).astype(np.int64)
        gone, come = (np.bincount(self.at_changes(mask), minlength=self.values) for mask in (self.old, self.new))
        return old, old - gone + come, gone + come

    @cached_property
    def tally(self) -> _Tally:
        """Counts against the label; those of the new mask follow from the old mask's at the changes alone."""
        assert self.label is not None
        held = np.flatnonzero((self.old | self.label) != 0)  # the rest is background in both
        old, truth = self.old.reshape(-1)[held], self.label.reshape(-1)[held]
        before, after, there = (self.at_changes(mask) for mask in (self.old, self.new, self.label))
        if self.ignore is not None:
            valid, near = truth != self.ignore, there != self.ignore
            old, truth, before, after, there = old[valid], truth[valid], before[near], after[near], there[near]

        def count(labels: NDArray[Any]) -> Integers:
            return np.bincount(labels, minlength=self.values)

        in_old, right_old = count(old), count(old[old == truth])
        in_label = count(truth)
        for counts in (in_old, right_old, in_label):
            counts[0] += self.size - held.size
        in_new = in_old - count(before) + count(after)
        right_new = right_old - count(before[before == there]) + count(after[after == there])
        return _Tally(in_old, in_new, in_label, right_old, right_new)


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


def _overall(case: _Case, corner: tuple[int, ...], *, foreground: bool, metric: str) -> Comparison:
    judged = None
    if case.label is not None:
        judged = harm(case.old, case.new, case.label, min_area=case.least, foreground=foreground, ignore=case.ignore)
    found = judged.found if judged else regions_of(case.old, case.new, min_area=case.least, foreground=foreground)
    covered = int(np.count_nonzero(case.old | case.new))
    plain = Comparison(
        voxels=case.size,
        changed=found.area,
        changed_share=found.area / covered if covered else 0.0,
        regions=int(found.kept.sum()),
        largest=int(found.sizes.max(initial=0)),
        labels=(),
        spacing_known=case.spacing is not None,
        metric=metric,
    )
    return plain if judged is None else _with_harm(plain, case, judged, corner)


def _with_harm(plain: Comparison, case: _Case, judged: Harm, corner: tuple[int, ...]) -> Comparison:
    made_wrong = round(judged.voxel_harm * judged.area)
    scores = _dice_means(case) if plain.metric == "dice" else _mean_ious(case)
    return replace(
        plain,
        labelled=True,
        metric_old=scores[0],
        metric_new=scores[1],
        ha=judged.ha,
        ba=judged.ba,
        neutral_scored=judged.neutral_scored,
        unscored=judged.unscored,
        made_wrong=made_wrong,
        made_right=made_wrong - int(judged.worse.sum()),
        regressions=_regressions(judged, corner, case.voxel_ml),
        harmful_regions=int(np.count_nonzero(judged.found.kept & (judged.worse > 0))),
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


def _regressions(judged: Harm, corner: tuple[int, ...], voxel_ml: float | None) -> tuple[Regression, ...]:
    """The largest harmful regions, with boxes in the indices of the whole mask."""
    if not (judged.found.kept & (judged.worse > 0)).any():
        return ()
    table = judged.table[judged.table["verdict"] == "harmful"]
    table = table[np.argsort(-table["area"], kind="stable")][:LISTED]
    return tuple(
        Regression(
            int(row["area"]),
            int(judged.worse[row["number"]]),
            tuple(int(x) + at for x, at in zip(row["box_low"], corner, strict=True)),
            tuple(int(x) + at for x, at in zip(row["box_high"], corner, strict=True)),
            None if voxel_ml is None else int(row["area"]) * voxel_ml,
        )
        for row in table
    )


def _labels(case: _Case, *, surfaces: Surfaces, holes: Enclosure) -> tuple[LabelChange, ...]:
    """One row for each foreground label that any of the masks holds."""
    in_old, in_new, changed = case.held
    there = (in_old + in_new > 0) if case.label is None else (in_old + in_new + case.tally.label > 0)
    there[0] = False
    if case.ignore is not None and case.ignore < there.size and not (in_old + in_new)[case.ignore]:
        there[case.ignore] = False
    counted = _piece_counts(case, holes)
    dice = None if case.label is None else _dice_by_label(case)
    rows = []
    for c in np.flatnonzero(there).tolist():
        pieces = {name: int(counts[c]) for name, counts in counted.items()}
        row = LabelChange(c, int(in_old[c]), int(in_new[c]), int(changed[c]), **pieces)
        if case.voxel_ml is not None:
            row = replace(
                row, volume_old_ml=row.voxels_old * case.voxel_ml, volume_new_ml=row.voxels_new * case.voxel_ml
            )
        if dice is not None:
            ha, ba = _harm_of(case, c) if row.changed else (0.0, 0.0)
            row = replace(row, dice_old=float(dice[0][c]), dice_new=float(dice[1][c]), ha=ha, ba=ba)
        rows.append(_with_surfaces(case, row, surfaces))
    return tuple(rows)


def _harm_of(case: _Case, c: int) -> tuple[float, float]:
    """HA and BA of one label against everything else (S25), from the voxels that changed alone."""
    assert case.label is not None
    before, after, truth = (case.at_changes(mask) for mask in (case.old, case.new, case.label))
    mine = (before == c) != (after == c)
    found = components(case.changed[mine], case.old.shape, min_area=case.least)
    sign = np.where((after == c) == (truth == c), -1, 1)[mine]  # one of old and new is right about c
    if case.ignore is not None:
        sign[truth[mine] == case.ignore] = 0
    worse = np.bincount(found.number, weights=sign, minlength=found.sizes.size)
    harmful, beneficial = (int(found.sizes[found.kept & (side > 0)].sum()) for side in (worse, -worse))
    return harmful / found.area, beneficial / found.area


def _piece_counts(case: _Case, holes: Enclosure) -> dict[str, Integers]:
    """Pieces and holes of each label in old and new, and those that have no counterpart."""
    size = case.values
    before = case.pieces_old
    after = pieces_of(padded(case.new)) if case.changed.size else before
    changed = padded_index(case.changed, case.old.shape)
    lost, gained = (found.without(changed) & (found.value > 0) for found in (before, after))

    def count(of: Integers, which: Flags, weights: Integers | None = None) -> Integers:
        counts = np.bincount(of[which], None if weights is None else weights[which], minlength=size)
        return counts.astype(np.int64)

    counted = {
        "components_old": count(before.value, before.value > 0),
        "components_new": count(after.value, after.value > 0),
        "components_gained": count(after.value, gained),
        "components_lost": count(before.value, lost),
        "gained_voxels": count(after.value, gained, after.sizes),
        "lost_voxels": count(before.value, lost, before.sizes),
    }
    if holes == "slice" and case.old.ndim == 3:
        before = pieces_of(padded(case.old, within=holes))
        after = pieces_of(padded(case.new, within=holes)) if case.changed.size else before
    return counted | _hole_counts(before, after, count)


def _hole_counts(before: Pieces, after: Pieces, count: Any) -> dict[str, Integers]:
    """A hole between several labels is a hole of none of them; it is seen as their change of volume."""
    kept_old, kept_new = before.hole_of > 0, after.hole_of > 0
    counted = {"holes_old": count(before.hole_of, kept_old), "holes_new": count(after.hole_of, kept_new)}
    gained, lost = _alone(after, before), _alone(before, after)
    return counted | {"holes_gained": count(after.hole_of, gained), "holes_lost": count(before.hole_of, lost)}


def _alone(found: Pieces, other: Pieces) -> Flags:
    """Which pieces are holes that touch no hole of the same label in the other mask."""
    holes: Flags = found.hole_of > 0
    if not holes.any() or not (other.hole_of > 0).any():
        return holes
    voxels = found.voxels_of(holes)
    mine = found.at(voxels)
    met = other.hole_of[other.at(voxels)] == found.hole_of[mine]
    return np.asarray(holes & (np.bincount(mine[met], minlength=holes.size) == 0))


def _with_surfaces(case: _Case, row: LabelChange, surfaces: Surfaces) -> LabelChange:
    if surfaces == "none":
        return row
    old, new = case.old == row.label, case.new == row.label
    if row.changed:
        gaps = surface_gaps(old, new, spacing_mm=case.spacing)
        row = replace(row, shift_hd95=hd95(gaps), shift_assd=assd(gaps))
    else:
        still = 0.0 if row.voxels_old else NAN
        row = replace(row, shift_hd95=still, shift_assd=still)
    if surfaces == "moved" or case.label is None:
        return row
    truth = case.label == row.label
    before = hd95(surface_gaps(old, truth, spacing_mm=case.spacing))
    after = hd95(surface_gaps(new, truth, spacing_mm=case.spacing)) if row.changed else before
    return replace(row, hd95_old=before, hd95_new=after)
