"""Conformal quality: a lower bound of the metric of a deployed mask, with clusters as the unit; refused where too few.

A new case comes from a new patient or sequence, so calibration clusters, not cases, are what it is exchangeable with.
A flag asks for a person where that bound is low; its options and what it does on the calibration cases are made here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from casewise.archive.store import Archive
from casewise.core.brief import UNIT
from casewise.core.errors import TooFewCases
from casewise.core.records import Controller, State
from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.controllers.choose import board, with_agreement
from casewise.judge.controllers.flag import Quality, deployed_signal
from casewise.judge.deciding import Setting, candidate_masks, decision_of, has_consensus, setting_of, whole_case
from casewise.judge.outcomes import outcomes

Floats = NDArray[np.float64]
FEWEST_CLUSTERS = 9  # with fewer, whether a signal carries is luck, and choosing it by that breaks the bound
CARRIES = 0.1  # one-sided p of the rank correlation below which a signal is said to carry


def clusters_needed(level: float) -> int:
    """Clusters from which a lower bound at this level exists: K / (K + 1) >= level.

    >>> clusters_needed(0.9), clusters_needed(0.8), clusters_needed(0.95)
    (9, 4, 19)
    """
    return math.ceil(round(level / (1 - level), 9))


def _within(clusters: int) -> str:
    """The round level that so many clusters carry, as a piece of a sentence."""
    level = next((level for level in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5) if clusters_needed(level) <= clusters), None)
    return "" if level is None else f": {clusters} carry {level:g}"


def cluster_quantile(scores: ArrayLike, clusters: Sequence[Any], level: float) -> float:
    r"""The smallest t such that a case of a new cluster has a score of at most t with chance ``level`` or more.

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
        raise TooFewCases(
            f"a lower bound at level {level:g} needs at least {clusters_needed(level)} clusters (patients or "
            f"sequences), got {amount}; label more, or ask for a lower level (--at){_within(amount)}"
        )
    weights = 1 / np.bincount(number)[number] / (amount + 1)
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) >= level - 1e-12
    return float(values[order][np.argmax(reached)])


@dataclass(frozen=True)
class QualityFit:
    """A quality model and what the calibration cases say about the signal behind it."""

    quality: Quality
    cases: int
    clusters: int
    rho: float  # rank correlation of signal and metric over cases
    p: float  # that this is chance, one-sided, by exchanging clusters

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def fit_quality(
    agreement: ArrayLike,
    metric: ArrayLike,
    clusters: Sequence[Any],
    *,
    level: float = 0.9,
    softening: float = 0.02,
    every: tuple[Floats, Floats] | None = None,
) -> QualityFit:
    """The two quantiles of a :class:`Quality`; a signal that does not carry on these cases is not used.

    ``every`` holds agreement and metric of all masks that might have been deployed, (case, mask) each: the lower bound
    then comes from the worst of them, and holds whatever is deployed, however it was chosen.
    """
    signal, truth = np.asarray(agreement, np.float64), np.asarray(metric, np.float64)
    known = np.isfinite(truth) & np.isfinite(signal)
    if not known.any():
        raise TooFewCases("a quality needs labelled calibration cases with two candidates or more, there is none")
    names = np.asarray([str(name) for name in clusters])
    rho, p = carries(signal[known], truth[known], names[known].tolist())
    used = p <= CARRIES and len(set(names[known].tolist())) >= FEWEST_CLUSTERS

    def ratios(signal: Floats, truth: Floats) -> Floats:  # without a signal the bound is for cases that have none, too
        return np.asarray((1 - truth) / (softening + (1 - signal if used else 0.0)))

    own = ratios(signal, truth)
    worst = own if every is None else np.max(np.nan_to_num(ratios(*every), nan=-np.inf), axis=1)
    known = np.isfinite(worst)
    quality = Quality(
        middle=float(np.median(own[np.isfinite(own)])),
        ratio=cluster_quantile(worst[known], names[known].tolist(), level),
        level=level,
        signal="agreement" if used else None,
        softening=softening,
    )
    return QualityFit(quality, int(known.sum()), len(set(names[known].tolist())), rho, p)


def carries(
    signal: ArrayLike, metric: ArrayLike, clusters: Sequence[Any], *, draws: int = 2000, seed: int = RESAMPLING_SEED
) -> tuple[float, float]:
    """Rank correlation of a signal with the metric, and its one-sided p when cluster means are exchanged at random."""
    values, truth = np.asarray(signal, np.float64), np.asarray(metric, np.float64)
    _, number = np.unique(np.asarray(list(clusters)).astype(str), return_inverse=True)
    if len(set(number)) < 3 or np.ptp(values) == 0 or np.ptp(truth) == 0:
        return float("nan"), 1.0
    size = np.bincount(number)
    first, second = (_ranks(np.bincount(number, column) / size) for column in (values, truth))
    first, second = first - first.mean(), second - second.mean()
    rng = np.random.default_rng(seed)
    drawn = np.array([first @ second[rng.permutation(len(second))] for _ in range(draws)])
    p = (1 + int((drawn >= first @ second - 1e-9).sum())) / (draws + 1)
    return float(np.corrcoef(_ranks(values), _ranks(truth))[0, 1]), p


def _ranks(values: Floats) -> Floats:
    """Ranks from 1, equal values sharing their mean rank."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[which])


def fitted_flag(
    archive: Archive, controller: Controller, *, below: float, at: float, consensus: str | None = None
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """(flag, what it does here, concerns) for a controller that reads one ladder step by step.

    The lower bound comes from the worst mask of each case's ladder, M0 and shrunk ones included, so it holds whichever
    is deployed: cut-points may be fitted on the same cases, move later, or differ by group.
    """
    if has_consensus(archive, consensus):
        setting = setting_of(archive, consensus=consensus)
    else:
        setting = Setting(archive.steps, "", background=archive.configuration.get("metric") == "miou")
    frame = outcomes(archive)
    rows, found = [], []  # all that might be deployed, and what is: (agreement, metric, cluster)
    for case_id in archive.ids:
        own = frame.loc[(frame["case"] == case_id) & np.isfinite(frame["metric"])]
        if own.empty:
            continue
        seen = with_agreement(
            whole_case(archive, case_id, setting),
            candidate_masks(archive, case_id),
            silent=_voiceless(setting),
            background=setting.background,
        )
        worth = {
            State(int(step), float(shrink)): float(metric)
            for step, shrink, metric in own[["step", "shrink", "metric"]].itertuples(index=False)
        }
        said = {state: deployed_signal(board(seen), state, "agreement") for state in worth}
        rows.append((said, worth))
        taken = decision_of(archive, controller, case_id).state.on("")
        cluster = archive.entry(case_id).cluster or case_id
        found.append((said[taken], worth[taken], cluster))
    if not found:
        raise TooFewCases(f"flags are calibrated on labelled cases, {archive.path} has none; record with labels")
    states = sorted(set().union(*(worth for _, worth in rows)), key=str)
    signal, truth = (
        np.array([[_or_nan(one[part].get(state)) for state in states] for one in rows], np.float64) for part in (0, 1)
    )
    fit = quality_of(found, level=at, every=(signal, truth))
    return flag_options(fit, below, setting), flag_report(found, fit, below), flag_concerns(fit)


Taken = Sequence[tuple[float | None, float, str]]
"""(agreement, metric, cluster) of what was deployed for each case."""


def quality_of(found: Taken, *, level: float, every: tuple[Floats, Floats] | None = None) -> QualityFit:
    """The quality model of what is deployed."""
    signal, metric, clusters = zip(*found, strict=True)
    return fit_quality([_or_nan(value) for value in signal], metric, clusters, level=level, every=every)


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value


def _voiceless(setting: Setting) -> tuple[str, ...]:
    return (*setting.silent, setting.consensus) if setting.consensus else setting.silent


def flag_options(fit: QualityFit, below: float, setting: Setting) -> dict[str, Any]:
    """The flag of a policy, as plain options."""
    flag = {"quality": asdict(fit.quality), "below": below, **asdict(setting)}
    flag.pop("consensus")
    return {**flag, "silent": _voiceless(setting)}


def flag_concerns(fit: QualityFit) -> list[str]:
    """What a person should know of the signal behind a flag."""
    if fit.quality.signal is not None:
        return []
    weak = f"rank correlation {fit.rho:.2f}, p {fit.p:.2f}"
    return [
        f"agreement does not surely tell good masks from poor ones on these cases ({weak}): all cases get the same "
        f"lower bound, so all are flagged or none; more labelled {UNIT[1]} may help"
    ]


def flag_report(found: Taken, fit: QualityFit, below: float) -> dict[str, Any]:
    """The fit, how many calibration cases would be flagged, and how many of the poor ones are among them."""
    pairs = [(fit.quality.of(agreement), metric) for agreement, metric, _ in found]
    flags = np.array([quality is None or quality[1] < below for quality, _ in pairs])
    poor = np.array([metric < below for _, metric in pairs])
    counts = {"flagged": int(flags.sum()), "poor": int(poor.sum()), "poor_flagged": int((flags & poor).sum())}
    return {**fit.as_dict(), **counts}


def flag_sentences(found: Mapping[str, Any]) -> list[str]:
    """How many calibration cases are flagged, for a terminal; nothing without flags."""
    if "quality" not in found:
        return []
    quality = found["quality"]
    return [
        f"flags: {quality['flagged']} of {quality['cases']} calibration cases, {quality['poor_flagged']} of the "
        f"{quality['poor']} poor ones among them; lower bound at level {quality['quality']['level']:g} from "
        f"{quality['clusters']} clusters"
    ]
