"""The size of the project: code lines by package, and prose. Lower a limit when you get below it.

The limits of commands and options are in ``cli/test_command_table.py``.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

import casewise

SOURCE = Path(casewise.__file__).parent
ROOT = Path(__file__).parents[1]

CODE = 32_900  # lines in all
PACKAGE = 6_500
LINES = {"README.md": 120, "CHANGELOG.md": 60}
HOW_TO_LINES = 80
KILOBYTES = {"docs/**/*.md": 180, "benchmarks/RESULTS.md": 15}


def code_lines(path: Path) -> int:
    """Lines that are neither blank, comment nor docstring."""
    text = path.read_text(encoding="utf-8")
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                documented |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(text.split("\n"), start=1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and at not in documented for at, line in lines)


def test_the_code_stays_small() -> None:
    sizes: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).parts
        sizes[parts[0] if len(parts) > 1 else "."] += code_lines(path)
    assert sizes.total() <= CODE, sizes
    assert max(sizes.values()) <= PACKAGE, sizes


@pytest.mark.parametrize("name", LINES)
def test_prose_stays_short(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= LINES[name]


@pytest.mark.parametrize("pages", KILOBYTES)
def test_the_documentation_stays_readable(pages: str) -> None:
    assert sum(page.stat().st_size for page in ROOT.glob(pages)) <= 1000 * KILOBYTES[pages]


def test_how_to_pages_fit_on_a_screen_or_two() -> None:
    lines = {page.name: len(page.read_text().splitlines()) for page in (ROOT / "docs" / "how-to").glob("*.md")}
    assert max(lines.values()) <= HOW_TO_LINES, lines
