r"""Alarms from labelled audits: is the risk above what was promised, or above what it was at calibration?

Both count patients (or sequences), never cases: one loss per patient, the mean over the patient's audited cases.

* :class:`Audit`: :math:`M_t = \prod_s (1 + \lambda_s (\ell_s - \epsilon))` with stakes from past losses only. While the
  risk is at most :math:`\epsilon`, M is a supermartingale from 1, so it ever reaches :math:`1/\delta` with probability
  at most delta.
* :class:`Reference`: :math:`L_t > U_{ref} + \epsilon_{tol}` with a time-uniform betting lower bound on the stream and a
  betting upper bound on the calibration losses, each at delta/2 (Podkopaev and Ramdas, ICLR 2022).

Wealth against "the mean loss is at most m": the bets that the audit, reference and proxy alarms share.

Proxy alarm: no labels after deployment; a coordinate's exceedances stand in for harm (Schirmer et al., 2025).

With a threshold q on the coordinate u,

.. math:: P(harmed) \ge P(u > q) - P(u > q,\ not\ harmed).

If false positives are not more frequent on the stream than at calibration, then a stream whose exceedance rate lies
above :math:`P_{cal}(u > q\ or\ harmed) + \epsilon` harms more often than calibration did, by more than epsilon.
That assumption cannot be checked without labels, so this is an alarm and never a certificate: where the coordinate does
not rank harm it will be silent, or wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from casewise.core.brief import UNIT
from casewise.core.errors import BadInput, TooFewCases
from casewise.judge.certificates.evidence import Floats, check_level
from casewise.judge.certificates.risk_control import clopper_pearson_upper

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


@dataclass(frozen=True)
class Audit:
    """Alarm when labelled audits contradict "the mean loss is at most ``limit``"."""

    limit: float  # the promised risk (alpha of a certificate)
    delta: float = 0.05
    losses: tuple[float, ...] = ()  # one per patient
    log_wealth: float = 0.0
    alarm_at: int | None = None  # patients seen when the alarm was raised

    def __post_init__(self) -> None:
        check_level("limit", self.limit)
        check_level("delta", self.delta)

    @property
    def alarm(self) -> bool:
        """Whether the alarm was raised; it stays raised."""
        return self.alarm_at is not None

    @property
    def lower(self) -> float:
        """Time-uniform lower bound of the audited risk at confidence 1 - delta."""
        return lower_bound(self.losses, self.delta)

    def seen(self, loss: float) -> Audit:
        """The monitor after one more audited patient."""
        stake = float(agrapa_stakes(self.losses, self.limit)[-1])
        wealth = self.log_wealth + math.log1p(stake * (check_loss(loss) - self.limit))
        losses = (*self.losses, float(loss))
        rings = self.alarm_at is None and wealth >= math.log(1.0 / self.delta)
        return replace(self, losses=losses, log_wealth=wealth, alarm_at=len(losses) if rings else self.alarm_at)


@dataclass(frozen=True)
class Reference:
    """Alarm when the stream's risk is above the calibration risk by more than ``tolerance``."""

    reference: float  # U_ref, an upper bound of the calibration risk at delta/2
    tolerance: float = 0.0
    delta: float = 0.05
    losses: tuple[float, ...] = ()  # one per patient
    alarm_at: int | None = None

    def __post_init__(self) -> None:
        check_level("delta", self.delta)
        if not (0 <= self.reference <= 1 and self.tolerance >= 0):
            raise BadInput(f"need 0 <= reference <= 1 and tolerance >= 0, got {self.reference} and {self.tolerance}")

    @classmethod
    def of(cls, calibration: Sequence[float], *, tolerance: float = 0.0, delta: float = 0.05) -> Reference:
        """A monitor for the risk that these calibration losses show, one loss per patient."""
        return cls(upper_bound(calibration, delta / 2), tolerance, delta)

    @property
    def limit(self) -> float:
        """The risk above which the alarm is raised."""
        return self.reference + self.tolerance

    @property
    def lower(self) -> float:
        """Time-uniform lower bound of the stream's risk at 1 - delta/2."""
        return lower_bound(self.losses, self.delta / 2)

    @property
    def alarm(self) -> bool:
        """Whether the alarm was raised; it stays raised."""
        return self.alarm_at is not None

    def seen(self, loss: float) -> Reference:
        """The monitor after one more audited patient."""
        losses = (*self.losses, check_loss(loss))
        rings = not self.alarm and bool(exceeds(losses, self.limit, self.delta / 2))
        return replace(self, losses=losses, alarm_at=len(losses) if rings else self.alarm_at)


def upper_bound(losses: Sequence[float], delta: float) -> float:
    """Upper bound of the mean of calibration losses: the lower bound of the gains, mirrored."""
    if not len(losses):
        raise BadInput("a reference needs calibration losses, got none")
    return 1.0 - lower_bound([1.0 - check_loss(loss) for loss in losses], delta)


def proxy_threshold(values: Sequence[float], harmed: Sequence[bool]) -> float:
    """The calibration value q whose exceedances u > q disagree least often with harm; the largest in case of a tie."""
    u, h = np.asarray(values, dtype=float), np.asarray(harmed, dtype=bool)
    if not len(u) or len(u) != len(h):
        raise BadInput(f"need one value and one harm flag for each case, got {len(u)} and {len(h)}")
    cuts = np.unique(u)[::-1]
    wrong = ((u[:, None] > cuts[None, :]) != h[:, None]).sum(axis=0)
    return float(cuts[np.argmin(wrong)])


@dataclass(frozen=True)
class Proxy:
    """Alarm when a label-free coordinate exceeds its threshold too often; an indication, not a certificate."""

    threshold: float
    limit: float  # exceedance rate that calibration explains, plus tolerance
    delta: float = 0.05
    exceeded: tuple[int, ...] = ()  # 1 where u > threshold
    alarm_at: int | None = None

    def __post_init__(self) -> None:
        check_level("delta", self.delta)

    @classmethod
    def of(
        cls, values: Sequence[float], harmed: Sequence[bool], *, tolerance: float = 0.0, delta: float = 0.05
    ) -> Proxy:
        """A proxy from labelled patients: every other one chooses the threshold, the rest bound it at delta/2."""
        u, h = np.asarray(values, dtype=float), np.asarray(harmed, dtype=bool)
        if len(u) < 4:
            raise TooFewCases(f"a proxy needs at least 4 labelled {UNIT[1]}, got {len(u)}")
        threshold = proxy_threshold(list(u[::2]), list(h[::2]))
        explained = (u[1::2] > threshold) | h[1::2]
        upper = clopper_pearson_upper(int(explained.sum()), len(explained), 1.0 - delta / 2)
        return cls(threshold, min(upper + tolerance, 1.0), delta)

    @property
    def lower(self) -> float:
        """Time-uniform lower bound of the stream's exceedance rate at 1 - delta/2."""
        return lower_bound(self.exceeded, self.delta / 2)

    @property
    def alarm(self) -> bool:
        """Whether the alarm was raised; it stays raised."""
        return self.alarm_at is not None

    def seen(self, value: float) -> Proxy:
        """The monitor after one more unlabelled patient."""
        if not np.isfinite(value):
            raise BadInput(f"a coordinate must be finite, got {value}")
        exceeded = (*self.exceeded, int(value > self.threshold))
        rings = not self.alarm and bool(exceeds(exceeded, self.limit, self.delta / 2))
        return replace(self, exceeded=exceeded, alarm_at=len(exceeded) if rings else self.alarm_at)
