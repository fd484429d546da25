"""Learn-then-test (C6, C8): certify any configuration, monotone or not, with probability 1 - delta.

Every configuration is a null hypothesis "its risk exceeds alpha"; those that are rejected while the family-wise error
stays below delta are safe together, so the best of them by any utility may be deployed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from casewise.core.errors import BadInput
from casewise.judge.certificates.loss_table import ACCEPT, Floats, check_level, check_losses
from casewise.judge.certificates.pvalues import betting, exact_binomial, hoeffding_bentkus

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
    """Several risks at once (C8): a configuration is unsafe if any risk is, so its p-value is the largest."""
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
