r"""Chance at a fixed quota: the mean of a quantity when the buckets are dealt to the cases at random (J4, P1).

With :math:`a_{ij}` what case i gets at place j (places of one bucket are alike) and a uniform permutation :math:`\pi`,
Hoeffding's combinatorial central limit theorem (1951) gives the moments of :math:`T = \sum_i a_{i\pi(i)}` exactly:

.. math:: E\,T = \tfrac{1}{n}\sum_{ij} a_{ij}, \qquad
          \operatorname{Var} T = \tfrac{1}{n-1}\sum_{ij} (a_{ij} - \bar a_{i\cdot} - \bar a_{\cdot j} + \bar a)^2 .
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
Buckets = NDArray[np.int64]


@dataclass(frozen=True)
class ChanceMoments:
    """Exact mean and standard deviation of a cohort mean under random assignment."""

    mean: float
    sd: float
    n: int

    def z(self, observed: float) -> float:
        """Standard deviations from chance; NaN when every assignment gives the same."""
        return (observed - self.mean) / self.sd if self.sd > 0 else float("nan")

    def p_at_most(self, observed: float) -> float:
        """P(chance <= observed) in the normal limit; NaN when every assignment gives the same."""
        return float(stats.norm.cdf(self.z(observed)))


def chance_moments(values: Floats, buckets: Buckets) -> ChanceMoments:
    """Moments of the cohort mean; ``values`` is (case, bucket), ``buckets`` the quota as one bucket number a case.

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
    return ChanceMoments(grand * n / kept, float(np.sqrt(variance)) / kept, kept)


def chance_draws(values: Floats, buckets: Buckets, draws: int, seed: int) -> Floats:
    """Cohort means of random assignments at the quota, (draw,)."""
    rng = np.random.default_rng(seed)
    dealt = rng.permuted(np.tile(buckets, (draws, 1)), axis=1)
    return np.asarray(np.nanmean(np.take_along_axis(values[None], dealt[:, :, None], axis=2)[:, :, 0], axis=1))
