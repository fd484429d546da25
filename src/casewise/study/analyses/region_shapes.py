"""Harmful against beneficial regions by area, compactness, distance and share of the edit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from casewise.archive.store import Archive
from casewise.core.records import SOURCE, State
from casewise.measure.metrics.harm import harm
from casewise.render.tables import Column, number
from casewise.study.finding import Finding, Section, rows, show
from casewise.study.study import Study

FEATURES = {"area": "area", "compactness": "compactness", "distance": "distance", "fraction": "share"}
SMALL = (0.02, 0.05, 0.10)


def section(study: Study) -> Section:
    """tab:supp-edit-geometry."""
    found = region_geometry(region_features(study.evaluation))
    caption = (
        f"Regions of {study.reference} against M0. Mann–Whitney U, two-sided; regions of one case are not independent. "
        "d is harmful minus beneficial, so negative means that harmful regions have lower values."
    )
    heads: dict[str, str | Column] = {
        "mean_harmful": Column("mean_harmful", "mean harmful", 4),
        "mean_beneficial": Column("mean_beneficial", "mean beneficial", 4),
        "p": Column("p", "p", 4),
        "cliff_d": Column("cliff_d", "Cliff's d", 2, signed=True),
        "harmful": "harmful regions",
        "beneficial": "beneficial regions",
    }
    keys, paper = "feature mean_harmful mean_beneficial p cliff_d harmful beneficial", "tab:supp-edit-geometry"
    title = "Harmful and beneficial regions"
    made = show("edit-geometry", title, found, keys, heads=heads, caption=caption, paper=paper)
    frame = found.table.dropna(subset=["cliff_d"])
    lead = "There are too few regions on one side for a contrast."
    if len(frame):
        row = frame.loc[frame["cliff_d"].abs().idxmax()]
        lead = (
            f"The largest contrast is {row['feature']} (Cliff's d = {number(row['cliff_d'], 2, signed=True)}) over "
            f"{int(row['harmful'])} harmful and {int(row['beneficial'])} beneficial regions of {found.n} cases."
        )
    return Section("geometry", "What harmful edits look like", lead, (made,), (), (found,))


def region_features(archive: Archive) -> pd.DataFrame:
    """One row for each region of the edit at the last step of every labelled case (M5-M7).

    compactness = area / boundary voxels squared; distance = between centroids, to the largest region, in voxels.
    """
    configured = archive.configuration
    options: dict[str, Any] = {
        "min_area": int(configured.get("min_area", 16)),
        "foreground": bool(configured.get("foreground", True)),
        "ignore": configured.get("ignore"),
    }
    records = []
    for case in archive.ids:
        if not archive.entries[case].labelled:
            continue
        masks = archive.masks(case)
        for row in harm(masks[SOURCE], masks[State(archive.steps)], archive.label(case), **options).table:
            numbers = {name: float(row[source]) for name, source in FEATURES.items()}
            records.append({"case": case, "region": int(row["number"]), "side": str(row["verdict"]), **numbers})
    return rows(records, ("case", "region", "side", *FEATURES))


def region_geometry(features: pd.DataFrame) -> Finding:
    """Means, Mann-Whitney U (two-sided, asymptotic, tie correction) and Cliff's d, harmful minus beneficial.

    Neutral regions are dropped and counted. "small@5%" is whether a region is below 5 % of |D| (M5).
    """
    harmful, beneficial = (features[features["side"] == name] for name in ("harmful", "beneficial"))
    neutral = len(features) - len(harmful) - len(beneficial)
    columns = {name: (harmful[name], beneficial[name]) for name in FEATURES}
    columns |= {f"small@{share:.0%}": (harmful["fraction"] < share, beneficial["fraction"] < share) for share in SMALL}
    records = [
        {"feature": name, **_contrast(first.to_numpy(float), second.to_numpy(float))}
        for name, (first, second) in columns.items()
    ]
    made = {"neutral": neutral, "neutral_share": neutral / len(features) if len(features) else float("nan")}
    return Finding("geometry", pd.DataFrame(records), features["case"].nunique(), "M5-M8", made)


def cliff_d(u: float, first: int, second: int) -> float:
    r"""Cliff's d from U of the first sample, :math:`d = 2U/(n_1 n_2) - 1` (M8).

    >>> cliff_d(0.0, 3, 4)
    -1.0
    """
    return 2 * u / (first * second) - 1


def _contrast(first: NDArray[np.float64], second: NDArray[np.float64]) -> dict[str, Any]:
    record: dict[str, Any] = {"harmful": len(first), "beneficial": len(second)}
    record["mean_harmful"] = float(first.mean()) if len(first) else np.nan
    record["mean_beneficial"] = float(second.mean()) if len(second) else np.nan
    if not len(first) or not len(second):
        return {**record, "u": np.nan, "p": np.nan, "cliff_d": np.nan, "reason": "one side has no region"}
    u, p = len(first) * len(second) / 2, 1.0
    if np.ptp(np.concatenate([first, second])) > 0:
        found = stats.mannwhitneyu(first, second, alternative="two-sided", method="asymptotic")
        u, p = float(found.statistic), float(found.pvalue)
    return {**record, "u": u, "p": p, "cliff_d": cliff_d(u, len(first), len(second)), "reason": ""}
