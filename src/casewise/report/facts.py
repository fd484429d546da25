"""The numbers that criteria are about, by the keys that declarations use (J10, O6-O10)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

from casewise.archive.store import Archive
from casewise.core.records import State
from casewise.judge.outcomes import outcomes
from casewise.report.material import Material
from casewise.study.association import association
from casewise.study.budget import ladder_shape
from casewise.study.prereg import Fact
from casewise.study.statistics.resample import Interval, clusters_of, interval_of_row, paired_interval
from casewise.study.trajectories import deployed_at, same_cases

TENT = "metric.first_minus_tent"
NEEDS = {TENT: "needs a TENT archive of the same cases (--other TENT=ARCHIVE)"}


def facts(material: Material) -> dict[str, Fact]:
    """Everything that a criterion may ask about the studied archive."""
    tent = tent_outcomes(material, material.evaluation)
    return trajectory_facts(material.outcomes, tent, material) | router_facts(material)


def trajectory_facts(frame: pd.DataFrame, tent: pd.DataFrame | None, material: Material) -> dict[str, Fact]:
    """What the recorded trajectories say without a controller: correlations, the ladder's shape, the first step."""
    shape = ladder_shape(frame).row(group="all")
    found: dict[str, Fact | None] = {
        **{f"rho.{name}": _rho(frame, name, material) for name in ("delta", "regions")},
        "ladder.non_monotone": bool(shape["non_monotone"]),
        "ladder.last_minus_best": float(shape["ha_last"] - shape["ha_best"]),
        "metric.first_minus_source": _first_step(frame, frame, 0, material),
        TENT: None if tent is None else _first_step(frame, tent, 1, material),
    }
    return {key: value for key, value in found.items() if value is not None}


def router_facts(material: Material) -> dict[str, Fact]:
    """What the router did: HA and metric against the full budget, and what chance does at its quota."""
    harm = material.interval(material.ours, material.reference, "ha")
    metric = material.interval(material.ours, material.reference, "metric")
    ha = material.matched.table[material.matched.table["scope"] == "all"].set_index("selector")["ha"]
    found: dict[str, Fact | None] = {
        "ha.router_minus_default": _interval(harm),
        "metric.default_minus_router": _turned(_interval(metric)),
        "share.random": float(material.attribution.row(control="random")["share"]),
        "p.random": float(material.chance.row(scope="all", quantity="ha")["p_draws_corrected"]),
        "ha.oracle_minus_router": _minus_router(ha, "oracle HA"),
        "ha.entropy_minus_router": _minus_router(ha, "entropy"),
    }
    return {key: value for key, value in found.items() if value is not None}


def _minus_router(ha: pd.Series, selector: str) -> float | None:
    return float(ha[selector] - ha["deployed"]) if selector in ha.index else None


def tent_outcomes(material: Material, archive: Archive) -> pd.DataFrame | None:
    """The TENT archive among the others, for V0; None when there is none or the archive is TENT itself."""
    if _is_tent(str(archive.configuration.get("objective", ""))):
        return None
    for name, other in material.extras.others.items():
        if other.path != archive.path and (_is_tent(name) or _is_tent(str(other.configuration.get("objective", "")))):
            return outcomes(other.select(ids=material.evaluation.ids))
    return None


def _is_tent(words: str) -> bool:
    return re.match(r"tent\b", words, re.IGNORECASE) is not None


def _rho(frame: pd.DataFrame, signal: str, material: Material) -> Interval | None:
    """Pooled case-clustered Spearman with HA (I1, I3)."""
    if signal not in frame.columns:
        return None
    options: Mapping[str, Any] = {"resamples": material.resamples, "seed": material.seed}
    found = association(frame, signals=[signal], differences=False, **options).table.iloc[0]
    return interval_of_row(found, estimate="rho", resamples=material.resamples)


def _first_step(frame: pd.DataFrame, other: pd.DataFrame, step: int, material: Material) -> Interval:
    """Metric after the first update minus the metric of a step of another (or the same) archive, by case."""
    left, right = same_cases(deployed_at(frame, State(1)), deployed_at(other, State(step)))
    defined = (left["metric"].notna() & right["metric"].notna()).to_numpy()
    left, right = left[defined], right[defined]
    options: Mapping[str, Any] = {"resamples": material.resamples, "seed": material.seed}
    return paired_interval(left["metric"], right["metric"], clusters=clusters_of(left), **options)


def _interval(row: Mapping[str, Any] | None) -> Interval | None:
    return None if row is None else interval_of_row(row)


def _turned(found: Interval | None) -> Interval | None:
    """The same interval seen from the other side."""
    if found is None:
        return None
    fields = {"estimate": -found.estimate, "low": -found.high, "high": -found.low, "p_below": 1 - found.p_below}
    return Interval(**{**vars(found), **fields})
