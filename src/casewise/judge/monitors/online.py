"""Online quantiles (S12, hybrid mode of E10): cut-points that follow the stream, only together with the alarm on it.

Off by default: cut-points become a function of the stream. Under exchangeability the rank rule rolls back at most a
third of the cases whatever their distribution; without it nothing is promised, hence the alarm.
"""

from __future__ import annotations

import math

import numpy as np

from casewise.core.errors import Refused
from casewise.judge.monitors.exchangeability import SUSPENDED, Exchangeability

WARM_UP = 15  # stream cases before refitted cut-points replace the calibrated ones (E10)


def rank_rollback(monitor: Exchangeability, value: float) -> bool:
    r"""Roll back iff the rank of u in pool + {u} exceeds :math:`\lceil 2(n+1)/3 \rceil`; ties take the lowest rank.

    The chance is at most 1/3 for exchangeable cases, exactly, for any n.
    """
    _check_active(monitor)
    n = len(monitor.pool)
    rank = 1 + sum(other < value for other in monitor.pool)
    return rank > math.ceil(2 * (n + 1) / 3)


def online_cuts(
    monitor: Exchangeability, *, window: int = 100, percentiles: tuple[float, float] = (33.33, 66.67)
) -> tuple[float, float] | None:
    """Cut-points refitted on the last ``window`` coordinates of pool and stream; None in the warm-up (E10)."""
    _check_active(monitor)
    if len(monitor.stream) < WARM_UP:
        return None
    low, high = np.percentile(monitor.pool[-window:], percentiles)
    return float(low), float(high)


def _check_active(monitor: Exchangeability) -> None:
    if monitor.alarm:
        raise Refused(f"alarm after {monitor.alarm_at} cases: {SUSPENDED}")
