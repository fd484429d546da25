"""Does a cut-point travel? The scale of a coordinate at home and away, and what a ported cut would roll back."""

from __future__ import annotations

import numpy as np
import pandas as pd

from casewise.judge.outcomes import outcomes
from casewise.study.finding import Finding, Section, plain_table
from casewise.study.study import Study
from casewise.study.trajectories import unshrunk


def section(study: Study) -> Section:
    """Would the cut-points mean anything on another modality? (O13)"""
    if study.extras.away is None:
        reason = "needs an archive of another modality; give --away ARCHIVE"
        return Section("scale", "Another modality", missing={"scale probe": reason})
    cut = min((router.cut_high for router in study.routers.values()), default=None) if study.is_router else None
    found = scale_probe(study.outcomes, outcomes(study.extras.away), coordinate=study.coordinate, cut_high=cut)
    made = plain_table("scale-probe", "The coordinate at home and away", found)
    return Section("scale", "Another modality", "", (made,), (), (found,), found.notes)


def scale_probe(
    home: pd.DataFrame, away: pd.DataFrame, *, coordinate: str = "delta", cut_high: float | None = None, step: int = 1
) -> Finding:
    """Mean and median of a step-1 coordinate in both cohorts, their ratios, and the share beyond the ported cut.

    Without ``cut_high`` the home cohort's own upper tertile (66.67th percentile) is ported.
    """
    values = {name: _values(frame, coordinate, step) for name, frame in (("home", home), ("away", away))}
    cut = float(np.percentile(values["home"], 66.67)) if cut_high is None else cut_high
    records = []
    for name, found in values.items():
        records.append(
            {
                "cohort": name,
                "n": len(found),
                "mean": float(found.mean()),
                "median": float(np.median(found)),
                "ratio_mean": _ratio(found.mean(), values["home"].mean()),
                "ratio_median": _ratio(np.median(found), np.median(values["home"])),
                "rolled_back": float((found >= cut).mean()),
            }
        )
    share, ratio = records[1]["rolled_back"], records[1]["ratio_mean"]
    note = f"{coordinate} is {ratio:.1f} times as large away; the ported cut {cut:.4g} rolls back {share:.1%} there"
    made = {"coordinate": coordinate, "cut_high": cut, "step": step}
    return Finding("scale", pd.DataFrame(records), len(values["away"]), "O13", made, (note,))


def _values(frame: pd.DataFrame, coordinate: str, step: int) -> np.ndarray:
    ladder = unshrunk(frame)
    return np.asarray(ladder.loc[ladder["step"] == step, coordinate].dropna(), dtype=np.float64)


def _ratio(top: float, bottom: float) -> float:
    return float(top / bottom) if bottom else float("nan")
