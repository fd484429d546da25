"""What counts as a region: the minimum area and the connectivity varied, with decisions held fixed (N1-N3, S20)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd

from casewise.archive.store import Archive
from casewise.core.errors import BadInput
from casewise.core.records import SOURCE, State
from casewise.measure.masks import least_voxels
from casewise.measure.metrics.harm import Harm, harm
from casewise.measure.regions import Connectivity
from casewise.study.finding import Finding, rows
from casewise.study.trajectories import mean_or_nan

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
