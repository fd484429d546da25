"""Is HA about more than overlap? HA against the Hausdorff distance of the mask and its change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from casewise.archive.store import Archive
from casewise.core.records import SOURCE, State
from casewise.measure.metrics.surface import hd95
from casewise.render.ink import HARM, INK, MUTED, Picture, canvas, inked
from casewise.render.tables import Column, Table, number, rows_of, table
from casewise.study.finding import Finding, Section
from casewise.study.statistics.ranks import spearman, spearman_p
from casewise.study.study import Study
from casewise.study.trajectories import horizon, unshrunk


def section(study: Study) -> Section:
    """fig:ha-hd95 and its correlations (P, figures)."""
    measured = distances(study.evaluation)
    found = harm_and_distance(study.outcomes, measured)
    at = study.uncontrolled[["case", "ha"]].merge(measured, on="case")
    at = at[~at["empty"].astype(bool)].dropna(subset=["ha", "hd95", "hd95_source"])
    unit = "mm" if all(entry.spacing_mm for entry in study.evaluation.entries.values()) else "voxels"
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


def distances(archive: Archive, *, step: int | None = None) -> pd.DataFrame:
    """HD95 of M0 and of ``step`` (the last unless given) against the label, foreground, in mm where spacing is known.

    An empty mask has no surface: its distance is NaN and ``empty`` is true (M9).
    """
    state = State(archive.steps if step is None else step)
    records = []
    for case in archive.ids:
        if archive.entries[case].labelled:
            masks, label = archive.masks(case), archive.label(case)
            spacing = archive.entries[case].spacing_mm
            pair = [hd95(masks[which], label, spacing_mm=spacing) for which in (SOURCE, state)]
            records.append({"case": case, "hd95_source": pair[0], "hd95": pair[1], "empty": bool(np.isnan(pair).any())})
    return pd.DataFrame(records, columns=["case", "hd95_source", "hd95", "empty"])


def harm_and_distance(outcomes: pd.DataFrame, measured: pd.DataFrame, *, step: int | None = None) -> Finding:
    """Spearman of HA with HD95(M_k) and with its change, over all cases and where both move (M10)."""
    ladder = unshrunk(outcomes)
    depth = horizon(ladder) if step is None else step
    harm = ladder.loc[ladder["step"] == depth, ["case", "ha"]]
    joined = harm.merge(measured, on="case")
    kept = joined.dropna(subset=["ha", "hd95", "hd95_source"])
    ha, after = kept["ha"].to_numpy(float), kept["hd95"].to_numpy(float)
    change = after - kept["hd95_source"].to_numpy(float)
    moving = (ha > 0) & (change != 0)
    pairs = {"HA, HD95": (ha, after), "HA, change of HD95": (ha, change), "both move": (ha[moving], change[moving])}
    records = [_row(name, *pair) for name, pair in pairs.items()]
    made = {
        "step": depth,
        "excluded": len(joined) - len(kept),
        "zero_ha": int((ha == 0).sum()),
        "unmoved": int((change == 0).sum()),
        "both_move": int(moving.sum()),
        "mean_change": float(change.mean()) if len(change) else float("nan"),
        "median_change": float(np.median(change)) if len(change) else float("nan"),
    }
    return Finding("distance", pd.DataFrame(records), len(kept), "M9, M10", made)


def _row(name: str, first: np.ndarray, second: np.ndarray) -> dict[str, Any]:
    rho = spearman(first, second)
    reason = "fewer than three cases, or one side does not vary" if np.isnan(rho) else ""
    return {"pairing": name, "rho": rho, "p": spearman_p(rho, len(first)), "n": len(first), "reason": reason}


def draw_distance(frame: pd.DataFrame, *, unit: str = "mm") -> Figure:
    """``frame``: ha, hd95_source, hd95, one row per case with both defined. The line in A is an OLS guide, no claim."""
    harm = frame["ha"].to_numpy(float)
    with inked():
        figure, axes = canvas(9.2, 3.4, columns=2)
        _scatter(axes[0, 0], harm, frame["hd95"].to_numpy(float), f"HD95 of the adapted mask ({unit})")
        _guide(axes[0, 0], harm, frame["hd95"].to_numpy(float))
        axes[0, 0].set_title("A  HA and HD95")
        change = (frame["hd95"] - frame["hd95_source"]).to_numpy(float)
        _scatter(axes[0, 1], harm, change, f"change of HD95 against M0 ({unit})")
        axes[0, 1].axhline(0, color=MUTED, linestyle=(0, (4, 3)), linewidth=1)
        axes[0, 1].axhline(float(change.mean()), color=INK, linewidth=1.2)
        axes[0, 1].set_title("B  HA and the change of HD95")
    return figure


def _scatter(axis: Any, harm: np.ndarray, value: np.ndarray, label: str) -> None:
    axis.scatter(harm, value, s=20, color=HARM, alpha=0.65, linewidth=0, rasterized=len(harm) > 2000)
    axis.set_xlabel("HA")
    axis.set_ylabel(label)


def _guide(axis: Any, harm: np.ndarray, value: np.ndarray) -> None:
    if len(harm) < 3 or np.ptp(harm) == 0:
        return
    slope, start = np.polyfit(harm, value, 1)
    ends = np.array([harm.min(), harm.max()])
    axis.plot(ends, start + slope * ends, color=INK, linewidth=1.1)
