"""The numbers that the paper's criteria ask for, taken from findings that were already made (O6-O10, J10)."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from casewise.study.finding import Finding
from casewise.study.prereg import Fact
from casewise.study.resample import Interval


def paper_facts(
    *,
    ladder: Finding | None = None,
    shape: Finding | None = None,
    association: Finding | None = None,
    intervals: Finding | None = None,
    router: str = "router",
    default: str = "fixed-4",
    attribution: Finding | None = None,
    random: Finding | None = None,
    matched: Finding | None = None,
    tent_first: float | None = None,
) -> dict[str, Fact]:
    """Facts by key, as far as the findings give them; what is missing is reconciled as "not run".

    ``tent_first`` is TENT's metric after its first step on the same cases (V0).
    """
    facts: dict[str, Fact] = {}
    if ladder is not None:
        facts |= _first_step(ladder.table[ladder.table["group"] == "all"].set_index("step")["metric"], tent_first)
    if shape is not None:
        row = shape.row(group="all")
        facts["ladder.non_monotone"] = bool(row["non_monotone"])
        facts["ladder.last_minus_best"] = float(row["ha_last"] - row["ha_best"])
    if association is not None:
        facts |= _correlations(association)
    if intervals is not None:
        facts |= _comparison(intervals.table.set_index("id"), router, default)
    if attribution is not None:
        facts["share.random"] = attribution.number("share", control="random")
    if random is not None:
        facts["p.random"] = random.number("p_draws_corrected", scope="all", quantity="ha")
    if matched is not None:
        facts |= _selectors(matched)
    return facts


def _first_step(metric: pd.Series, tent_first: float | None) -> dict[str, Fact]:
    facts: dict[str, Fact] = {"metric.first_minus_source": float(metric[1] - metric[0])}
    if tent_first is not None:
        facts["metric.first_minus_tent"] = float(metric[1] - tent_first)
    return facts


def _correlations(found: Finding) -> dict[str, Fact]:
    pooled = found.table[(found.table["scope"] == "all") & (found.table["kind"] == "level")].set_index("signal")
    return {
        f"rho.{name}": _interval(pooled.loc[name].rename({"rho": "estimate"}))
        for name in ("delta", "regions")
        if name in pooled.index
    }


def _comparison(table: pd.DataFrame, router: str, default: str) -> dict[str, Fact]:
    facts: dict[str, Fact] = {}
    harm, metric = (f"{router}~{default}:{quantity}" for quantity in ("ha", "metric"))
    if harm in table.index:
        facts["ha.router_minus_default"] = _interval(table.loc[harm])
    if metric in table.index:
        found = _interval(table.loc[metric])
        turned = {"estimate": -found.estimate, "low": -found.high, "high": -found.low, "p_below": 1 - found.p_below}
        facts["metric.default_minus_router"] = replace(found, **turned)
    return facts


def _interval(row: pd.Series) -> Interval:
    below = float(row["p_below"]) if "p_below" in row.index else float("nan")
    limits = (float(row[name]) for name in ("estimate", "low", "high"))
    return Interval(*limits, below, int(row["n"]), int(row["clusters"]), resamples=0)


def _selectors(found: Finding) -> dict[str, Fact]:
    harm = found.table[found.table["scope"] == "all"].set_index("selector")["ha"]
    named = {"ha.entropy_minus_router": "entropy", "ha.oracle_minus_router": "oracle HA"}
    return {key: float(harm[name] - harm["deployed"]) for key, name in named.items() if name in harm.index}
