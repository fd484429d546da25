"""What harmful edits look like, and whether HA goes with a boundary metric that nobody optimized (M5-M10)."""

from __future__ import annotations

import pandas as pd

from casewise.render.cells import number
from casewise.render.tables import Column, Table, rows_of, table
from casewise.report.figures.distance import draw_distance
from casewise.report.material import Material
from casewise.report.section import Picture, Section
from casewise.study.distance import distances, harm_and_distance
from casewise.study.finding import Finding
from casewise.study.geometry import region_features, region_geometry


def geometry(material: Material) -> Section:
    """tab:supp-edit-geometry (P 8)."""
    found = region_geometry(region_features(material.evaluation))
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
        f"Regions of {material.reference} against M0. Mann–Whitney U, two-sided; regions of one case are not "
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


def distance(material: Material) -> Section:
    """fig:ha-hd95 and its correlations (P, figures)."""
    measured = distances(material.evaluation)
    found = harm_and_distance(material.outcomes, measured)
    at = material.uncontrolled[["case", "ha"]].merge(measured, on="case")
    at = at[~at["empty"].astype(bool)].dropna(subset=["ha", "hd95", "hd95_source"])
    unit = "mm" if all(entry.spacing_mm for entry in material.evaluation.entries.values()) else "voxels"
    pictures = (_picture(at, unit),) if len(at) else ()
    missing = {} if pictures else {"figure of HA and HD95": "no case has a surface in every mask"}
    tables, lead = (_table(found),), _lead(found, unit)
    return Section("distance", "HA and surface distance", lead, tables, pictures, (found,), found.notes, missing)


def _lead(found: Finding, unit: str) -> str:
    made = found.made
    if found.reason:
        return found.reason
    return (
        f"HD95 changes by {number(made.get('mean_change'), 2, signed=True)} {unit} on average (median "
        f"{number(made.get('median_change'), 2, signed=True)}); {int(made.get('zero_ha', 0))} cases have HA 0, "
        f"{int(made.get('both_move', 0))} have both HA and a change of HD95, and {int(made.get('excluded', 0))} are "
        "excluded because a mask is empty."
    )


def _table(found: Finding) -> Table:
    columns = (Column("pairing", "Pair", text=True), Column("rho", "Spearman ρ"), Column("p", "p", 4), Column("n", "n"))
    caption = (
        "HD95 pools the distances of both directions, uses each case's spacing, and is undefined for an empty mask."
    )
    return table("ha-hd95", "HA and HD95", columns, rows_of(found.table, columns), caption=caption)


def _picture(frame: pd.DataFrame, unit: str) -> Picture:
    caption = (
        f"n = {len(frame)}; the line in A is a least-squares guide; in B solid is the cohort mean, dashed no change."
    )
    figure = draw_distance(frame, unit=unit)
    return Picture("ha-hd95", "HA against a boundary metric", figure, caption, "fig:ha-hd95")
