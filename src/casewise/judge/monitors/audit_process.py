r"""Audit e-process (5.1): a trickle of labelled cases against the promised risk.

:math:`M_t = \prod_s (1 + \lambda_s (\ell_s - \epsilon))` with stakes from past losses only. While the risk is at most
:math:`\epsilon`, M is a supermartingale from 1, so it ever reaches :math:`1/\delta` with probability at most delta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from casewise.judge.certificates.loss_table import check_level
from casewise.judge.monitors.betting import agrapa_stakes, check_loss, lower_bound


@dataclass(frozen=True)
class Audit:
    """Alarm when labelled audits contradict "the mean loss is at most ``limit``"."""

    limit: float  # the promised risk (alpha of a certificate)
    delta: float = 0.05
    losses: tuple[float, ...] = ()
    log_wealth: float = 0.0
    alarm_at: int | None = None  # audits seen when the alarm was raised

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
        """The monitor after one more audited case."""
        stake = float(agrapa_stakes(self.losses, self.limit)[-1])
        wealth = self.log_wealth + math.log1p(stake * (check_loss(loss) - self.limit))
        losses = (*self.losses, float(loss))
        rings = self.alarm_at is None and wealth >= math.log(1.0 / self.delta)
        return replace(self, losses=losses, log_wealth=wealth, alarm_at=len(losses) if rings else self.alarm_at)
