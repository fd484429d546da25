"""Ids of the definitions: each one that the code cites stands in definitions.md, and no user meets one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import casewise

ROOT = Path(casewise.__file__).parent
DOCS = Path(__file__).parent.parent / "docs"
ONE = r"[A-X]\d{1,2}[a-c]?"
CITED = re.compile(rf"\((?:spec )?({ONE}(?:(?:, |; |-|–| and ){ONE})*)\)")
PAPER = re.compile(r"\b(?:sec|app):[a-z]")
NO_IDS = {"M0", "M1", "M4"}  # masks of steps


def defined() -> set[str]:
    rows = re.findall(r"^\| ([A-X]\d[^|]*?) \|", (DOCS / "reference" / "definitions.md").read_text(), re.MULTILINE)
    return {name for row in rows for name in spelled_out(row)}


def spelled_out(cited: str) -> set[str]:
    """Ids of a citation: "B5-B7" is three of them, "E12a" is E12."""
    names: set[str] = set()
    for part in re.split(r"[,;] | and ", cited):
        ends = [re.sub(r"[a-c]$", "", end) for end in re.split(r"[-–]", part)]
        letter, first, last = ends[0][0], int(ends[0][1:]), int(ends[-1][1:])
        names |= {f"{letter}{number}" for number in range(first, last + 1)}
    return names


def strings_of(path: Path) -> Iterator[tuple[bool, int, str]]:
    """Every string: whether it is a docstring, its line, its text."""
    tree = ast.parse(path.read_text())
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield id(node) in documents, node.lineno, node.value


def test_every_id_in_a_docstring_is_defined() -> None:
    known = defined()
    assert len(known) > 150
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {cited}"
        for path in sorted(ROOT.rglob("*.py"))
        for _, line, text in strings_of(path)
        for cited in CITED.findall(text)
        if spelled_out(cited) - known - NO_IDS
    ]
    assert not wrong, "\n".join(wrong)


def test_no_message_table_or_page_shows_an_id() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text[:80]}"
        for path in sorted(ROOT.rglob("*.py"))
        for is_document, line, text in strings_of(path)
        if not is_document and (set(CITED.findall(text)) - NO_IDS or PAPER.search(text))
    ]
    wrong += [
        f"{path.relative_to(ROOT)}: {cited}"
        for path in sorted([*ROOT.rglob("*.html"), *ROOT.rglob("*.js")])
        for cited in CITED.findall(path.read_text())
        if cited not in NO_IDS
    ]
    assert not wrong, "\n".join(wrong)


def test_help_shows_no_id() -> None:
    """Docstrings of commands are their help."""
    wrong = [
        f"{path.name}:{line}: {text[:80]}"
        for path in sorted((ROOT / "cli").rglob("*.py"))
        for _, line, text in strings_of(path)
        if set(CITED.findall(text)) - NO_IDS
    ]
    assert not wrong, "\n".join(wrong)
