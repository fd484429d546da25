"""The order of the documentation's sections, for mkdocs: newcomers first, decisions last."""

from __future__ import annotations

from typing import Any

ORDER = ("Tutorial", "How to", "Reference", "Explanation", "Decisions")


def on_nav(nav: Any, **_: Any) -> Any:
    """Sort the sections of the site; the home page stays in front."""
    nav.items.sort(key=lambda item: _rank(str(getattr(item, "title", "") or "")))
    return nav


def _rank(title: str) -> int:
    return ORDER.index(title) + 1 if title in ORDER else 0


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links from a page of docs/ to a folder, or to a file above docs/, lead to no page of the site."""
    return markdown.replace("(decisions/)", "(decisions/0001-four-verbs-one-direction.md)")
