"""One part of the report: sentences, tables, figures, and the findings behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from casewise.render.tables import Table
from casewise.study.finding import Finding


@dataclass(frozen=True, eq=False)
class Picture:
    """A matplotlib figure with the words that it needs; ``ink.py`` writes it as SVG and PNG."""

    id: str
    title: str
    figure: Any
    caption: str = ""
    paper: str = ""  # the label of the figure that it has the shape of, such as fig:pareto


@dataclass(frozen=True, eq=False)
class Section:
    """What one analysis has to say."""

    id: str
    title: str
    lead: str = ""  # the finding, in a sentence or two
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    findings: tuple[Finding, ...] = ()  # go to results.json at full precision
    notes: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)  # what was not run, and what it needs
