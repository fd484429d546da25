"""HA with other minimum areas and connectivities of a region; decisions stay as they were deployed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from casewise.archive.store import Archive
from casewise.core.errors import BadInput
from casewise.core.records import SOURCE
from casewise.measure.metrics.harm import Harm, harm
from casewise.measure.regions import Connectivity
from casewise.render.tables import Cell, Column, Table
from casewise.study.finding import Finding, Section, not_run, notes_of, rows, show
from casewise.study.study import Study
from casewise.study.trajectories import mean_or_nan

FACTORS = (0.5, 1.0, 2.0, 4.0)  # of the deployed min_area: 8, 16, 32, 64 for the paper's 16 (N1)
_KEYS = ["case", "step", "shrink"]


def section(study: Study) -> Section:
    """tab:app-tau and rank invariance."""
    title = "The smallest region that counts"
    if not study.is_router:
        reason = f"the policy is a {study.controller.name}; the sweep compares a router with a budget"
        return not_run("min-area", title, "sweep of min_area", reason)
    areas = tuple(sorted({max(1, round(study.measure["min_area"] * factor)) for factor in FACTORS}))
    sweep = sweep_outcomes(study.evaluation, min_areas=areas, connectivities=("face", "full"))
    swept = min_area_sweep(sweep, study.methods, router=study.ours, reference=study.retrospective)
    ranks = rank_invariance(swept)
    tables = (
        _min_area_table(study, swept),
        show("rank-invariance", "Rank of each method over the sweep", ranks, collapsed=True),
    )
    frame = swept.table[swept.table["connectivity"] == "face"]
    own = frame[frame["method"] == study.ours]
    lead = (
        f"Under face connectivity the {study.title(study.ours)} has less HA than {study.retrospective} at "
        f"{int((own['difference'] < 0).sum())} of {len(own)} minimum areas."
    )
    return Section("min-area", title, lead, tables, (), (swept, ranks), notes_of(swept, ranks))


def _min_area_table(study: Study, swept: Finding) -> Table:
    methods = [name for name in swept.table["method"].unique() if name in study.budgets or name == study.ours]
    cells: list[dict[str, Cell]] = []
    for (connectivity, least), part in swept.table.groupby(["connectivity", "min_area"], sort=False):
        by_method = part.set_index("method")
        ours = by_method.loc[study.ours]
        row: dict[str, Cell] = {"connectivity": str(connectivity), "min_area": int(least)}
        row |= {str(name): float(by_method.loc[name, "ha"]) for name in methods}
        cells.append({**row, "difference": float(ours["difference"]), "scored": int(ours["scored"])})
    heads: dict[str, str | Column] = {str(name): study.title(str(name)) for name in methods}
    heads |= {
        "connectivity": Column("connectivity", "Connectivity", text=True),
        "min_area": "smallest region (voxels)",
        "difference": Column("difference", f"router − {study.retrospective}", signed=True),
    }
    caption = "HA recomputed from the stored masks. It can only fall as the minimum grows: fewer regions count."
    return show("min-area", "The smallest region that counts", cells, heads=heads, caption=caption, paper="tab:app-tau")


def sweep_outcomes(
    archive: Archive, *, min_areas: Sequence[int], connectivities: Sequence[Connectivity] = ("face",)
) -> pd.DataFrame:
    """HA, BA and region count of every labelled candidate under every setting."""
    options = {
        "foreground": bool(archive.configuration.get("foreground", True)),
        "ignore": archive.configuration.get("ignore"),
    }
    records = [record for case in archive.ids for record in _case(archive, case, min_areas, connectivities, options)]
    return rows(records, (*_KEYS, "connectivity", "min_area", "ha", "ba", "regions", "delta", "area"))


def _case(
    archive: Archive, case: str, min_areas: Sequence[int], kinds: Sequence[Connectivity], options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    if not archive.entries[case].labelled:
        return
    masks, label = archive.masks(case), archive.label(case)
    for state, mask in masks.items():
        for kind in kinds:
            found = harm(masks[SOURCE], mask, label, min_area=1, connectivity=kind, **options)
            for area in min_areas:
                key = {"case": case, "step": state.step, "shrink": state.shrink}
                yield {**key, "connectivity": kind, "min_area": area, **_thresholded(found, area)}


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

    The setting changes how an edit is scored, not the decisions. Region gates deploy masks that were not recorded, so
    they are left out and named.
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
