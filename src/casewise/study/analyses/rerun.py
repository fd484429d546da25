"""Agreement of two recordings of the same cases, layer by layer, and why HA moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from casewise.core.errors import BadInput
from casewise.judge.outcomes import outcomes
from casewise.study.finding import Finding, Section, not_run, rows, show
from casewise.study.statistics.ranks import spearman
from casewise.study.study import Study
from casewise.study.trajectories import adapted_rows, signals_in, unshrunk

GRADIENT_LIMIT = 1e-6  # step-1 gradient norm, largest absolute difference
METRIC_LIMIT = 5e-4  # cohort metric at every step
HARM_LIMIT = 0.002  # cohort HA at every step; also between shared correlations (N6)
MOVED = 0.05  # a case whose HA moved by more is listed (N5)


def section(study: Study) -> Section:
    """Does a second recording of the same cases give the same numbers? (N4-N7)"""
    if study.extras.rerun is None:
        return not_run("rerun", "Rerun", "alignment of a rerun", "needs a second archive of the same cases: --rerun")
    second = outcomes(study.extras.rerun)
    aligned, moved = alignment(study.outcomes, second), harm_moves(study.outcomes, second)
    shared = shared_signals(study.outcomes, second)
    tables = (
        show("alignment", "Layer by layer", aligned, caption="Only gated layers must pass."),
        show("harm-moves", "Cases whose HA moved", moved),
        show("shared-signals", "Correlations in both runs", shared),
    )
    lead = f"The rerun {'passes' if aligned.made['aligned'] else 'does not pass'} every gated layer."
    return Section("rerun", "Rerun", lead, tables, (), (aligned, moved, shared), (*aligned.notes, *shared.notes))


def alignment(first: pd.DataFrame, second: pd.DataFrame) -> Finding:
    """Step-1 gradient norm, cohort metric and cohort HA of two runs; the metric of cases is shown, not gated (N4)."""
    joined, cases = _joined(first, second)
    records = []
    if "gradient_norm_1" in joined.columns:
        part = joined[joined["step"] == 1].dropna(subset=["gradient_norm_1", "gradient_norm_2"])
        if len(part):
            gap = float((part["gradient_norm_1"] - part["gradient_norm_2"]).abs().max())
            scale = float(part["gradient_norm_1"].abs().max())
            records.append(_layer("step-1 gradient norm", 1, gap, scale, GRADIENT_LIMIT, len(part)))
    for step, part in joined.groupby("step"):
        for name, limit in (("metric", METRIC_LIMIT), ("ha", HARM_LIMIT)):
            left, right = (float(part[f"{name}_{side}"].mean()) for side in ("1", "2"))
            records.append(_layer(f"cohort {name}", int(step), abs(left - right), left, limit, len(part)))
        worst = float((part["metric_1"] - part["metric_2"]).abs().max())
        records.append(_layer("case metric", int(step), worst, float(part["metric_1"].abs().max()), None, len(part)))
    table = rows(records, "layer step difference relative limit passed gated n")
    gated = table[table["gated"]]
    own, other = set(first["case"]), set(second["case"])
    made = {"aligned": bool(gated["passed"].all()), "only_first": len(own - other), "only_second": len(other - own)}
    note = f"{int(gated['passed'].sum())} of {len(gated)} gated layers agree, n = {cases}"
    return Finding("alignment", table, cases, "N4, N7", made, (note,))


def _joined(first: pd.DataFrame, second: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    joined = unshrunk(first).merge(unshrunk(second), on=["case", "step"], suffixes=("_1", "_2"))
    if joined.empty:
        raise BadInput("the two archives share no (case, step); align two runs of the same cases")
    return joined, int(joined["case"].nunique())


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


def harm_moves(first: pd.DataFrame, second: pd.DataFrame) -> Finding:
    """Cases whose HA moved by more than 0.05, why, and the difference of the cohort without them (N5)."""
    joined, cases = _joined(first, second)
    change = joined["ha_2"] - joined["ha_1"]
    large = joined.assign(change=change)[change.abs() > MOVED]
    came = large["regions_1"] != large["regions_2"]
    cause = np.where(came, "region count changed", "region changed side")
    table = large[["case", "step", "change"]].assign(cause=cause)
    rest = change[~joined["case"].isin(large["case"])]
    made = {
        "difference": float(change.mean()),
        "difference_without": float(rest.mean()) if len(rest) else float("nan"),
        "moved_cases": int(large["case"].nunique()),
    }
    return Finding("alignment.moves", table.reset_index(drop=True), cases, "N5", made)


def shared_signals(first: pd.DataFrame, second: pd.DataFrame) -> Finding:
    """Pooled Spearman of every shared signal with HA in both runs; they agree within 0.002 (N6, N7)."""
    records = []
    for name in (one for one in signals_in(first) if one in signals_in(second)):
        pairs = [adapted_rows(frame)[[name, "ha"]].dropna().to_numpy(float) for frame in (first, second)]
        left, right = (spearman(pair[:, 0], pair[:, 1]) for pair in pairs)
        gap = abs(left - right)
        records.append(
            {"signal": name, "rho_first": left, "rho_second": right, "difference": gap, "agrees": gap <= HARM_LIMIT}
        )
    table = rows(records, "signal rho_first rho_second difference agrees")
    apart = table.loc[~table["agrees"].astype(bool), "signal"]
    notes = tuple(f"the correlation of {name} differs between the runs" for name in apart)
    return Finding("alignment.signals", table, len(set(first["case"]) & set(second["case"])), "N6, N7", notes=notes)
