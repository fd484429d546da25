"""Panels of painted masks side by side (fig:med-qual and its relatives)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from casewise.report.ink import canvas, inked


def draw_masks(panels: Sequence[tuple[str, Any]], *, rows: int = 1) -> Figure:
    """``panels``: (title, picture of (rows, columns, 3)), row by row; drawn without smoothing."""
    tall = max(picture.shape[0] / picture.shape[1] for _, picture in panels)
    columns = len(panels) // rows
    with inked():
        figure, axes = canvas(9.2, (9.2 / columns * tall + 0.5) * rows, columns=columns, rows=rows)
        for axis, (title, picture) in zip(axes.flat, panels, strict=True):
            axis.imshow(picture, interpolation="nearest")
            axis.set_title(title, fontsize=8.5, fontweight="normal")
            axis.set_axis_off()
    return figure
