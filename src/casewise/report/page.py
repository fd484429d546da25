"""report.html: one self-contained file. Everything that came from data is escaped by the template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from casewise.render.ink import page_svg
from casewise.report.section import Picture, Section


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
