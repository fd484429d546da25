"""Cut-points when the condition of a case may be unknown: union, pooled, per-group, robust, inferred (S2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from casewise.core.errors import BadInput
from casewise.core.registry import Registry
from casewise.judge.calibration.cuts import FEWEST, Floats, checked, cut_points

MODES: Registry[str] = Registry(
    "mode",
    {
        "union": "percentiles of all calibration cases together, as on prostate in the paper",
        "pooled": "percentiles of the union in which every group weighs the same",
        "per-group": "each group its own cut-points; the group must be known at deployment",
        "robust": "the smallest cut-points of any group: no group is rolled back less often than with its own",
        "inferred": "the group whose M0 looks nearest; robust where two are about as near",
    },
)
_POSITIONS = 1000


def fitted_cuts(step_one: pd.DataFrame, values: Floats, *, mode: str, convention: str) -> dict[str, Any]:
    """``options`` with cut_low and cut_high, ``groups`` with those of each group, by mode."""
    MODES[mode]
    if mode == "union":
        return {"options": _named(cut_points(values, convention)), "groups": {}}
    groups = _by_group(step_one, values)
    if mode == "pooled":
        return {"options": _named(cut_points(_balanced(groups), convention)), "groups": {}}
    cuts = {name: cut_points(part, convention) for name, part in groups.items()}
    robust = _named((min(low for low, _ in cuts.values()), min(high for _, high in cuts.values())))
    own = {name: _named(pair) for name, pair in cuts.items()}
    if mode == "robust":
        return {"options": robust, "groups": {}}
    return {"options": robust, "groups": own}


def inference(step_zero: pd.DataFrame) -> dict[str, Any]:
    """Centroids of each group over step-0 signals, and the spread that distances are measured in (S2)."""
    names = [
        name
        for name in ("entropy", "msp", "foreground_share", "intensity_mean", "intensity_sd")
        if name in step_zero and step_zero[name].notna().all() and step_zero[name].nunique() > 1
    ]
    if not names:
        raise BadInput(
            "to infer a group, M0 needs a signal that varies (entropy or msp); record with it, or use robust"
        )
    means = step_zero.groupby("group")[names].mean()
    scales = {name: float(step_zero[name].std(ddof=0)) for name in names}
    centroids = {str(group): {name: float(row[name]) for name in names} for group, row in means.iterrows()}
    return {"centroids": centroids, "scales": scales}


def _by_group(step_one: pd.DataFrame, values: Floats) -> dict[str, Floats]:
    if step_one["group"].isna().any():
        raise BadInput("some calibration cases have no group; give groups, or use mode union")
    groups = {str(name): values[step_one["group"].to_numpy() == name] for name in sorted(step_one["group"].unique())}
    for name, part in groups.items():
        checked(part, fewest=FEWEST, what=f"cut-points of group {name}")
    return groups


def _balanced(groups: Mapping[str, Floats]) -> Floats:
    """The union in which every group weighs the same: evenly spaced order statistics of each."""
    if len({len(part) for part in groups.values()}) == 1:
        return np.concatenate(list(groups.values()))
    at = (np.arange(_POSITIONS) + 0.5) / _POSITIONS
    return np.concatenate([np.quantile(part, at, method="inverted_cdf") for part in groups.values()])


def _named(cuts: tuple[float, float]) -> dict[str, float]:
    return {"cut_low": cuts[0], "cut_high": cuts[1]}
