r"""Bounds of a risk: learn-then-test with high probability, conformal risk control in expectation.

Learn-then-test certifies any setting with probability 1 - delta. Each setting is a null hypothesis "its risk exceeds
alpha". Settings that are rejected while the family-wise error stays below delta are safe together, so the best of them
may be deployed. p-values come from n independent losses in [0, 1]. There are no p-values by the central limit theorem:
with n <= 30 they do not hold.

Conformal risk control bounds the expected loss of the next unit (Angelopoulos et al., ICLR 2024). An infeasible problem
gives None, never an end point of the grid.

:func:`plan` says how many labelled patients either way needs, and the risks that the given ones can promise.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from casewise.core.errors import BadInput
from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.certificates.evidence import ACCEPT, Floats, LossTable, check_level, check_losses

Indices = NDArray[np.intp]
P_VALUES = ("hoeffding-bentkus", "betting", "binomial")


def p_values(losses: ArrayLike, alpha: float, *, kind: str, delta: float = 0.1, orders: int = 1) -> Floats:
    """Return the p-value of each column of (unit, configuration) losses; 'binomial' needs losses of 0 or 1."""
    table = check_losses(losses)
    if kind == "betting":
        return betting(table, alpha, delta=delta, orders=orders)
    if kind == "hoeffding-bentkus":
        return hoeffding_bentkus(table.mean(axis=0), len(table), alpha)
    if kind != "binomial":
        raise BadInput(f"a p-value must be one of {', '.join(P_VALUES)}, got {kind!r}")
    if not np.isin(table, (0.0, 1.0)).all():
        raise BadInput("the binomial p-value needs losses of 0 or 1; use 'hoeffding-bentkus' or 'betting'")
    return exact_binomial(table.mean(axis=0), len(table), alpha)


def fixed_sequence(p: ArrayLike, order: ArrayLike, delta: float) -> Indices:
    """Walk through the order and stop at the first p > delta; all settings before it are certified.

    No correction for multiplicity is needed if the order does not depend on the tested labels, such as by kept share.
    """
    walk = np.asarray(order, dtype=np.intp)
    fails = np.flatnonzero(np.asarray(p, dtype=float)[walk] > check_level("delta", delta) + ACCEPT)
    return walk[: fails[0]] if fails.size else walk


_CEIL_GUARD = 1e-9  # n times a mean of counts is an integer up to rounding; do not let 3.0000000001 become 4


def hoeffding_bentkus(risk: ArrayLike, n: int, alpha: float) -> Floats:
    r"""The Hoeffding-Bentkus p-value.

    .. math:: p = \min( e^{-n\,KL(\min(\hat R, \alpha) \| \alpha)},\
              e \cdot P[Bin(n, \alpha) \le \lceil n \hat R \rceil] )

    At :math:`\hat R = 0` the first term is :math:`(1 - \alpha)^n`, not NaN.
    """
    r = np.asarray(risk, dtype=float)
    low = np.minimum(r, check_level("alpha", alpha))
    divergence = special.rel_entr(low, alpha) + special.rel_entr(1 - low, 1 - alpha)  # KL of two coins
    hoeffding = np.exp(-n * divergence)
    bentkus = np.e * special.bdtr(np.ceil(n * r - _CEIL_GUARD), n, alpha)
    return np.asarray(np.minimum(1.0, np.minimum(hoeffding, bentkus)))


def exact_binomial(risk: ArrayLike, n: int, alpha: float) -> Floats:
    r"""For losses that are 0 or 1: :math:`p = P[Bin(n, \alpha) \le n \hat R]`, no factor e."""
    hits = np.rint(n * np.asarray(risk, dtype=float))
    return np.asarray(special.bdtr(hits, n, check_level("alpha", alpha)))


def betting_process(losses: ArrayLike, alpha: float, delta: float) -> Floats:
    r"""Wealth :math:`K_t = \prod_s (1 - \nu_s (L_s - \alpha))` after each loss (Waudby-Smith and Ramdas, one-sided).

    :math:`\nu_s = \min(\sqrt{2 \ln(1/\delta) / (n \hat\sigma^2_{s-1})},\ 0.99/(1-\alpha))` with priors 1/2 and 1/4.
    Losses run along the first axis, in an order that was fixed in advance. Only losses below alpha raise the
    wealth; a two-sided martingale would also grow on large losses and certify them.
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

    With ``orders`` > 1 the final wealth is averaged over fixed permutations. A mean of e-values is an e-value, so
    p = 1/mean is valid by Markov's inequality. The maximum over t of that mean would not be valid.
    """
    table = check_losses(losses)
    if orders == 1:
        return _inverse(betting_process(table, alpha, delta).max(axis=0))
    shuffle = np.random.default_rng(RESAMPLING_SEED)
    others = (table[shuffle.permutation(len(table))] for _ in range(orders - 1))
    shuffled = np.stack([table, *others], axis=1)  # (unit, order, column)
    return _inverse(betting_process(shuffled, alpha, delta)[-1].mean(axis=0))


def clopper_pearson_upper(hits: int, n: int, confidence: float = 0.9) -> float:
    """Exact upper bound of a share from hits in n.

    >>> round(clopper_pearson_upper(4, 20), 3)
    0.361
    """
    return 1.0 if hits >= n else float(special.betaincinv(hits + 1, n - hits, confidence))


def share_bound(values: ArrayLike, confidence: float, *, binary: bool) -> float:
    """Upper bound of the mean of independent values in [0, 1], valid at any number of units.

    Args:
        values: One value per unit (patient or sequence), in [0, 1].
        confidence: Chance, over draws of the units, that the bound holds.
        binary: True if each value is 0 or 1 by construction (one case per patient). Then the bound is
            Clopper-Pearson's, else that of Hoeffding and Bentkus. It is not enough that all values happen to be 0 or 1.

    Returns:
        The smallest share that the values refute at this confidence.

    Example:
        >>> round(share_bound(np.zeros(59), 0.95, binary=True), 3)
        0.05
    """
    rows = check_losses(values).ravel()
    return loss_sum_bound(float(rows.sum()), len(rows), confidence, binary=binary)


def loss_sum_bound(total: float, n: int, confidence: float, *, binary: bool) -> float:
    """Upper bound of a mean loss from n independent losses in [0, 1] that sum to at most ``total``."""
    if binary:
        return clopper_pearson_upper(math.floor(total + _CEIL_GUARD), n, confidence)
    low, high = total / n, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        refuted = 0 < middle < 1 and float(hoeffding_bentkus(total / n, n, middle)) <= 1 - confidence
        low, high = (low, middle) if refuted else (middle, high)
    return high


def _inverse(wealth: Floats) -> Floats:
    return np.asarray(1.0 / np.maximum(wealth, 1.0))


def conformal_bounds(table: LossTable) -> Floats:
    r"""Expected loss of a new unit at most, per setting: :math:`(n \hat R + 1)/(n + 1)` (L5)."""
    n = table.units
    return np.asarray((table.losses.sum(axis=0) + 1.0) / (n + 1))


def conformal_setting(table: LossTable, alpha: float) -> int | None:
    r"""Return the column of the most permissive setting with :math:`(n \hat R + 1)/(n + 1) \le \alpha`, or None.

    Losses must not fall from column to column, else the theorem does not apply: make them monotone per unit
    (:func:`~casewise.judge.certificates.certify_gate.envelope`) or use learn-then-test.
    """
    check_level("alpha", alpha)
    if not table.is_monotone:
        raise BadInput("losses must not fall as settings keep more cases; use the envelope or method 'ltt'")
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
    """Return the mean loss of each unit under the setting that the other n - 1 units certify.

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


ALPHAS = (0.05, 0.10, 0.15, 0.20, 0.25, 0.30)
Points = tuple[dict[str, float | None], ...]


def reliability(certified: LossTable, paid: LossTable, fresh: tuple[LossTable, LossTable] | None = None) -> Points:
    """alpha, certified risk and deployed risk, for every alpha that can be certified.

    Each unit is scored under the setting that the others certify; units of ``fresh`` (both tables of evaluation
    cases) under the setting that all of them certify.
    """
    points = []
    for alpha in ALPHAS:
        if fresh is None:
            risks = [left_out_risk(certified, alpha, paid=table) for table in (certified, paid)]
        else:
            at = conformal_setting(certified, alpha)
            risks = [None if at is None else risk_at(table, float(certified.settings[at])) for table in fresh]
        if None not in risks:
            points.append({"alpha": alpha, "risk": risks[0], "deployed": risks[1]})
    return tuple(points)


def risk_at(table: LossTable, setting: float) -> float:
    """Empirical risk of a table's units at any setting, between its jump points too.

    Rollback cuts rise along the columns: {u < c} is that of the smallest jump point >= c. Gate thresholds fall along
    them: {s > t} is that of the largest jump point <= t.
    """
    rising = table.settings[-1] == np.inf
    column = np.flatnonzero(table.settings >= setting)[0] if rising else np.flatnonzero(table.settings <= setting)[0]
    return float(table.risks[column])


def patients_needed(
    alpha: float, *, delta: float | None = None, binary: bool = True, designs: int = 1, halved: bool = False
) -> int:
    """Return the fewest patients with which a promise is possible; plan, certify, calibrate and fit all use this.

    Args:
        alpha: The risk that is promised.
        delta: Chance that the promise fails; None for a promise in expectation (conformal risk control).
        binary: True if a patient loses 0 or 1 by construction (one case each, or the worst case counts). Otherwise
            learn-then-test bets, which needs a little more.
        designs: Designs that are certified together; each gets its share of delta.
        halved: True if one half of the patients fits the designs and the other, not smaller, half tests them.

    Returns:
        The number of patients, if none of them shows any loss.

    Example:
        >>> patients_needed(0.1), patients_needed(0.2, delta=0.1)
        (9, 11)
        >>> patients_needed(0.2, delta=0.1, binary=False, designs=6, halved=True)  # 18 fit six designs, 19 test them
        37
    """
    if delta is None:
        needed = conformal_cases(alpha)
    else:
        needed = (ltt_cases if binary else betting_cases)(alpha, delta / designs)
    return 2 * needed - 1 if halved else needed


TOGETHER = 6
"""Designs that ``certify --policy default`` tests together."""
PLANNED = (0.05, 0.10, 0.15, 0.20, 0.30)


@dataclass(frozen=True)
class SampleSize:
    """The number of cases that (alpha, delta) needs, and the risks that n cases can certify."""

    alpha: float
    delta: float
    crc_cases: int  # cases that CRC needs
    ltt_cases: int  # cases that learn-then-test needs for the loss "harmed", one case per patient and no observed loss
    betting_cases: int  # the same for other losses, or with several cases per patient
    default_cases: int  # the same with a choice among designs: half of the cases fit the designs, half test them
    together_cases: int | None = None  # the same with a choice among several fitted policies
    cases: int | None = None
    crc_alpha: float | None = None  # smallest alpha that CRC can promise with ``cases``
    ltt_alpha: float | None = None  # smallest alpha that LTT can promise with ``cases`` and no loss observed
    crc_budget: float | None = None  # summed loss of the kept cases that still certifies alpha; None if infeasible
    ltt_budget: int | None = None  # harmed cases among ``cases`` that still certify alpha; None if infeasible


def plan(alpha: float, delta: float = 0.1, cases: int | None = None, designs: int = 1) -> SampleSize:
    """Sample sizes for CRC (in expectation) and LTT (with probability 1 - delta), and the reach of ``cases``.

    ``designs``: number of fitted policies to choose among.
    """
    several = patients_needed(alpha, delta=delta, binary=False, designs=designs) if designs > 1 else None
    together = patients_needed(alpha, delta=delta, binary=False, designs=TOGETHER, halved=True)
    harmed, others = (patients_needed(alpha, delta=delta, binary=binary) for binary in (True, False))
    needed = SampleSize(alpha, delta, patients_needed(alpha), harmed, others, together, several)
    if cases is None:
        return needed
    return replace(
        needed, cases=cases, crc_alpha=conformal_floor(cases), ltt_alpha=ltt_alpha(cases, delta),
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
