"""Conformal quality: a lower bound of the metric of a deployed mask, with clusters as the unit; refused where too few.

A new case comes from a new patient or sequence, so it is exchangeable with calibration clusters, not with cases.
A flag asks for a person where that bound is low; its options and its results on the calibration cases are computed
here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from casewise.archive.store import Archive
from casewise.core.errors import BadInput, TooFewCases
from casewise.core.records import Controller, Signals, State
from casewise.core.seeds import RESAMPLING_SEED
from casewise.core.text import UNIT
from casewise.data.splits import cluster_of
from casewise.judge.controllers.choose import candidate_signals, with_agreement
from casewise.judge.controllers.flag import QUALITY_SIGNALS, Quality, deployed_signal
from casewise.judge.decide import Setting, candidate_masks, has_consensus, replay_case, setting_of, whole_case
from casewise.judge.outcomes import outcomes

Floats = NDArray[np.float64]
DRAWS = 2000  # permutations behind p of a rank correlation
FEWEST_CLUSTERS = 9  # with fewer clusters a correlation may be chance, and choosing a signal by it breaks the bound
SOFTENING = 0.02  # s of :class:`Quality`
LARGEST_P = 0.1  # a signal is used if the one-sided p of its rank correlation is at most this


def clusters_needed(level: float) -> int:
    """Return the number of clusters that a lower bound at this level needs: K / (K + 1) >= level.

    >>> clusters_needed(0.9), clusters_needed(0.8), clusters_needed(0.95)
    (9, 4, 19)
    """
    if not 0 < level < 1:
        raise BadInput(f"the confidence must lie between 0 and 1, such as 0.9, got {level:g}")
    return math.ceil(round(level / (1 - level), 9))


def too_few_for_flags(archive: Archive, level: float) -> str | None:
    """Say why the labelled patients cannot support flags at a level; None if they can. Nothing is computed."""
    labelled = {cluster_of(entry) for entry in archive.entries.values() if entry.labelled}
    return None if len(labelled) >= clusters_needed(level) else f"no case is flagged: {_too_few(level, len(labelled))}"


def _too_few(level: float, amount: int) -> str:
    possible = [one for one in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5) if clusters_needed(one) <= amount]
    return (
        f"a lower bound at level {level:g} needs at least {clusters_needed(level)} {UNIT[1]}, got {amount}; "
        f"label more{f', or take a lower level (casewise calibrate --confidence {possible[0]:g})' if possible else ''}"
    )


def cluster_quantile(scores: ArrayLike, clusters: Sequence[Any], level: float) -> float:
    r"""The smallest t such that a case of a new cluster has a score of at most t with probability ``level`` or more.

    .. math:: \hat t = \inf\Big\{t : \frac{1}{K + 1} \sum_{k=1}^K \frac{1}{N_k} \sum_{i \in k} 1[s_i \le t]
              \ge \ell\Big\}

    Clusters are exchangeable with the new one, the cases within a cluster with each other (hierarchical conformal
    prediction, Lee, Barber & Willett 2023). One case in each cluster gives the usual (n + 1) correction.

    >>> cluster_quantile(range(1, 10), range(9), 0.9)
    9.0
    """
    values = np.asarray(scores, np.float64)
    _, number = np.unique(np.asarray(clusters).astype(str), return_inverse=True)
    amount = int(number.max(initial=-1)) + 1
    if amount < clusters_needed(level):
        raise TooFewCases(_too_few(level, amount))
    weights = 1 / np.bincount(number)[number] / (amount + 1)
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) >= level - 1e-12
    return float(values[order][np.argmax(reached)])


Taken = Sequence[tuple[Signals, float, str]]
"""(signals, metric, cluster) of what was deployed for each case."""
Every = tuple[Mapping[str, Floats], Floats]
"""Signals and metric of every mask that might be deployed, (case, mask) each."""


@dataclass(frozen=True)
class QualityFit:
    """A quality model, and the value of its signal on the calibration cases."""

    quality: Quality
    cases: int
    clusters: int
    rho: float  # rank correlation of signal and metric over cases
    p: float  # one-sided p of that correlation, by exchanging clusters


def fit_quality(
    signals: Mapping[str, ArrayLike],
    metric: ArrayLike,
    clusters: Sequence[Any],
    *,
    level: float = 0.9,
    every: Every | None = None,
) -> QualityFit:
    """Fit the two quantiles of a :class:`Quality`.

    Args:
        signals: Label-free signals of the deployed masks by name, one value per case. The one that predicts the metric
            best on left-out patients is used, the first among equals; none is used if its correlation may be chance.
        metric: Metric of the deployed masks.
        clusters: Patient or sequence of each case.
        level: Chance that the metric of a new case is at least its lower bound.
        every: Signals and metric of all masks that might have been deployed, (case, mask) each. The lower bound then
            comes from the worst of them, and holds whatever is deployed, however it was chosen.

    Returns:
        The quality model, and how well its signal ranks the calibration cases.

    Raises:
        TooFewCases: There are too few labelled patients for the level.
    """
    truth = np.asarray(metric, np.float64)
    columns = {name: np.asarray(values, np.float64) for name, values in signals.items()}
    known = np.isfinite(truth) & np.all([np.isfinite(one) for one in columns.values()], axis=0)
    if not known.any():
        raise TooFewCases("a quality estimate needs labelled cases with two or more candidates, there is none")
    names = np.asarray([str(name) for name in clusters])
    chosen = min(columns, key=lambda one: round(_left_out_error(columns[one][known], truth[known], names[known]), 9))
    signal = columns[chosen]
    rho, p = rank_correlation(signal[known], truth[known], names[known].tolist())
    used = p <= LARGEST_P and len(set(names[known].tolist())) >= FEWEST_CLUSTERS

    def ratios(signal: Floats, truth: Floats) -> Floats:  # without a signal the bound is for cases that have none, too
        return np.asarray((1 - truth) / (SOFTENING + (1 - signal if used else 0.0)))

    own = ratios(signal, truth)
    worst = own if every is None else np.max(np.nan_to_num(ratios(every[0][chosen], every[1]), nan=-np.inf), axis=1)
    known = np.isfinite(worst)
    quality = Quality(
        middle=float(np.median(own[np.isfinite(own)])),
        ratio=cluster_quantile(worst[known], names[known].tolist(), level), level=level,
        signal=chosen if used else None, softening=SOFTENING,
    )  # fmt: skip
    return QualityFit(quality, int(known.sum()), len(set(names[known].tolist())), rho, p)


def _left_out_error(signal: Floats, truth: Floats, clusters: Any) -> float:
    """Mean absolute error of 1 - k (1 - signal + s) on each patient, with k the median ratio of the other patients."""
    gap = SOFTENING + 1 - signal
    names = np.unique(clusters)
    if len(names) < 2:
        return 0.0
    errors = []
    for name in names:
        out = clusters == name
        middle = np.median((1 - truth[~out]) / gap[~out])
        errors.append(np.abs(1 - middle * gap[out] - truth[out]).mean())
    return float(np.mean(errors))


def rank_correlation(signal: ArrayLike, metric: ArrayLike, clusters: Sequence[Any]) -> tuple[float, float]:
    """Return the rank correlation of a signal with the metric, and its one-sided permutation p over clusters.

    p = (1 + #{permuted >= observed}) / (1 + :data:`DRAWS`), with the rank products of cluster means.
    """
    values, truth = np.asarray(signal, np.float64), np.asarray(metric, np.float64)
    _, number = np.unique(np.asarray(list(clusters)).astype(str), return_inverse=True)
    if len(set(number)) < 3 or np.ptp(values) == 0 or np.ptp(truth) == 0:
        return float("nan"), 1.0
    size = np.bincount(number)
    first, second = (rankdata(np.bincount(number, column) / size) for column in (values, truth))
    first, second = first - first.mean(), second - second.mean()
    rng = np.random.default_rng(RESAMPLING_SEED)
    drawn = np.array([first @ second[rng.permutation(len(second))] for _ in range(DRAWS)])
    p = (1 + int((drawn >= first @ second - 1e-9).sum())) / (DRAWS + 1)
    return float(np.corrcoef(rankdata(values), rankdata(truth))[0, 1]), p


def fitted_flag(
    archive: Archive, controller: Controller, *, below: float, at: float, consensus: str | None = None
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return (flag, its effect on these cases, concerns) for a controller that reads one ladder step by step.

    The lower bound comes from the worst mask of each case's ladder, M0 and shrunk ones included, so it holds whichever
    is deployed: cut-points may be fitted on the same cases, move later, or differ by group.
    """
    if has_consensus(archive, consensus):
        setting = setting_of(archive, consensus=consensus)
    else:
        setting = Setting(archive.steps, "", background=archive.configuration.get("metric") == "miou")
    frame = outcomes(archive)
    rows, found = [], []  # every mask that might be deployed, and the deployed ones: (signals, metric, cluster)
    for case_id in archive.ids:
        own = frame.loc[(frame["case"] == case_id) & np.isfinite(frame["metric"])]
        if own.empty:
            continue
        seen = with_agreement(
            whole_case(archive, case_id, setting),
            candidate_masks(archive, case_id),
            silent=_non_voting(setting),
            background=setting.background,
        )
        worth = {
            State(int(step), float(shrink)): float(metric)
            for step, shrink, metric in own[["step", "shrink", "metric"]].itertuples(index=False)
        }
        candidates = candidate_signals(seen)
        said = {state: {n: deployed_signal(candidates, state, n) for n in QUALITY_SIGNALS} for state in worth}
        rows.append((said, worth))
        taken = replay_case(archive, controller, case_id).state.on("")
        found.append((said[taken], worth[taken], cluster_of(archive.entry(case_id))))
    if not found:
        raise TooFewCases(f"flags are calibrated on labelled cases, {archive.path} has none; record with labels")
    states = sorted(set().union(*(worth for _, worth in rows)), key=str)

    def table(values: Sequence[Mapping[State, float | None]]) -> Floats:  # (case, state)
        return np.array([[_or_nan(one.get(state)) for state in states] for one in values], np.float64)

    signals = {
        name: table([{state: of[name] for state, of in said.items()} for said, _ in rows]) for name in QUALITY_SIGNALS
    }
    every = signals, table([worth for _, worth in rows])
    fit = quality_of(found, level=at, every=every)
    return flag_options(fit, below, setting), flag_report(found, fit, below, every), flag_concerns(fit)


def quality_of(found: Taken, *, level: float, every: Every | None = None) -> QualityFit:
    """Fit the quality model of the deployed masks."""
    signals = {name: [_or_nan(said.get(name)) for said, _, _ in found] for name in QUALITY_SIGNALS}
    return fit_quality(signals, [one[1] for one in found], [one[2] for one in found], level=level, every=every)


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value


def _non_voting(setting: Setting) -> tuple[str, ...]:
    return (*setting.silent, setting.consensus) if setting.consensus else setting.silent


def flag_options(fit: QualityFit, below: float, setting: Setting) -> dict[str, Any]:
    """The flag of a policy, as plain options."""
    flag = {"quality": asdict(fit.quality), "below": below, **asdict(setting), "silent": _non_voting(setting)}
    flag.pop("consensus")
    return flag


def flag_concerns(fit: QualityFit) -> list[str]:
    """Return warnings about the signal of a flag."""
    if fit.quality.signal is not None:
        return []
    same = f"all cases get the same lower bound, so all are flagged or none; more labelled {UNIT[1]} may help"
    if fit.clusters < FEWEST_CLUSTERS:
        return [f"agreement is not used with fewer than {FEWEST_CLUSTERS} {UNIT[1]}, there are {fit.clusters}: {same}"]
    weak = f"rank correlation {fit.rho:.2f}, p {fit.p:.2f}"
    return [f"agreement does not clearly separate good from poor masks on these cases ({weak}): {same}"]


def flag_report(found: Taken, fit: QualityFit, below: float, every: Every | None = None) -> dict[str, Any]:
    """Return the fit, and the flags of the calibration cases, each by a fit without its patient."""
    clusters = np.array([cluster for _, _, cluster in found])
    flags = np.zeros(len(found), bool)
    for out in np.unique(clusters):
        quality = _without(found, clusters != out, fit, every)
        for i in np.flatnonzero(clusters == out).tolist():
            bound = quality.of(None if quality.signal is None else found[i][0].get(quality.signal))
            flags[i] = bound is None or bound[1] < below
    poor = np.array([metric < below for _, metric, _ in found])
    counts = {"flagged": int(flags.sum()), "poor": int(poor.sum()), "poor_flagged": int((flags & poor).sum())}
    return {**asdict(fit), **counts}


def _without(found: Taken, rest: Any, fit: QualityFit, every: Every | None) -> Quality:
    """Fit the quality model of the other patients, at the highest level that they support."""
    amount = len({found[i][2] for i in np.flatnonzero(rest).tolist()})
    level = min(fit.quality.level, amount / (amount + 1))
    if amount < 1:
        return fit.quality
    part = None if every is None else ({name: one[rest] for name, one in every[0].items()}, every[1][rest])
    return quality_of([found[i] for i in np.flatnonzero(rest).tolist()], level=level, every=part).quality


def caught_sentence(quality: Mapping[str, Any]) -> str:
    """Say how many poor calibration cases were flagged."""
    if not quality.get("poor", 0):
        return "no labelled mask is poor, so the flag could not be tested; expect it to miss most poor masks"
    return (
        f"poor masks seen: {quality['poor']}, of which {quality['poor_flagged']} were flagged; the share of "
        f"future poor masks that will be flagged is not promised"
    )


def flag_sentences(found: Mapping[str, Any]) -> list[str]:
    """Return how many calibration cases are flagged, as lines for a terminal; none without flags."""
    if "quality" not in found:
        return []
    quality = found["quality"]
    return [
        f"flags: {quality['flagged']} of {quality['cases']} calibration cases, each by a fit without its {UNIT[0]}; "
        f"{caught_sentence(quality)}",
        f"the lower bound holds for {quality['quality']['level']:.0%} of all cases of new {UNIT[1]} (from "
        f"{quality['clusters']}); among cases that are not flagged it may fail more often",
    ]
