"""Style of the figures, and SVG whose colors follow the light or dark page.

Figures use the colors that are named here. On the page each color becomes a CSS variable, so one drawing is readable on
a light and on a dark page. The files in ``figures/`` keep the light colors on white.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK = "#1d2126"  # text and axes
MUTED = "#6a7078"  # secondary text, baselines
FAINT = "#d9d6cf"  # grid and rules
HARM = "#c43d1b"  # harmed
HELP = "#2b6cb0"  # helped
OURS = "#0f766e"  # the router and the stop rules
SOURCE = "#8a6d1f"  # M0
PAPER = "#fefdfb"  # the page itself
SOFT = "#dbe9e6"  # the region in which a promise holds

_NAMES = ("ink", "muted", "faint", "harm", "help", "ours", "source", "paper", "soft")  # of the CSS variables
_VARIABLES = dict(zip((INK, MUTED, FAINT, HARM, HELP, OURS, SOURCE, PAPER, SOFT), _NAMES, strict=True))

_STYLE = mpl.rc_params_from_file(Path(__file__).with_name("figures.mplstyle"), use_default_template=False)


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure with its title and caption."""

    id: str
    title: str
    figure: Figure
    caption: str = ""
    paper: str = ""  # label of the paper's figure of the same shape, such as fig:pareto


@contextmanager
def inked() -> Iterator[None]:
    """Draw in the style of casewise."""
    with mpl.rc_context(_STYLE):
        yield


def canvas(width: float = 6.4, height: float = 3.2, *, columns: int = 1, rows: int = 1) -> tuple[Figure, Any]:
    """Make a figure and its axes without the global state of pyplot; call it inside :func:`inked`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def svg_text(figure: Figure, *, id: str) -> str:
    """Return the figure as SVG with text and without dates; ids begin with ``id``, so that figures can share a page."""
    buffer = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": id}):
        FigureCanvasSVG(figure)
        _lay_out(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return re.sub(r"(\bid=\"|url\(#|href=\"#)", rf"\1{id}-", buffer.getvalue())


def _lay_out(figure: Figure) -> None:
    """Arrange the axes once; later drawings of the figure keep the arrangement."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")


def page_svg(drawn: str, *, title: str) -> str:
    """Prepare an SVG for the page: colors become CSS variables, width follows the column, the title is its label."""
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", drawn, flags=re.DOTALL)
    opening = re.search(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', drawn)
    if opening is None:
        raise RuntimeError("matplotlib wrote an SVG without a viewBox")
    width = 1.5 * float(opening[1].split()[2])
    begin = f'<svg viewBox="{opening[1]}" style="max-width:{width:.0f}px" role="img" aria-label="{html.escape(title)}">'
    drawn = drawn.replace(opening[0], begin, 1)
    drawn = drawn.replace("font-family: 'DejaVu Sans', sans-serif", "font-family: var(--sans)")
    for color, variable in _VARIABLES.items():
        drawn = drawn.replace(color, f"var(--{variable})")
    drawn = drawn.replace("xlink:href", "href")
    # coordinates with two decimals halve the file; text between tags stays as it is
    return re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d+\.\d{2})\d+", r"\1", tag[0]), drawn)


def write_png(path: Path, figure: Figure, *, dots_per_inch: int = 160) -> None:
    """Write the figure on white, for slides."""
    with mpl.rc_context(_STYLE):
        FigureCanvasAgg(figure)
        _lay_out(figure)
        figure.savefig(path, format="png", dpi=dots_per_inch, facecolor="white", metadata={"Software": None})


def draw_forest(panels: Sequence[tuple[str, pd.DataFrame]]) -> Figure:
    """Draw estimates with their intervals, one line each; filled where the interval excludes zero.

    ``panels`` holds (title, frame with name, estimate, low, high): one panel for each quantity, with the same names.
    """
    names = list(dict.fromkeys(name for _, frame in panels for name in frame["name"]))
    with inked():
        figure, axes = canvas(9.2, 0.9 + 0.29 * max(len(names), 3), columns=len(panels))
        for at, (title, frame) in enumerate(panels):
            _panel(axes[0, at], frame, names)
            axes[0, at].set_title(title)
            if at:
                axes[0, at].tick_params(labelleft=False)
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


def draw_reliability(promised: Sequence[float], risks: Mapping[str, Sequence[float]]) -> Figure:
    """Draw risks that were found against the promised ones, on the safe side where it is shaded (L6, L10)."""
    top = 1.1 * max([0.05, *promised, *chain(*risks.values())])
    with inked():
        figure, axes = canvas(5.4, 4.2)
        axis = axes[0, 0]
        axis.fill_between([0, top], [0, top], color=SOFT, linewidth=0)
        axis.plot([0, top], [0, top], color=MUTED, linestyle=(0, (4, 3)), linewidth=1)
        for (name, found), color in zip(risks.items(), (OURS, HARM), strict=False):
            axis.plot(promised, found, marker="o", color=color, label=name, markersize=6)
        axis.set(xlim=(0, top), ylim=(0, top), xlabel="promised risk α", ylabel="risk found")
        axis.legend(loc="upper left")
    return figure


POINT = 0.01  # a change of the metric that counts
NAMED = 40  # more cases than this are drawn without their names


def change_svg(rows: Sequence[tuple[str, float, float]], *, metric: str, id: str = "changes") -> str:
    """Draw how much every case changed: a hollow dot before, a filled dot after, sorted by the change.

    Args:
        rows: Name, metric before and metric after of each case.
        metric: Name of the metric.
        id: Prefix of ids inside the SVG.

    Returns:
        An SVG for a page.
    """
    shown = sorted(rows, key=lambda row: row[2] - row[1])
    with inked():
        figure, axes = canvas(5.4, 0.7 + (0.2 if len(shown) <= NAMED else 0.07) * max(len(shown), 3))
        axis = axes[0, 0]
        for place, (_, before, after) in enumerate(shown):
            color = HARM if after < before - POINT else OURS if after > before else MUTED
            axis.plot([before, after], [place, place], color=color, linewidth=1.6)
            axis.plot(before, place, "o", color=color, markersize=4.5, markerfacecolor=PAPER)
            axis.plot(after, place, "o", color=color, markersize=4.5)
        short = [name if len(name) < 26 else f"{name[:12]}…{name[-12:]}" for name, _, _ in shown]
        names = short if len(shown) <= NAMED else []
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(-0.7, len(shown) - 0.3)
        axis.grid(visible=False, axis="y")
        axis.set_xlabel(metric)
    return page_svg(svg_text(figure, id=id), title=f"{metric} of each case before and after")
