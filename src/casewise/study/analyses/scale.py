"""The scale of a coordinate in two cohorts, and the share of cases that a ported cut-point would roll back."""

from __future__ import annotations

import numpy as np
import pandas as pd

from casewise.judge.outcomes import outcomes
from casewise.study.finding import Finding, Section, not_run, show
from casewise.study.study import Study
from casewise.study.trajectories import step_one


def section(study: Study) -> Section:
    """Cut-points on another modality (O13)."""
    if study.extras.away is None:
        reason = "needs an archive of another modality: --other-modality ARCHIVE"
        return not_run("scale", "Another modality", "scale probe", reason)
    cut = min((router.cut_high for router in study.routers.values()), default=None) if study.is_router else None
    found = scale_probe(study.outcomes, outcomes(study.extras.away), coordinate=study.coordinate, cut_high=cut)
    made = show("scale-probe", "The coordinate in both cohorts", found)
    return Section("scale", "Another modality", "", (made,), (), (found,), found.notes)


def scale_probe(
    home: pd.DataFrame, away: pd.DataFrame, *, coordinate: str = "delta", cut_high: float | None = None
) -> Finding:
    """Mean and median of a step-1 coordinate in both cohorts, their ratios, and the share beyond the ported cut.

    Without ``cut_high`` the upper tertile (66.67th percentile) of the home cohort is ported.
    """
    values = {name: step_one(frame, coordinate).dropna() for name, frame in (("home", home), ("away", away))}
    cut = float(np.percentile(values["home"], 66.67)) if cut_high is None else cut_high
    records = []
    for name, found in values.items():
        means = {"mean": float(found.mean()), "median": float(found.median())}
        own = {"mean": float(values["home"].mean()), "median": float(values["home"].median())}
        ratios = {f"ratio_{key}": value / own[key] if own[key] else float("nan") for key, value in means.items()}
        records.append(
            {"cohort": name, "n": len(found), **means, **ratios, "rolled_back": float((found >= cut).mean())}
        )
    share, ratio = records[1]["rolled_back"], records[1]["ratio_mean"]
    note = f"{coordinate} is {ratio:.1f} times as large away; the ported cut {cut:.4g} rolls back {share:.1%} there"
    made = {"coordinate": coordinate, "cut_high": cut}
    return Finding("scale", pd.DataFrame(records), len(values["away"]), "O13", made, (note,))
