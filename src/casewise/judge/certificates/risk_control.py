r"""The two ways to a bound: learn-then-test with high probability, conformal risk control in expectation.

Learn-then-test: certify any configuration, monotone or not, with probability 1 - delta.

Every configuration is a null hypothesis "its risk exceeds alpha"; those that are rejected while the family-wise error
stays below delta are safe together, so the best of them by any utility may be deployed. p-values come from n
independent losses in [0, 1]. Central-limit p-values are missing on purpose: with n <= 30 they promise what they do not
keep.

Conformal risk control: a bound in expectation on the loss of the next unit (Angelopoulos et al., ICLR 2024).

Infeasible is None, never an end point of the grid: "nothing is safe" and "everything is safe" must not look alike.
Losses that are not monotone pay for choosing on a finite grid (inflated, experimental):
:math:`E \max_j (R_j - \hat R_j) \le \sqrt{\ln(m + 1) / (2n)} = q` over m settings and "nothing", so any choice with
:math:`\hat R \le \alpha - q` has expected risk at most alpha. With n = 20 and m = 10 the price is 0.24.
The reliability diagram sets promised alpha against the risk that was found; infeasible alphas are left out.

Before all that, :func:`plan` says how many labelled cases either way needs, and what the ones at hand can buy.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from casewise.core.errors import BadInput
from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.certificates.evidence import ACCEPT, Floats, LossTable, check_level, check_losses

Indices = NDArray[np.intp]
P_VALUES = ("hoeffding-bentkus", "betting", "binomial")


def p_values(losses: ArrayLike, alpha: float, *, kind: str, delta: float = 0.1, orders: int = 1) -> Floats:
    """p-value of each column of (unit, configuration) losses; 'binomial' refuses losses other than 0 and 1."""
    table = check_losses(losses)
    if kind == "betting":
        return betting(table, alpha, delta=delta, orders=orders)
    if kind == "hoeffding-bentkus":
        return hoeffding_bentkus(table.mean(axis=0), len(table), alpha)
    if kind != "binomial":
        raise BadInput(f"a p-value is one of {', '.join(P_VALUES)}, got {kind!r}")
    if not np.isin(table, (0.0, 1.0)).all():
        raise BadInput("the binomial p-value needs losses of 0 or 1; use 'hoeffding-bentkus' or 'betting'")
    return exact_binomial(table.mean(axis=0), len(table), alpha)


def joint_p_values(each: Sequence[ArrayLike]) -> Floats:
    """Several risks at once (T8): a configuration is unsafe if any risk is, so its p-value is the largest."""
    return np.asarray(np.max(np.stack([np.asarray(p, dtype=float) for p in each]), axis=0))


def fixed_sequence(p: ArrayLike, order: ArrayLike, delta: float) -> Indices:
    """Walk the order and stop at the first p > delta; what was passed is certified. No price for multiplicity.

    The order must not come from the labels that are tested: by kept share it does not.
    """
    walk = np.asarray(order, dtype=np.intp)
    fails = np.flatnonzero(np.asarray(p, dtype=float)[walk] > check_level("delta", delta) + ACCEPT)
    return walk[: fails[0]] if fails.size else walk


def by_kept_share(kept: ArrayLike) -> Indices:
    """The label-free order: what keeps least comes first; ties stay in place."""
    return np.argsort(np.asarray(kept, dtype=float), kind="stable")


def holm(p: ArrayLike, delta: float) -> Indices:
    """Holm's step-down procedure for configurations without an order."""
    values = np.asarray(p, dtype=float)
    walk = np.argsort(values, kind="stable")
    limits = check_level("delta", delta) / (len(values) - np.arange(len(values)))
    fails = np.flatnonzero(values[walk] > limits + ACCEPT)
    return np.sort(walk[: fails[0]] if fails.size else walk)


def pareto_order(risks: ArrayLike, utility: ArrayLike, alphas: ArrayLike) -> Indices:
    """Configurations on the Pareto front of (risks low, utility high), safest first (Laufer-Goldshtein et al., 2023).

    ``risks`` is (risk, configuration), measured on the *learning* half; the sequence is then tested on the other half.
    Safest first means by the largest excess of a risk over its alpha.
    """
    r, gain = np.atleast_2d(np.asarray(risks, dtype=float)), np.asarray(utility, dtype=float)
    goals = np.vstack([r, -gain])
    weakly = (goals[:, :, None] <= goals[:, None, :]).all(axis=0)  # (a, b): a is nowhere worse than b
    dominated = (weakly & ~weakly.T).any(axis=0)
    front = np.flatnonzero(~dominated)
    excess = (r[:, front] - np.asarray(alphas, dtype=float).reshape(-1, 1)).max(axis=0)
    return front[np.lexsort((gain[front], excess))]


def best_certified(certified: Indices, utility: ArrayLike) -> int | None:
    """The certified configuration of greatest utility, the first in case of a tie; None if nothing is certified."""
    if not len(certified):
        return None
    ordered = np.sort(certified)
    return int(ordered[np.argmax(np.asarray(utility, dtype=float)[ordered])])


_CEIL_GUARD = 1e-9  # n times a mean of counts is an integer up to rounding; do not let 3.0000000001 become 4


def hoeffding_bentkus(risk: ArrayLike, n: int, alpha: float) -> Floats:
    r"""The Hoeffding-Bentkus p-value.

    .. math:: p = \min( e^{-n\,KL(\min(\hat R, \alpha) \| \alpha)},\
              e \cdot P[Bin(n, \alpha) \le \lceil n \hat R \rceil] )

    At :math:`\hat R = 0` the first term is :math:`(1 - \alpha)^n`, not NaN.
    """
    r = np.asarray(risk, dtype=float)
    hoeffding = np.exp(-n * _divergence(np.minimum(r, alpha), check_level("alpha", alpha)))
    bentkus = np.e * special.bdtr(np.ceil(n * r - _CEIL_GUARD), n, alpha)
    return np.asarray(np.minimum(1.0, np.minimum(hoeffding, bentkus)))


def exact_binomial(risk: ArrayLike, n: int, alpha: float) -> Floats:
    r"""For losses that are 0 or 1: :math:`p = P[Bin(n, \alpha) \le n \hat R]`, no factor e."""
    hits = np.rint(n * np.asarray(risk, dtype=float))
    return np.asarray(special.bdtr(hits, n, check_level("alpha", alpha)))


def betting_process(losses: ArrayLike, alpha: float, delta: float) -> Floats:
    r"""Wealth :math:`K_t = \prod_s (1 - \nu_s (L_s - \alpha))` after each loss (Waudby-Smith and Ramdas, one-sided).

    :math:`\nu_s = \min(\sqrt{2 \ln(1/\delta) / (n \hat\sigma^2_{s-1})},\ 0.99/(1-\alpha))` with priors 1/2 and 1/4.
    Losses run along the first axis, in an order that was fixed in advance. Only low losses earn: all-harmful data
    end near 0, where a two-sided martingale would end rich and certify them.
    """
    table = check_losses(losses)
    n = len(table)
    growth, scale = 2.0 * np.log(1.0 / check_level("delta", delta)) / n, 0.99 / (1.0 - check_level("alpha", alpha))
    wealth, total = np.ones(table.shape[1:]), np.full(table.shape[1:], 0.5)
    spread = np.full(table.shape[1:], 0.25)
    path = np.empty_like(table)
    for t, loss in enumerate(table):
        stake = np.minimum(np.sqrt(growth / (spread / (t + 1))), scale)
        wealth = wealth * (1.0 - stake * (loss - alpha))
        total = total + loss
        spread = spread + (loss - total / (t + 2)) ** 2
        path[t] = wealth
    return path


def betting(losses: ArrayLike, alpha: float, *, delta: float = 0.1, orders: int = 1) -> Floats:
    r"""Betting p-value of each column: :math:`1/\max_t K_t` for the given order, by Ville's inequality.

    With ``orders`` > 1 the luck of the order is averaged out over fixed permutations: p = 1/mean of the final wealths,
    a mean of e-values, by Markov's inequality. A maximum over t of that mean is *not* covered, because the orders
    share no filtration.
    """
    table = check_losses(losses)
    if orders == 1:
        return _inverse(betting_process(table, alpha, delta).max(axis=0))
    shuffled = np.stack([table[row] for row in _orders(len(table), orders)], axis=1)  # (unit, order, column)
    return _inverse(betting_process(shuffled, alpha, delta)[-1].mean(axis=0))


def clopper_pearson_upper(hits: int, n: int, confidence: float = 0.9) -> float:
    """Exact upper bound of a share from hits in n.

    >>> round(clopper_pearson_upper(4, 20), 3)
    0.361
    """
    return 1.0 if hits >= n else float(special.betaincinv(hits + 1, n - hits, confidence))


def _divergence(r: Floats, alpha: float) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        low = np.where(r > 0, r * np.log(r / alpha), 0.0)
        high = np.where(r < 1, (1 - r) * np.log((1 - r) / (1 - alpha)), 0.0)
    return np.asarray(low + high)


def _orders(n: int, orders: int) -> list[NDArray[np.intp]]:
    shuffle = np.random.default_rng(RESAMPLING_SEED)
    return [np.arange(n), *(shuffle.permutation(n) for _ in range(orders - 1))]


def _inverse(wealth: Floats) -> Floats:
    return np.asarray(1.0 / np.maximum(wealth, 1.0))


def conformal_bounds(table: LossTable) -> Floats:
    r"""Expected loss of a new unit at most, per setting: :math:`(n \hat R + 1)/(n + 1)` (L5)."""
    n = table.units
    return np.asarray((table.losses.sum(axis=0) + 1.0) / (n + 1))


def conformal_setting(table: LossTable, alpha: float) -> int | None:
    r"""Column of the most permissive setting with :math:`(n \hat R + 1)/(n + 1) \le \alpha`; None if there is none.

    Losses must not fall from column to column, else the theorem does not apply: make them monotone per unit
    (:func:`~casewise.judge.certificates.certify_gate.envelope`) or use learn-then-test.
    """
    check_level("alpha", alpha)
    if not table.is_monotone:
        raise BadInput("losses must not fall as settings keep more; take the envelope per case or use method 'ltt'")
    safe = np.flatnonzero(conformal_bounds(table) <= alpha + ACCEPT)
    return int(safe[-1]) if safe.size else None


def conformal_floor(n: int) -> float:
    """The smallest alpha that n units can certify: 1/(n + 1) (L6)."""
    return 1.0 / (n + 1)


def conformal_cases(alpha: float) -> int:
    """Units needed before anything can be certified: ceil(1/alpha - 1).

    >>> [conformal_cases(alpha) for alpha in (0.05, 0.10, 0.15, 0.20, 0.30)]
    [19, 9, 6, 4, 3]
    """
    return max(1, math.ceil(1.0 / check_level("alpha", alpha) - 1.0 - 1e-9))


def left_out_risk(table: LossTable, alpha: float, *, paid: LossTable | None = None) -> float | None:
    """Mean loss of each unit under the setting that the others certify: an honest look at the promise, n - 1 at a time.

    The setting is chosen by ``table`` and the loss read from ``paid`` (the same settings; by default ``table`` itself).
    None where n - 1 units are too few.
    """
    n, read = table.units, (paid or table).losses
    if n < 2 or conformal_floor(n - 1) > alpha + ACCEPT:
        return None
    totals = table.losses.sum(axis=0)
    safe = (totals[None, :] - table.losses + 1.0) / n <= alpha + ACCEPT
    last = safe.shape[1] - 1 - np.argmax(safe[:, ::-1], axis=1)
    return float(np.where(safe.any(axis=1), read[np.arange(n), last], 0.0).mean())


def inflation(units: int, settings: int) -> float:
    """The price of choosing among m settings, or none of them, with n units: sqrt(ln(m + 1) / 2n).

    >>> round(inflation(20, 10), 2)
    0.24
    """
    return float(np.sqrt(np.log(settings + 1) / (2 * units)))


def inflated_bounds(table: LossTable) -> Floats:
    """Expected risk at most, per setting."""
    return np.asarray(table.risks + inflation(table.units, len(table.settings)))


def inflated_setting(table: LossTable, alpha: float) -> int | None:
    """The setting that keeps most among those whose inflated risk is at most alpha; None if there is none."""
    safe = np.flatnonzero(inflated_bounds(table) <= check_level("alpha", alpha) + ACCEPT)
    return int(safe[np.argmax(table.kept[safe])]) if safe.size else None


def stability(table: LossTable, alpha: float) -> float | None:
    """Leave-one-out change of a unit's loss when it joins the calibration: *estimated, not guaranteed* (4.4).

    Selects the last setting whose conformal bound is at most alpha, monotone or not.
    """
    chosen = np.flatnonzero(conformal_bounds(table) <= alpha + ACCEPT)
    if not chosen.size or table.units < 2:
        return None
    totals, n = table.losses.sum(axis=0), table.units
    moves = []
    for row in table.losses:
        safe = np.flatnonzero((totals - row + 1.0) / n <= alpha + ACCEPT)
        moves.append(abs(row[chosen[-1]] - (row[safe[-1]] if safe.size else 0.0)))
    return float(np.mean(moves))


ALPHAS = (0.05, 0.10, 0.15, 0.20, 0.25, 0.30)
Points = tuple[dict[str, float], ...]


def left_out_reliability(certified: LossTable, paid: LossTable) -> Points:
    """alpha, certified risk and deployed risk of each unit under the setting that the others certify."""
    points = []
    for alpha in ALPHAS:
        risk = left_out_risk(certified, alpha)
        deployed = left_out_risk(certified, alpha, paid=paid)
        if risk is not None and deployed is not None:
            points.append({"alpha": alpha, "risk": risk, "deployed": deployed})
    return tuple(points)


def tested_reliability(certified: LossTable, fresh: LossTable, paid: LossTable) -> Points:
    """The same on evaluation cases: the setting from calibration, the risks from tables of fresh cases."""
    points = []
    for alpha in ALPHAS:
        at = conformal_setting(certified, alpha)
        if at is None:
            continue
        setting = float(certified.settings[at])
        points.append({"alpha": alpha, "risk": risk_at(fresh, setting), "deployed": risk_at(paid, setting)})
    return tuple(points)


def risk_at(table: LossTable, setting: float) -> float:
    """Empirical risk of a table's units at any setting, between its jump points too.

    Rollback cuts rise along the columns: {u < c} is that of the smallest jump point >= c. Gate thresholds fall along
    them: {s > t} is that of the largest jump point <= t.
    """
    rising = table.settings[-1] == np.inf
    column = np.flatnonzero(table.settings >= setting)[0] if rising else np.flatnonzero(table.settings <= setting)[0]
    return float(table.risks[column])


PLANNED = (0.05, 0.10, 0.15, 0.20, 0.30)


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

    >>> [ltt_cases(alpha, 0.10) for alpha in PLANNED], [ltt_cases(alpha, 0.05) for alpha in PLANNED]
    ([45, 22, 15, 11, 7], [59, 29, 19, 14, 9])
    """
    return max(1, math.ceil(math.log(check_level("delta", delta)) / math.log1p(-check_level("alpha", alpha)) - 1e-9))


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
    # The distribution rises with the count, so a search by halves finds the last one that passes, whatever n is.
    passing = bisect_right(range(cases + 1), delta + ACCEPT, key=lambda harmed: stats.binom.cdf(harmed, cases, alpha))
    return passing - 1 if passing else None
