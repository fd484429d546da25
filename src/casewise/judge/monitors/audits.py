r"""Alarms from labelled audits: is the risk above what was promised, or above what it was at calibration?

Both count patients (or sequences), never cases: one loss per patient, the mean over the patient's audited cases.

* :class:`Audit`: :math:`M_t = \prod_s (1 + \lambda_s (\ell_s - \epsilon))` with stakes from past losses only. While the
  risk is at most :math:`\epsilon`, M is a supermartingale from 1, so it ever reaches :math:`1/\delta` with probability
  at most delta.
* :class:`Reference`: :math:`L_t > U_{ref} + \epsilon_{tol}` with a time-uniform betting lower bound on the stream and a
  betting upper bound on the calibration losses, each at delta/2 (Podkopaev and Ramdas, ICLR 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from casewise.core.errors import BadInput
from casewise.judge.certificates.loss_table import check_level
from casewise.judge.monitors.betting import agrapa_stakes, check_loss, exceeds, lower_bound


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
