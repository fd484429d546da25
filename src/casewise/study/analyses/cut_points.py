"""The router and its cut-points: coordinate, actions, buckets, and the effect of other calibration cases."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from casewise.archive.store import Archive
from casewise.core.errors import DegenerateTertiles, TooFewCases
from casewise.core.records import Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.core.text import UNIT
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.calibration.cuts import CONVENTIONS, resampled
from casewise.judge.monitors.quota import BUCKETS, quota_drift, quota_of, quota_p
from casewise.judge.policy import controller_of
from casewise.render.tables import Cell, Column, Table, number
from casewise.replay import replay
from casewise.study.assignment import RANKED, Arms, buckets_at
from casewise.study.finding import INTERVAL, Finding, Section, not_run, notes_of, rows, sentences, show
from casewise.study.statistics.resample import RESAMPLES, cluster_numbers, draws
from casewise.study.study import Study, once
from casewise.study.trajectories import mean_or_nan, step_one

ALGORITHM = (
    "reset to M0 and predict ŷ₀",
    "take one adaptation step and predict ŷ₁",
    "u ← the coordinate of (ŷ₀, ŷ₁): two masks, no label, no backward pass",
    "if u ≥ cut_high: restore M0 and return the cached ŷ₀ (rollback)",
    "bucket ← mid if u > cut_low, else low",
    "run the bucket's action: a fixed depth (with shrink, part of the way back to M0), or a stop rule with a cap",
    "return the deployed mask and the decision record",
)


def routing_section(study: Study) -> Section:
    """tab:supp-routing-coord, tab:supp-depth-var, tab:app-algorithm."""
    if not study.is_router:
        reason = f"the policy is a {study.controller.name}, not a router"
        return not_run("routing", "The router", "routing tables", reason)
    depth, stability = depth_dispersion(study.policy_rows), stability_of(study)
    lines = pd.DataFrame({"line": range(1, len(ALGORITHM) + 1), "what": ALGORITHM})
    heads = {"what": "Algorithm 1: routing one case, without labels"}
    tables = (
        _coordinates(study),
        show("depth-variation", "Deployed depth by bucket", depth, paper="tab:supp-depth-var"),
        _cuts(study, stability),
        show("algorithm", "The algorithm", lines, heads=heads, paper="tab:app-algorithm", collapsed=True),
    )
    found, notes = (depth, stability, quota_found(study)), notes_of(depth, stability)
    return Section("routing", "The router", _routing_lead(study, stability), tables, (), found, notes)


def _coordinate_values(study: Study) -> tuple[pd.Series, pd.Series, pd.Series]:
    """The coordinate of the calibration and of the evaluation cases, and the patient of each calibration case."""
    first = study.holdout[(study.holdout["step"] == 1) & (study.holdout["shrink"] == 0)].sort_values("case")
    pool, values = (step_one(frame, study.coordinate) for frame in (study.holdout, study.outcomes))
    return pool, values, pd.Series(cluster_numbers(first), index=first["case"])


def stability_of(study: Study) -> Finding:
    """Cut-points from redrawn calibration patients: one pair for all cases, or one for each group."""
    options: dict[str, Any] = {"percentiles": study.percentiles, **study.bootstrap}
    pool, values, units = _coordinate_values(study)
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
    names = ("changed_median", "changed_high")
    shares = {key: sum(one.made[key] * one.n for one in found.values()) / n for key in names}
    notes = tuple(f"{group}: {note}" for group, one in found.items() for note in one.notes)
    return Finding("sensitivity.cuts", table, n, "F9", shares, notes)


def _routing_lead(study: Study, stability: Finding) -> str:
    counts = study.policy_rows["bucket"].value_counts()
    low, mid, hard = (int(counts.get(name, 0)) for name in BUCKETS)
    moved, drift = 100 * float(stability.made["changed_median"]), quota_found(study).notes
    return (
        f"Of {len(study.policy_rows)} cases {low} fall low, {mid} mid and {hard} hard, by {study.coordinate} after one "
        f"update and cut-points fitted on {study.calibration_size} calibration cases. Resampling the calibration "
        f"{UNIT[1]} moves {moved:.1f} % of the cases to another bucket (median).{f' {drift[0]}.' if drift else ''}"
    )


@once
def quota_found(study: Study) -> Finding:
    """Patients in each bucket at calibration and here; a note says if the two differ."""
    deployed = quota_of(study.decisions[study.ours])
    calibrated = study.policy.preflight.get("quota")
    if not calibrated:
        reason = "the policy does not store its buckets at calibration; calibrate it again"
        return Finding("routing.quota", pd.DataFrame(), sum(deployed.values()), "F9", reason=reason)
    counts = [(name, int(calibrated.get(name, 0)), deployed[name]) for name in BUCKETS]
    table, drift = rows(counts, "bucket calibrated deployed"), quota_drift(study.policy, deployed)
    made = {"p": quota_p(calibrated, deployed)}
    return Finding("routing.quota", table, sum(deployed.values()), "F9", made, () if drift is None else (drift,))


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
    depths = {name: router.loc[router["bucket"] == name, "deployed"].astype(float) for name in BUCKETS}
    records = [
        (name, len(depth), depth.std(ddof=0), depth.min(), depth.max(), "" if len(depth) else "the bucket is empty")
        for name, depth in depths.items()
    ]
    return Finding("dispersion", rows(records, "bucket n std low high reason"), len(router), "M11")


def cut_stability(
    calibration_values: ArrayLike, evaluation_values: ArrayLike, *, clusters: Sequence[Hashable] | None = None,
    percentiles: tuple[float, float] = CONVENTIONS["medical"], resamples: int = RESAMPLES, seed: int = RESAMPLING_SEED,
) -> Finding:  # fmt: skip
    """Bootstrap intervals of both cut-points, and how many evaluation cases would change their bucket (F9).

    Patients are drawn, each with all of its cases, where ``clusters`` numbers them.
    """
    pool, u = (np.asarray(values, dtype=np.float64) for values in (calibration_values, evaluation_values))
    pools, index = resampled(pool, clusters, resamples, seed)
    drawn = draws(index.shape[1], resamples, seed)  # the same stream, which is proven
    fitted = np.percentile(pool, percentiles)
    cuts = np.array([np.percentile(one, percentiles) for one in pools]).T  # (cut, draw)
    changed = (buckets_at(u, *cuts) != buckets_at(u, *fitted)).mean(axis=1)
    low, high = np.percentile(cuts, [2.5, 97.5], axis=1)
    table = pd.DataFrame({"cut": ["cut_low", "cut_high"], "estimate": fitted, "low": low, "high": high, "n": len(pool)})
    median, upper = np.percentile(changed, [50, 97.5])
    note = f"resampled calibration cases change the bucket of {median:.1%} of {len(u)} cases (97.5 %: {upper:.1%})"
    made = {"changed_median": float(median), "changed_high": float(upper), "stream": drawn.proof}
    return Finding("sensitivity.cuts", table, len(u), "F9", made, (note,))


# ---- fewer calibration cases ----

Floats = NDArray[np.float64]


def sensitivity_section(study: Study) -> Section:
    """tab:app-calibsens."""
    title = "Sensitivity to the calibration cases"
    if not study.is_router:
        reason = f"the policy is a {study.controller.name}; refitting cut-points needs a router"
        return not_run("sensitivity", title, "sensitivity", reason)
    refit, again = refit_of(study), reproduced(study)
    caption = (
        f"Cut-points refitted on some of the calibration {UNIT[1]}, drawn without replacement; brackets hold 95 % of "
        "the draws. Last row: all."
    )
    heads: dict[str, str | Column] = {
        "cases": f"calibration {UNIT[1]}",
        "metric": Column("metric", "{metric} [95 %]", 4, interval=("metric_low", "metric_high")),
        "ha": Column("ha", "HA [95 %]", interval=("ha_low", "ha_high")),
        "ha_worst": "worst draw",
        "beats_reference": Column("beats_reference", f"below {study.retrospective} (%)", 0, percent=True),
    }
    tables = (
        show(
            "calibration-sensitivity", "Fewer calibration cases", refit.table.sort_values("cases"),
            "cases metric ha ha_worst beats_reference draws n", heads=heads, caption=caption, paper="tab:app-calibsens",
        ),
        show("refit-check", "Fitted again on the same cases", again, caption=sentences(again), collapsed=True),
    )  # fmt: skip
    found, lead = (refit, again), f"{_sensitivity_lead(study, refit)} {sentences(again)}"
    return Section("sensitivity", title, lead, tables, (), found, notes_of(*found))


@once
def reproduced(study: Study) -> Finding:
    """Fit the cut-points again on the same calibration cases and count the evaluation cases whose bucket changes.

    Cut-points may differ in the last digit and still decide alike, so buckets are compared, not bits.
    """
    fitted, _ = refitted(study, study.calibration)
    decided = {decision.case_id: decision.bucket for decision in replay(study.evaluation, controller_of(fitted))}
    own = {decision.case_id: decision.bucket for decision in study.decisions[study.ours]}
    same = sum(decided[case] == bucket for case, bucket in own.items())
    records = []
    options_of = {name: {**fitted.options, **more} for name, more in (fitted.groups or {"all": {}}).items()}
    for name, router in study.routers.items():
        options = options_of[name if fitted.groups else "all"]
        for cut in ("cut_low", "cut_high"):
            before, after = float(getattr(router, cut)), float(options[cut])
            gap = 0.0 if before == after else abs(after - before)
            records.append({"group": name, "cut": cut, "deployed": before, "refitted": after, "difference": gap})
    table = pd.DataFrame(records)
    made = {"same": same, "cases": len(own), "reproduced": same == len(own)}
    return Finding("sensitivity.again", table, len(own), "F10", made, (_again(study, table, same),))


def _again(study: Study, cuts: pd.DataFrame, same: int) -> str:
    n, again = len(study.policy_rows), "fitted again on the same calibration cases, the cut-points put"
    if same == n:
        return f"{again} all {n} cases into the same bucket"
    why = "the policy was changed after it was fitted, or other calibration cases were given"
    if study.policy.preflight.get("guard") == "closed":
        why = "its guard rolls every case back"
    elif (cuts["deployed"] <= cuts["refitted"]).all():
        why = "the deployed cut-points are lower, as a certificate makes them"
    return f"{again} only {same} of {n} cases into the same bucket: {why}"


def refitted(study: Study, calibration: Archive, *, unshrunk: bool = False) -> tuple[Policy, list[str]]:
    """Fit the cut-points of the studied design on calibration cases; return the policy and the warnings."""
    fitted_by = study.policy.preflight
    mode, convention = str(fitted_by.get("mode", "union")), str(fitted_by.get("convention", "medical"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DegenerateTertiles)
        policy = calibrate(calibration, study.policy, mode=mode, percentiles=convention, unshrunk=unshrunk)
    return policy, [str(one.message) for one in caught]


@once
def refit_of(study: Study) -> Finding:
    """The router with cut-points from fewer calibration cases."""
    pool, values, units = _coordinate_values(study)
    found = calibration_sensitivity(
        pool, values, study.arms, reference=study.methods[study.retrospective], percentiles=study.percentiles,
        sizes=tuple(size for size in (5, 10, 15) if size < len(set(units))), seed=study.seed, clusters=units,
    )  # fmt: skip
    refitted, deployed = float(found.table["ha"].iloc[0]), mean_or_nan(study.policy_rows["ha"])
    if np.isclose(refitted, deployed, rtol=0, atol=1e-12):
        return found
    note = (
        f"One pair of tertiles is refitted for all cases here: HA {refitted:.3f} with all calibration cases. The "
        f"deployed policy has other cut-points (of each group, or closed by its guard): HA {deployed:.3f}."
    )
    return replace(found, notes=(*found.notes, note))


def _sensitivity_lead(study: Study, refit: Finding) -> str:
    drawn = refit.table[refit.table["draws"] > 1]
    if drawn.empty:
        return "There are too few calibration cases for subsamples."
    worst = drawn.iloc[0]
    return (
        f"With cut-points refitted on {int(worst['cases'])} calibration {UNIT[1]}, "
        f"{100 * float(worst['beats_reference']):.0f} % of {int(worst['draws'])} draws stay below "
        f"{study.retrospective} in HA; the worst draw has HA {number(worst['ha_worst'])}."
    )


def calibration_sensitivity(
    calibration_values: ArrayLike, evaluation_values: pd.Series, arms: Arms, *, reference: pd.DataFrame,
    sizes: Sequence[int] = (5, 10, 15), draws: int = 500, seed: int = RESAMPLING_SEED,
    percentiles: tuple[float, float] = CONVENTIONS["medical"], clusters: ArrayLike | None = None,
) -> Finding:  # fmt: skip
    """Refit the cut-points on subsamples of the calibration cases and replay the whole evaluation split (K1-K4).

    ``evaluation_values`` is the coordinate by case. ``reference`` is the deployed frame of the budget to beat. The
    first row is the full calibration. If ``clusters`` has patients with several cases, patients are drawn.
    """
    pool = np.asarray(calibration_values, dtype=np.float64)
    fitted = tuple(np.percentile(pool, percentiles))
    by_case = [arms[name].set_index("case").reindex(evaluation_values.index) for name in RANKED]
    values = {name: np.column_stack([arm[name].to_numpy(float) for arm in by_case]) for name in ("ha", "metric")}
    u, rng = evaluation_values.to_numpy(float), np.random.default_rng(seed)
    to_beat = mean_or_nan(reference["ha"])
    units = np.unique(np.arange(len(pool)) if clusters is None else np.asarray(clusters), return_inverse=True)[1]
    patients = int(units.max()) + 1
    records = [_refit_row(patients, buckets_at(u, *fitted), values, to_beat)]
    for size in sizes:
        if size > patients:
            raise TooFewCases(f"a subsample of {size} needs at least as many calibration cases, got {patients}")
        chosen = rng.permuted(np.tile(np.arange(patients), (draws, 1)), axis=1)[:, :size]
        low, high = np.array([np.percentile(pool[np.isin(units, row)], percentiles) for row in chosen]).T
        records.append(_refit_row(size, buckets_at(u, low, high), values, to_beat))
    made = {"draws": draws, "seed": seed, "percentiles": list(percentiles), "to_beat": to_beat, "cuts": list(fitted)}
    return Finding("sensitivity.calibration", pd.DataFrame(records), len(u), "K1-K4", made)


def _refit_row(size: int, buckets: NDArray[np.int64], values: Mapping[str, Floats], to_beat: float) -> dict[str, Any]:
    """Cohort means over the draws of cut-points; ``buckets`` is (draw, case), ``values`` are (case, bucket)."""
    record: dict[str, Any] = {"cases": size, "draws": len(buckets), "n": buckets.shape[1]}
    for name, by_bucket in values.items():
        drawn = np.nanmean(np.take_along_axis(by_bucket[None], buckets[:, :, None], axis=2)[:, :, 0], axis=1)
        low, high = np.percentile(drawn, [2.5, 97.5])
        record |= {name: float(drawn.mean()), f"{name}_low": float(low), f"{name}_high": float(high)}
        if name == "ha":
            record |= {"ha_worst": float(drawn.max()), "beats_reference": float((drawn < to_beat).mean())}
    return record
