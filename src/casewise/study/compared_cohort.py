"""Summary of many compared cases: helped and hurt with intervals by patient, by label, by group and by size."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from casewise.core.text import brief
from casewise.judge.certificates.risk_control import share_bound
from casewise.judge.outcomes import judged_share
from casewise.measure.changes import NAN, Comparison, LabelChange, Regression
from casewise.measure.masks import Floats, Integers
from casewise.study.compared_pairs import MadeOnDemand
from casewise.study.statistics.resample import Interval, sign_flip_p, undefined_interval

MANY = 200  # clusters from which p is by Student's t: as good as sign flips there, with less memory
GOOD = 0.7  # default metric from which a case is good; a case that was good and is not now is a flip


@dataclass(frozen=True)
class ComparedCase:
    """One case of a comparison, with the patient or sequence that it belongs to."""

    id: str
    found: Comparison
    group: str | None = None
    cluster: str | None = None
    scan: str | None = None  # scan of the patient: ED, ES, a date

    @property
    def size(self) -> float:
        """Foreground of the label, or of the old mask where there is no label: ml, or voxels without a spacing."""
        side = "voxels_label" if self.found.labelled else "voxels_old"
        return sum(getattr(row, side) or 0 for row in self.found.labels) * (self.found.voxel_ml or 1.0)


SIZES = ("small", "medium", "large")


def size_cuts(sizes: Floats) -> tuple[float, float] | None:
    """The terciles of the sizes of all cases; None where there are fewer than six cases or no spread."""
    if sizes.size < 6:
        return None
    low, high = (float(cut) for cut in np.quantile(sizes, (1 / 3, 2 / 3)))
    return (low, high) if float(sizes.min()) < low < high < float(sizes.max()) else None


@dataclass(frozen=True)
class Comparisons:
    """Many cases, new against old.

    The cases may be in a file: each is read when it is needed, and only a few numbers of each stay in memory
    (:class:`ComparedCohort`).
    """

    cases: Sequence[ComparedCase]
    good: float = GOOD

    __repr__ = brief

    @cached_property
    def cohort(self) -> ComparedCohort:
        """The numbers for the summary and the order of the cases."""
        found = ComparedCohort()
        for case in self.cases:
            found.add(case)
        return found

    @property
    def summary(self) -> dict[str, Any]:
        """The cohort, its labels and its groups in plain JSON types; estimates with 95 % intervals by cluster."""
        cohort = self.cohort
        unit = "ml" if cohort.in_ml else "voxels"
        return {
            **cohort_row(cohort, good=self.good),
            "labels": [{"label": number, **label_row(cohort, number, good=self.good)} for number in self.label_numbers],
            "groups": [
                {"group": name, **cohort_row(cohort, cohort.of_group(name), good=self.good)} for name in cohort.groups
            ],
            "sizes": [
                {"size": name, "from": low, "to": high, "unit": unit, **cohort_row(cohort, which, good=self.good)}
                for name, low, high, which in cohort.size_classes
            ],
        }

    @property
    def label_numbers(self) -> tuple[int, ...]:
        """Every foreground label of any case."""
        return tuple(sorted(self.cohort.labels))

    @property
    def worst_first(self) -> Sequence[ComparedCase]:
        """The most suspicious cases first.

        Sorted by the fall of the metric (with labels), then by the share of a label that was gained or lost in one
        piece (:attr:`Comparison.suspicion`), then by the share that changed.
        """
        return MadeOnDemand(self.cases.__getitem__, self.cohort.worst_first)

    @property
    def worst_first_ids(self) -> list[str]:
        """Ids of ``worst_first``; no case is read for them."""
        return [self.cohort.ids[at] for at in self.cohort.worst_first.tolist()]


_OF_CASE = ("changed_share", "suspicion", "metric_old", "metric_new", "ha", "ba", "worse_voxels", "unscored", "changed")
_COUNTED = ("components_gained", "components_lost", "holes_gained", "holes_lost")
_OF_LABEL = (
    "drift_ml", "agreement", "shift_hd95", "ha", "ba", "dice_old", "dice_new", "hd95_old", "hd95_new",
    "voxels_old", "voxels_new", "voxels_label",
)  # fmt: skip


class _Columns:
    """Numbers by name, 8 bytes each; None becomes NaN."""

    def __init__(self) -> None:
        self._held: dict[str, array[float]] = {}

    def add(self, row: Any, names: Sequence[str], **more: float) -> None:
        for name in names:
            value = getattr(row, name)
            self._held.setdefault(name, array("d")).append(NAN if value is None else value)
        for name, value in more.items():
            self._held.setdefault(name, array("d")).append(value)

    def __getitem__(self, name: str) -> Floats:
        return np.array(self._held.get(name, ()), float)

    def whole(self, name: str) -> Integers:
        return self[name].astype(np.int64)


class ComparedCohort:
    """The numbers of the cases that a summary needs: some twenty for each case and for each of its labels."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.of_case = _Columns()
        self.labels: dict[int, _Columns] = {}
        self.counts: dict[int, Counter[str]] = {}  # by label
        self.metric = ""  # of the first case with a label
        self.in_ml = True
        self.unit_spacing = True  # every voxel is 1 mm3
        self._clusters: dict[str, int] = {}
        self._groups: dict[str, int] = {}

    def add(self, case: ComparedCase) -> None:
        """Add a case."""
        at, found = len(self.ids), case.found
        self.ids.append(case.id)
        # A case without a cluster is its own; it gets a negative number.
        alone = case.cluster is None
        self.of_case.add(
            found,
            _OF_CASE,
            unit=-1 - at if alone else self._clusters.setdefault(str(case.cluster), len(self._clusters)),
            group=-1 if case.group is None else self._groups.setdefault(case.group, len(self._groups)),
            labelled=found.labelled,
            size=case.size,
            voxel_ml=found.voxel_ml or 1.0,
            made_wrong=found.made_wrong or 0,
            made_right=found.made_right or 0,
        )
        self.in_ml &= found.voxel_ml is not None
        self.unit_spacing &= found.voxel_ml == 0.001
        self.metric = self.metric or (found.metric if found.labelled else "")
        for row in found.labels:
            shares = {"hole": row.share(row.largest_hole), "lost": row.share(row.largest_lost)}
            self.labels.setdefault(row.label, _Columns()).add(row, _OF_LABEL, at=at, **shares)
            counts = {name: getattr(row, name) for name in _COUNTED}
            counts |= {"changed": int(row.changed > 0), "cases_with_new_holes": int(row.holes_gained > 0)}
            counts["cases_with_lost_components"] = int(row.components_lost > 0)
            self.counts.setdefault(row.label, Counter()).update(counts)

    @property
    def groups(self) -> list[str]:
        """Names of the groups."""
        return sorted(self._groups)

    def of_group(self, name: str) -> Integers:
        """Positions of the cases of a group."""
        return np.flatnonzero(self.of_case["group"] == self._groups[name])

    def volumes(self, number: int) -> tuple[Integers, dict[str, Floats]]:
        """Clusters of the cases that hold a label in any mask, and its volumes there; NaN without a true label."""
        held = self.labels[number]
        at = held.whole("at")
        ml = self.of_case["voxel_ml"][at]
        return self.units(at), {side: held[f"voxels_{side}"] * ml for side in ("old", "new", "label")}

    @property
    def held(self) -> list[tuple[str, list[int], list[int]]]:
        """Yield (case, labels of the old mask, labels of the new mask) for every case."""
        found: list[tuple[str, list[int], list[int]]] = [(case_id, [], []) for case_id in self.ids]
        for number, rows in self.labels.items():
            for at, old, new in zip(rows.whole("at"), rows["voxels_old"], rows["voxels_new"], strict=True):
                if old:
                    found[at][1].append(number)
                if new:
                    found[at][2].append(number)
        return found

    @property
    def size_classes(self) -> list[tuple[str, float, float, Integers]]:
        """Return (name, smallest, largest, positions) of small, medium and large cases; [] if sizes are alike."""
        sizes = self.of_case["size"]
        cuts = size_cuts(sizes)
        if cuts is None:
            return []
        members = [np.flatnonzero(np.searchsorted(cuts, sizes) == number) for number in range(len(SIZES))]
        return [
            (name, float(sizes[at].min()), float(sizes[at].max()), at) for name, at in zip(SIZES, members, strict=True)
        ]

    @property
    def labelled(self) -> NDArray[np.bool_]:
        """True for cases with a label."""
        return self.of_case["labelled"].astype(bool)

    def units(self, which: Integers) -> Integers:
        """Cluster of each of these cases, numbered in order of appearance."""
        _, first, of = np.unique(self.of_case["unit"][which], return_index=True, return_inverse=True)
        return np.argsort(np.argsort(first)).astype(np.int64)[of]

    @property
    def worst_first(self) -> Integers:
        """Positions of the cases, the most suspicious first; ties keep the order of the cases."""
        fall = np.nan_to_num(self.of_case["metric_old"] - self.of_case["metric_new"], nan=0.0)
        rounded = np.fromiter((round(value, 12) for value in fall.tolist()), float, fall.size)
        keys = (rounded, self.of_case["suspicion"], self.of_case["changed_share"])
        return np.lexsort([-key for key in reversed(keys)]).astype(np.int64)


def cohort_row(cohort: ComparedCohort, which: Integers | None = None, *, good: float = GOOD) -> dict[str, Any]:
    """Counts, and with labels metric, harm, helped and hurt of some cases, or of all."""
    of_case = cohort.of_case
    which = np.arange(len(cohort.ids)) if which is None else which
    row: dict[str, Any] = {
        "cases": len(which),
        "clusters": len(np.unique(cohort.units(which))),
        "named": int((of_case["unit"][which] >= 0).sum()),  # cases whose patient is known
        "changed": int((of_case["changed"][which] > 0).sum()),
        "warned": int((of_case["suspicion"][which] > 0).sum()),
        "changed_share": _interval(cohort, which, of_case["changed_share"][which], top=1),
    }
    labelled = which[cohort.labelled[which]]
    if not labelled.size:
        return row
    edits = pd.DataFrame({"area": of_case["changed"][labelled], "unscored": of_case["unscored"][labelled]})
    return {
        **row,
        "labelled": len(labelled),
        "labelled_clusters": len(np.unique(cohort.units(labelled))),
        "metric": cohort.metric,
        **{name: _interval(cohort, labelled, of_case[name][labelled], top=1) for name in ("ha", "ba", "worse_voxels")},
        "judged": judged_share(edits),
        **{name: int(of_case[name][labelled].sum()) for name in ("made_wrong", "made_right")},
        **_sides(cohort, labelled, of_case["metric_old"][labelled], of_case["metric_new"][labelled], good),
    }


def label_row(cohort: ComparedCohort, number: int, *, good: float = GOOD) -> dict[str, Any]:
    """One label over the cases that hold it."""
    held = cohort.labels[number]
    at = held.whole("at")

    def mean(*names: str, top: float | None = None) -> dict[str, Any]:
        return {name: _interval(cohort, at, held[name], top=top) for name in names}

    old, new = (np.bincount(cohort.units(at), held[name]) for name in ("voxels_old", "voxels_new"))
    shifts = held["shift_hd95"]
    shifts = shifts[~np.isnan(shifts)]
    found: dict[str, Any] = {
        "cases": len(at),
        **cohort.counts[number],
        # (all new - all old) / all old voxels: small labels would rule a mean of ratios
        "drift": as_plain(_ratio(new - old, old, n=len(at))) if old.sum() else None,
        **mean("drift_ml"),
        **mean("agreement", top=1),
        "shift_hd95_median": float(np.median(shifts)) if shifts.size else None,
        "shift_hd95_max": float(shifts.max()) if shifts.size else None,
    }
    if cohort.labelled[at].any():
        found |= mean("ha", "ba", top=1) | mean("hd95_old", "hd95_new", top=np.inf)
        found |= _sides(cohort, at, held["dice_old"], held["dice_new"], good)
    return found


def _sides(cohort: ComparedCohort, which: Integers, before: Floats, after: Floats, good: float) -> dict[str, Any]:
    """Old and new metric and their difference; cases helped, hurt, and no longer good."""
    defined = np.isfinite(before) & np.isfinite(after)
    kept, old, new = which[defined], before[defined], after[defined]
    change = np.round(new - old, 12)
    flips = (old >= good) & (new < good)
    of = cohort.units(kept)
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
        "flipped": [cohort.ids[at] for at in kept[flips].tolist()],
    }


def _share(flags: NDArray[np.bool_], of: NDArray[np.int64]) -> dict[str, Any] | None:
    """A share of cases with a 95 % interval by cluster that is valid for few clusters and for 0 and 1."""
    if not flags.size:
        return None
    found = as_plain(_mean(flags.astype(float), of))
    if 1 < found["clusters"] < MANY:
        means = np.bincount(of, flags) / np.bincount(of)
        alone = len(means) == flags.size
        low, high = 1 - share_bound(1 - means, 0.975, binary=alone), share_bound(means, 0.975, binary=alone)
        low = round(low, 6) if low > 1e-4 else 0.0  # rounding of the search
        found |= {"low": min(low, found["estimate"]), "high": max(high, found["estimate"]), "shown": low > 0}
    return found


def _mean(values: NDArray[np.float64], of: NDArray[np.int64]) -> Interval:
    """The mean with its interval by cluster: Student's t, and below :data:`MANY` clusters p by sign flips."""
    sums = np.bincount(of, values).astype(float)
    found = _ratio(sums, np.bincount(of), n=values.size)
    return found if len(sums) >= MANY else replace(found, p_flip=sign_flip_p(sums))


def _ratio(sums: NDArray[Any], sizes: NDArray[Any], *, n: int) -> Interval:
    r"""One sum by another over clusters, with Student's t interval; NaN with one cluster.

    .. math:: r = \frac{\sum_c S_c}{\sum_c m_c}, \qquad
              \mathrm{se}^2 = \frac{C}{C - 1} \cdot \frac{\sum_c (S_c - r m_c)^2}{(\sum_c m_c)^2}
    """
    whole, clusters = float(sizes.sum()), len(sums)
    ratio = float(sums.sum()) / whole
    if clusters < 2:
        return replace(undefined_interval(n, "one patient has no interval", ratio), clusters=clusters)
    error = float(np.sqrt(clusters / (clusters - 1) * np.square(sums - ratio * sizes).sum())) / whole
    reach = float(stats.t.ppf(0.975, clusters - 1)) * error
    below = float(stats.t.cdf(-ratio / error, clusters - 1)) if error else float(ratio < 0)
    p = 2 * min(below, 1 - below) if error else float(ratio == 0)
    return Interval(ratio, ratio - reach, ratio + reach, below, n, clusters, 0, method="t", p_flip=p)


def _interval(
    cohort: ComparedCohort, which: Integers, values: Floats, *, top: float | None = None
) -> dict[str, Any] | None:
    """The mean over cases with its 95 % interval by cluster, within 0 and ``top`` if that is given; undefined values
    are left out and counted."""
    defined = ~np.isnan(values)
    if not defined.any():
        return None
    found = _mean(values[defined], cohort.units(which[defined]))
    if top is not None:
        found = replace(found, low=max(found.low, 0.0), high=min(found.high, top))
    return {**as_plain(found), "undefined": int((~defined).sum())}


def as_plain(found: Interval) -> dict[str, Any]:
    """An interval in plain JSON types; one cluster and equal values have an estimate and no interval."""
    several = found.clusters > 1 and found.low < found.high - 1e-12
    return {
        "estimate": found.estimate,
        "low": found.low if several else None,
        "high": found.high if several else None,
        "cases": found.n,
        "clusters": found.clusters,
        "shown": bool(found.clusters > 1 and found.shown),
    }


def comparison_of(plain: Mapping[str, Any]) -> Comparison:
    """Read a dict of :meth:`Comparison.as_dict`; an undefined number stays None."""
    labels = tuple(
        LabelChange(**{name: row[name] for name in LabelChange.__dataclass_fields__}) for row in plain["labels"]
    )
    fields = {name: plain[name] for name in Comparison.__dataclass_fields__}
    regressions = tuple(
        Regression(**{**row, "low": tuple(row["low"]), "high": tuple(row["high"])}) for row in plain["regressions"]
    )
    return Comparison(**{**fields, "labels": labels, "regressions": regressions})
