r"""Chance at a fixed quota: the mean of a quantity when the buckets are assigned to the cases at random (J4, P1).

With :math:`a_{ij}` the value of case i at place j (places of one bucket are alike) and a uniform permutation
:math:`\pi`, Hoeffding's combinatorial central limit theorem (1951) gives the moments of :math:`T = \sum_i a_{i\pi(i)}`
exactly:

.. math:: E\,T = \tfrac{1}{n}\sum_{ij} a_{ij}, \qquad
          \operatorname{Var} T = \tfrac{1}{n-1}\sum_{ij} (a_{ij} - \bar a_{i\cdot} - \bar a_{\cdot j} + \bar a)^2 .

Cases of one patient or sequence resemble each other, in the decision of a router and in its cost. If buckets were
assigned to single cases, chance would vary less than a router without any skill: with 12 patients of 8 scans such a
router is better at p <= 0.05 in 28 % of cohorts. So with ``units`` the buckets of one patient go to another patient, in
any order among the scans; if patients have different numbers of scans, the rest goes to the next patient.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from casewise.core.seeds import RESAMPLING_SEED

_DEALS = 4000
Floats = NDArray[np.float64]
Buckets = NDArray[np.int64]


@dataclass(frozen=True)
class ChanceMoments:
    """Mean and standard deviation of a cohort mean under random assignment.

    The mean is exact; so is the deviation if every case is one unit, else it comes from 4,000 random assignments.
    """

    mean: float
    sd: float
    n: int

    def z(self, observed: float) -> float:
        """Standard deviations from chance; NaN when every assignment gives the same."""
        return (observed - self.mean) / self.sd if self.sd > 0 else float("nan")

    def p_normal(self, observed: float) -> float:
        """P(chance <= observed) in the normal limit, an approximation; NaN when every assignment gives the same."""
        return float(stats.norm.cdf(self.z(observed)))


def chance_moments(values: Floats, buckets: Buckets, units: Buckets | None = None) -> ChanceMoments:
    """Moments of the cohort mean; ``values`` is (case, bucket), ``buckets`` the quota as one bucket number per case.

    ``units`` numbers the patient or sequence of each case; without them every case is its own.

    >>> chance_moments(np.array([[0.0, 1.0], [0.0, 0.0]]), np.array([0, 1]))
    ChanceMoments(mean=0.25, sd=0.25, n=2)
    """
    defined = np.asarray(np.isfinite(values).all(axis=1))
    n, kept = len(values), int(defined.sum())
    if not kept:
        return ChanceMoments(float("nan"), float("nan"), 0)
    values = np.where(defined[:, None], values, 0.0)  # an undefined case takes a place but adds nothing
    share = np.bincount(buckets, minlength=values.shape[1]) / n
    by_case, by_bucket = values @ share, values.mean(axis=0)
    grand = float(by_bucket @ share)
    left_over = values - by_case[:, None] - by_bucket[None, :] + grand
    variance = (left_over**2 @ share).sum() * n / max(n - 1, 1)
    sd = float(np.sqrt(variance)) / kept
    if _shared(units) and sd > 0:
        whole = np.where(defined[:, None], values, np.nan)
        sd = float(chance_draws(whole, buckets, _DEALS, RESAMPLING_SEED, units).std())
    return ChanceMoments(grand * n / kept, sd, kept)


def chance_draws(values: Floats, buckets: Buckets, draws: int, seed: int, units: Buckets | None = None) -> Floats:
    """Cohort means of random assignments at the quota, (draw,); with ``units`` whole patients are assigned."""
    rng = np.random.default_rng(seed)
    if units is None or not _shared(units):
        dealt = rng.permuted(np.tile(buckets, (draws, 1)), axis=1)
    else:
        dealt = np.empty((draws, len(buckets)), dtype=buckets.dtype)
        np.put_along_axis(dealt, _by_unit(units, draws, rng), buckets[_by_unit(units, draws, rng)], axis=1)
    return np.asarray(np.nanmean(np.take_along_axis(values[None], dealt[:, :, None], axis=2)[:, :, 0], axis=1))


def _shared(units: Buckets | None) -> bool:
    """True if any unit has more than one case."""
    return units is not None and len(np.unique(units)) < len(units)


def _by_unit(units: Buckets, draws: int, rng: np.random.Generator) -> Buckets:
    """Cases in a random order in which those of one unit are adjacent, (draw, place)."""
    _, number = np.unique(units, return_inverse=True)
    places = rng.permuted(np.tile(np.arange(number.max() + 1), (draws, 1)), axis=1)
    return np.asarray(np.argsort(places[:, number] + rng.random((draws, len(units))), axis=1))
