"""Where the router puts the cases: the coordinate of each, the cut-points, and what fixed-K would have done to it."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from casewise.render.ink import HARM, HELP, INK, MUTED, canvas, inked


def draw_buckets(frame: pd.DataFrame, *, coordinate: str, cuts: list[tuple[float, float]], reference: str) -> Figure:
    """``frame``: value (the coordinate), ha and change under the reference; one dot a case."""
    with inked():
        figure, axes = canvas(6.9, 3.2)
        axis = axes[0, 0]
        for side, color, name in (
            (frame["change"] < 0, HARM, f"made worse by {reference}"),
            (frame["change"] > 0, HELP, f"made better by {reference}"),
            (frame["change"] == 0, MUTED, "unchanged"),
        ):
            if side.any():
                part = frame[side]
                axis.scatter(
                    part["value"], part["ha"], s=18, color=color, alpha=0.7, linewidth=0, label=name,
                    rasterized=len(part) > 2000,
                )  # fmt: skip
        for cut in sorted({cut for pair in cuts for cut in pair}):
            axis.axvline(cut, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        positive = frame["value"][frame["value"] > 0]
        if len(positive) and positive.max() > 50 * max(np.median(positive), 1e-12):
            axis.set_xscale("symlog", linthresh=float(np.median(positive)))
        axis.set(xlabel=f"{coordinate} after one update", ylabel=f"HA under {reference}")
        axis.set_ylim(-0.03, 1.03)
        axis.legend(loc="upper right")
    return figure
