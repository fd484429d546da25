"""Every case as one bar: how much adaptation changed its metric, without control and under the router."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from casewise.render.ink import FAINT, HARM, HELP, INK, MUTED, canvas, inked


def draw_changes(reference: pd.DataFrame, router: pd.DataFrame, *, names: tuple[str, str], metric: str) -> Figure:
    """Two rows of bars that share one order, worst case first: change = metric(deployed) - metric(M0) (M1)."""
    order = reference.set_index("case")["change"].sort_values(kind="stable").index
    with inked():
        figure, axes = canvas(9.2, 3.7, rows=2)
        limit = _limit(reference["change"], router["change"])
        for axis, frame, name in zip(axes[:, 0], (reference, router), names, strict=True):
            _bars(axis, frame.set_index("case").loc[order], limit)
            axis.set_title(f"{name}: {_counts(frame)}", fontsize=9.5)
        axes[0, 0].tick_params(labelbottom=False)
        axes[1, 0].set_xlabel(f"cases, worst first under {names[0]}")
        figure.supylabel(f"change of {metric} against M0", fontsize=9, color=INK)
    return figure


def _bars(axis: Any, frame: pd.DataFrame, limit: float) -> None:
    change = frame["change"].to_numpy(float)
    where = np.arange(len(change))
    shown = np.clip(np.nan_to_num(change), -limit, limit)
    for side, color in ((change < 0, HARM), (change > 0, HELP)):
        axis.vlines(where[side], 0, shown[side], color=color, linewidth=max(0.7, min(4.0, 420 / max(len(change), 1))))
    back = frame["rolled_back"].to_numpy(bool)
    axis.plot(where[back], np.zeros(back.sum()), "|", color=MUTED, markersize=4, markeredgewidth=0.8)
    axis.axhline(0, color=INK, linewidth=0.8)
    axis.set_ylim(-1.06 * limit, 1.06 * limit)
    axis.set_xlim(-1, len(change))
    axis.grid(visible=False, axis="x")
    axis.spines["bottom"].set_color(FAINT)
    axis.yaxis.set_major_locator(MaxNLocator(5, symmetric=True))


def _limit(*changes: pd.Series) -> float:
    """The axis ends at the 99th percentile of |change|, so that one outlier does not flatten the rest."""
    sizes = np.abs(np.concatenate([change.to_numpy(float) for change in changes]))
    sizes = sizes[np.isfinite(sizes)]
    return float(np.percentile(sizes, 99)) * 1.05 if sizes.size and np.percentile(sizes, 99) > 0 else 1e-3


def _counts(frame: pd.DataFrame) -> str:
    worse, better = int((frame["change"] < 0).sum()), int((frame["change"] > 0).sum())
    back = int(frame["rolled_back"].sum())
    return f"{worse} worse, {better} better" + (f", {back} rolled back" if back else "")
