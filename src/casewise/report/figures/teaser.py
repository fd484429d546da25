"""fig:teaser. A: the metric is flat while HA moves with the budget. B: HA of each method at about the same metric."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from casewise.render.ink import HARM, INK, MUTED, OURS, canvas, inked


def draw_teaser(
    ladder: pd.DataFrame, methods: pd.DataFrame, *, ours: frozenset[str], metric: str, curve: str
) -> Figure:
    """``ladder``: step, metric, ha. ``methods``: method, metric, ha, in table order; M0 is left out of panel B.

    ``curve`` names the metric of panel A, which may be averaged in another way (micro) than that of panel B (A11).
    """
    with inked():
        figure, axes = canvas(9.2, 3.3, columns=2)
        _panel_ladder(axes[0, 0], ladder, curve)
        _panel_methods(axes[0, 1], methods[methods["method"] != "M0"], ours, metric)
    return figure


def _panel_ladder(axis: Any, ladder: pd.DataFrame, curve: str) -> None:
    axis.plot(ladder["step"], ladder["ha"], color=HARM, marker="o", markersize=5)
    axis.set_xlabel("updates k")
    axis.set_ylabel("HA", color=HARM)
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_title("A  the mean hides the harm")
    other = axis.twinx()
    other.grid(visible=False)
    other.spines["right"].set_visible(True)
    other.plot(ladder["step"], ladder["metric"], color=INK, marker="s", markersize=4, linestyle=(0, (4, 2)))
    other.set_ylabel(curve, color=INK)
    middle = float(ladder["metric"].mean())
    spread = max(0.02, 2 * float((ladder["metric"] - middle).abs().max()))
    other.set_ylim(middle - spread, middle + spread)


def _panel_methods(axis: Any, methods: pd.DataFrame, ours: frozenset[str], metric: str) -> None:
    where = range(len(methods))[::-1]
    colors = [OURS if name in ours else MUTED for name in methods["method"]]
    axis.barh(list(where), methods["ha"], color=colors, height=0.62)
    for place, ha, value in zip(where, methods["ha"], methods["metric"], strict=True):
        axis.text(ha, place, f"  {ha:.3f}   {metric} {value:.3f}", va="center", fontsize=8, color=INK)
    axis.set_yticks(list(where), list(methods["method"]))
    axis.set_xlim(0, max(0.02, float(methods["ha"].max()) * 1.6))
    axis.set_xlabel("HA (lower is safer)")
    axis.grid(visible=False, axis="y")
    axis.set_title("B  harm that each method accepts")
