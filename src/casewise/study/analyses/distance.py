"""HA against the 95 % Hausdorff distance of the mask, and against its change."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from casewise.archive.store import Archive
from casewise.core.records import SOURCE, State
from casewise.measure.metrics.surface import hd95
from casewise.render.ink import HARM, INK, MUTED, Picture, canvas, inked
from casewise.render.tables import number
from casewise.study.finding import Finding, Section, rows, show
from casewise.study.statistics.ranks import spearman, spearman_p
from casewise.study.study import Study
from casewise.study.trajectories import horizon, unshrunk


def section(study: Study) -> Section:
    """fig:ha-hd95 and its correlations."""
    measured = distances(study.evaluation)
    found = harm_and_distance(study.outcomes, measured)
    at = study.uncontrolled[["case", "ha"]].merge(measured, on="case")
    at = at[~at["empty"].astype(bool)].dropna(subset=["ha", "hd95", "hd95_source"])
    unit = "mm" if all(entry.spacing_mm for entry in study.evaluation.entries.values()) else "voxels"
    caption = f"n = {len(at)}; the line in A is a least-squares guide; in B solid is the mean, dashed no change."
    title = "HA against a boundary metric"
    pictures = (Picture("ha-hd95", title, draw_distance(at, unit=unit), caption, "fig:ha-hd95"),) if len(at) else ()
    missing = {} if pictures else {"figure of HA and HD95": "no case has a surface in every mask"}
    made = found.made
    lead = (
        f"HD95 changes by {number(made['mean_change'], 2, signed=True)} {unit} on average (median "
        f"{number(made['median_change'], 2, signed=True)}). {made['zero_ha']} cases have HA 0, {made['both_move']} "
        f"have both HA and a change of HD95, and {made['excluded']} are excluded because a mask is empty."
    )
    caption = "HD95 pools the distances of both directions and uses the spacing of each case; an empty mask has none."
    tables = (show("ha-hd95", "HA and HD95", found, heads={"rho": "ρ"}, caption=caption),)
    return Section("distance", "HA and surface distance", lead, tables, pictures, (found,), found.notes, missing)


def distances(archive: Archive) -> pd.DataFrame:
    """HD95 of M0 and of the last step against the label, foreground, in mm if the spacing is known.

    An empty mask has no surface: its distance is NaN and ``empty`` is true (M9).
    """
    records = []
    for case in archive.ids:
        if archive.entries[case].labelled:
            masks, label = archive.masks(case), archive.label(case)
            spacing = archive.entries[case].spacing_mm
            pair = [hd95(masks[which], label, spacing_mm=spacing) for which in (SOURCE, State(archive.steps))]
            records.append({"case": case, "hd95_source": pair[0], "hd95": pair[1], "empty": bool(np.isnan(pair).any())})
    return rows(records, "case hd95_source hd95 empty")


def harm_and_distance(outcomes: pd.DataFrame, measured: pd.DataFrame) -> Finding:
    """Spearman of HA with HD95(M_k) and with its change, over all cases and over those in which both move (M10)."""
    ladder = unshrunk(outcomes)
    depth = horizon(ladder)
    joined = ladder.loc[ladder["step"] == depth, ["case", "ha"]].merge(measured, on="case")
    kept = joined.dropna(subset=["ha", "hd95", "hd95_source"])
    ha, after = kept["ha"].to_numpy(float), kept["hd95"].to_numpy(float)
    change = after - kept["hd95_source"].to_numpy(float)
    moving = (ha > 0) & (change != 0)
    pairs = {"HA, HD95": (ha, after), "HA, change of HD95": (ha, change), "both move": (ha[moving], change[moving])}
    records = []
    for name, (first, second) in pairs.items():
        rho = spearman(first, second)
        reason = "fewer than three cases, or one side does not vary" if np.isnan(rho) else ""
        p = spearman_p(rho, len(first))
        records.append({"pairing": name, "rho": rho, "p": p, "n": len(first), "reason": reason})
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


def draw_distance(frame: pd.DataFrame, *, unit: str = "mm") -> Figure:
    """Draw HA against HD95 (A, with a least-squares guide) and against its change (B)."""
    harm, after = frame["ha"].to_numpy(float), frame["hd95"].to_numpy(float)
    change = after - frame["hd95_source"].to_numpy(float)
    with inked():
        figure, axes = canvas(9.2, 3.4, columns=2)
        first, second = axes[0]
        for axis, value in ((first, after), (second, change)):
            axis.scatter(harm, value, s=20, color=HARM, alpha=0.65, linewidth=0, rasterized=len(harm) > 2000)
        first.set(xlabel="HA", ylabel=f"HD95 of the adapted mask ({unit})", title="A  HA and HD95")
        second.set(xlabel="HA", ylabel=f"change of HD95 against M0 ({unit})", title="B  HA and the change of HD95")
        if len(harm) > 2 and np.ptp(harm) > 0:
            slope, start = np.polyfit(harm, after, 1)
            ends = np.array([harm.min(), harm.max()])
            first.plot(ends, start + slope * ends, color=INK, linewidth=1.1)
        second.axhline(0, color=MUTED, linestyle=(0, (4, 3)), linewidth=1)
        second.axhline(float(change.mean()), color=INK, linewidth=1.2)
    return figure
