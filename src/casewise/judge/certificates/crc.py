"""Conformal risk control: a bound in expectation on the loss of the next case (Angelopoulos et al., ICLR 2024).

Infeasible is None, never an end point of the grid: "nothing is safe" and "everything is safe" must not look alike.
"""

from __future__ import annotations

import math

import numpy as np

from casewise.core.errors import BadInput
from casewise.judge.certificates.loss_table import ACCEPT, Floats, LossTable, check_level


def conformal_bounds(table: LossTable) -> Floats:
    r"""Expected loss of a new unit at most, per setting: :math:`(n \hat R + 1)/(n + 1)` (L5)."""
    n = table.units
    return np.asarray((table.losses.sum(axis=0) + 1.0) / (n + 1))


def conformal_setting(table: LossTable, alpha: float) -> int | None:
    r"""Column of the most permissive setting with :math:`(n \hat R + 1)/(n + 1) \le \alpha`; None if there is none.

    Losses must not fall from column to column, else the theorem does not apply: make them monotone per unit
    (:func:`~casewise.judge.certificates.gate_losses.envelope`) or use learn-then-test.
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
