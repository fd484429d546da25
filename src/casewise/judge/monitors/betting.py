"""Wealth against "the mean loss is at most m": the bets that the audit, reference and proxy alarms share."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from casewise.core.errors import BadInput
from casewise.judge.certificates.loss_table import Floats

_TRUNCATION = 0.5  # c of aGRAPA: never stake more than c/m, so wealth never reaches zero


def agrapa_stakes(losses: ArrayLike, limit: float) -> Floats:
    r"""aGRAPA: :math:`(\hat\mu - m) / (\hat\sigma^2 + (\hat\mu - m)^2)` clipped to [0, c/m], from past losses only.

    Losses run along the last axis; the answer is one longer, its last entry being the stake on the loss to come.
    Priors are one half and one quarter, each worth one observation.
    """
    x = np.asarray(losses, dtype=float)
    seen = np.arange(x.shape[-1] + 1)
    total, squares = _before(x), _before(x**2)
    mean = (0.5 + total) / (seen + 1)
    spread = (0.25 + squares - 2 * mean * total + seen * mean**2) / (seen + 1)
    gap = mean - limit
    return np.asarray(np.clip(gap / (spread + gap * gap), 0.0, _TRUNCATION / limit))


def log_wealth(losses: ArrayLike, limit: ArrayLike, delta: float) -> Floats:
    r"""Log wealth against "mean at most ``limit``" after each loss, with empirical-Bernstein mixture stakes.

    :math:`\lambda_t = \sqrt{2 \ln(1/\delta) / (\hat\sigma^2_{t-1} t \ln(1 + t))}`, truncated at c/m. Before
    truncation stakes do not depend on the limit, so wealth falls as the limit grows and :func:`lower_bounds` can
    bisect. Losses run along the last axis; there is one limit, or one for each stream.
    """
    x, m = np.asarray(losses, dtype=float), np.asarray(limit, dtype=float)[..., None]
    t = np.arange(1, x.shape[-1] + 1)
    mean = (0.5 + np.cumsum(x, axis=-1)) / (t + 1)
    spread = (0.25 + np.cumsum((x - mean) ** 2, axis=-1)) / (t + 1)
    before = np.concatenate([np.full((*x.shape[:-1], 1), 0.25), spread[..., :-1]], axis=-1)
    stakes = np.sqrt(2 * np.log(1 / delta) / (before * t * np.log(1 + t)))
    growth = np.log1p(np.minimum(stakes, _TRUNCATION / np.maximum(m, 1e-12)) * (x - m))
    return np.asarray(np.cumsum(growth, axis=-1))


def exceeds(losses: ArrayLike, limit: ArrayLike, delta: float) -> NDArray[np.bool_]:
    """Whether the wealth against "mean at most ``limit``" has ever reached 1/delta: the lower bound is above it."""
    highest = log_wealth(losses, limit, delta).max(axis=-1, initial=-np.inf)
    return np.asarray((highest >= np.log(1.0 / delta)) & (np.asarray(limit) < 1))


def lower_bounds(losses: ArrayLike, delta: float) -> Floats:
    """Time-uniform lower bound of each stream's mean: the largest limit that its wealth has ever ruled out."""
    x = np.asarray(losses, dtype=float)
    low, high = np.zeros(x.shape[:-1]), np.ones(x.shape[:-1])
    for _ in range(50):
        middle = 0.5 * (low + high)
        above = exceeds(x, middle, delta)
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.asarray(low)


def lower_bound(losses: ArrayLike, delta: float) -> float:
    """The lower bound of one stream; 0 at its start."""
    return float(lower_bounds(losses, delta))


def _before(x: Floats) -> Floats:
    """Running sums, beginning with the sum of nothing."""
    return np.concatenate([np.zeros((*x.shape[:-1], 1)), np.cumsum(x, axis=-1)], axis=-1)


def check_loss(loss: float) -> float:
    """Refuse a monitored loss outside [0, 1]."""
    if not 0 <= loss <= 1:
        raise BadInput(f"a monitored loss lies in [0, 1], got {loss}")
    return float(loss)
