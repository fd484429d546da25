"""Sensitivity of the cut-points: fitted again on the same calibration cases, and on fewer of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from casewise.archive.store import Archive
from casewise.core.errors import BadInput, DegenerateTertiles, TooFewCases
from casewise.core.records import Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.core.text import UNIT
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.policy import controller_of
from casewise.render.tables import Column, number
from casewise.replay import replay
from casewise.study.assignment import BUCKETS, MEDICAL, Arms, buckets_at
from casewise.study.finding import Finding, Section, not_run, notes_of, sentences, show
from casewise.study.statistics.resample import cluster_numbers
from casewise.study.study import Study, once
from casewise.study.trajectories import mean_or_nan, step_one

Floats = NDArray[np.float64]


def section(study: Study) -> Section:
    """tab:app-calibsens."""
    title = "How much depends on the calibration cases"
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
    found, lead = (refit, again), f"{_lead(study, refit)} {sentences(again)}"
    return Section("sensitivity", title, lead, tables, (), found, notes_of(*found))


@once
def reproduced(study: Study) -> Finding:
    """Cut-points fitted again on the same calibration cases: do they put every evaluation case into the same bucket?

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
    n, again = len(study.router), "fitted again on the same calibration cases, the cut-points put"
    if same == n:
        return f"{again} all {n} cases into the same bucket"
    why = "the policy was changed after it was fitted, or other calibration cases were given"
    if study.policy.preflight.get("guard") == "closed":
        why = "its guard closed it"
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
    pool, values = (step_one(frame, study.coordinate) for frame in (study.holdout, study.outcomes))
    first = study.holdout[(study.holdout["step"] == 1) & (study.holdout["shrink"] == 0)].sort_values("case")
    units = cluster_numbers(first)
    found = calibration_sensitivity(
        pool, values, study.arms, reference=study.methods[study.retrospective], percentiles=study.percentiles,
        sizes=tuple(size for size in (5, 10, 15) if size < len(set(units))), seed=study.seed, clusters=units,
    )  # fmt: skip
    refitted, deployed = float(found.table["ha"].iloc[0]), mean_or_nan(study.router["ha"])
    if np.isclose(refitted, deployed, rtol=0, atol=1e-12):
        return found
    note = (
        f"One pair of tertiles is refitted for all cases here: HA {refitted:.3f} with all calibration cases. The "
        f"deployed policy has other cut-points (of each group, or closed by its guard): HA {deployed:.3f}."
    )
    return replace(found, notes=(*found.notes, note))


def _lead(study: Study, refit: Finding) -> str:
    drawn = refit.table[refit.table["draws"] > 1]
    if drawn.empty:
        return "There are too few calibration cases to leave some out."
    worst = drawn.iloc[0]
    return (
        f"With cut-points refitted on {int(worst['cases'])} calibration {UNIT[1]}, "
        f"{100 * float(worst['beats_reference']):.0f} % of {int(worst['draws'])} draws stay below "
        f"{study.retrospective} in HA; the worst draw has HA {number(worst['ha_worst'])}."
    )


def calibration_sensitivity(
    calibration_values: ArrayLike,
    evaluation_values: pd.Series,
    arms: Arms,
    *,
    reference: pd.DataFrame,
    sizes: Sequence[int] = (5, 10, 15),
    draws: int = 500,
    seed: int = RESAMPLING_SEED,
    percentiles: tuple[float, float] = MEDICAL,
    vary: str = "both",
    clusters: ArrayLike | None = None,
) -> Finding:
    """Refit the cut-points on subsamples of the calibration cases and replay the whole evaluation split (K1-K5).

    ``evaluation_values`` is the coordinate by case. ``reference`` is the deployed frame of the budget to beat.
    ``vary="high"`` refits the rollback cut only (K5). The first row is the full calibration.
    Where ``clusters`` numbers patients with several cases, patients are drawn, each with all of its cases.
    """
    pool = np.asarray(calibration_values, dtype=np.float64)
    if vary not in ("both", "high"):
        raise BadInput(f"vary is 'both' or 'high', got {vary!r}")
    fitted = tuple(np.percentile(pool, percentiles))
    harm, metric = (_arm_values(arms, evaluation_values.index, name) for name in ("ha", "metric"))
    u, rng = evaluation_values.to_numpy(float), np.random.default_rng(seed)
    to_beat = mean_or_nan(reference["ha"])
    whole = _replayed(u, np.array([fitted[0]]), np.array([fitted[1]]), harm, metric)
    units = np.unique(np.arange(len(pool)) if clusters is None else np.asarray(clusters), return_inverse=True)[1]
    patients = int(units.max()) + 1
    records = [_row(patients, whole, to_beat, len(u))]
    for size in sizes:
        if size > patients:
            raise TooFewCases(f"a subsample of {size} needs at least as many calibration cases, got {patients}")
        chosen = rng.permuted(np.tile(np.arange(patients), (draws, 1)), axis=1)[:, :size]
        low, high = np.array([np.percentile(pool[np.isin(units, row)], percentiles) for row in chosen]).T
        low = np.full(draws, fitted[0]) if vary == "high" else low
        records.append(_row(size, _replayed(u, np.minimum(low, high), high, harm, metric), to_beat, len(u)))
    made = {"draws": draws, "seed": seed, "percentiles": list(percentiles), "vary": vary, "to_beat": to_beat}
    made["cuts"] = [float(cut) for cut in fitted]
    return Finding("sensitivity.calibration", pd.DataFrame(records), len(u), "K1-K5", made)


def _arm_values(arms: Arms, cases: pd.Index, column: str) -> Floats:
    return np.column_stack([arms[name].set_index("case")[column].reindex(cases).to_numpy(float) for name in BUCKETS])


def _replayed(u: Floats, low: Floats, high: Floats, harm: Floats, metric: Floats) -> dict[str, Floats]:
    """Cohort means in every draw."""
    bucket = buckets_at(u, low, high)[:, :, None]
    took = {
        name: np.take_along_axis(values[None], bucket, axis=2)[:, :, 0]
        for name, values in (("ha", harm), ("metric", metric))
    }
    return {name: np.nanmean(values, axis=1) for name, values in took.items()}


def _row(size: int, drawn: dict[str, Floats], to_beat: float, n: int) -> dict[str, Any]:
    record: dict[str, Any] = {"cases": size, "draws": len(drawn["ha"]), "n": n}
    for name, values in drawn.items():
        low, high = np.percentile(values, [2.5, 97.5])
        record |= {name: float(values.mean()), f"{name}_low": float(low), f"{name}_high": float(high)}
    return {**record, "ha_worst": float(drawn["ha"].max()), "beats_reference": float((drawn["ha"] < to_beat).mean())}
