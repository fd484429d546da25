"""Compare a new mask with an old one of the same case: what changed per label and, with a label, if it improved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import BadInput
from casewise.measure.changes import NAN, Comparison, LabelChange, Regression
from casewise.measure.geometry import boxes_of
from casewise.measure.mask_pair import Change, MaskPair, foreground_change
from casewise.measure.masks import Flags, Floats, Integers, checked_masks, checked_spacing, least_voxels, on_host
from casewise.measure.metrics.overlap import VOID, dice_of_counts, miou_of_counts
from casewise.measure.metrics.surface import assd, hd95, surface_gaps
from casewise.measure.pieces import Enclosure, LabelPieces
from casewise.measure.regions import Regions

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
    holes: Enclosure = "volume",
    zero_is_label: bool = False,
) -> Comparison:
    """Compare the new mask of a case with its old one, and both with the label if there is one.

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
        pairs = zip(named, whole, strict=True)
        whole = [np.where(np.isin(mask, kept[name]), mask, mask.dtype.type(0)) for name, mask in pairs]
    least = least_voxels(min_area, axes=whole[0].ndim)
    same = np.result_type(*whole)
    masks = [np.ascontiguousarray(mask, same) for mask in whole]
    pair = MaskPair(masks[0], masks[1], masks[2] if len(masks) == 3 else None, spacing, least, ignore, holes)
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
        raise BadInput(f"labels are at most {2**16 - 1}, got {largest} in {name}; give semantic labels, not instances")
    return mask.astype(np.uint8 if largest < 256 else np.uint16)


def _overall(pair: MaskPair, *, foreground: bool, metric: str) -> Comparison:
    change = foreground_change(pair) if foreground else pair.change
    found = change.found
    before, after, _ = pair.at_changes
    old = pair.held[0]
    covered = int(old[1:].sum()) + int(np.count_nonzero((before == 0) & (after != 0)))
    plain = Comparison(
        voxels=pair.old.size,
        changed=found.area,
        changed_share=found.area / covered if covered else 0.0,
        regions=int(found.kept.sum()),
        largest=int(found.sizes.max(initial=0)),
        labels=(),
        spacing_known=pair.spacing is not None,
        voxel_ml=pair.voxel_ml,
        metric=metric,
    )
    return plain if pair.label is None else _with_harm(plain, pair, change)


def _with_harm(plain: Comparison, pair: MaskPair, change: Change) -> Comparison:
    scores = _metrics(pair, plain.metric)
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
        regressions=_regressions(found, worse, pair.voxel_ml),
        harmful_regions=int(np.count_nonzero(found.kept & (worse > 0))),
    )


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
        rows.append(_with_surfaces(pair, row, surfaces))
    return tuple(rows)


def _piece_counts(pair: MaskPair) -> dict[str, Integers]:
    """Count pieces and holes of each label in old and new, and those without a counterpart."""
    before, after = pair.pieces
    old, new = pair.old.reshape(-1), pair.new.reshape(-1)

    def differ(voxels: Integers) -> Flags:
        return np.asarray(old[voxels] != new[voxels])

    lost, gained = (found.within(differ(found.runs.first), differ) for found in (before, after))

    def count(of: Integers, which: Flags, weights: Integers | None = None) -> Integers:
        counts = np.bincount(of[which], None if weights is None else weights[which], minlength=pair.values)
        return counts.astype(np.int64)

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


def _alone(found: LabelPieces, other: LabelPieces) -> Flags:
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


def _with_surfaces(pair: MaskPair, row: LabelChange, surfaces: Surfaces) -> LabelChange:
    if surfaces == "none":
        return row
    old, new = pair.old[pair.box] == row.label, pair.new[pair.box] == row.label
    if row.changed:
        gaps = surface_gaps(old, new, spacing_mm=pair.spacing)
        row = replace(row, shift_hd95=hd95(gaps), shift_assd=assd(gaps))
    else:
        still = 0.0 if row.voxels_old else NAN
        row = replace(row, shift_hd95=still, shift_assd=still)
    if surfaces == "moved" or pair.label is None:
        return row
    truth = pair.label[pair.box] == row.label
    before = hd95(surface_gaps(old, truth, spacing_mm=pair.spacing))
    after = hd95(surface_gaps(new, truth, spacing_mm=pair.spacing)) if row.changed else before
    return replace(row, hd95_old=before, hd95_new=after)
