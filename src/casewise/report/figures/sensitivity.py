"""How HA depends on what was chosen: the number of calibration cases (K), the smallest region that counts (N1)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from casewise.report.ink import HARM, MUTED, OURS, canvas, inked


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


def draw_min_area(frame: pd.DataFrame) -> Figure:
    """``frame``: min_area, method, ha; one line a method, the router colored."""
    with inked():
        figure, axes = canvas(5.6, 3.0)
        axis = axes[0, 0]
        for method, part in frame.groupby("method", sort=False):
            ours = method == "router"
            axis.plot(
                part["min_area"], part["ha"], marker="o", color=OURS if ours else MUTED, linewidth=2 if ours else 1.1
            )
            last = part.iloc[-1]
            axis.annotate(
                str(method), (last["min_area"], last["ha"]), (7, 0), textcoords="offset points", fontsize=8, va="center"
            )
        axis.set_xscale("log", base=2)
        ticks = sorted(set(frame["min_area"]))
        axis.set_xticks(ticks, [str(int(value)) for value in ticks])
        axis.minorticks_off()
        axis.set_xlim(ticks[0] * 0.9, ticks[-1] * 1.8)
        axis.set(xlabel="smallest region that counts (voxels)", ylabel="HA")
        axis.set_ylim(bottom=0)
    return figure
