"""The analyses in the order of the page: ``ANALYSES``; ``--only`` takes its names.

An analysis is one file with a function ``section(study)``: its findings go to results.json, its tables to CSV, LaTeX
and the page, its figures to SVG and PNG. To add one, write that file and add it to the list here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace

from casewise.core.errors import CasewiseError
from casewise.core.registry import Registry
from casewise.judge.outcomes import judged_sentence, judged_share
from casewise.study.analyses import (
    association,
    budget,
    clinical_measures,
    controls,
    cost,
    criteria,
    cut_points,
    deployed_methods,
    edited_area,
    elsewhere,
    gain,
    helphurt,
    promise,
    qualitative,
)
from casewise.study.finding import Section, not_run
from casewise.study.study import Progress, Study

Analysis = Callable[[Study], Section]
_HA = re.compile(r"\bHA\b|harmful", re.IGNORECASE)

ANALYSES: Registry[Analysis] = Registry(
    "analysis",
    {
        "deployment": deployed_methods.section,
        "helphurt": helphurt.section,
        "quality": gain.section,
        "measures": clinical_measures.section,
        "qualitative": qualitative.section,
        "routing": cut_points.routing_section,
        "controls": controls.section,
        "budget": budget.section,
        "association": association.section,
        "ranking": association.ranking_section,
        "accounting": edited_area.accounting_section,
        "cost": cost.section,
        "sensitivity": cut_points.sensitivity_section,
        "min-area": edited_area.min_area_section,
        "geometry": edited_area.geometry_section,
        "distance": edited_area.distance_section,
        "criteria": criteria.section,
        "objectives": criteria.objectives_section,
        "certificate": promise.section,
        "early": budget.early_section,
        "frozen": elsewhere.frozen_section,
        "rerun": elsewhere.rerun_section,
        "learning-rates": budget.learning_rates_section,
        "backbones": elsewhere.backbones_section,
        "scale": elsewhere.scale_section,
    },
)


def chosen_analyses(only: Collection[str] | None) -> dict[str, Analysis]:
    """The analyses of these names, or all; a wrong name lists them."""
    return {name: ANALYSES[name] for name in (only or ANALYSES)}


def finished(section: Section, study: Study) -> Section:
    """Name the metric and the methods in the tables, and say below tables and figures of HA how much HA judged."""
    said = f"{judged_sentence(judged_share(study.uncontrolled))} after {study.reference}."

    def with_share(caption: str, *texts: str) -> str:
        prints_ha = any(_HA.search(text) for text in texts) and "HA judged" not in caption
        return f"{caption} {said[0].upper()}{said[1:]}".strip() if prints_ha else caption

    tables = []
    for one in section.tables:
        columns = tuple(replace(column, title=column.title.replace("{metric}", study.metric)) for column in one.columns)
        rows = tuple(
            {**row, "method": study.title(str(row["method"]))} if row.get("method") in study.methods else row
            for row in one.rows
        )
        caption = with_share(one.caption, one.title, *(column.title for column in columns))
        tables.append(replace(one, columns=columns, rows=rows, caption=caption))
    pictures = tuple(replace(one, caption=with_share(one.caption, one.title, one.caption)) for one in section.pictures)
    return replace(section, tables=tuple(tables), pictures=pictures)


def sections_of(
    study: Study, analyses: dict[str, Analysis] | None = None, *, progress: Progress = lambda _: None
) -> list[Section]:
    """The section of every analysis; one that cannot be computed says why."""
    found = []
    for name, analysis in (chosen_analyses(None) if analyses is None else analyses).items():
        progress(name)
        try:
            found.append(finished(analysis(study), study))
        except CasewiseError as error:
            found.append(not_run(name, name.capitalize(), name, str(error)))
    return found
