r"""Conformal risk control: a bound in expectation on the loss of the next unit (Angelopoulos et al., ICLR 2024).

Infeasible is None, never an end point of the grid: "nothing is safe" and "everything is safe" must not look alike.
Losses that are not monotone pay for choosing on a finite grid (inflated, experimental):
:math:`E \max_j (R_j - \hat R_j) \le \sqrt{\ln(m + 1) / (2n)} = q` over m settings and "nothing", so any choice with
:math:`\hat R \le \alpha - q` has expected risk at most alpha. With n = 20 and m = 10 the price is 0.24.
The reliability diagram sets promised alpha against the risk that was found; infeasible alphas are left out.
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
