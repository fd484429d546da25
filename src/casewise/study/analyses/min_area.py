"""What counts as a region: the minimum area and the connectivity varied, with decisions held fixed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from casewise.archive.store import Archive
from casewise.core.errors import BadInput
from casewise.core.records import SOURCE, State
from casewise.judge.controllers.depth import FragStop
from casewise.measure.masks import least_voxels
from casewise.measure.metrics.harm import Harm, harm
from casewise.measure.regions import Connectivity
from casewise.render.ink import MUTED, OURS, Picture, canvas, inked
from casewise.render.tables import NOT_RUN, Cell, Column, Table, rows_of, table
from casewise.study.finding import Finding, Section, notes_of, rows
from casewise.study.study import Study
from casewise.study.trajectories import mean_or_nan

FACTORS = (0.5, 1.0, 2.0, 4.0)  # of the deployed min_area: 8, 16, 32, 64 for the paper's 16 (N1)


def section(study: Study) -> Section:
    """tab:app-tau and rank invariance."""
    title = "The smallest region that counts"
    if not study.is_router:
        reason = f"the policy is a {study.controller.name}; the sweep compares a router with a budget"
        return Section("min-area", title, missing={"sweep of min_area": reason})
    swept = _swept(study)
    ranks = rank_invariance(swept)
    tables, found = [_min_area_table(study, swept), _rank_table(study, ranks)], [swept, ranks]
    missing = {}
    unspaced = sum(entry.spacing_mm is None for entry in study.evaluation.entries.values())
    if study.extras.min_areas_mm and unspaced:
        missing["sweep of min_area in mm"] = f"{unspaced} evaluation cases have no spacing; record them with one"
    elif study.extras.min_areas_mm:
        found.append(_swept_mm(study))
        tables.append(_min_area_table(study, found[-1], unit="mm"))
    pictures = (_min_area_picture(study, swept),)
    notes = notes_of(swept, ranks)
    return Section("min-area", title, _lead(study, swept), tuple(tables), pictures, tuple(found), notes, missing)


def _lead(study: Study, swept: Finding) -> str:
    own = swept.table[(swept.table["connectivity"] == "face") & (swept.table["method"] == study.ours)]
    below = int((own["difference"] < 0).sum())
    return (
        f"Under face connectivity the {study.title(study.ours)} has less HA than {study.retrospective} at {below} of "
        f"{len(own)} minimum areas."
    )


def _swept(study: Study) -> Finding:
    least = study.measure["min_area"]
    areas = tuple(sorted({max(1, round(least * factor)) for factor in FACTORS}))
    sweep = sweep_outcomes(study.evaluation, min_areas=areas, connectivities=("face", "full"))
    return min_area_sweep(sweep, study.methods, router=study.ours, reference=study.retrospective)


def _swept_mm(study: Study) -> Finding:
    areas = tuple(sorted(set(study.extras.min_areas_mm)))
    sweep = sweep_outcomes(study.evaluation, min_areas=areas, connectivities=("face", "full"), unit="mm")
    found = min_area_sweep(sweep, study.methods, router=study.ours, reference=study.retrospective)
    return replace(found, name="sweep.min_area_mm")


def _min_area_table(study: Study, swept: Finding, *, unit: Literal["voxels", "mm"] = "voxels") -> Table:
    methods = [name for name in swept.table["method"].unique() if name in study.budgets or name == study.ours]
    columns = [Column("connectivity", "Connectivity", text=True), Column("min_area", f"min_area ({unit})", 2)]
    columns += [Column(str(name), study.title(str(name))) for name in methods]
    columns += [
        Column("difference", f"router − {study.retrospective}", signed=True),
        Column("scored", "cases with regions"),
    ]
    rows: list[dict[str, Cell]] = []
    for (connectivity, least), part in swept.table.groupby(["connectivity", "min_area"], sort=False):
        by_method = part.set_index("method")
        row: dict[str, Cell] = {
            "connectivity": str(connectivity),
            "min_area": int(least) if unit == "voxels" else float(least),
        }
        row |= {str(name): float(by_method.loc[name, "ha"]) if name in by_method.index else NOT_RUN for name in methods}
        ours = by_method.loc[study.ours]
        rows.append({**row, "difference": float(ours["difference"]), "scored": int(ours["scored"])})
    caption = (
        "HA recomputed from the stored masks. HA can only fall as min_area grows: |D| stays, the numerator shrinks."
    )
    if unit == "mm":
        caption += " Minima are mm² (2-D) or mm³ (3-D) and become voxels by each case's spacing."
        return table("min-area-mm", "The smallest region that counts, in mm", columns, rows, caption=caption)
    return table("min-area", "The smallest region that counts", columns, rows, caption=caption, paper="tab:app-tau")


def _rank_table(study: Study, ranks: Finding) -> Table:
    columns = (
        Column("connectivity", "Connectivity", text=True),
        Column("method", "Method", text=True),
        Column("ranks", "ranks over the sweep", text=True),
        Column("invariant", "invariant"),
    )
    named = ranks.table.assign(method=[study.title(name) for name in ranks.table["method"]])
    caption = "Does the order of the methods by HA depend on min_area?"
    return table(
        "rank-invariance", "Order of the methods", columns, rows_of(named, columns), caption=caption, collapsed=True
    )


def _min_area_picture(study: Study, swept: Finding) -> Picture:
    frame = swept.table[swept.table["connectivity"] == "face"]
    kept = frame["method"].isin([study.ours, study.reference, study.retrospective, FragStop.name])
    shown = frame[kept].assign(method=[study.title(name) for name in frame.loc[kept, "method"]])
    caption = f"n = {swept.n}; face connectivity."
    return Picture(
        "min-area", "The smallest region that counts", draw_min_area(shown, ours=study.title(study.ours)), caption
    )


MIN_AREAS = (8, 16, 32, 64)


_KEYS = ["case", "step", "shrink"]


def sweep_outcomes(
    archive: Archive,
    *,
    min_areas: Sequence[float] = MIN_AREAS,
    connectivities: Iterable[Connectivity] = ("face",),
    unit: Literal["voxels", "mm"] = "voxels",
) -> pd.DataFrame:
    """HA, BA and region count of every labelled candidate under every setting; one labelling for each connectivity.

    With ``unit="mm"`` the minima are mm2 (2-D) or mm3 (3-D) and become voxels by each case's spacing (S26).
    """
    if unit not in ("voxels", "mm"):
        raise BadInput(f"the unit of a minimum area is 'voxels' or 'mm', got {unit!r}")
    options = {
        "foreground": bool(archive.configuration.get("foreground", True)),
        "ignore": archive.configuration.get("ignore"),
    }
    kinds = list(connectivities)
    records = [
        record
        for case in archive.ids
        for record in _case(archive, case, _minima(archive, case, min_areas, unit), kinds, options)
    ]
    columns = (*_KEYS, "connectivity", "min_area", "ha", "ba", "regions", "delta", "area")
    return rows(records, columns)


def _minima(archive: Archive, case: str, min_areas: Sequence[float], unit: str) -> dict[float, int]:
    """The fewest voxels that each minimum means for this case."""
    entry = archive.entries[case]
    if unit == "voxels":
        return {area: least_voxels(int(area), axes=len(entry.shape)) for area in min_areas}
    return {area: least_voxels(1, area, entry.spacing_mm, axes=len(entry.shape)) for area in min_areas}


def _case(
    archive: Archive, case: str, minima: Mapping[float, int], kinds: Sequence[Connectivity], options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    if not archive.entries[case].labelled:
        return
    masks, label = archive.masks(case), archive.label(case)
    for state, mask in masks.items():
        for kind in kinds:
            found = harm(masks[SOURCE], mask, label, min_area=1, connectivity=kind, **options)
            for area, least in minima.items():
                yield {**_key(case, state), "connectivity": kind, "min_area": area, **_thresholded(found, least)}


def _key(case: str, state: State) -> dict[str, Any]:
    return {"case": case, "step": state.step, "shrink": state.shrink}


def _thresholded(found: Harm, min_area: int) -> dict[str, float]:
    """The same components under another minimum; HA cannot rise with it (B14)."""
    sizes = found.found.sizes
    kept = sizes >= min_area
    whole = max(found.area, 1)
    shares = {
        name: float(sizes[kept & (sign * found.worse > 0)].sum()) / whole for name, sign in (("ha", 1), ("ba", -1))
    }
    return {**shares, "regions": int(kept.sum()), "delta": found.delta, "area": found.area}


def min_area_sweep(sweep: pd.DataFrame, methods: Mapping[str, pd.DataFrame], *, router: str, reference: str) -> Finding:
    """Cohort HA of every method under every setting, its rank among them, and router minus reference (N1, N3).

    Decisions are those that were deployed: the setting changes how an edit is scored, not what was done. Where the
    router reads the region count, refit and replay it on the sweep's counts for the other question. Region gates deploy
    masks that no recorded state holds, so they are left out and named.
    """
    for name in (router, reference):
        if name not in methods:
            raise BadInput(f"the sweep compares {router!r} with {reference!r}, methods are {', '.join(methods)}")
    gated = [name for name, frame in methods.items() if (frame["action"] == "gate").any()]
    methods = {name: frame for name, frame in methods.items() if name not in gated}
    records: list[dict[str, Any]] = []
    for (kind, area), part in sweep.groupby(["connectivity", "min_area"], sort=True):
        scores = {name: _scored(part, frame) for name, frame in methods.items()}
        order = sorted({score["ha"] for score in scores.values()})
        gap = scores[router]["ha"] - scores[reference]["ha"]
        for name, score in scores.items():
            place = {"connectivity": kind, "min_area": area, "method": name, "rank": order.index(score["ha"]) + 1}
            records.append({**place, **score, "difference": gap if name == router else np.nan})
    columns = ("connectivity", "min_area", "method", "ha", "scored", "n", "rank", "difference")
    n = max((len(frame) for frame in methods.values()), default=0)
    made = {"router": router, "reference": reference}
    notes = tuple(f"{name} deploys masks that were not recorded, so it is not in the sweep" for name in gated)
    return Finding("sweep.min_area", rows(records, columns), n, "N1, N3", made, notes)


def _scored(part: pd.DataFrame, frame: pd.DataFrame) -> dict[str, Any]:
    states = frame[["case", "deployed", "shrink"]].rename(columns={"deployed": "step"})
    joined = states.merge(part, on=_KEYS, how="left")
    return {
        "ha": mean_or_nan(joined["ha"]),
        "scored": int((joined["regions"] >= 1).sum()),
        "n": int(joined["ha"].notna().sum()),
    }


def rank_invariance(found: Finding) -> Finding:
    """Whether each method keeps its rank by HA across the sweep (N2)."""
    records = [
        {"connectivity": kind, "method": name, "ranks": part["rank"].tolist(), "invariant": part["rank"].nunique() == 1}
        for (kind, name), part in found.table.groupby(["connectivity", "method"], sort=False)
    ]
    return Finding(
        "sweep.ranks", rows(records, ("connectivity", "method", "ranks", "invariant")), found.n, "N2", found.made
    )


def draw_min_area(frame: pd.DataFrame, *, ours: str) -> Figure:
    """``frame``: min_area, method, ha; one line per method, ours colored, the others told apart by their dashes."""
    dashes = iter(((0, ()), (0, (5, 2)), (0, (1, 2)), (0, (5, 1, 1, 1))) * 4)
    with inked():
        figure, axes = canvas(6.4, 3.0)
        axis = axes[0, 0]
        for method, part in frame.groupby("method", sort=False):
            style = {"color": OURS, "linewidth": 2} if method == ours else {"color": MUTED, "linestyle": next(dashes)}
            axis.plot(part["min_area"], part["ha"], marker="o", markersize=4.5, label=method, **style)
        ticks = sorted(set(frame["min_area"]))
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(int(value)) for value in ticks])
        axis.minorticks_off()
        axis.set(xlabel="smallest region that counts (voxels)", ylabel="HA")
        axis.set_ylim(bottom=-0.02 * float(frame["ha"].max() or 1))
        figure.legend(loc="outside right center")
    return figure
