"""Cut-points of routers: percentiles of the step-1 coordinate of calibration cases, by a named convention.

Also here: the change of the cut-points under resampling, which coordinate gives the most stable ones, the z-statistics
of the two-term risk, and hybrid cut-points that follow a stream. No label is read.

Hybrid cut-points (E10, S12) are off by default. Their pool is the pool of the exchangeability alarm, so one cannot run
without the other. After an alarm every case gets M0. Promises for fixed cut-points do not hold for hybrid ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from casewise.core.errors import BadInput, DegenerateStatistic, DegenerateTertiles, NotFinite, TooFewCases
from casewise.core.records import Controller, Policy
from casewise.core.registry import Registry
from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.monitors.exchangeability import Exchangeability, suspended_policy
from casewise.judge.policy import controller_of, is_hybrid
from casewise.measure.signals import SIGNALS
from casewise.measure.signals.risk import RiskStatistics

Floats = NDArray[np.float64]
FEWEST = 5
"""Calibration cases below which nothing is fitted: the smallest set that the paper examined (K1)."""


CONVENTIONS: Registry[tuple[float, float]] = Registry("percentiles", {"medical": (33.33, 66.67), "driving": (33, 66)})
"""Percentiles of cut_low and cut_high, with linear interpolation (F1)."""


def _percentiles(values: Floats, convention: str) -> Floats:
    """(cut_low, cut_high) along the last axis of the values; shape (2, ...)."""
    return np.asarray(np.percentile(values, CONVENTIONS[convention], axis=-1), dtype=np.float64)


def cut_points(values: Sequence[float] | Floats, convention: str = "medical") -> tuple[float, float]:
    """(cut_low, cut_high) of the calibration values.

    >>> cut_points([0] * 10 + [1] * 6 + [2] * 4)
    (0.0, 1.0)
    """
    low, high = _percentiles(checked(values), convention)
    return float(low), float(high)


def checked(values: Any, *, what: str = "cut-points") -> Floats:
    """Return the values as an array; refuse too few or infinite ones."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise BadInput(f"{what} need one value per case, got shape {array.shape}")
    if len(array) < FEWEST:
        raise TooFewCases(f"{what} need at least {FEWEST} calibration cases, got {len(array)}; record {FEWEST} or more")
    if not np.isfinite(array).all():
        raise NotFinite(
            f"{int((~np.isfinite(array)).sum())} of {len(array)} calibration values are not finite; leave the cases out"
        )
    return array


def buckets(values: Floats, cut_low: Any, cut_high: Any) -> NDArray[np.int8]:
    """0 low, 1 mid, 2 hard: value >= cut_high is hard, otherwise value > cut_low is mid (E6)."""
    return np.where(values >= cut_high, 2, np.where(values > cut_low, 1, 0)).astype(np.int8)


def bucket_counts(values: Floats, cut_low: float, cut_high: float) -> dict[str, int]:
    """Cases in each bucket."""
    counts = np.bincount(buckets(values, cut_low, cut_high), minlength=3)
    return {name: int(count) for name, count in zip(("low", "mid", "hard"), counts, strict=True)}


def warn_if_degenerate(coordinate: str, values: Floats, cut_low: float, cut_high: float, instead: str | None) -> None:
    """Refuse a coordinate without any spread; warn when a bucket of the calibration cases is empty (E9, S11)."""
    hint = f"; {instead!r} does not degenerate here" if instead else ""
    if np.ptp(values) == 0:
        raise DegenerateStatistic(
            f"{coordinate} is {values[0]:g} on all {len(values)} calibration cases, so one action would be taken "
            f"for every case; choose another coordinate{hint}"
        )
    counts = bucket_counts(values, cut_low, cut_high)
    if counts["hard"] == len(values):
        raise DegenerateStatistic(
            f"the tertiles of {coordinate} collapse to {cut_low:g} and {cut_high:g}, so all {len(values)} calibration "
            f"cases would roll back and adaptation would never be used; choose another coordinate{hint}"
        )
    empty = [name for name, count in counts.items() if not count]
    if empty or cut_low == cut_high:
        warnings.warn(
            f"the tertiles of {coordinate} degenerate: cut-points {cut_low:g} and {cut_high:g} leave "
            f"{' and '.join(empty) or 'mid'} empty on {len(values)} calibration cases{hint}",
            DegenerateTertiles,
            stacklevel=3,
        )


def stability(
    values: Floats, convention: str = "medical", *, clusters: Sequence[Hashable] | None = None, resamples: int = 5000
) -> dict[str, Any]:
    """Percentile intervals of both cuts, and the share of cases that change bucket: median and 97.5th percentile.

    Patients are drawn, each with all of its cases, where ``clusters`` names them.
    """
    pool, seed = checked(values, what="a bootstrap of cut-points"), RESAMPLING_SEED
    drawn, index = resampled(pool, clusters, resamples, seed)
    if isinstance(drawn, list):
        low, high = np.array([_percentiles(one, convention) for one in drawn]).T
    else:
        low, high = _percentiles(drawn, convention)
    moved = (buckets(pool, low[:, None], high[:, None]) != buckets(pool, *cut_points(pool, convention))).mean(axis=1)
    changed = {"changed_median": float(np.median(moved)), "changed_upper": float(np.percentile(moved, 97.5))}
    stream = {"first_row": index[0, :5].tolist(), "sum": int(index.sum())}
    made = {"judged": len(pool), "patients": index.shape[1], "resamples": resamples, "seed": seed, "stream": stream}
    return {"cut_low": _interval(low), "cut_high": _interval(high), **changed, **made}


def resampled(
    pool: Floats, clusters: Sequence[Hashable] | None, resamples: int, seed: int
) -> tuple[Floats | list[Floats], NDArray[np.int64]]:
    """Resample the pool by patient; return the draws and the index of the patients drawn."""
    names = range(len(pool)) if clusters is None else [str(name) for name in clusters]
    units = np.unique(np.asarray(names), return_inverse=True)[1]
    patients = int(units.max()) + 1
    index = np.random.default_rng(seed).integers(0, patients, size=(resamples, patients))
    if len(set(np.bincount(units))) == 1:  # every patient has the same number of scans, usually one
        by_patient = pool[np.argsort(units, kind="stable")].reshape(patients, -1)
        return by_patient[index].reshape(resamples, -1), index
    each = [pool[units == unit] for unit in range(patients)]
    return [np.concatenate([each[unit] for unit in row]) for row in index], index


def stability_by_group(step_one: pd.DataFrame, values: Floats, convention: str) -> dict[str, Any]:
    """For each group the stability of its own cut-points; over all groups, the share of cases that change bucket."""
    known = step_one["group"].to_numpy()
    groups = {}
    for name in sorted(set(known)):
        own = known == name
        members = step_one.loc[own, "cluster"].tolist()
        groups[str(name)] = stability(values[own], convention, clusters=members)
    cases = sum(one["judged"] for one in groups.values())
    shares = {
        key: sum(one[key] * one["judged"] for one in groups.values()) / max(cases, 1)
        for key in ("changed_median", "changed_upper")
    }
    return {"groups": groups, **shares, "judged": cases}


def _interval(draws: Floats) -> list[float]:
    return [float(value) for value in np.percentile(draws, [2.5, 97.5])]


def mean_and_sigma(values: Floats, name: str) -> tuple[float, float]:
    """Return mean and standard deviation (ddof 0); refuse values without spread, which have no z-score (C6).

    >>> import numpy as np
    >>> mean, sigma = mean_and_sigma(np.array([0.0] * 10 + [1.0] * 6 + [2.0] * 4), "regions")
    >>> round(mean, 2), round(sigma, 3)
    (0.7, 0.781)
    """
    array = checked(values, what="z-statistics")
    mean, sigma = float(array.mean()), float(array.std(ddof=0))
    if not sigma > 0:
        raise DegenerateStatistic(
            f"{name} is {mean:g} on all {len(array)} calibration cases, so it has no z-score; calibrate on more varied "
            "cases, or choose a policy without z-scores (for more regions: a higher --lr, a smaller min-area)"
        )
    return mean, sigma


def statistics(regions: Floats, delta: Floats) -> RiskStatistics:
    """The statistics of the two-term risk r = z(n)/2 + z(delta)/2 (C6)."""
    return RiskStatistics(*mean_and_sigma(regions, "regions"), *mean_and_sigma(delta, "delta"))


def first_step_statistics(signals: pd.DataFrame) -> RiskStatistics:
    """The statistics of the two-term risk from a table of recorded signals: those of step 1."""
    first = signals.loc[(signals["step"] == 1) & (signals["shrink"] == 0)]
    return statistics(first["regions"].to_numpy(float), first["delta"].to_numpy(float))


SMALLEST_SHARE = 0.10
DISTINCT_SHARE = 2 / 3
_BOOKKEEPING = frozenset({"area", "largest"})  # counts of voxels: delta and largest_share say the same without units


def candidates(step_one: pd.DataFrame) -> dict[str, Floats]:
    """Return every registered signal that all cases have, negated where lower is riskier."""
    found = {}
    for name, info in SIGNALS.items():
        if name in step_one and name not in _BOOKKEEPING and np.isfinite(step_one[name].astype(float)).all():
            values = step_one[name].to_numpy(dtype=np.float64)
            found[name if info.higher_is_riskier else f"-{name}"] = values if info.higher_is_riskier else -values
    return found


def judged(values: Floats, convention: str, clusters: Sequence[Hashable] | None = None) -> dict[str, Any]:
    """Examine one coordinate: its cuts, its buckets, why it is unfit, and its stability by patient if it is fit."""
    low, high = cut_points(values, convention)
    counts = bucket_counts(values, low, high)
    distinct = len(np.unique(values))
    fewest = SMALLEST_SHARE * len(values)
    reasons = [f"{name} holds {count} of {len(values)}" for name, count in counts.items() if count < fewest]
    if low == high:
        reasons.insert(0, "cut-points coincide")
    if distinct < DISTINCT_SHARE * len(values):
        reasons.append(f"{distinct} distinct values of {len(values)}")
    row = {"cut_low": low, "cut_high": high, "counts": counts, "distinct": distinct, "unfit": reasons}
    moved = None if reasons else stability(values, convention, clusters=clusters, resamples=1000)["changed_median"]
    return {**row, "changed_median": moved}


def recommended(step_one: pd.DataFrame, convention: str) -> tuple[str | None, dict[str, dict[str, Any]]]:
    """Return the fit coordinate with the most stable buckets (ties: registry order), and the table of all."""
    clusters = step_one["cluster"].tolist() if "cluster" in step_one else None
    table = {name: judged(values, convention, clusters) for name, values in candidates(step_one).items()}
    fit = [name for name, row in table.items() if not row["unfit"]]
    return min(fit, key=lambda name: table[name]["changed_median"], default=None), table


MODES: Registry[str] = Registry(
    "mode",
    {
        "union": "percentiles of all calibration cases together, as on prostate in the paper",
        "per-group": "separate cut-points for each group; the group must be known at deployment",
        "robust": "the smallest cut-points of any group: no group is rolled back less often than with its own",
    },
)


def fitted_cuts(step_one: pd.DataFrame, values: Floats, *, mode: str, convention: str) -> dict[str, Any]:
    """``options`` with cut_low and cut_high, ``groups`` with those of each group, by mode."""
    MODES[mode]
    if mode == "union":
        return {"options": _named(cut_points(values, convention)), "groups": {}}
    if step_one["group"].isna().any():
        raise BadInput("some calibration cases have no group; give all of them a group, or use mode union")
    groups = {str(name): values[step_one["group"].to_numpy() == name] for name in sorted(step_one["group"].unique())}
    cuts = {
        name: cut_points(checked(part, what=f"cut-points of group {name}"), convention) for name, part in groups.items()
    }
    robust = _named((min(low for low, _ in cuts.values()), min(high for _, high in cuts.values())))
    return {"options": robust, "groups": {} if mode == "robust" else {name: _named(cuts[name]) for name in cuts}}


def _named(cuts: tuple[float, float]) -> dict[str, float]:
    return {"cut_low": cuts[0], "cut_high": cuts[1]}


WARM_UP = 15  # cases of the stream before refitted cut-points replace the calibrated ones
DELTA = 0.05  # chance that the alarm is ever false


@dataclass(frozen=True)
class Stream:
    """A hybrid policy within its stream, with the monitor that may suspend it."""

    hybrid: Policy  # the policy as it was calibrated
    monitor: Exchangeability  # calibration pool, the stream so far, and the alarm
    patients: tuple[str, ...] = ()  # patients of the stream that were counted

    @property
    def policy(self) -> Policy:
        """Policy for the next case: calibrated cut-points in the warm-up, then refitted ones; M0 after an alarm."""
        if self.monitor.alarm:
            return suspended_policy(self.hybrid)
        options = dict(self.hybrid.options)
        settings = options.pop("hybrid")
        if len(self.monitor.stream) >= settings["warm_up"]:
            window = settings["window"] or len(self.monitor.pool)
            low, high = cut_points(self.monitor.pool[-window:], settings["convention"])
            options |= {"cut_low": low, "cut_high": high}
        return replace(self.hybrid, options=options)

    @property
    def controller(self) -> Controller:
        """Controller of the next case."""
        return controller_of(self.policy)

    def after(self, case_id: str, value: float, cluster: str | None = None) -> Stream:
        """Return the stream after a case with this coordinate; only the first case of a patient counts."""
        patient = cluster or case_id
        if patient in self.patients:
            return self
        return replace(self, monitor=self.monitor.seen(case_id, value), patients=(*self.patients, patient))


def stream_of(policy: Policy) -> Stream:
    """Return the start of the stream of a hybrid policy."""
    if not is_hybrid(policy):
        raise BadInput(f"policy {policy.name!r} is not hybrid; calibrate with hybrid=true for a stream")
    settings = policy.options["hybrid"]
    return Stream(policy, Exchangeability(tuple(settings["pool"]), settings.get("delta", DELTA)))
