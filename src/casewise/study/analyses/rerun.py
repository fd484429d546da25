"""Is a rerun the same run? Layers of agreement between two archives, and why HA moved where it did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from casewise.core.errors import BadInput
from casewise.judge.outcomes import outcomes
from casewise.study.finding import Finding, Section, plain_table, rows
from casewise.study.statistics.ranks import spearman
from casewise.study.study import Study
from casewise.study.trajectories import signals_in, unshrunk


def section(study: Study) -> Section:
    """Does a second recording of the same cases give the same numbers? (N4-N7)"""
    if study.extras.rerun is None:
        return Section(
            "rerun", "Rerun", missing={"alignment of a rerun": "needs a second archive of the same cases; give --rerun"}
        )
    second = outcomes(study.extras.rerun)
    aligned = alignment(study.outcomes, second, runs=("this", "rerun"))
    moved, shared = harm_moves(study.outcomes, second), shared_signals(study.outcomes, second)
    tables = (
        plain_table("alignment", "Layer by layer", aligned, caption="Only gated layers must pass."),
        plain_table("harm-moves", "Cases whose HA moved", moved),
        plain_table("shared-signals", "Correlations in both runs", shared),
    )
    passed = bool(aligned.table.loc[aligned.table["gated"].astype(bool), "passed"].all())
    lead = "The rerun passes every gated layer." if passed else "The rerun does not pass every gated layer."
    return Section("rerun", "Rerun", lead, tables, (), (aligned, moved, shared), (*aligned.notes, *moved.notes))


GRADIENT_LIMIT = 1e-6  # step-1 gradient norm, largest absolute difference


METRIC_LIMIT = 5e-4  # cohort metric at every step


HARM_LIMIT = 0.002  # cohort HA at every step; also between shared correlations (N6)


MOVED = 0.05  # a case whose HA moved by more is listed (N5)


def alignment(first: pd.DataFrame, second: pd.DataFrame, *, runs: Sequence[str] = ("first", "second")) -> Finding:
    """Layer by layer: step-1 gradient norm, cohort metric, cohort HA; per-case metric is shown, not gated (N4)."""
    joined, cases = _joined(first, second)
    records = list(_gradients(joined))
    for step, part in joined.groupby("step"):
        for name, limit in (("metric", METRIC_LIMIT), ("ha", HARM_LIMIT)):
            left, right = (float(part[f"{name}_{side}"].mean()) for side in ("1", "2"))
            records.append(_layer(f"cohort {name}", int(step), abs(left - right), left, limit, len(part)))
        worst = float((part["metric_1"] - part["metric_2"]).abs().max())
        records.append(_layer("case metric", int(step), worst, float(part["metric_1"].abs().max()), None, len(part)))
    columns = ("layer", "step", "difference", "relative", "limit", "passed", "gated", "n")
    table = rows(records, columns)
    gated = table[table["gated"]]
    passed = bool(gated["passed"].all())
    note = f"{runs[0]} and {runs[1]}: {int(gated['passed'].sum())} of {len(gated)} gated layers agree, n = {cases}"
    made = {"runs": list(runs), "aligned": passed, **_unshared(first, second)}
    return Finding("alignment", table, cases, "N4, N7", made, (note,))


def _joined(first: pd.DataFrame, second: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    joined = unshrunk(first).merge(unshrunk(second), on=["case", "step"], suffixes=("_1", "_2"))
    if joined.empty:
        raise BadInput("the two archives share no (case, step); align two runs of the same cases")
    return joined, int(joined["case"].nunique())


def _unshared(first: pd.DataFrame, second: pd.DataFrame) -> dict[str, int]:
    left, right = set(first["case"]), set(second["case"])
    return {"only_first": len(left - right), "only_second": len(right - left)}


def _gradients(joined: pd.DataFrame) -> list[dict[str, Any]]:
    if "gradient_norm_1" not in joined.columns:
        return []
    part = joined[(joined["step"] == 1) & joined["gradient_norm_1"].notna() & joined["gradient_norm_2"].notna()]
    if part.empty:
        return []
    gap = (part["gradient_norm_1"] - part["gradient_norm_2"]).abs()
    scale = float(part["gradient_norm_1"].abs().max())
    return [_layer("step-1 gradient norm", 1, float(gap.max()), scale, GRADIENT_LIMIT, len(part))]


def _layer(name: str, step: int, difference: float, scale: float, limit: float | None, n: int) -> dict[str, Any]:
    return {
        "layer": name,
        "step": step,
        "difference": difference,
        "relative": difference / abs(scale) if scale else float("nan"),
        "limit": float("nan") if limit is None else limit,
        "passed": limit is None or difference <= limit,
        "gated": limit is not None,
        "n": n,
    }


def harm_moves(first: pd.DataFrame, second: pd.DataFrame, *, moved: float = MOVED) -> Finding:
    """Cases whose HA moved by more than ``moved``: a region came or changed sides? And the cohort without them (N5)."""
    joined, cases = _joined(first, second)
    change = joined["ha_2"] - joined["ha_1"]
    large = joined[change.abs() > moved]
    records = [
        {
            "case": row["case"],
            "step": int(row["step"]),
            "change": float(row["ha_2"] - row["ha_1"]),
            "cause": "region count changed" if row["regions_1"] != row["regions_2"] else "region changed side",
        }
        for _, row in large.iterrows()
    ]
    rest = change[~joined["case"].isin(large["case"])]
    made = {
        "difference": float(change.mean()),
        "difference_without": float(rest.mean()) if len(rest) else float("nan"),
        "moved_cases": int(large["case"].nunique()),
    }
    return Finding("alignment.moves", rows(records, ("case", "step", "change", "cause")), cases, "N5", made)


def shared_signals(
    first: pd.DataFrame, second: pd.DataFrame, *, runs: Sequence[str] = ("first", "second"), target: str = "ha"
) -> Finding:
    """Pooled Spearman of every shared signal with HA in both runs; they agree within 0.002 (N6, N7)."""
    names = [name for name in signals_in(first) if name in signals_in(second)]
    records = []
    for name in names:
        rho = [_pooled(frame, name, target) for frame in (first, second)]
        gap = abs(rho[0] - rho[1])
        records.append(
            {"signal": name, "rho_first": rho[0], "rho_second": rho[1], "difference": gap, "agrees": gap <= HARM_LIMIT}
        )
    table = rows(records, ("signal", "rho_first", "rho_second", "difference", "agrees"))
    n = len(set(first["case"]) & set(second["case"]))
    flagged = tuple(
        f"{row.signal} differs between {runs[0]} and {runs[1]}" for row in table.itertuples() if not row.agrees
    )
    return Finding("alignment.signals", table, n, "N6, N7", {"runs": list(runs)}, flagged)


def _pooled(frame: pd.DataFrame, name: str, target: str) -> float:
    ladder = unshrunk(frame)
    both = ladder.loc[ladder["step"] >= 1, [name, target]].dropna()
    return spearman(*(np.asarray(both[column], dtype=np.float64) for column in (name, target)))
