"""New against old on one case or on many: helped and hurt with intervals by patient, label by label, group by group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from casewise.core.brief import brief
from casewise.core.errors import BadInput
from casewise.measure.comparison import Comparison, LabelChange, Regression, comparison
from casewise.measure.masks import is_tensor
from casewise.study.statistics.resample import (
    Interval,
    draws,
    interval_of,
    mean_interval,
    undefined_interval,
)

MANY = 200  # clusters from which on intervals are Student's t: as good there, and memory does not grow with the cohort
GOOD = 0.7  # a case at or above this metric is good, unless told otherwise; good before and not now is a flip


@dataclass(frozen=True)
class ComparedCase:
    """One case of a comparison, with the patient or sequence that it belongs to."""

    id: str
    found: Comparison
    group: str | None = None
    cluster: str | None = None

    @property
    def unit(self) -> str:
        """What counts once in an interval: the cluster, or the case itself where none is named."""
        return f"case {self.id}" if self.cluster is None else f"cluster {self.cluster}"


@dataclass(frozen=True)
class Comparisons:
    """Many cases, new against old."""

    cases: tuple[ComparedCase, ...]
    good: float = GOOD

    __repr__ = brief

    @property
    def summary(self) -> dict[str, Any]:
        """The cohort, its labels and its groups in plain JSON types; estimates with 95 % intervals by cluster."""
        groups = sorted({case.group for case in self.cases if case.group is not None})
        return {
            **cohort_row(self.cases, good=self.good),
            "labels": [
                {"label": number, **label_row(self.cases, number, good=self.good)} for number in self.label_numbers
            ],
            "groups": [
                {"group": name, **cohort_row([one for one in self.cases if one.group == name], good=self.good)}
                for name in groups
            ],
        }

    @property
    def label_numbers(self) -> tuple[int, ...]:
        """Every foreground label of any case."""
        return tuple(sorted({row.label for case in self.cases for row in case.found.labels}))

    @property
    def worst_first(self) -> tuple[ComparedCase, ...]:
        """The most suspicious first: with labels by the fall of the metric; then, and without, by the share of a label
        that was gained or lost in one piece (see :attr:`Comparison.suspicion`); then by the share that changed."""
        return tuple(sorted(self.cases, key=_suspicion))


def _suspicion(case: ComparedCase) -> tuple[float, ...]:
    found = case.found
    fall = 0.0 if np.isnan(found.change) else -found.change
    return (-round(fall, 12), -found.suspicion, -found.changed_share)


def compare(
    old: Any,
    new: Any,
    label: Any = None,
    *,
    ids: Sequence[str] | None = None,
    clusters: Sequence[str | None] | None = None,
    groups: Sequence[str | None] | None = None,
    good: float = GOOD,
    **options: Any,
) -> Comparison | Comparisons:
    """What a new mask does to a case that had an old one; with a label, for better or worse.

    Two arrays give a :class:`Comparison`; two sequences (lists, generators) of masks give :class:`Comparisons`, whose
    ``summary`` has intervals by cluster. Options are those of :func:`casewise.measure.comparison.comparison`.

    >>> old = np.zeros((4, 6), np.uint8)
    >>> old[1:3, 1:5] = 1
    >>> new = old.copy()
    >>> new[1:3, 4] = 0
    >>> found = compare(old, new, old, min_area=1)
    >>> found.labels[0].drift, found.ha, round(found.change, 3)
    (-0.25, 1.0, -0.143)
    >>> compare([old, old], [new, old], [old, old], min_area=1).summary["hurt"]
    1
    """
    if _is_mask(old) and _is_mask(new):
        if any(extra is not None for extra in (ids, clusters, groups)):
            raise BadInput("ids, clusters and groups describe many cases; pass sequences of masks with them")
        return comparison(old, new, label, **options)
    if _is_mask(old) or _is_mask(new):
        raise BadInput("compare takes two masks or two sequences of masks, got one of each")
    return Comparisons(tuple(_each(old, new, label, ids, clusters, groups, options)), good)


def _is_mask(given: Any) -> bool:
    return is_tensor(given) or (isinstance(given, np.ndarray) and given.dtype != object)


def _each(
    old: Iterable[Any],
    new: Iterable[Any],
    label: Iterable[Any] | None,
    ids: Sequence[str] | None,
    clusters: Sequence[str | None] | None,
    groups: Sequence[str | None] | None,
    options: Mapping[str, Any],
) -> Iterable[ComparedCase]:
    """Case after case, so that generators are never held as a whole."""
    olds, news = iter(old), iter(new)
    labels = None if label is None else iter(label)
    end, at = object(), 0
    while True:
        one, other = next(olds, end), next(news, end)
        truth = None if labels is None else next(labels, end)
        over = [item is end for item in (one, other, *(() if labels is None else (truth,)))]
        if any(over):
            break
        case_id = str(at) if ids is None else ids[at]
        found = comparison(one, other, truth, **options)
        yield ComparedCase(
            case_id, found, None if groups is None else groups[at], None if clusters is None else clusters[at]
        )
        at += 1
    if not all(over):
        raise BadInput(f"old, new and label must have as many masks each; one of them ended after {at}")


def cohort_row(cases: Sequence[ComparedCase], *, good: float = GOOD) -> dict[str, Any]:
    """Counts, and with labels metric, harm, helped and hurt of some cases."""
    found = [case.found for case in cases]
    row: dict[str, Any] = {
        "cases": len(cases),
        "clusters": len({case.unit for case in cases}),
        "changed": sum(one.changed > 0 for one in found),
        "warned": sum(one.suspicion > 0 for one in found),
        "changed_share": interval(cases, lambda case: case.found.changed_share),
    }
    labelled = [case for case in cases if case.found.labelled]
    if not labelled:
        return row
    return {
        **row,
        "labelled": len(labelled),
        "metric": labelled[0].found.metric,
        "ha": interval(labelled, lambda case: case.found.ha),
        "judged": _judged(labelled),
        "ba": interval(labelled, lambda case: case.found.ba),
        "worse_voxels": interval(labelled, lambda case: case.found.worse_voxels),
        "made_wrong": sum(case.found.made_wrong or 0 for case in labelled),
        "made_right": sum(case.found.made_right or 0 for case in labelled),
        **_sides(labelled, lambda case: (case.found.metric_old, case.found.metric_new), good),
    }


def _judged(cases: Sequence[ComparedCase]) -> float | None:
    """The share of all changed voxels that HA judged: those in regions; None where nothing changed."""
    known = [case.found for case in cases if case.found.unscored is not None and case.found.changed]
    changed = sum(one.changed for one in known)
    return sum((1 - (one.unscored or 0)) * one.changed for one in known) / changed if changed else None


def label_row(cases: Sequence[ComparedCase], number: int, *, good: float = GOOD) -> dict[str, Any]:
    """One label over the cases that hold it."""
    held = [(case, row) for case in cases for row in case.found.labels if row.label == number]
    held.sort(key=lambda pair: not pair[0].found.labelled)  # labelled ones first; the order changes no mean
    rows = {case.id: row for case, row in held}
    those = [case for case, _ in held]
    shifts = [row.shift_hd95 for _, row in held if row.shift_hd95 is not None and not np.isnan(row.shift_hd95)]
    found: dict[str, Any] = {
        "cases": len(those),
        "changed": sum(row.changed > 0 for _, row in held),
        "drift": _total_drift(those, rows),
        "drift_ml": interval(those, lambda case: rows[case.id].drift_ml),
        "agreement": interval(those, lambda case: rows[case.id].agreement),
        "shift_hd95_median": float(np.median(shifts)) if shifts else None,
        "shift_hd95_max": max(shifts, default=None),
        **{
            name: sum(getattr(row, name) for _, row in held)
            for name in ("components_gained", "components_lost", "holes_gained", "holes_lost")
        },
        "cases_with_new_holes": sum(row.holes_gained > 0 for _, row in held),
        "cases_with_lost_components": sum(row.components_lost > 0 for _, row in held),
    }
    if those and those[0].found.labelled:
        found["ha"] = interval(those, lambda case: rows[case.id].ha)
        found["ba"] = interval(those, lambda case: rows[case.id].ba)
        found |= _sides(those, lambda case: (rows[case.id].dice_old, rows[case.id].dice_new), good)
        found["hd95_old"] = interval(those, lambda case: rows[case.id].hd95_old)
        found["hd95_new"] = interval(those, lambda case: rows[case.id].hd95_new)
    return found


def _total_drift(cases: Sequence[ComparedCase], rows: Mapping[str, LabelChange]) -> dict[str, Any] | None:
    """(all new - all old) / all old voxels, with an interval by cluster; a mean of ratios would be that of crumbs."""
    of = units(cases)
    old, new = (
        np.bincount(of, [getattr(rows[case.id], name) for case in cases]) for name in ("voxels_old", "voxels_new")
    )
    if not old.sum():
        return None
    if len(old) >= MANY:
        found = _ratio(new, old, n=len(cases))
        return as_plain(replace(found, estimate=found.estimate - 1, low=found.low - 1, high=found.high - 1))
    index = draws(len(old)).index
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = new[index].sum(axis=1) / old[index].sum(axis=1) - 1
    drift = float(new.sum() / old.sum() - 1)
    return as_plain(interval_of(drift, drawn, n=len(cases), clusters=len(old)))


def _sides(
    cases: Sequence[ComparedCase],
    metric: Callable[[ComparedCase], tuple[float | None, float | None]],
    good: float,
) -> dict[str, Any]:
    """Old, new and their difference; who was helped, who was hurt, and who was good before and is not now."""
    scores = np.array([[np.nan if value is None else value for value in metric(case)] for case in cases], float)
    defined = np.isfinite(scores).all(axis=1)
    kept = [case for case, there in zip(cases, defined, strict=True) if there]
    old, new = scores[defined].T
    change = np.round(new - old, 12)
    flips = (old >= good) & (new < good)
    of = units(kept)
    return {
        "undefined": int((~defined).sum()),
        "metric_old": float(old.mean()) if old.size else None,
        "metric_new": float(new.mean()) if new.size else None,
        "change": as_plain(_mean(change, of) if old.size else undefined_interval(0, "no case")),
        "helped": int((change > 0).sum()),
        "hurt": int((change < 0).sum()),
        "unchanged": int((change == 0).sum()),
        "helped_share": _share(change > 0, of),
        "hurt_share": _share(change < 0, of),
        "good": good,
        "flips": int(flips.sum()),
        "flipped": [case.id for case, flip in zip(kept, flips, strict=True) if flip],
    }


def _share(flags: NDArray[np.bool_], of: NDArray[np.int64]) -> dict[str, Any] | None:
    return as_plain(_mean(flags.astype(float), of)) if flags.size else None


def _mean(values: NDArray[np.float64], of: NDArray[np.int64]) -> Interval:
    """The mean with its interval by cluster."""
    if int(of.max()) + 1 < MANY:
        return mean_interval(values, clusters=of)
    return _ratio(np.bincount(of, values), np.bincount(of), n=values.size)


def _ratio(sums: NDArray[Any], sizes: NDArray[Any], *, n: int) -> Interval:
    r"""One sum by another over many clusters, with Student's t interval.

    .. math:: r = \frac{\sum_c S_c}{\sum_c m_c}, \qquad
              \mathrm{se}^2 = \frac{C}{C - 1} \cdot \frac{\sum_c (S_c - r m_c)^2}{(\sum_c m_c)^2}
    """
    whole, clusters = float(sizes.sum()), len(sums)
    ratio = float(sums.sum()) / whole
    error = float(np.sqrt(clusters / (clusters - 1) * np.square(sums - ratio * sizes).sum())) / whole
    reach = float(stats.t.ppf(0.975, clusters - 1)) * error
    below = float(stats.t.cdf(-ratio / error, clusters - 1)) if error else float(ratio < 0)
    p = 2 * min(below, 1 - below) if error else float(ratio == 0)
    return Interval(ratio, ratio - reach, ratio + reach, below, n, clusters, 0, method="t", p_flip=p)


def units(cases: Sequence[ComparedCase]) -> NDArray[np.int64]:
    """The number of each case's cluster, in order of appearance."""
    known: dict[str, int] = {}
    return np.array([known.setdefault(case.unit, len(known)) for case in cases], np.int64)


def interval(cases: Sequence[ComparedCase], value: Callable[[ComparedCase], float | None]) -> dict[str, Any] | None:
    """The mean over cases with its 95 % interval by cluster; undefined values are left out and counted."""
    pairs = [(case, value(case)) for case in cases]
    defined = [(case, number) for case, number in pairs if number is not None and not np.isnan(number)]
    if not defined:
        return None
    found = _mean(np.array([number for _, number in defined]), units([case for case, _ in defined]))
    return {**as_plain(found), "undefined": len(pairs) - len(defined)}


def as_plain(found: Interval) -> dict[str, Any]:
    """An interval in plain JSON types."""
    return {
        "estimate": found.estimate,
        "low": found.low,
        "high": found.high,
        "cases": found.n,
        "clusters": found.clusters,
        "shown": bool(found.shown),
    }


def comparison_of(plain: Mapping[str, Any]) -> Comparison:
    """The inverse of :meth:`Comparison.as_dict`; an undefined number is None then."""
    labels = tuple(
        LabelChange(**{name: row[name] for name in LabelChange.__dataclass_fields__}) for row in plain["labels"]
    )
    fields = {name: plain[name] for name in Comparison.__dataclass_fields__}
    regressions = tuple(
        Regression(**{**row, "low": tuple(row["low"]), "high": tuple(row["high"])}) for row in plain["regressions"]
    )
    return Comparison(**{**fields, "labels": labels, "regressions": regressions})
