"""Public names: documented in one form (Google style), and shown in docs/reference/python.md, whose examples run."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import casewise

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "python.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
NAMES = [name for name in casewise.__all__ if name != "__version__"]
SECTIONS = re.compile(r"^(Args|Attributes|Returns|Raises|Example|Examples):$", re.MULTILINE)


def sections(text: str) -> dict[str, str]:
    """The parts of a docstring by heading; the part before the first heading has the name ''."""
    parts = SECTIONS.split(text)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def problems(thing: Any) -> list[str]:
    """What the docstring of a public function or class lacks."""
    found = sections(inspect.getdoc(thing) or "")
    wrong = []
    first = found[""].strip().split("\n\n")[0]
    if not first or not first.rstrip().endswith("."):
        wrong.append("begins with no sentence")
    is_error = inspect.isclass(thing) and issubclass(thing, Exception)
    if is_error:
        return wrong
    arguments = [
        one.name
        for one in inspect.signature(thing).parameters.values()
        if one.name not in ("self", "args", "kwargs") and not one.name.startswith("_")
    ]
    described = found.get("Args", "") + found.get("Attributes", "")
    missing = [one for one in arguments if not re.search(rf"^\s*\*{{0,2}}{one}\b[^\n]*:", described, re.MULTILINE)]
    if missing:
        wrong.append(f"does not describe {', '.join(missing)}")
    if not inspect.isclass(thing) and "Returns" not in found and inspect.signature(thing).return_annotation != "None":
        wrong.append("has no Returns")
    if ">>>" not in found.get("Example", "") + found.get("Examples", ""):
        wrong.append("has no Example")
    raises = not inspect.isclass(thing) and re.search(r"^\s+raise \w", inspect.getsource(thing), re.MULTILINE)
    if raises and "Raises" not in found:
        wrong.append("has no Raises")
    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented_in_the_same_form(name: str) -> None:
    wrong = problems(getattr(casewise, name))
    assert not wrong, f"casewise.{name} {'; '.join(wrong)}"


def test_a_docstring_in_another_form_is_found() -> None:
    def scored(mask: Any, *, label: Any) -> float:
        """Score a mask.

        Args:
            mask: The mask.
        """
        raise ValueError(mask, label)

    assert problems(scored) == [
        "does not describe label",
        "has no Returns",
        "has no Example",
        "has no Raises",
    ]


def test_the_examples_run_in_order_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
    shown = {name for name in NAMES for block in BLOCKS if re.search(rf"\bcasewise\.{name}\b", block)}
    assert shown == set(NAMES), f"no example of {sorted(set(NAMES) - shown)}"


def test_a_docstring_refers_only_to_names_that_exist() -> None:
    """``:func:`audit_limit``` outlived the function; the last part of each such name must be a name of the code."""
    referred, known = set[tuple[str, str]](), set[str]()
    for path in Path(casewise.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        referred |= {
            (path.name, name.rpartition(".")[2])
            for name in re.findall(r":(?:func|class|meth|mod|data|attr):`~?([\w.]+)`", text)
        }
        for node in ast.walk(ast.parse(text)):
            known |= {str(getattr(node, field)) for field in ("name", "id", "attr", "arg") if hasattr(node, field)}
        known.add(path.stem)
    assert len(referred) > 50
    assert not [f"{file} refers to {name}" for file, name in sorted(referred) if name not in known]
