"""Imports point one way, torch stays in its half, and labels stay behind the wall."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import casewise

ROOT = Path(casewise.__file__).parent

# Each row may import the rows below it; names on one row may not import each other.
LAYERS = [
    {"cli"},
    {"serve"},
    {"run", "report"},
    {"study"},
    {"guard", "replay"},
    {"adapt", "judge"},
    {"measure", "data", "archive"},
    {"core"},
]
HEIGHT = {name: len(LAYERS) - row for row, names in enumerate(LAYERS) for name in names}
MAY_IMPORT_TORCH = {"adapt", "guard", "run", "serve"}
TORCH_HALF = {"torch", "nnunetv2", "monai", "transformers", "torchmetrics", "ray", "dynamic_network_architectures"}
FILES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem in HEIGHT)


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imports_of(path: Path) -> list[str]:
    """Every imported module, lazy ones and those for type checkers too; relative imports are not used here."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    here = part_of(path)
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "casewise" or len(parts) < 2 or parts[1] not in HEIGHT or parts[1] == here:
            continue
        assert HEIGHT[parts[1]] < HEIGHT[here], f"{here} may not import {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_torch_stays_in_its_half(path: Path) -> None:
    if part_of(path) in MAY_IMPORT_TORCH:
        return
    found = {name.split(".")[0] for name in imports_of(path)} & TORCH_HALF
    assert not found, f"{path.relative_to(ROOT)} imports {found}; replay, study and reports must run anywhere"


@pytest.mark.parametrize("path", sorted((ROOT / "judge" / "controllers").rglob("*.py")), ids=lambda path: path.name)
def test_a_controller_cannot_reach_a_label(path: Path) -> None:
    walled = ("casewise.measure.metrics", "casewise.judge.outcomes", "casewise.data", "casewise.archive")
    for name in imports_of(path):
        assert not name.startswith(walled), f"{path.name} imports {name}: labels stay behind the wall (A9)"


def test_nothing_that_decides_has_an_argument_for_a_label() -> None:
    for path in sorted((ROOT / "judge" / "controllers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                arguments = {a.arg for a in [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]}
                assert not arguments & {"label", "labels", "truth", "gradient"}, f"{path.name}:{node.name}"


def test_help_answers_in_half_a_second_and_imports_no_torch() -> None:
    probe = (
        "import sys, runpy; sys.argv = ['casewise', '--help']\n"
        "try: runpy.run_module('casewise', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, 'pandas' in sys.modules)"
    )
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        shown = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert "predict" in shown
    assert shown.strip().endswith("False False")
    assert min(times) < 0.5, "CPU seconds, so that a busy machine does not fail the test"


@pytest.mark.parametrize("name", casewise.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(casewise, name) is not None


@pytest.mark.parametrize("word", ["utils", "helpers", "misc", "common", "manager", "handler", "engine", "base"])
def test_no_module_has_a_name_that_says_nothing(word: str) -> None:
    assert not list(ROOT.rglob(f"{word}.py"))
