"""bench.html: the table of a benchmark, the change of each case by method, and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from markupsafe import Markup

from casewise.core.text import UNIT, pluralize
from casewise.measure.metrics import METRICS
from casewise.render.ink import page_svg, svg_text
from casewise.render.tables import Table, interval, number
from casewise.report.page import render_page
from casewise.study.summary_text import draw_changes

PICTURED = 8  # methods in the picture


def bench_page(result: Mapping[str, Any], made: Table, notes: Sequence[str]) -> str:
    """Write the page of a benchmark as one file that loads nothing.

    Args:
        result: Result of ``casewise.bench``.
        made: Its table.
        notes: Sentences below the table.

    Returns:
        HTML.
    """
    metric = METRICS[result["metric"]].title
    methods = [one for one in result["methods"] if one["name"] != "M0"]
    frames = [(one["name"], pd.DataFrame(one["cases"])) for one in methods[:PICTURED]]
    drawn = [(name, frame) for name, frame in frames if len(frame) and frame["change"].notna().any()]
    picture = ""
    if drawn:
        figure = draw_changes(drawn, metric=metric)
        picture = page_svg(svg_text(figure, id="changes"), title="Change of each case by method")
    return render_page(
        "bench.html.j2", result=result, headline=_headline(methods, metric), table=made, notes=notes, metric=metric,
        picture=Markup(picture), size=f"{pluralize(len(result['evaluation']), 'evaluation case')}, "
        f"{pluralize(len(result['calibration']), 'calibration case')}",
        unit=UNIT[0], left_out=len(methods) - len(frames),
    )  # fmt: skip


def _headline(methods: Sequence[Mapping[str, Any]], metric: str) -> str:
    """Name the method with the largest mean gain, and whether its interval shows a gain."""
    known = [one for one in methods if one["scores"]["gain"] is not None]
    if not known:
        return f"No method has a defined {metric}."
    best = max(known, key=lambda one: float(one["scores"]["gain"]))
    scores = best["scores"]
    if scores["gain"] <= 0:
        return f"No method has a higher mean {metric} than M0."
    counts = f"{scores['helped']} cases helped, {scores['hurt']} hurt"
    if scores["low"] is None:
        gain = number(scores["gain"], 4, signed=True)
        return f"{best['name']} has the largest mean gain: {gain} {metric} ({counts})."
    gain, _, spread = interval(scores["gain"], scores["low"], scores["high"], 4, signed=True).partition(" ")
    shown = "" if scores["low"] > 0 else "; the interval contains zero, so no gain is shown"
    return f"{best['name']} has the largest mean gain: {gain} {metric} {spread}, {counts}{shown}."
