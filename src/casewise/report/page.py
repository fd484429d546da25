"""Render pages from templates: one HTML file each, styles inside, everything that came from data escaped."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from casewise.core.text import pluralize

TEMPLATES = Path(__file__).parent / "templates"


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.globals["pluralize"] = pluralize
    made.globals["style"] = Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))
    return made


def render_page(template: str, **content: Any) -> str:
    """Return the page that a template makes of its content."""
    return _environment().get_template(template).render(**content)
