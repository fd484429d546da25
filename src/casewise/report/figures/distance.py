"""fig:ha-hd95. Does HA follow a boundary metric that nobody optimized? A: HD95 after adaptation. B: its change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from casewise.render.ink import HARM, INK, MUTED, canvas, inked


def draw_distance(frame: pd.DataFrame, *, unit: str = "mm") -> Figure:
    """``frame``: ha, hd95_source, hd95, one row per case with both defined. The line in A is an OLS guide, no claim."""
    harm = frame["ha"].to_numpy(float)
    with inked():
        figure, axes = canvas(9.2, 3.4, columns=2)
        _scatter(axes[0, 0], harm, frame["hd95"].to_numpy(float), f"HD95 of the adapted mask ({unit})")
        _guide(axes[0, 0], harm, frame["hd95"].to_numpy(float))
        axes[0, 0].set_title("A  HA and HD95")
        change = (frame["hd95"] - frame["hd95_source"]).to_numpy(float)
        _scatter(axes[0, 1], harm, change, f"change of HD95 against M0 ({unit})")
        axes[0, 1].axhline(0, color=MUTED, linestyle=(0, (4, 3)), linewidth=1)
        axes[0, 1].axhline(float(change.mean()), color=INK, linewidth=1.2)
        axes[0, 1].set_title("B  HA and the change of HD95")
    return figure


def _scatter(axis: Any, harm: np.ndarray, value: np.ndarray, label: str) -> None:
    axis.scatter(harm, value, s=20, color=HARM, alpha=0.65, linewidth=0, rasterized=len(harm) > 2000)
    axis.set_xlabel("HA")
    axis.set_ylabel(label)


def _guide(axis: Any, harm: np.ndarray, value: np.ndarray) -> None:
    if len(harm) < 3 or np.ptp(harm) == 0:
        return
    slope, start = np.polyfit(harm, value, 1)
    ends = np.array([harm.min(), harm.max()])
    axis.plot(ends, start + slope * ends, color=INK, linewidth=1.1)
