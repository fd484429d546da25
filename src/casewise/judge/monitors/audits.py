r"""Alarm from labelled audits: is the risk above the promise?

One loss per patient (or sequence) counts: the mean over the patient's audited cases. With stakes from past losses,

.. math:: M_t = \prod_s (1 + \lambda_s (\ell_s - \epsilon))

is a supermartingale from 1 while the risk is at most :math:`\epsilon`. It ever reaches :math:`1/\delta` with
probability at most delta.

A certificate by learn-then-test bounds the risk of the very policy that it was issued for, so audits are held against
its alpha. A certificate by conformal risk control bounds an average over calibration sets: the risk of one certified
policy may be above alpha. :func:`audit_of` adds the uncertainty of n patients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from casewise.core.errors import BadInput, Refused
from casewise.judge.certificates.certificate import Certificate, check_feasible
from casewise.judge.certificates.evidence import Floats, check_level
from casewise.judge.certificates.risk_control import crc_budget, loss_sum_bound
from casewise.judge.monitors.exchangeability import Alarm

_TRUNCATION = 0.5  # c of aGRAPA: a stake is at most c/m, so wealth never reaches zero


def agrapa_stakes(losses: ArrayLike, limit: float) -> Floats:
    r"""Stakes of aGRAPA, :math:`(\hat\mu - m) / (\hat\sigma^2 + (\hat\mu - m)^2)` clipped to [0, c/m].

    Args:
        losses: Past losses along the last axis.
        limit: m, the risk that is tested.

    Returns:
        One stake more than there are losses; the last one is for the next loss. The priors of mean and variance are
        1/2 and 1/4, each worth one observation.
    """
    x = np.asarray(losses, dtype=float)
    seen = np.arange(x.shape[-1] + 1)
    total, squares = (
        np.concatenate([np.zeros((*x.shape[:-1], 1)), np.cumsum(one, axis=-1)], axis=-1) for one in (x, x**2)
    )
    mean = (0.5 + total) / (seen + 1)
    spread = (0.25 + squares - 2 * mean * total + seen * mean**2) / (seen + 1)
    gap = mean - limit
    return np.asarray(np.clip(gap / (spread + gap * gap), 0.0, _TRUNCATION / limit))


def check_loss(loss: float) -> float:
    """Refuse a monitored loss outside [0, 1]."""
    if not 0 <= loss <= 1:
        raise BadInput(f"a monitored loss must be in [0, 1], got {loss}")
    return float(loss)


@dataclass(frozen=True)
class Audit(Alarm):
    """Alarm when labelled audits contradict "the mean loss is at most ``limit``"."""

    limit: float
    delta: float = 0.05
    losses: tuple[float, ...] = ()  # one per patient
    log_wealth: float = 0.0
    alarm_at: int | None = None  # patients seen when the alarm was raised

    def __post_init__(self) -> None:
        check_level("limit", self.limit)
        check_level("delta", self.delta)

    def seen(self, loss: float) -> Audit:
        """Return the monitor after one more audited patient."""
        stake = float(agrapa_stakes(self.losses, self.limit)[-1])
        wealth = self.log_wealth + math.log1p(stake * (check_loss(loss) - self.limit))
        losses = (*self.losses, float(loss))
        rings = self.alarm_at is None and wealth >= math.log(1.0 / self.delta)
        return replace(self, losses=losses, log_wealth=wealth, alarm_at=len(losses) if rings else self.alarm_at)


def audit_of(certificate: Certificate, delta: float) -> Audit:
    r"""Return the audit that a certificate supports; a healthy stream raises its alarm with chance at most ``delta``.

    Learn-then-test: the limit is alpha, and the alarm is false with chance at most ``delta`` if the promise holds.

    Conformal risk control certifies the largest cut whose n losses sum to at most :math:`b = \alpha (n + 1) - 1`.
    Learn-then-test at level a walks over the same cuts, and all of them have sums of at most b. So every a that n
    losses with the sum b refute at :math:`\delta / 2` bounds the true risk of the certified cut with chance
    :math:`1 - \delta / 2`. The smallest such a is the limit, and the audit has the other half of ``delta``.

    Args:
        certificate: The certificate of the watched policy.
        delta: Chance of a false alarm.

    Returns:
        The audit, with no patient seen.

    Raises:
        Refused: Nothing is certified, or the certificate is about one batch.
    """
    check_feasible(certificate)
    if certificate.method == "selection":
        raise Refused("this certificate is for the kept cases of one batch, which later audits cannot test")
    if certificate.delta is not None:
        return Audit(certificate.alpha, delta)
    single = certificate.units == certificate.cases or certificate.details.get("within_cluster") == "max"
    budget = crc_budget(certificate.units, certificate.alpha) or 0.0
    binary = single and certificate.loss == "harmed"
    return Audit(loss_sum_bound(budget, certificate.units, 1 - delta / 2, binary=binary), delta / 2)
