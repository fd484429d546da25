"""Conformal quality: a lower bound of the metric of a deployed mask, with clusters as the unit; refused where too few.

A new case comes from a new patient or sequence, so calibration clusters, not cases, are what it is exchangeable with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from casewise.core.errors import TooFewCases
from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.controllers.flag import Quality

Floats = NDArray[np.float64]
FEWEST_CLUSTERS = 9  # with fewer, whether a signal carries is luck, and choosing it by that breaks the bound
CARRIES = 0.1  # one-sided p of the rank correlation below which a signal is said to carry


def clusters_needed(level: float) -> int:
    """Clusters from which a lower bound at this level exists: K / (K + 1) >= level.

    >>> clusters_needed(0.9), clusters_needed(0.8), clusters_needed(0.95)
    (9, 4, 19)
    """
    return math.ceil(round(level / (1 - level), 9))


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
            f"sequences), got {amount}; label more, or ask for a lower level"
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
    _, number = np.unique(np.asarray(clusters).astype(str), return_inverse=True)
    if number.max() < 2 or np.ptp(values) == 0 or np.ptp(truth) == 0:
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
