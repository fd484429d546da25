"""fig:crc. Promised risk against risk on evaluation cases; the shaded half is where the promise holds (L10)."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from casewise.render.ink import INK, MUTED, OURS, SOFT, canvas, inked

_SHAPES = "osD^vP"


def draw_reliability(curves: Mapping[str, pd.DataFrame]) -> Figure:
    """``curves``: name to (alpha, risk); levels that are infeasible are left out, never drawn at an end point (L6)."""
    top = max(
        (float(frame[["alpha", "risk"]].to_numpy().max()) for frame in curves.values() if len(frame)), default=0.3
    )
    top = 1.1 * max(top, 0.05)
    with inked():
        figure, axes = canvas(5.4, 4.2)
        axis = axes[0, 0]
        axis.fill_between([0, top], [0, top], color=SOFT, linewidth=0)
        axis.plot([0, top], [0, top], color=MUTED, linestyle=(0, (4, 3)), linewidth=1)
        for shape, (name, frame) in zip(_SHAPES, curves.items(), strict=False):
            color = OURS if shape == "o" else INK
            axis.plot(frame["alpha"], frame["risk"], marker=shape, color=color, label=name, markersize=6)
        axis.set(xlim=(0, top), ylim=(0, top), xlabel="promised risk α", ylabel="risk on evaluation cases")
        axis.legend(loc="upper left")
    return figure
