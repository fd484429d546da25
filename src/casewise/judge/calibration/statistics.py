"""z-statistics of the step-1 signals of the calibration cases: population deviation, no labels (C6, F5)."""

from __future__ import annotations

from casewise.core.errors import DegenerateStatistic
from casewise.judge.calibration.cuts import Floats, checked
from casewise.measure.signals.risk import RiskStatistics


def mean_and_sigma(values: Floats, name: str) -> tuple[float, float]:
    """Mean and deviation with ddof 0; no spread is an error, never a silent z = 0 (C6).

    >>> import numpy as np
    >>> mean, sigma = mean_and_sigma(np.array([0.0] * 10 + [1.0] * 6 + [2.0] * 4), "regions")
    >>> round(mean, 2), round(sigma, 3)
    (0.7, 0.781)
    """
    array = checked(values, what="z-statistics")
    mean, sigma = float(array.mean()), float(array.std(ddof=0))
    if not sigma > 0:
        raise DegenerateStatistic(
            f"{name} is {mean:g} on all {len(array)} calibration cases, so it has no z-score; "
            f"calibrate on more varied cases, or choose what needs none (for more regions: a higher --lr, a smaller "
            f"--min-area)"
        )
    return mean, sigma


def statistics(regions: Floats, delta: Floats) -> RiskStatistics:
    """The statistics of the two-term risk r = z(n)/2 + z(delta)/2 (C6)."""
    return RiskStatistics(*mean_and_sigma(regions, "regions"), *mean_and_sigma(delta, "delta"))
