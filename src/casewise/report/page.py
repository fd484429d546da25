"""Render pages from templates: one HTML file each, styles inside, everything that came from data escaped."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from casewise.core.text import pluralize

TEMPLATES = Path(__file__).parent / "templates"


def render_page(template: str, *, filters: Mapping[str, Callable[..., Any]] | None = None, **content: Any) -> str:
    """Return the page that a template makes of its content; ``filters`` format values in it."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= dict(filters or {})
    made.globals["pluralize"] = pluralize
    made.globals |= {name: Markup((TEMPLATES / file).read_text("utf-8")) for name, file in INCLUDED.items()}
    return re.sub(r'<table class="cards.*?</table>', _titled, made.get_template(template).render(**content), flags=re.S)


INCLUDED = {"style": "style.css", "script": "page.js"}


def _titled(table: re.Match[str]) -> str:
    """Write the head of a column into each of its cells, because a narrow screen shows every row as a card."""
    titles = [re.sub("<.*?>", "", head) for head in re.findall(r"<th[ >].*?</th>", table[0], re.S)]

    def row(found: re.Match[str]) -> str:
        own = iter(titles)
        return re.sub("<td", lambda _: f'<td data-title="{next(own, "")}"', found[0])

    return re.sub("<tr.*?</tr>", row, table[0], flags=re.S)
