r"""Non-monotone losses in expectation (C7, experimental): CRC on a finite grid, inflated by the price of choosing.

:math:`E \max_j (R_j - \hat R_j) \le \sqrt{\ln m / (2n)} = q`, so any choice with :math:`\hat R \le \alpha - q`
has expected risk at most alpha. With n = 20 and m = 10 the price is 0.24: of use from about n = 100 on.
"""

from __future__ import annotations

import numpy as np

from casewise.judge.certificates.crc import conformal_bounds
from casewise.judge.certificates.loss_table import ACCEPT, Floats, LossTable, check_level


def inflation(units: int, settings: int) -> float:
    """The price of choosing among m settings with n units.

    >>> round(inflation(20, 10), 2)
    0.24
    """
    return float(np.sqrt(np.log(settings) / (2 * units)))


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
