"""The reliability diagram (L7, L10): promised alpha against the risk that was found; infeasible alphas are left out."""

from __future__ import annotations

import numpy as np

from casewise.judge.certificates.crc import conformal_setting, left_out_risk
from casewise.judge.certificates.loss_table import LossTable

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
