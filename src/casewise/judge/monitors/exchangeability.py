r"""Exchangeability alarm (5.4): do the stream's coordinates still look like the calibration pool? No labels.

Each coordinate gets a conformal p-value against everything seen before it, pool and stream,

.. math:: p_t = \frac{\#\{i : u_i > u_t\} + U (\#\{i : u_i = u_t\} + 1)}{n + t}, \qquad i < n + t,

uniform and independent while all are exchangeable, and wealth is bet against uniformity in both directions. It ever
reaches :math:`1/\delta` with probability at most delta; then cut-points no longer apply and M0 is deployed.

The pool must grow. Against a *fixed* pool the p-values are dependent through the pool's own luck, and the product of
bets alarms on half of all healthy streams (docs/explanation/certificates.md has the simulation).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from casewise.core.errors import BadInput
from casewise.core.records import Policy
from casewise.core.seeds import seed_of
from casewise.judge.certificates.loss_table import Floats, check_level

_POWERS = np.arange(1, 10) / 10  # bets e p^(e-1): the smaller e, the more they like small p
SUSPENDED = "cut-points no longer apply: the stream differs from the calibration cases. Deploying M0; recalibrate."


@dataclass(frozen=True)
class Exchangeability:
    """Alarm when the calibration coordinate drifts; suspends the policy."""

    calibration: tuple[float, ...]
    delta: float = 0.05
    seed: int = 0  # of the tie-breaking U, with the case id
    stream: tuple[float, ...] = ()  # in order of arrival
    log_bets: tuple[float, ...] = (0.0,) * (2 * len(_POWERS))
    alarm_at: int | None = None

    def __post_init__(self) -> None:
        check_level("delta", self.delta)
        if not self.calibration or not np.isfinite(self.calibration).all():
            raise BadInput("an exchangeability alarm needs finite calibration coordinates; record and calibrate first")

    @property
    def alarm(self) -> bool:
        """Whether the policy is suspended; it stays so until recalibration."""
        return self.alarm_at is not None

    @property
    def pool(self) -> tuple[float, ...]:
        """Everything seen so far: calibration, then the stream."""
        return self.calibration + self.stream

    @property
    def log_wealth(self) -> float:
        """Log of the mean wealth of all bets."""
        return float(mean_log_wealth(np.array(self.log_bets)))

    def p_value(self, case_id: str, value: float) -> float:
        """Conformal p-value of a coordinate: small when it is larger than nearly all before it."""
        pool = np.asarray(self.pool)
        luck = 1.0 - np.random.default_rng(seed_of(self.seed, case_id)).random()  # in (0, 1]
        return float(((pool > value).sum() + luck * ((pool == value).sum() + 1)) / (len(pool) + 1))

    def seen(self, case_id: str, value: float) -> Exchangeability:
        """The monitor after one more case; the case joins the pool."""
        if not math.isfinite(value):
            raise BadInput(f"a coordinate must be finite, got {value} for case {case_id}")
        bets = np.array(self.log_bets) + log_gains(np.array(self.p_value(case_id, value)))
        grown = replace(self, stream=(*self.stream, float(value)), log_bets=tuple(bets.tolist()))
        rings = not self.alarm and grown.log_wealth >= math.log(1.0 / self.delta)
        return replace(grown, alarm_at=len(grown.stream)) if rings else grown


def log_gains(p: Floats) -> Floats:
    """What each bet makes of a p-value, along a new last axis: those for small p, then those for large p."""
    sides = np.log(np.stack([p, np.maximum(1.0 - p, 1e-12)], axis=-1))[..., None]
    gains = np.log(_POWERS) + (_POWERS - 1) * sides
    return np.asarray(gains.reshape(*p.shape, -1))


def mean_log_wealth(log_bets: Floats) -> Floats:
    """Log of the mean wealth over the bets, the last axis."""
    top = log_bets.max(axis=-1, keepdims=True)
    return np.asarray(top[..., 0] + np.log(np.exp(log_bets - top).mean(axis=-1)))


def suspended_policy(policy: Policy) -> Policy:
    """What runs while a policy is suspended: M0 for every case, and each decision says why."""
    return replace(policy, name=f"{policy.name}-suspended", controller="m0", options={"reason": SUSPENDED}, groups={})
