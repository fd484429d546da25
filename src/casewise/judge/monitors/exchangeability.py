r"""Two alarms without labels: is a number of the stream distributed as in the calibration pool?

A patient (or sequence) counts once, by the first case that is seen of it, in the pool and in the stream. Cases of one
patient resemble each other, and bets on each of them raise alarms on healthy streams.

* :class:`Exchangeability` bets for as long as the stream runs. Each coordinate gets a conformal p-value against
  everything seen before it, pool and stream,

  .. math:: p_t = \frac{\#\{i : u_i > u_t\} + U (\#\{i : u_i = u_t\} + 1)}{n + t}, \qquad i < n + t,

  uniform and independent while all are exchangeable, and wealth is bet against uniformity in both directions. It ever
  reaches :math:`1/\delta` with probability at most delta; then the calibration no longer applies and M0 is deployed.
  The pool must grow. P-values against a *fixed* pool depend on each other, and the product of bets raises an alarm on
  half of all healthy streams (docs/explanation/certificates.md has the simulation). The cost: a shift that exists from
  the first case on soon becomes part of the pool and may be missed.
* :class:`GoLive` tests for such a shift once: the first m patients against the calibration pool, by a permutation test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from casewise.core.errors import BadInput
from casewise.core.records import Policy
from casewise.core.seeds import RESAMPLING_SEED, seed_of
from casewise.core.text import UNIT
from casewise.judge.certificates.evidence import Floats, check_level

_POWERS = np.arange(1, 10) / 10  # bets e p^(e-1): the smaller e, the more they like small p
SUSPENDED = "the calibration no longer applies: new cases differ from it. Every case gets M0 until you recalibrate."
AUDITED = "the promise no longer holds: audited cases show more harm. Every case gets M0 until you recalibrate."
_SHUFFLES = 4999


class Alarm:
    """A test that raises an alarm once; it stays raised."""

    alarm_at: int | None  # patients seen when the alarm was raised

    @property
    def alarm(self) -> bool:
        """True once the alarm was raised."""
        return self.alarm_at is not None


@dataclass(frozen=True)
class Exchangeability(Alarm):
    """Alarm when the calibration coordinate drifts; suspends the policy."""

    calibration: tuple[float, ...]
    delta: float = 0.05
    seed: int = 0  # seed of the tie-breaking U, together with the case id
    stream: tuple[float, ...] = ()  # in order of arrival
    log_bets: tuple[float, ...] = (0.0,) * (2 * len(_POWERS))
    alarm_at: int | None = None

    def __post_init__(self) -> None:
        check_level("delta", self.delta)
        if not self.calibration or not np.isfinite(self.calibration).all():
            raise BadInput("an exchangeability alarm needs finite calibration coordinates; record and calibrate first")

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
        tie = 1.0 - np.random.default_rng(seed_of(self.seed, case_id)).random()  # in (0, 1]
        return float(((pool > value).sum() + tie * ((pool == value).sum() + 1)) / (len(pool) + 1))

    def seen(self, case_id: str, value: float) -> Exchangeability:
        """Return the monitor after one more case, which joins the pool."""
        if not math.isfinite(value):
            raise BadInput(f"a coordinate must be finite, got {value} for case {case_id}")
        bets = np.array(self.log_bets) + log_gains(np.array(self.p_value(case_id, value)))
        grown = replace(self, stream=(*self.stream, float(value)), log_bets=tuple(bets.tolist()))
        rings = not self.alarm and grown.log_wealth >= math.log(1.0 / self.delta)
        return replace(grown, alarm_at=len(grown.stream)) if rings else grown


@dataclass(frozen=True)
class GoLive(Alarm):
    """Alarm when the first ``first`` patients of a stream differ from the calibration pool; tested once, suspends."""

    calibration: tuple[float, ...]
    first: int = 20
    delta: float = 0.05
    stream: tuple[float, ...] = ()  # values of the first patients only
    p: float | None = None  # known once they are complete
    alarm_at: int | None = None

    def __post_init__(self) -> None:
        check_level("delta", self.delta)
        if len(self.calibration) < 2 or not np.isfinite(self.calibration).all():
            raise BadInput(f"a go-live test needs finite coordinates of at least two calibration {UNIT[1]}")
        if self.first < 2:
            raise BadInput(f"a go-live test needs at least 2 {UNIT[1]}, got first = {self.first}")

    def seen(self, value: float) -> GoLive:
        """Return the test after one more patient; patients after the first ones change nothing."""
        if not math.isfinite(value):
            raise BadInput(f"a coordinate must be finite, got {value}")
        if self.p is not None:
            return self
        stream = (*self.stream, float(value))
        if len(stream) < self.first:
            return replace(self, stream=stream)
        p = two_sample_p(self.calibration, stream)
        return replace(self, stream=stream, p=p, alarm_at=len(stream) if p <= self.delta else None)


def two_sample_p(pool: Sequence[float], stream: Sequence[float], *, shuffles: int = _SHUFFLES) -> float:
    r"""Permutation p-value of the Cramer-von Mises distance between two samples; ties are no problem.

    .. math:: T = \sum_z (F_{pool}(z) - F_{stream}(z))^2 \text{ over all } n + m \text{ values},
              \qquad p = \frac{1 + \#\{T^* \ge T\}}{1 + \text{shuffles}}

    The shuffles are seeded by the pooled values without their order, so the same data give the same p, and other data
    get other shuffles.

    >>> two_sample_p([1, 2, 3, 4, 5, 6, 7, 8], [21, 22, 23, 24, 25]) < 0.01
    True
    """
    values = np.concatenate([np.asarray(pool, dtype=float), np.asarray(stream, dtype=float)])
    order = np.argsort(values, kind="stable")
    last = np.append(np.diff(values[order]) > 0, True)  # the last of each group of equal values
    jumps = np.where(np.arange(len(values)) < len(pool), 1.0 / len(pool), -1.0 / len(stream))
    rng = np.random.default_rng(seed_of(RESAMPLING_SEED, values[order].tobytes().hex()))
    shuffled = rng.permuted(np.tile(jumps, (shuffles, 1)), axis=1)
    weight = np.diff(np.flatnonzero(last), prepend=-1)  # number of values in each group
    found = ((np.cumsum(jumps[order])[last] ** 2) * weight).sum()
    drawn = ((np.cumsum(shuffled, axis=1)[:, last] ** 2) * weight).sum(axis=1)
    return float((1 + (drawn >= found - 1e-9).sum()) / (1 + shuffles))


def log_gains(p: Floats) -> Floats:
    """Return log(e p^(e-1)) of every bet e, along a new last axis: of p, then of 1 - p."""
    sides = np.log(np.stack([p, np.maximum(1.0 - p, 1e-12)], axis=-1))[..., None]
    gains = np.log(_POWERS) + (_POWERS - 1) * sides
    return np.asarray(gains.reshape(*p.shape, -1))


def mean_log_wealth(log_bets: Floats) -> Floats:
    """Log of the mean wealth over the bets, the last axis."""
    top = log_bets.max(axis=-1, keepdims=True)
    return np.asarray(top[..., 0] + np.log(np.exp(log_bets - top).mean(axis=-1)))


def suspended_policy(policy: Policy, reason: str = SUSPENDED) -> Policy:
    """Return the policy that replaces a suspended one: M0 for every case, with the reason in each decision."""
    plain = replace(policy, controller="m0", options={"reason": reason}, groups={}, cleanup="", flag={})
    return replace(plain, name=f"{policy.name}-suspended")
