"""The analyses in the order of the page. ``ANALYSES`` is the list; ``--only`` takes its names.

An analysis is one file with a function ``section(study)``: its findings go to results.json, its tables to CSV, LaTeX
and the page, its pictures to SVG and PNG. Adding one is that file, its import and its line here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace

from casewise.core.errors import CasewiseError
from casewise.core.registry import Registry
from casewise.judge.outcomes import judged_sentence, judged_share
from casewise.study.analyses import (
    accounting,
    association,
    backbones,
    balance,
    budget,
    certificate,
    classes,
    controls,
    cost,
    criteria,
    deployment,
    distance,
    early,
    frozen,
    geometry,
    helphurt,
    learned,
    learning_rates,
    min_area,
    objectives,
    qualitative,
    quality,
    ranking,
    rerun,
    routing,
    scale,
    search,
    sensitivity,
)
from casewise.study.finding import Section
from casewise.study.study import Progress, Study

Analysis = Callable[[Study], Section]
_HA = re.compile(r"\bHA\b|harmful", re.IGNORECASE)

ANALYSES: Registry[Analysis] = Registry(
    "analysis",
    {
        "deployment": deployment.section,
        "helphurt": helphurt.section,
        "quality": quality.section,
        "qualitative": qualitative.section,
        "routing": routing.section,
        "controls": controls.section,
        "budget": budget.section,
        "association": association.section,
        "ranking": ranking.section,
        "accounting": accounting.section,
        "cost": cost.section,
        "sensitivity": sensitivity.section,
        "min-area": min_area.section,
        "classes": classes.section,
        "geometry": geometry.section,
        "distance": distance.section,
        "criteria": criteria.section,
        "objectives": objectives.section,
        "certificate": certificate.section,
        "early": early.section,
        "learned": learned.section,
        "search": search.section,
        "balance": balance.section,
        "frozen": frozen.section,
        "rerun": rerun.section,
        "learning-rates": learning_rates.section,
        "backbones": backbones.section,
        "scale": scale.section,
    },
)


def chosen_analyses(only: Collection[str] | None) -> dict[str, Analysis]:
    """The analyses of these names, or all; a wrong name lists them."""
    return {name: ANALYSES[name] for name in (only or ANALYSES)}


def with_judged_share(section: Section, study: Study) -> Section:
    """A section in which every table and picture of HA says how much of the edit HA judged (of the full horizon)."""
    said = f"{judged_sentence(judged_share(study.uncontrolled))} after {study.reference}."

    def told(caption: str, *texts: str) -> str:
        prints_ha = any(_HA.search(text) for text in texts) and "HA judged" not in caption
        return f"{caption} {said[0].upper()}{said[1:]}".strip() if prints_ha else caption

    tables = tuple(
        replace(one, caption=told(one.caption, one.title, *(column.title for column in one.columns)))
        for one in section.tables
    )
    pictures = tuple(replace(one, caption=told(one.caption, one.title, one.caption)) for one in section.pictures)
    return replace(section, tables=tables, pictures=pictures)


def sections_of(
    study: Study, analyses: dict[str, Analysis] | None = None, *, progress: Progress = lambda _: None
) -> list[Section]:
    """The section of every analysis; what cannot be computed from this study says so instead of stopping the report."""
    found = []
    for name, analysis in (chosen_analyses(None) if analyses is None else analyses).items():
        progress(name)
        try:
            found.append(with_judged_share(analysis(study), study))
        except CasewiseError as error:
            found.append(Section(name, name.capitalize(), missing={name: str(error)}))
    return found
