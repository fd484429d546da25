"""The router: its coordinate and actions, the bucket of every case, and the stability of its cut-points."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from casewise.core.seeds import RESAMPLING_SEED
from casewise.core.text import UNIT
from casewise.judge.calibration.cuts import resampled
from casewise.judge.monitors.quota import quota_drift, quota_of, quota_p
from casewise.render.tables import Cell, Column, Table, number
from casewise.study.assignment import MEDICAL, buckets_at
from casewise.study.finding import INTERVAL, Finding, Section, not_run, notes_of, show
from casewise.study.statistics.resample import RESAMPLES, cluster_numbers, draws
from casewise.study.study import Study, once
from casewise.study.trajectories import step_one

BUCKETS = ("low", "mid", "hard")
ALGORITHM = (
    "reset to M0 and predict ŷ₀",
    "take one adaptation step and predict ŷ₁",
    "u ← the coordinate of (ŷ₀, ŷ₁): two masks, no label, no backward pass",
    "if u ≥ cut_high: restore M0 and return the cached ŷ₀ (rollback)",
    "bucket ← mid if u > cut_low, else low",
    "run the bucket's action: a fixed depth (and part of the way back to M0 where it shrinks), or a stop rule in a cap",
    "return the deployed mask and the decision record",
)


def section(study: Study) -> Section:
    """tab:supp-routing-coord, tab:supp-depth-var, tab:app-algorithm."""
    if not study.is_router:
        reason = f"the policy is a {study.controller.name}, not a router"
        return not_run("routing", "The router", "routing tables", reason)
    depth, stability = depth_dispersion(study.router), stability_of(study)
    lines = pd.DataFrame({"line": range(1, len(ALGORITHM) + 1), "what": ALGORITHM})
    heads = {"what": "Algorithm 1: routing one case, without labels"}
    tables = (
        _coordinates(study),
        show("depth-variation", "Deployed depth by bucket", depth, paper="tab:supp-depth-var"),
        _cuts(study, stability),
        show("algorithm", "The algorithm", lines, heads=heads, paper="tab:app-algorithm", collapsed=True),
    )
    found, notes = (depth, stability, quota_found(study)), notes_of(depth, stability)
    return Section("routing", "The router", _lead(study, stability), tables, (), found, notes)


def stability_of(study: Study) -> Finding:
    """Cut-points from redrawn calibration patients: one pair for all cases, or one for each group."""
    options: dict[str, Any] = {"percentiles": study.percentiles, **study.bootstrap}
    pool, values = (step_one(frame, study.coordinate) for frame in (study.holdout, study.outcomes))
    first = study.holdout[(study.holdout["step"] == 1) & (study.holdout["shrink"] == 0)].sort_values("case")
    units = pd.Series(cluster_numbers(first), index=first["case"])
    if not study.policy.groups:
        return cut_stability(pool, values, clusters=units.tolist(), **options)
    of = {case: entry.group for case, entry in {**study.calibration.entries, **study.evaluation.entries}.items()}
    found = {}
    for group in study.policy.groups:
        mine, theirs = (one[[of[case] == group for case in one.index]] for one in (pool, values))
        if len(mine) and len(theirs):
            found[group] = cut_stability(mine, theirs, clusters=units[mine.index].tolist(), **options)
    n = sum(one.n for one in found.values())
    table = pd.concat([one.table.assign(group=group) for group, one in found.items()], ignore_index=True)
    shares = {
        key: sum(one.made[key] * one.n for one in found.values()) / n for key in ("changed_median", "changed_high")
    }
    notes = tuple(f"{group}: {note}" for group, one in found.items() for note in one.notes)
    return Finding("sensitivity.cuts", table, n, "F9", shares, notes)


def _lead(study: Study, stability: Finding) -> str:
    counts = study.router["bucket"].value_counts()
    low, mid, hard = (int(counts.get(name, 0)) for name in BUCKETS)
    moved, drift = 100 * float(stability.made["changed_median"]), quota_found(study).notes
    return (
        f"Of {len(study.router)} cases {low} fall low, {mid} mid and {hard} hard, by {study.coordinate} after one "
        f"update and cut-points fitted on {study.calibration_size} calibration cases. Redrawing the calibration "
        f"{UNIT[1]} moves {moved:.1f} % of the cases to another bucket (median).{f' {drift[0]}.' if drift else ''}"
    )


@once
def quota_found(study: Study) -> Finding:
    """Patients in each bucket at calibration and here; a note says if the two differ."""
    deployed = quota_of(study.decisions[study.ours])
    calibrated = study.policy.preflight.get("quota")
    if not calibrated:
        reason = "the policy does not know its buckets at calibration; calibrate it again"
        return Finding("routing.quota", pd.DataFrame(), sum(deployed.values()), "F9", reason=reason)
    rows = pd.DataFrame(
        [{"bucket": name, "calibrated": int(calibrated.get(name, 0)), "deployed": deployed[name]} for name in BUCKETS]
    )
    drift = quota_drift(study.policy, deployed)
    made = {"p": quota_p(calibrated, deployed)}
    return Finding("routing.quota", rows, sum(deployed.values()), "F9", made, () if drift is None else (drift,))


def _coordinates(study: Study) -> Table:
    cells: list[dict[str, Cell]] = []
    for group, router in study.routers.items():
        row: dict[str, Cell] = {"group": group, "coordinate": study.coordinate}
        row |= {name: str(getattr(router, name)) if hasattr(router, name) else "stop rule" for name in BUCKETS}
        cuts = {"cut_low": float(router.cut_low), "cut_high": float(router.cut_high)}
        cells.append({**row, **cuts, "n": study.calibration_size})
    heads: dict[str, str | Column] = {name: Column(name, name, text=True) for name in ("coordinate", *BUCKETS)}
    caption = f"Policy “{study.policy.name}”: value ≥ cut_high rolls back, value > cut_low is mid."
    paper = "tab:supp-routing-coord"
    heads["n"] = "calibration cases"
    return show("routing", "Coordinate and actions", cells, heads=heads, caption=caption, paper=paper)


def _cuts(study: Study, stability: Finding) -> Table:
    tail = number(100 * float(stability.made["changed_high"]), 1)
    caption = (
        f"Calibration {UNIT[1]} drawn with replacement, B = {study.resamples}, seed {study.seed}. In the upper tail "
        f"{tail} % of the cases change bucket."
    )
    heads: dict[str, str | Column] = {"n": "calibration cases"}
    heads["estimate"] = Column("estimate", "value [95 %]", 6, interval=INTERVAL)
    keys = f"{'group ' if 'group' in stability.table else ''}cut estimate n"
    return show("cut-stability", "Stability of the cut-points", stability, keys, heads=heads, caption=caption)


def depth_dispersion(router: pd.DataFrame) -> Finding:
    """Cases, standard deviation (ddof 0) and range of the deployed depth by bucket."""
    records = []
    for name in BUCKETS:
        depth = router.loc[router["bucket"] == name, "deployed"].to_numpy(float)
        low, std, high = (depth.min(), depth.std(), depth.max()) if len(depth) else (np.nan, np.nan, np.nan)
        reason = "" if len(depth) else "the bucket is empty"
        records.append({"bucket": name, "n": len(depth), "std": std, "low": low, "high": high, "reason": reason})
    return Finding("dispersion", pd.DataFrame(records), len(router), "M11")


def cut_stability(
    calibration_values: ArrayLike,
    evaluation_values: ArrayLike,
    *,
    percentiles: tuple[float, float] = MEDICAL,
    clusters: Sequence[Hashable] | None = None,
    resamples: int = RESAMPLES,
    seed: int = RESAMPLING_SEED,
) -> Finding:
    """Bootstrap intervals of both cut-points, and how many evaluation cases would change their bucket (F9).

    Patients are drawn, each with all of its cases, where ``clusters`` numbers them.
    """
    pool, u = (np.asarray(values, dtype=np.float64) for values in (calibration_values, evaluation_values))
    pools, index = resampled(pool, clusters, resamples, seed)
    drawn = draws(index.shape[1], resamples, seed)  # the same stream, which is proven
    fitted = np.percentile(pool, percentiles)
    cuts = np.array([np.percentile(one, percentiles) for one in pools]).T  # (cut, draw)
    changed = (buckets_at(u, *cuts) != buckets_at(u, *fitted)).mean(axis=1)
    records = []
    for at, name in enumerate(("cut_low", "cut_high")):
        low, high = np.percentile(cuts[at], [2.5, 97.5])
        records.append({"cut": name, "estimate": fitted[at], "low": low, "high": high, "n": len(pool)})
    median, upper = np.percentile(changed, [50, 97.5])
    note = f"a resampled calibration rebuckets {median:.1%} of {len(u)} evaluation cases (97.5 %: {upper:.1%})"
    made = {"changed_median": float(median), "changed_high": float(upper), "stream": drawn.proof}
    return Finding("sensitivity.cuts", pd.DataFrame(records), len(u), "F9", made, (note,))
