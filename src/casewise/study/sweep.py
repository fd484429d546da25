"""What counts as a region: the minimum area and the connectivity varied, with decisions held fixed (N1-N3, S20)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from casewise.archive.store import Archive
from casewise.core.errors import BadInput
from casewise.core.records import SOURCE, State
from casewise.measure.metrics.harm import Harm, harm
from casewise.measure.regions import Connectivity
from casewise.study.finding import Finding, rows
from casewise.study.trajectories import mean_or_nan

MIN_AREAS = (8, 16, 32, 64)
_KEYS = ["case", "step", "shrink"]


def sweep_outcomes(
    archive: Archive, *, min_areas: Sequence[int] = MIN_AREAS, connectivities: Iterable[Connectivity] = ("face",)
) -> pd.DataFrame:
    """HA, BA and region count of every labelled candidate under every setting; one labelling for each connectivity."""
    options = {
        "foreground": bool(archive.configuration.get("foreground", True)),
        "ignore": archive.configuration.get("ignore"),
    }
    kinds = list(connectivities)
    records = [record for case in archive.ids for record in _case(archive, case, min_areas, kinds, options)]
    columns = (*_KEYS, "connectivity", "min_area", "ha", "ba", "regions", "delta", "area")
    return rows(records, columns)


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
                yield {**_key(case, state), "connectivity": kind, "min_area": area, **_thresholded(found, area)}


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
    router reads the region count, refit and replay it on the sweep's counts for the other question.
    """
    for name in (router, reference):
        if name not in methods:
            raise BadInput(f"the sweep compares {router!r} with {reference!r}, methods are {', '.join(methods)}")
    records: list[dict[str, Any]] = []
    for (kind, area), part in sweep.groupby(["connectivity", "min_area"], sort=True):
        scores = {name: _scored(part, frame) for name, frame in methods.items()}
        order = sorted({score["ha"] for score in scores.values()})
        gap = scores[router]["ha"] - scores[reference]["ha"]
        for name, score in scores.items():
            place = {"connectivity": kind, "min_area": int(area), "method": name, "rank": order.index(score["ha"]) + 1}
            records.append({**place, **score, "difference": gap if name == router else np.nan})
    columns = ("connectivity", "min_area", "method", "ha", "scored", "n", "rank", "difference")
    n = max((len(frame) for frame in methods.values()), default=0)
    return Finding("sweep.min_area", rows(records, columns), n, "N1, N3", {"router": router, "reference": reference})


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
