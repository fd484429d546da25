"""How HA depends on what was chosen: the number of calibration cases (K), the smallest region that counts (N1)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from casewise.render.ink import HARM, MUTED, OURS, canvas, inked


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


def draw_min_area(frame: pd.DataFrame, *, ours: str) -> Figure:
    """``frame``: min_area, method, ha; one line a method, ours colored, the others told apart by their dashes."""
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
