"""Hooks of mkdocs: the order of the sections, and pages that are generated from the code and from notebooks."""

from __future__ import annotations

import json
import sys
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
    return markdown.replace("(decisions/)", "(decisions/0001-layers.md)")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages that are made from the code, and each notebook of docs/ as a page."""
    from mkdocs.structure.files import File

    sys.path.insert(0, str(Path(__file__).parent))
    import reference

    for name, text in reference.pages().items():
        files.append(File.generated(config, f"reference/{name}", content=text))

    for path in sorted(Path(config["docs_dir"]).rglob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        parts = ["".join(cell["source"]) for cell in cells]
        text = [part if cell["cell_type"] == "markdown" else f"```python\n{part}\n```"
                for cell, part in zip(cells, parts, strict=True)]  # fmt: skip
        name = str(path.relative_to(config["docs_dir"]).with_suffix(".md"))
        files.append(File.generated(config, name, content="\n\n".join(text)))
    return files
