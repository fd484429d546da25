"""How many labelled cases a certificate needs, and what the ones at hand can buy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from casewise.judge.certificates.evidence import ACCEPT, check_level
from casewise.judge.certificates.risk_control import betting, conformal_cases, conformal_floor

ALPHAS = (0.05, 0.10, 0.15, 0.20, 0.30)


@dataclass(frozen=True)
class Plan:
    """What is needed for (alpha, delta), and what n cases buy."""

    alpha: float
    delta: float
    crc_cases: int  # before CRC certifies anything
    ltt_cases: int  # before learn-then-test certifies anything, with no loss observed at all
    cases: int | None = None
    crc_alpha: float | None = None  # smallest alpha that CRC can promise with ``cases``
    ltt_alpha: float | None = None  # smallest alpha that LTT can promise with ``cases`` and no loss observed
    crc_budget: float | None = None  # summed loss of the kept cases that still certifies alpha; None if infeasible
    ltt_budget: int | None = None  # harmed cases among ``cases`` that still certify alpha; None if infeasible


def plan(alpha: float, delta: float = 0.1, cases: int | None = None) -> Plan:
    """Sample sizes for CRC (in expectation) and LTT (with probability 1 - delta), and the reach of ``cases``."""
    needed = Plan(alpha, delta, conformal_cases(alpha), ltt_cases(alpha, delta))
    if cases is None:
        return needed
    return Plan(
        alpha, delta, needed.crc_cases, needed.ltt_cases, cases,
        crc_alpha=conformal_floor(cases), ltt_alpha=ltt_alpha(cases, delta),
        crc_budget=crc_budget(cases, alpha), ltt_budget=ltt_budget(cases, alpha, delta),
    )  # fmt: skip


def ltt_cases(alpha: float, delta: float) -> int:
    """Smallest n with (1 - alpha)^n <= delta: even without any observed loss, fewer certify nothing.

    >>> [ltt_cases(alpha, 0.10) for alpha in ALPHAS], [ltt_cases(alpha, 0.05) for alpha in ALPHAS]
    ([45, 22, 15, 11, 7], [59, 29, 19, 14, 9])
    """
    return max(1, math.ceil(math.log(check_level("delta", delta)) / math.log(1 - check_level("alpha", alpha)) - 1e-9))


def ltt_alpha(cases: int, delta: float) -> float:
    """The smallest alpha that n cases without any loss support: 1 - delta^(1/n).

    >>> [round(ltt_alpha(n, 0.10), 3) for n in (10, 20, 23, 32)]
    [0.206, 0.109, 0.095, 0.069]
    """
    return 1.0 - math.pow(check_level("delta", delta), 1.0 / cases)


def betting_cases(alpha: float, delta: float) -> int:
    """Smallest n at which n zero losses certify alpha by betting: a little more than :func:`ltt_cases`."""
    n = ltt_cases(alpha, delta)
    while betting(np.zeros(n), alpha, delta=delta) > delta + ACCEPT:
        n += 1
    return n


def betting_alpha(cases: int, delta: float) -> float:
    """The smallest alpha that n zero losses certify by betting, to four digits."""
    grid = np.arange(ltt_alpha(cases, delta), 1.0, 1e-4)
    return float(next((a for a in grid if betting(np.zeros(cases), a, delta=delta) <= delta + ACCEPT), 1.0))


def crc_budget(cases: int, alpha: float) -> float | None:
    """Summed loss of the kept calibration cases that CRC still accepts: alpha (n + 1) - 1; None if infeasible."""
    budget = alpha * (cases + 1) - 1.0
    return max(budget, 0.0) if budget >= -ACCEPT * (cases + 1) else None


def ltt_budget(cases: int, alpha: float, delta: float) -> int | None:
    """Harmed cases among n that the exact binomial test still accepts; None if even zero are too many."""
    passes = np.flatnonzero(stats.binom.cdf(np.arange(cases + 1), cases, alpha) <= delta + ACCEPT)
    return int(passes[-1]) if passes.size else None
