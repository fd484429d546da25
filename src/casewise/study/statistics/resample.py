"""The bootstrap: one index matrix drawn once, whole clusters resampled together, and intervals from its draws (A8, H1).

Every interval of a study with the same number of clusters uses the same index matrix,

    index = numpy.random.default_rng(seed).integers(0, n, size=(B, n)),

and its first row and sum go into the result, so that a port can prove that it uses the same stream.

Cross-fitting folds that keep the cases of one cluster together.

Two methods on the same cases: wins, the signed-rank test, and Holm's correction of a declared family (H3-H5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from casewise.core.brief import counted
from casewise.core.errors import BadInput, TooFewCases
from casewise.core.seeds import RESAMPLING_SEED

RESAMPLES = 5000
LEVEL = 0.05  # of every test behind a verdict
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Draws:
    """B resamples of n units, with replacement."""

    index: NDArray[np.int64]  # (draw, position)
    seed: int

    @property
    def n(self) -> int:
        """How many units are resampled."""
        return int(self.index.shape[1])

    @cached_property
    def counts(self) -> NDArray[np.int32]:
        """How often each unit is in each draw: (draw, unit)."""
        resamples, n = self.index.shape
        flat = self.index + np.arange(resamples)[:, None] * n
        return np.bincount(flat.ravel(), minlength=resamples * n).reshape(resamples, n).astype(np.int32)

    @property
    def proof(self) -> dict[str, Any]:
        """What a port needs to show that it draws the same numbers (A8)."""
        return {
            "seed": self.seed,
            "resamples": int(self.index.shape[0]),
            "units": self.n,
            "first_row": self.index[0].tolist(),
            "sum": int(self.index.sum()),
        }


@lru_cache(maxsize=4)
def draws(n: int, resamples: int = RESAMPLES, seed: int = RESAMPLING_SEED) -> Draws:
    """The index matrix of a study; the same call gives the very same object."""
    if n < 1 or resamples < 1:
        raise BadInput(f"a bootstrap needs at least one unit and one draw, got {n} units and {resamples} draws")
    return Draws(np.random.default_rng(seed).integers(0, n, size=(resamples, n)), seed)


@dataclass(frozen=True)
class Interval:
    """A point estimate with its bootstrap interval; NaN and a reason where there is none."""

    estimate: float
    low: float
    high: float
    p_below: float  # fraction of draws strictly below zero (H1)
    n: int  # cases
    clusters: int  # resampled units
    resamples: int
    skipped: int = 0  # draws without a value
    method: str = "percentile"
    reason: str = ""
    p_flip: float = float("nan")  # two-sided sign-flip p of a mean of differences

    @property
    def separated(self) -> bool:
        """Whether the interval excludes zero (H7)."""
        return bool(self.low > 0 or self.high < 0)

    @property
    def shown(self) -> bool:
        """Whether a difference is called shown: the interval excludes zero and the sign-flip test rejects at 0.05.

        With few clusters the percentile interval misses a null difference too often; the test does not (decision 0011).
        """
        return self.separated and self.p_flip <= LEVEL

    @property
    def holds_zero(self) -> bool:
        """Whether the interval contains zero: "matched", never "equal" (H7)."""
        return bool(self.low <= 0 <= self.high)


def undefined_interval(n: int, reason: str, estimate: float = np.nan) -> Interval:
    """An interval that is not there, and why."""
    nan = float("nan")
    return Interval(estimate, nan, nan, nan, n, 0, 0, reason=reason)


def interval_of(
    estimate: float, drawn: Floats, *, n: int, clusters: int, level: float = 0.95, method: str = "percentile"
) -> Interval:
    """Percentile interval of the draws that have a value; the others are counted (H1, I3)."""
    kept = drawn[np.isfinite(drawn)]
    skipped = len(drawn) - len(kept)
    if not len(kept):
        return undefined_interval(n, "no bootstrap draw has a value", estimate)
    low, high = np.percentile(kept, [50 * (1 - level), 50 * (1 + level)])
    below = float(np.mean(kept < 0))
    return Interval(float(estimate), float(low), float(high), below, n, clusters, len(drawn), skipped, method)


def interval_of_row(row: Mapping[str, Any], *, estimate: str = "estimate", resamples: int = 0) -> Interval:
    """The interval that a row of a finding's table holds."""
    return Interval(
        float(row[estimate]),
        float(row["low"]),
        float(row["high"]),
        float(row.get("p_below", np.nan)),
        int(row["n"]),
        int(row["clusters"]),
        resamples,
        method=str(row.get("interval", "percentile")),
        p_flip=float(row.get("p_flip", np.nan)),
    )


def clusters_of(frame: pd.DataFrame) -> NDArray[np.int64]:
    """Number of each row's cluster; a case without a cluster is its own, numbered in order of appearance."""
    if "cluster" not in frame.columns:
        names = frame["case"].astype(str)
    else:
        named = frame["cluster"].notna()
        names = ("cluster " + frame["cluster"].astype(str)).where(named, "case " + frame["case"].astype(str))
    return np.asarray(pd.factorize(names)[0], dtype=np.int64)


def mean_interval(
    values: ArrayLike,
    *,
    clusters: NDArray[np.int64] | None = None,
    resamples: int = RESAMPLES,
    seed: int = RESAMPLING_SEED,
    level: float = 0.95,
    method: str = "percentile",
) -> Interval:
    r"""Bootstrap interval of a mean; with ``clusters``, whole clusters are drawn and their cases go along.

    .. math:: \bar d^{(b)} = \sum_{c} S_{I_{bc}} \Big/ \sum_c m_{I_{bc}}, \quad S_c = \sum_{i \in c} d_i,\ m_c = |c|.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers):
        return undefined_interval(0, "no case")
    if not np.isfinite(numbers).all():
        raise BadInput("a bootstrap mean needs finite values; drop undefined cases first and count them")
    unit = np.arange(len(numbers)) if clusters is None else np.asarray(clusters)
    sums, sizes = (np.bincount(unit, one).astype(np.float64) for one in (numbers, np.ones(len(unit))))
    drawn = draws(len(sums), resamples, seed)
    means = cluster_means(sums, sizes, drawn)
    found = interval_of(numbers.mean(), means, n=len(numbers), clusters=len(sums), level=level)
    found = replace(found, p_flip=sign_flip_p(sums, resamples=resamples, seed=seed))
    if method == "percentile":
        return found
    if method != "bca":
        raise BadInput(f"the interval method is 'percentile' or 'bca', got {method!r}")
    return _corrected(found, sums, sizes, means, level)


def cluster_means(sums: Floats, sizes: Floats, drawn: Draws) -> Floats:
    """The mean over cases in every draw of clusters."""
    if (sizes == 1).all():
        return np.asarray(sums[drawn.index].mean(axis=1))
    return np.asarray(sums[drawn.index].sum(axis=1) / sizes[drawn.index].sum(axis=1))


def sign_flip_p(sums: Floats, *, resamples: int = RESAMPLES, seed: int = RESAMPLING_SEED) -> float:
    r"""Two-sided p of a mean of paired differences when the two methods of any cluster could be exchanged.

    .. math:: p = \frac{1 + \#\{b : |\sum_c \epsilon_{bc} S_c| \ge |\sum_c S_c|\}}{B + 1}, \qquad
              \epsilon_{bc} = \pm 1

    Exact at any number of clusters: exchanging the methods of a cluster turns the sign of all its differences.
    """
    flipped = np.abs(signs(len(sums), resamples, seed) @ np.asarray(sums, np.float64))
    reached = flipped >= abs(float(np.sum(sums))) * (1 - 1e-12)
    return float((1 + reached.sum()) / (1 + resamples))


@lru_cache(maxsize=4)
def signs(n: int, resamples: int, seed: int) -> Floats:
    """Random signs, (draw, unit); a stream of its own, so that test and interval do not share their luck."""
    return np.random.default_rng([seed, 1]).choice([-1.0, 1.0], size=(resamples, n))


def paired_interval(first: ArrayLike, second: ArrayLike, **options: Any) -> Interval:
    """Interval of mean(first - second) over the same cases (H1); options as in :func:`mean_interval`."""
    left, right = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if left.shape != right.shape:
        raise BadInput(
            f"paired values must be of the same cases, got {left.shape} and {right.shape}; join them by case"
        )
    return mean_interval(left - right, **options)


def _corrected(found: Interval, sums: Floats, sizes: Floats, means: Floats, level: float) -> Interval:
    """Bias-corrected and accelerated interval (Efron 1987), jackknife over clusters (H12)."""
    rest = (sums.sum() - sums) / np.maximum(sizes.sum() - sizes, 1)
    spread = rest.mean() - rest
    if len(sums) < 2 or not spread.any():
        return found
    acceleration = (spread**3).sum() / (6 * (spread**2).sum() ** 1.5)
    below = (np.mean(means < found.estimate) + np.mean(means <= found.estimate)) / 2
    bias = stats.norm.ppf(below)
    tails = bias + stats.norm.ppf([(1 - level) / 2, (1 + level) / 2])
    low, high = np.percentile(means, 100 * stats.norm.cdf(bias + tails / (1 - acceleration * tails)))
    fields: Mapping[str, Any] = {**vars(found), "low": float(low), "high": float(high), "method": "bca"}
    return Interval(**fields)


Integers = NDArray[np.int64]


def folds_of(units: Integers, folds: int, seed: int) -> Integers:
    """A fold number for every row; rows of one unit share it, and folds differ by at most one unit.

    >>> folds_of(np.array([0, 0, 1, 2, 2, 3]), 2, seed=0).tolist()
    [1, 1, 0, 0, 0, 1]
    """
    names = np.unique(units)
    if len(names) < folds or folds < 2:
        raise TooFewCases(
            f"{folds} folds need at least two folds and as many clusters, got {counted(len(names), 'cluster')}"
        )
    order = np.random.default_rng(seed).permutation(len(names))
    number = np.empty(len(names), np.int64)
    number[order] = np.arange(len(names)) % folds
    return np.asarray(number[np.searchsorted(names, units)])


_EXACT_UP_TO = 25  # nonzero differences; beyond it, or with ties, the normal approximation with tie correction


def wins(method: ArrayLike, reference: ArrayLike, *, lower_is_better: bool = True) -> tuple[int, int, int]:
    """Strict wins, exact ties and losses of a method (H3).

    >>> wins([0.1, 0.2, 0.3], [0.2, 0.2, 0.1])
    (1, 1, 1)
    """
    difference = np.asarray(method, float) - np.asarray(reference, float)
    signed = difference if lower_is_better else -difference
    return int((signed < 0).sum()), int((signed == 0).sum()), int((signed > 0).sum())


@dataclass(frozen=True)
class SignedRank:
    """Wilcoxon's signed-rank test; ``p`` is NaN with a reason when no difference is left."""

    statistic: float
    p: float
    n: int  # nonzero differences
    zeros: int
    method: str  # "exact" or "asymptotic"
    reason: str = ""


def wilcoxon(method: ArrayLike, reference: ArrayLike) -> SignedRank:
    """Two-sided, zeros dropped; differences are rounded to 12 decimals so that float noise makes no ties (H4)."""
    difference = np.round(np.asarray(method, float) - np.asarray(reference, float), 12)
    nonzero = difference[difference != 0]
    zeros = len(difference) - len(nonzero)
    if not len(nonzero):
        return SignedRank(float("nan"), float("nan"), 0, zeros, "none", "every difference is zero")
    tied = len(np.unique(np.abs(nonzero))) < len(nonzero)
    how = "exact" if len(nonzero) <= _EXACT_UP_TO and not tied else "asymptotic"
    found = stats.wilcoxon(nonzero, method="exact" if how == "exact" else "approx", correction=False)
    return SignedRank(float(found.statistic), float(found.pvalue), len(nonzero), zeros, how)


def holm(p_values: Sequence[float], *, family: int | None = None) -> NDArray[np.float64]:
    r"""Holm's step-down adjustment, :math:`\tilde p_{(i)} = \max_{j \le i} \min(1, (m - j + 1) p_{(j)})` (H5).

    ``family`` is the declared size m when not every member is at hand.

    >>> holm([0.01625, 0.5], family=4).round(6).tolist()
    [0.065, 1.0]
    """
    p = np.asarray(p_values, dtype=np.float64)
    size = len(p) if family is None else family
    if size < len(p) or ((p < 0) | (p > 1)).any() or np.isnan(p).any():
        raise BadInput(f"Holm needs p-values in [0, 1] and a family of at least {len(p)}, got {p.tolist()} and {size}")
    order = np.argsort(p, kind="stable")
    stepped = np.minimum(1.0, (size - np.arange(len(p))) * p[order])
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(stepped)
    return adjusted
