"""How much hangs on which calibration cases were at hand: cut-points refitted on fewer cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from casewise.core.errors import BadInput, TooFewCases
from casewise.core.seeds import RESAMPLING_SEED
from casewise.render.cells import number
from casewise.render.ink import HARM, OURS, Picture, canvas, inked
from casewise.render.tables import Column, Table, rows_of, table
from casewise.study.assignment import BUCKETS, MEDICAL, Arms, buckets_at
from casewise.study.finding import Finding, Section
from casewise.study.study import Study, once
from casewise.study.trajectories import mean_or_nan, step_one


def section(study: Study) -> Section:
    """tab:app-calibsens."""
    title = "How much depends on the calibration cases"
    if not study.is_router:
        reason = f"the policy is a {study.controller.name}; refitting cut-points needs a router"
        return Section("sensitivity", title, missing={"sensitivity": reason})
    refit = refit_of(study)
    tables, pictures = (_refit_table(study, refit),), (_refit_picture(study, refit),)
    return Section("sensitivity", title, _lead(study, refit), tables, pictures, (refit,), refit.notes)


@once
def refit_of(study: Study) -> Finding:
    """The router with cut-points from fewer calibration cases."""
    pool, values = (step_one(frame, study.coordinate) for frame in (study.holdout, study.outcomes))
    found = calibration_sensitivity(
        pool,
        values,
        study.arms,
        reference=study.methods[study.retrospective],
        sizes=tuple(size for size in (5, 10, 15) if size < len(pool)),
        percentiles=study.percentiles,
        seed=study.seed,
    )
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
        f"With cut-points refitted on {int(worst['cases'])} calibration cases, "
        f"{100 * float(worst['beats_reference']):.0f} % of {int(worst['draws'])} draws stay below "
        f"{study.retrospective} in HA; the worst draw has HA {number(worst['ha_worst'])}."
    )


def _refit_table(study: Study, refit: Finding) -> Table:
    columns = (
        Column("cases", "calibration cases"),
        Column("metric", f"{study.metric} [95 %]", 4, interval=("metric_low", "metric_high")),
        Column("ha", "HA [95 %]", interval=("ha_low", "ha_high")),
        Column("ha_worst", "worst draw"),
        Column("beats_reference", f"below {study.retrospective} (%)", 0, percent=True),
        Column("draws", "draws"),
        Column("n", "n"),
    )
    caption = "Cut-points refitted on subsamples without replacement; brackets hold 95 % of the draws. Last row: all."
    rows = rows_of(refit.table.sort_values("cases"), columns)
    paper = "tab:app-calibsens"
    return table("calibration-sensitivity", "Fewer calibration cases", columns, rows, caption=caption, paper=paper)


def _refit_picture(study: Study, refit: Finding) -> Picture:
    frame = refit.table.sort_values("cases").fillna({"ha_low": refit.table["ha"], "ha_high": refit.table["ha"]})
    reference = float(study.methods[study.retrospective]["ha"].mean())
    figure = draw_sensitivity(frame, reference=reference, reference_name=study.retrospective)
    caption = f"Deployed HA when the cut-points come from fewer calibration cases; n = {refit.n} evaluation cases."
    return Picture("calibration-sensitivity", "Fewer calibration cases", figure, caption)


Floats = NDArray[np.float64]


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
    cuts: tuple[float, float] | None = None,
) -> Finding:
    """Refit the cut-points on subsamples of the calibration cases and replay the whole evaluation split (K1-K5).

    ``evaluation_values`` is the coordinate by case. ``reference`` is the deployed frame of the budget to beat.
    ``vary="high"`` refits the rollback cut only (K5). The first row is the full calibration, or the given ``cuts``.
    """
    pool = np.asarray(calibration_values, dtype=np.float64)
    if vary not in ("both", "high"):
        raise BadInput(f"vary is 'both' or 'high', got {vary!r}")
    fitted = tuple(np.percentile(pool, percentiles)) if cuts is None else cuts
    harm, metric = (_arm_values(arms, evaluation_values.index, name) for name in ("ha", "metric"))
    u, rng = evaluation_values.to_numpy(float), np.random.default_rng(seed)
    to_beat = mean_or_nan(reference["ha"])
    whole = _replayed(u, np.array([fitted[0]]), np.array([fitted[1]]), harm, metric)
    records = [_row(len(pool), whole, to_beat, len(u))]
    for size in sizes:
        if size > len(pool):
            raise TooFewCases(f"a subsample of {size} needs at least as many calibration cases, got {len(pool)}")
        chosen = rng.permuted(np.tile(np.arange(len(pool)), (draws, 1)), axis=1)[:, :size]
        low, high = np.percentile(pool[chosen], percentiles, axis=1)
        low = np.full(draws, fitted[0]) if vary == "high" else low
        records.append(_row(size, _replayed(u, np.minimum(low, high), high, harm, metric), to_beat, len(u)))
    made = {
        "draws": draws,
        "seed": seed,
        "percentiles": list(percentiles),
        "vary": vary,
        "cuts": [float(c) for c in fitted],
    }
    return Finding("sensitivity.calibration", pd.DataFrame(records), len(u), "K1-K5", {**made, "to_beat": to_beat})


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


def draw_sensitivity(frame: pd.DataFrame, *, reference: float, reference_name: str) -> Figure:
    """``frame``: cases, ha, ha_low, ha_high; deployed HA over refits of the cut-points on fewer calibration cases."""
    with inked():
        figure, axes = canvas(5.6, 3.0)
        axis = axes[0, 0]
        place = np.arange(len(frame))
        axis.vlines(place, frame["ha_low"], frame["ha_high"], color=OURS, linewidth=2)
        axis.plot(place, frame["ha"], "o", color=OURS, markersize=6)
        axis.axhline(reference, color=HARM, linestyle=(0, (1, 2)), linewidth=1.3)
        axis.annotate(reference_name, (len(frame) - 0.5, reference), ha="right", va="bottom", fontsize=8.5, color=HARM)
        axis.set_xticks(place, [str(int(value)) for value in frame["cases"]])
        axis.set(xlabel="calibration cases", ylabel="deployed HA")
        axis.set_ylim(bottom=0)
        axis.set_xlim(-0.6, len(frame) - 0.4)
    return figure
