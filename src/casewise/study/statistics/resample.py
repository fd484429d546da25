"""Intervals of means by patient, the bootstrap behind them, and paired tests (A8, H1-H4).

Every bootstrap of a study with the same number of clusters uses the same index matrix,

    index = numpy.random.default_rng(seed).integers(0, n, size=(B, n)),

and its first row and sum go into the result, so that another program can show that it draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from casewise.core.errors import BadInput
from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.calibration.adoption import mean_low
from casewise.judge.certificates.risk_control import clopper_pearson_upper
from casewise.judge.outcomes import POINT, patients_of

RESAMPLES = 5000
LEVEL = 0.05  # level of every test
MANY = 200  # clusters from which the percentile bootstrap is used for means
FEWEST = 5  # clusters that an interval of a correlation, of a benchmark or of a study needs
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Draws:
    """B resamples of n units, with replacement."""

    index: NDArray[np.int64]  # (draw, position)
    seed: int

    @cached_property
    def counts(self) -> NDArray[np.int32]:
        """Count of each unit in each draw: (draw, unit)."""
        resamples, n = self.index.shape
        flat = self.index + np.arange(resamples)[:, None] * n
        return np.bincount(flat.ravel(), minlength=resamples * n).reshape(resamples, n).astype(np.int32)

    @property
    def proof(self) -> dict[str, Any]:
        """Numbers that show whether another program draws equal indices (A8)."""
        return {
            "seed": self.seed,
            "resamples": int(self.index.shape[0]),
            "units": int(self.index.shape[1]),
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
    """A point estimate with its interval; NaN and a reason where there is none."""

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
        """True if the interval excludes zero (H7)."""
        return bool(self.low > 0 or self.high < 0)

    @property
    def shown(self) -> bool:
        """True if the interval excludes zero and the sign-flip test rejects at 0.05 (decision 0011)."""
        return self.separated and self.p_flip <= LEVEL

    @property
    def holds_zero(self) -> bool:
        """True if the interval contains zero: "matched", never "equal" (H7)."""
        return bool(self.low <= 0 <= self.high)


def undefined_interval(n: int, reason: str, estimate: float = np.nan) -> Interval:
    """Return an interval without values, with the reason."""
    nan = float("nan")
    return Interval(estimate, nan, nan, nan, n, 0, 0, reason=reason)


def interval_of(estimate: float, drawn: Floats, *, n: int, clusters: int) -> Interval:
    """Percentile interval of the draws; draws without a value are counted (H1, I3)."""
    kept = drawn[np.isfinite(drawn)]
    skipped = len(drawn) - len(kept)
    if not len(kept):
        return undefined_interval(n, "no bootstrap draw has a value", estimate)
    low, high = np.percentile(kept, [2.5, 97.5])
    below = float(np.mean(kept < 0))
    return Interval(float(estimate), float(low), float(high), below, n, clusters, len(drawn), skipped)


def interval_of_row(row: Mapping[str, Any], *, estimate: str = "estimate") -> Interval:
    """The interval in a row of a finding's table."""
    fields: dict[str, Any] = {name: float(row.get(name, np.nan)) for name in ("low", "high", "p_below", "p_flip")}
    fields |= {name: int(row[name]) for name in ("n", "clusters")}
    method = str(row.get("interval", "percentile"))
    return Interval(float(row[estimate]), **fields, resamples=0, method=method)


def interval_fields(found: Interval) -> dict[str, Any]:
    """The columns that a table of intervals has."""
    names = ("estimate", "low", "high", "p_below", "n", "clusters", "separated", "p_flip", "shown")
    return {name: getattr(found, name) for name in names}


def cluster_numbers(frame: pd.DataFrame) -> NDArray[np.int64]:
    """Number of each row's patient (:func:`patients_of`), in order of appearance."""
    return np.asarray(pd.factorize(np.asarray(patients_of(frame), object))[0], dtype=np.int64)


def mean_interval(
    values: ArrayLike, *, clusters: NDArray[np.int64] | None = None, resamples: int = RESAMPLES,
    seed: int = RESAMPLING_SEED, method: str = "auto", largest: float = np.inf,
) -> Interval:  # fmt: skip
    r"""Interval of a mean over cases; the cases of one cluster (patient or sequence) go together.

    Below 200 clusters it is Student's t with the degrees of freedom of the clusters, because the percentile bootstrap
    covers too seldom with few of them (.82 to .85 with 5 at a stated .95). One cluster has no interval, and equal
    values have none.

    .. math:: \bar d \pm t_{C-1} \sqrt{\tfrac{C}{C-1} \sum_c \big((S_c - m_c \bar d) / n\big)^2}, \quad
              \bar d^{(b)} = \sum_{c} S_{I_{bc}} \Big/ \sum_c m_{I_{bc}}, \quad S_c = \sum_{i \in c} d_i,\ m_c = |c|.

    Args:
        values: One number per case.
        clusters: The cluster of each case, numbered from 0; each case is its own by default.
        resamples: Draws of the bootstrap.
        seed: Of the draws.
        method: ``"auto"``, ``"t"`` or ``"percentile"``.
        largest: Largest possible absolute value of the mean; the interval ends there.

    Returns:
        The interval; NaN with a reason where there is none.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers):
        return undefined_interval(0, "no case")
    if not np.isfinite(numbers).all():
        raise BadInput("a bootstrap mean needs finite values; drop undefined cases first and count them")
    unit = np.arange(len(numbers)) if clusters is None else np.asarray(clusters)
    sums, sizes = (np.bincount(unit, one).astype(np.float64) for one in (numbers, np.ones(len(unit))))
    means = cluster_means(sums, sizes, draws(len(sums), resamples, seed))
    found = interval_of(numbers.mean(), means, n=len(numbers), clusters=len(sums))
    found = replace(found, p_flip=sign_flip_p(sums, resamples=resamples, seed=seed))
    if method not in ("auto", "t", "percentile"):
        raise BadInput(f"the interval method must be 'auto', 't' or 'percentile', got {method!r}")
    if len(sums) < 2 or np.ptp(numbers) <= 1e-12:
        why = "one patient has no interval" if len(sums) < 2 else "every value is equal, so there is no interval"
        return replace(found, low=np.nan, high=np.nan, p_below=np.nan, reason=why)
    if method == "t" or (method == "auto" and len(sums) < MANY):
        _, low, high = mean_low(numbers, unit, level=0.975)
        found = replace(found, low=low, high=high, method="t")
    return replace(found, low=max(found.low, -largest), high=min(found.high, largest))


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
    """Random signs, (draw, unit), from another stream than the bootstrap."""
    return np.random.default_rng([seed, 1]).choice([-1.0, 1.0], size=(resamples, n))


def paired_interval(first: ArrayLike, second: ArrayLike, **options: Any) -> Interval:
    """Interval of mean(first - second) over the same cases (H1); options as in :func:`mean_interval`.

    Differences of values between 0 and 1 (HA, Dice) lie between -1 and 1, and so does their interval.
    """
    left, right = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if left.shape != right.shape:
        raise BadInput(f"paired values must be of the same cases, got {left.shape} and {right.shape}; join by case")
    return mean_interval(left - right, largest=_largest(left, right), **options)


def _largest(*values: Floats) -> float:
    """1 if all values lie between 0 and 1, else infinity."""
    return 1.0 if all((one >= 0).all() and (one <= 1).all() for one in values) else np.inf


_EXACT_UP_TO = 25  # nonzero differences; beyond it, or with ties, the normal approximation with tie correction


def hurt_share(change: Floats, clusters: NDArray[np.int64], limit: float) -> tuple[int, float]:
    """Patients with a case that loses more than ``limit``, and the exact upper 95 % bound of their share.

    >>> hurt_share(np.array([0.1, -0.2, 0.0]), np.array([0, 0, 1]), 0.01)[0]
    1
    """
    units = int(clusters.max()) + 1 if len(clusters) else 0
    hurt = len(np.unique(clusters[change < -limit]))
    return hurt, clopper_pearson_upper(hurt, units, 0.95) if units else float("nan")


def gain_fields(change: Floats, clusters: NDArray[np.int64], **options: Any) -> dict[str, Any]:
    """Summarize the changes of the metric: mean with interval, cases helped and hurt, patients hurt by a point."""
    gain = mean_interval(change, clusters=clusters, largest=_largest(np.abs(change)), **options)
    hurt, bound = hurt_share(change, clusters, POINT)
    return {
        "gain": gain.estimate,
        **{name: getattr(gain, name) for name in ("low", "high", "clusters", "shown")},
        "helped": int((change > 0).sum()),
        "hurt": int((change < 0).sum()),
        "hurt_by_a_point": int((change < -POINT).sum()),
        "hurt_patients": hurt,
        "hurt_bound": bound,
        "worst": float(change.min()) if len(change) else float("nan"),
    }


def wins(method: ArrayLike, reference: ArrayLike, *, lower_is_better: bool = True) -> tuple[int, int, int]:
    """Strict wins, exact ties and losses of a method (H3).

    >>> wins([0.1, 0.2, 0.3], [0.2, 0.2, 0.1])
    (1, 1, 1)
    """
    difference = np.asarray(method, float) - np.asarray(reference, float)
    signed = difference if lower_is_better else -difference
    return int((signed < 0).sum()), int((signed == 0).sum()), int((signed > 0).sum())


def wilcoxon(method: ArrayLike, reference: ArrayLike) -> tuple[float, str]:
    """Two-sided p of Wilcoxon's signed-rank test, zeros dropped, and how it was computed (H4).

    Differences are rounded to 12 decimals so that float noise makes no ties. NaN and "none" if all are zero.
    """
    difference = np.round(np.asarray(method, float) - np.asarray(reference, float), 12)
    nonzero = difference[difference != 0]
    if not len(nonzero):
        return float("nan"), "none"
    tied = len(np.unique(np.abs(nonzero))) < len(nonzero)
    how = "exact" if len(nonzero) <= _EXACT_UP_TO and not tied else "asymptotic"
    found = stats.wilcoxon(nonzero, method="exact" if how == "exact" else "approx", correction=False)
    return float(found.pvalue), how
