"""Do harmful regions look different? Harmful against beneficial by area, compactness, distance and share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from casewise.archive.store import Archive
from casewise.core.records import SOURCE, State
from casewise.measure.metrics.harm import harm
from casewise.render.tables import Column, number, rows_of, table
from casewise.study.finding import Finding, Section, rows
from casewise.study.study import Study


def section(study: Study) -> Section:
    """tab:supp-edit-geometry."""
    found = region_geometry(region_features(study.evaluation))
    columns = (
        Column("feature", "Feature", text=True),
        Column("mean_harmful", "mean harmful", 4),
        Column("mean_beneficial", "mean beneficial", 4),
        Column("p", "p", 4),
        Column("cliff_d", "Cliff's d", 2, signed=True),
        Column("harmful", "n harmful"),
        Column("beneficial", "n beneficial"),
    )
    caption = (
        f"Regions of {study.reference} against M0. Mann–Whitney U, two-sided; regions of one case are not "
        "independent. d is harmful minus beneficial, so negative means that harmful regions score lower."
    )
    made = table(
        "edit-geometry", "Harmful and beneficial regions", columns, rows_of(found.table, columns), caption=caption,
        paper="tab:supp-edit-geometry",
    )  # fmt: skip
    lead = found.reason or _strongest(found)
    return Section("geometry", "What harmful edits look like", lead, (made,), (), (found,), found.notes)


def _strongest(found: Finding) -> str:
    frame = found.table.dropna(subset=["cliff_d"])
    if frame.empty:
        return "There are too few regions on one side for a contrast."
    row = frame.loc[frame["cliff_d"].abs().idxmax()]
    return (
        f"The largest contrast is {row['feature']} (Cliff's d = {number(row['cliff_d'], 2, signed=True)}) over "
        f"{int(row['harmful'])} harmful and {int(row['beneficial'])} beneficial regions of {found.n} cases."
    )


Floats = NDArray[np.float64]


FEATURES = ("area", "compactness", "distance", "fraction")


SMALL = (0.02, 0.05, 0.10)


def region_features(
    archive: Archive, *, step: int | None = None, min_area: int | None = None, foreground: bool | None = None
) -> pd.DataFrame:
    """One row for each region of the edit at ``step`` (the last unless given) of every labelled case (M5-M7).

    compactness = area / boundary voxels squared; distance = between centroids, to the largest region, in voxels.
    """
    configured = archive.configuration
    options: dict[str, Any] = {
        "min_area": int(configured.get("min_area", 16)) if min_area is None else min_area,
        "foreground": bool(configured.get("foreground", True)) if foreground is None else foreground,
        "ignore": configured.get("ignore"),
    }
    state = State(archive.steps if step is None else step)
    records = [record for case in archive.ids for record in _case(archive, case, state, options)]
    return rows(records, ("case", "region", "side", *FEATURES))


def _case(archive: Archive, case: str, state: State, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not archive.entries[case].labelled:
        return
    masks = archive.masks(case)
    for row in harm(masks[SOURCE], masks[state], archive.label(case), **options).table:
        features = {
            "area": row["area"],
            "compactness": row["compactness"],
            "distance": row["distance"],
            "fraction": row["share"],
        }
        numbers = {name: float(value) for name, value in features.items()}
        yield {"case": case, "region": int(row["number"]), "side": str(row["verdict"]), **numbers}


def region_geometry(features: pd.DataFrame, *, small: Sequence[float] = SMALL) -> Finding:
    """Means, Mann-Whitney U (two-sided, asymptotic, tie correction) and Cliff's d, harmful minus beneficial.

    Neutral regions are dropped and counted. "small@5%" is whether a region is below 5 % of |D| (M5).
    """
    harmful, beneficial = (features[features["side"] == name] for name in ("harmful", "beneficial"))
    neutral = len(features) - len(harmful) - len(beneficial)
    columns = {name: (harmful[name].to_numpy(float), beneficial[name].to_numpy(float)) for name in FEATURES}
    for share in small:
        pair = tuple((part["fraction"] < share).to_numpy(float) for part in (harmful, beneficial))
        columns[f"small@{share:.0%}"] = (pair[0], pair[1])
    records = [{"feature": name, **_contrast(first, second)} for name, (first, second) in columns.items()]
    made = {"neutral": neutral, "neutral_share": neutral / len(features) if len(features) else float("nan")}
    return Finding("geometry", pd.DataFrame(records), features["case"].nunique(), "M5-M8", made)


def cliff_d(u: float, first: int, second: int) -> float:
    r"""Cliff's d from U of the first sample, :math:`d = 2U/(n_1 n_2) - 1` (M8).

    >>> cliff_d(0.0, 3, 4)
    -1.0
    """
    return 2 * u / (first * second) - 1


def _contrast(first: Floats, second: Floats) -> dict[str, Any]:
    sizes = {"harmful": len(first), "beneficial": len(second)}
    means = {
        "mean_harmful": float(first.mean()) if len(first) else np.nan,
        "mean_beneficial": float(second.mean()) if len(second) else np.nan,
    }
    if not len(first) or not len(second):
        nothing = {"u": np.nan, "p": np.nan, "cliff_d": np.nan}
        return {**sizes, **means, **nothing, "reason": "one side has no region"}
    if np.ptp(np.concatenate([first, second])) == 0:
        return {**sizes, **means, "u": len(first) * len(second) / 2, "p": 1.0, "cliff_d": 0.0, "reason": ""}
    found = stats.mannwhitneyu(first, second, alternative="two-sided", method="asymptotic")
    u = float(found.statistic)
    return {
        **sizes,
        **means,
        "u": u,
        "p": float(found.pvalue),
        "cliff_d": cliff_d(u, len(first), len(second)),
        "reason": "",
    }
