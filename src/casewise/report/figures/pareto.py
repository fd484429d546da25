"""fig:pareto. HA against the metric, one panel per deployment; right is safer, y is not shared (tier C)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from casewise.render.ink import MUTED, OURS, SOURCE, canvas, inked

_SHAPES = "osD^vP*X<>ph8dH"


def draw_pareto(panels: Mapping[str, pd.DataFrame], *, ours: frozenset[str], metric: str) -> Figure:
    """``panels``: title to (method, metric, ha); ours colored, baselines grey, shape names the method, M0 dashed."""
    columns = len(panels) if len(panels) < 4 else 2 if len(panels) == 4 else 3
    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(name for frame in panels.values() for name in frame["method"] if name != "M0"))
    shapes = dict(zip(names, _SHAPES * 3, strict=False))
    with inked():
        figure, axes = canvas(max(3.1 * columns, 6.2), 2.7 * rows + 0.9, columns=columns, rows=rows)
        for axis, (title, frame) in zip(axes.flat, panels.items(), strict=False):
            _panel(axis, frame, shapes, ours)
            axis.set_title(title)
            axis.set(xlabel="HA (right is safer)", ylabel=metric)
        for axis in list(axes.flat)[len(panels) :]:
            axis.remove()
        handles = _handles(axes.flat[0], shapes, ours)
        figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    return figure


def _panel(axis: Any, frame: pd.DataFrame, shapes: Mapping[str, str], ours: frozenset[str]) -> None:
    for _, row in frame.iterrows():
        if row["method"] == "M0":
            axis.axhline(row["metric"], color=SOURCE, linestyle=(0, (4, 3)), linewidth=1)
            continue
        is_ours = row["method"] in ours
        axis.scatter(
            row["ha"],
            row["metric"],
            marker=shapes[row["method"]],
            s=62 if is_ours else 38,
            color=OURS if is_ours else MUTED,
            zorder=3 if is_ours else 2,
        )
    axis.invert_xaxis()
    axis.margins(0.16)


def _handles(axis: Any, shapes: Mapping[str, str], ours: frozenset[str]) -> list[Any]:
    marks = [
        axis.plot([], [], linestyle="", marker=shape, color=OURS if name in ours else MUTED, label=name)[0]
        for name, shape in shapes.items()
    ]
    return [*marks, axis.plot([], [], color=SOURCE, linestyle=(0, (4, 3)), linewidth=1, label="M0")[0]]
