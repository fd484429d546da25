"""docs/reference/python.md is the public surface: every public name, all of its arguments, and examples that run."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import casewise

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "python.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
SECTIONS = dict(re.findall(r"^### `(\w+)`[^\n]*\n(.*?)(?=^### |^## |\Z)", TEXT, re.DOTALL | re.MULTILINE))
NAMES = [name for name in casewise.__all__ if name != "__version__"]


def test_every_public_name_has_its_section_and_no_other_has() -> None:
    assert sorted(SECTIONS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_of_a_public_name_is_explained(name: str) -> None:
    thing = getattr(casewise, name)
    if inspect.isclass(thing) and not dataclasses.is_dataclass(thing):
        return
    arguments = [argument for argument in inspect.signature(thing).parameters if argument not in ("args", "kwargs")]
    missing = [argument for argument in arguments if f"`{argument}`" not in SECTIONS[name]]
    assert not missing, f"{name} takes {missing}, and its section says nothing of them"


def test_the_examples_run_in_order_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
    shown = {name for name in NAMES for block in BLOCKS if re.search(rf"\bcasewise\.{name}\b", block)}
    assert shown == set(NAMES), f"no example of {sorted(set(NAMES) - shown)}"
