"""report.html of a study: one self-contained file. Everything that came from data is escaped by the template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from casewise import __version__
from casewise.render.ink import Picture, page_svg
from casewise.render.tables import Table
from casewise.report import cases
from casewise.study.finding import Section
from casewise.study.inventory import FIGURES, TABLES
from casewise.study.story import advised, keys, story, words
from casewise.study.study import Study


@cache
def _environment() -> Environment:
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def _template(name: str) -> str:
    return (resources.files("casewise.report") / "templates" / name).read_text(encoding="utf-8")


def render(
    content: Mapping[str, Any], *, sections: Sequence[Section], hero: Sequence[Picture], drawings: Mapping[str, str]
) -> str:
    """The page from its content; ``drawings`` (picture id to SVG) become inline SVG in the page's own colors."""
    return (
        _environment()
        .from_string(_template("report.html.j2"))
        .render(
            **content,
            sections=[_drawn(section, drawings) for section in sections],
            hero=[_svg(picture, drawings) for picture in hero],
            style=Markup(_template("style.css")),
            script=Markup(_template("page.js")),
        )
    )


def _drawn(section: Section, drawings: Mapping[str, str]) -> dict[str, Any]:
    fields = ("id", "title", "lead", "notes", "tables", "missing")
    pictures = [_svg(one, drawings) for one in section.pictures]
    return {**{name: getattr(section, name) for name in fields}, "pictures": pictures}


def _svg(picture: Picture, drawings: Mapping[str, str]) -> dict[str, Any]:
    drawn = Markup(page_svg(drawings[picture.id], title=picture.title))
    return {**{name: getattr(picture, name) for name in ("id", "title", "caption", "paper")}, "svg": drawn}


def content(
    study: Study,
    *,
    shown: Sequence[cases.Shown],
    inventory: Table,
    origin: Sequence[Table],
    here: Mapping[str, int],
    checked: int,
) -> dict[str, Any]:
    """Everything but the sections and the figures."""
    return {
        **_heading(study),
        **_cases(study, shown),
        "inventory": inventory,
        "inventory_lead": (
            f"{here['tables']} of the paper's {TABLES} tables and {here['figures']} of its {FIGURES} figures are made "
            "from what was given; the others say what they need."
        ),
        "provenance": list(origin),
        "audit_lead": (
            f"The report recomputed bucket sums, help and hurt sums and HA identities for {checked} methods; all "
            f"agree. Archive {study.evaluation.digest[:12]}, seed {study.seed}, B = {study.resamples}."
        ),
        "footer": f"casewise {__version__}. One file, no network. Every number is in results.json at full precision.",
    }


def _heading(study: Study) -> dict[str, Any]:
    title = str(study.configuration.get("dataset") or study.evaluation.path.name)
    size = f"{len(study.evaluation.ids)} evaluation cases × {study.evaluation.steps} updates"
    notices = [one.configuration.get("notice") for one in (study.evaluation, study.calibration)]
    return {
        "title": title,
        "kicker": f"{title} · {size} · policy “{study.policy.name}”",
        "notices": [*advised(study), *dict.fromkeys(str(notice) for notice in notices if notice)],
        "story": story(study),
        "keys": keys(study),
        "words": words(study),
    }


def _cases(study: Study, shown: Sequence[cases.Shown]) -> dict[str, Any]:
    pictured = sum(bool(one.pictures) for one in shown)
    return {
        "cases": list(shown),
        "case_columns": cases.columns(study),
        "case_sorted": 3,
        "case_facts": {one.id: one.facts for one in shown},
        "case_lead": (
            f"Worst first: by the change of {study.metric} under {study.reference}, without control. "
            "Open a case to see more."
        ),
        "case_note": f"{len(shown)} cases, {pictured} with pictures of the slice that shows most harm.",
        "panel_names": cases.panel_names(study),
        "buckets": sorted({one.bucket for one in shown}),
        "groups": sorted({one.group for one in shown}),
        "reference": study.reference,
        "metric": study.metric,
    }
