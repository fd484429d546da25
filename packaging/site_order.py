"""The order of the documentation's sections, for mkdocs: newcomers first, decisions last."""

from __future__ import annotations

import json
from pathlib import Path
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


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Each notebook of docs/ as a page: its text, and its code in blocks."""
    from mkdocs.structure.files import File

    for path in sorted(Path(config["docs_dir"]).rglob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        parts = ["".join(cell["source"]) for cell in cells]
        text = [part if cell["cell_type"] == "markdown" else f"```python\n{part}\n```"
                for cell, part in zip(cells, parts, strict=True)]  # fmt: skip
        name = str(path.relative_to(config["docs_dir"]).with_suffix(".md"))
        files.append(File.generated(config, name, content="\n\n".join(text)))
    return files
