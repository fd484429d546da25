"""Estimates with their intervals, one line each; filled where the interval excludes zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from casewise.render.ink import INK, MUTED, OURS, canvas, inked


def draw_forest(panels: Sequence[tuple[str, pd.DataFrame]], *, label: str = "") -> Figure:
    """``panels``: (title, frame with name, estimate, low, high); one shared list of names, one panel per quantity."""
    names = list(dict.fromkeys(name for _, frame in panels for name in frame["name"]))
    with inked():
        figure, axes = canvas(9.2, 0.9 + 0.29 * max(len(names), 3), columns=len(panels))
        for at, (title, frame) in enumerate(panels):
            _panel(axes[0, at], frame, names)
            axes[0, at].set_title(title)
            if at:
                axes[0, at].tick_params(labelleft=False)
        if label:
            figure.supxlabel(label, fontsize=9)
    return figure


def _panel(axis: Any, frame: pd.DataFrame, names: Sequence[str]) -> None:
    places = {name: len(names) - 1 - at for at, name in enumerate(names)}
    for _, row in frame.dropna(subset=["estimate"]).iterrows():
        place = places[row["name"]]
        separated = row["low"] > 0 or row["high"] < 0
        color = OURS if separated else MUTED
        axis.plot([row["low"], row["high"]], [place, place], color=color, linewidth=1.6)
        axis.plot(
            row["estimate"], place, "o", color=color, markersize=5.5, markerfacecolor=color if separated else "none"
        )
    axis.axvline(0, color=INK, linewidth=0.8)
    axis.set_yticks(list(places.values()), list(places))
    axis.set_ylim(-0.7, len(names) - 0.3)
    axis.grid(visible=False, axis="y")
