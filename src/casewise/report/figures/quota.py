"""Did the ranking matter, or only the number of cases rolled back? Selectors at one quota against random assignment."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from casewise.render.ink import FAINT, HARM, MUTED, OURS, SOURCE, canvas, inked


def draw_quota(selectors: pd.DataFrame, *, low: float, high: float, mean: float, reference: float, name: str) -> Figure:
    """``selectors``: selector, ha at the deployed quota; the band is 95 % of random assignments, dotted is fixed-K."""
    frame = selectors.sort_values("ha", ascending=False, kind="stable").reset_index(drop=True)
    with inked():
        figure, axes = canvas(6.9, 0.9 + 0.3 * max(len(frame), 4))
        axis = axes[0, 0]
        axis.axvspan(low, high, color=FAINT, linewidth=0)
        axis.axvline(mean, color=MUTED, linewidth=1.2)
        axis.axvline(reference, color=HARM, linewidth=1.2, linestyle=(0, (1, 2)))
        for place, row in frame.iterrows():
            axis.plot(row["ha"], place, "o", color=_color(str(row["selector"])), markersize=6.5)
        axis.set_yticks(range(len(frame)), list(frame["selector"]))
        axis.set_ylim(-0.7, len(frame) - 0.3)
        axis.set_xlabel("HA at the same bucket sizes and actions")
        axis.set_xlim(left=-0.03 * axis.get_xlim()[1])
        axis.annotate("random", (mean, len(frame) - 0.3), ha="center", va="bottom", fontsize=8, annotation_clip=False)
        axis.annotate(name, (reference, len(frame) - 0.3), ha="center", va="bottom", fontsize=8, annotation_clip=False)
        axis.grid(visible=False, axis="y")
    return figure


def _color(selector: str) -> str:
    if selector == "deployed":
        return OURS
    return SOURCE if selector.startswith("oracle") or selector == "m0" else MUTED
