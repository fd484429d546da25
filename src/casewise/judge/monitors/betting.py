"""Wealth against "the mean loss is at most m": the bets that the audit, reference and proxy alarms share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from casewise.core.errors import BadInput
from casewise.judge.certificates.table import Floats

_TRUNCATION = 0.5  # c of aGRAPA: never stake more than c/m, so wealth never reaches zero


def agrapa_stake(past: Sequence[float], limit: float) -> float:
    r"""aGRAPA: :math:`(\hat\mu - m) / (\hat\sigma^2 + (\hat\mu - m)^2)` clipped to [0, c/m], from past losses only.

    Priors are one half and one quarter, each worth one observation.
    """
    losses = np.asarray(past, dtype=float)
    mean = (0.5 + losses.sum()) / (len(losses) + 1)
    spread = (0.25 + ((losses - mean) ** 2).sum()) / (len(losses) + 1)
    gap = mean - limit
    return float(min(max(gap / (spread + gap * gap), 0.0), _TRUNCATION / limit))


def log_wealth(losses: Sequence[float], limit: float, delta: float) -> Floats:
    r"""Log wealth against "mean at most ``limit``" after each loss, with empirical-Bernstein mixture stakes.

    :math:`\lambda_t = \sqrt{2 \ln(1/\delta) / (\hat\sigma^2_{t-1} t \ln(1 + t))}`, truncated at c/m. Before
    truncation stakes do not depend on the limit, so wealth falls as the limit grows and :func:`lower_bound` can bisect.
    """
    x = np.asarray(losses, dtype=float)
    t = np.arange(1, len(x) + 1)
    mean = (0.5 + np.cumsum(x)) / (t + 1)
    spread = (0.25 + np.cumsum((x - mean) ** 2)) / (t + 1)
    before = np.concatenate([[0.25], spread[:-1]])
    stakes = np.sqrt(2 * np.log(1 / delta) / (before * t * np.log(1 + t)))
    return np.asarray(np.cumsum(np.log1p(np.minimum(stakes, _TRUNCATION / max(limit, 1e-12)) * (x - limit))))


def exceeds(losses: Sequence[float], limit: float, delta: float) -> bool:
    """Whether the wealth against "mean at most ``limit``" has ever reached 1/delta: the lower bound is above it."""
    return bool(len(losses)) and limit < 1 and bool(log_wealth(losses, limit, delta).max() >= np.log(1.0 / delta))


def lower_bound(losses: Sequence[float], delta: float) -> float:
    """Time-uniform lower bound of the mean: the largest limit that the wealth has ever ruled out; 0 at the start."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if exceeds(losses, middle, delta) else (low, middle)
    return low


def check_loss(loss: float) -> float:
    """Refuse a monitored loss outside [0, 1]."""
    if not 0 <= loss <= 1:
        raise BadInput(f"a monitored loss lies in [0, 1], got {loss}")
    return float(loss)
