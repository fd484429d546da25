"""The worked examples of CONTRIBUTING.md, each added to a copy of the tree as it is printed, and used from outside."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import casewise

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```python\n# (src/\S+)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))
LINES = re.findall(r"^In `(src/\S+)`: (?:`(from [^`]+)` and )?`([^`]+)` in `([A-Z]+)`", TEXT, re.MULTILINE)
PROGRAM = """
import sys
import pandas as pd
from casewise.cli import app
from casewise.study.analyses import ANALYSES
from typer.testing import CliRunner
from worlds.cohorts import synthetic_archive

def ran(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, (words, done.output, repr(done.exception))
    return done.output

held = synthetic_archive("held", cases=24, seed=1)
scored = synthetic_archive("scored", cases=24, seed=2, prefix="new", split="evaluation")
assert "24 cases" in ran("count", "held")
ran("calibrate", "held", "--policy", "small-edits")
assert "small-edits" in open("held/policy.json").read()
shown = ran("study", "scored", "--calibration", "held", "-o", "report", "--only", "edit-sizes")
assert "of the voxels in the mean of 24 cases" in open("report/report.html").read()
assert "edit_sizes" in open("report/results.json").read()
import pathlib
assert list(pathlib.Path("report").rglob("edit-sizes.csv")) and list(pathlib.Path("report").rglob("edit-sizes.tex"))

import numpy as np, torch, casewise
from torch import nn
network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 2, 1))
image = np.random.default_rng(0).normal(size=(1, 1, 16, 16)).astype("float32")
made = casewise.run_episode(network, image, "calm", steps=1, learning_rate=0.1)
assert "loss" in made.diagnostics[0] and made.signals[1]["border_share"] is not None

from casewise.adapt.views import views_of
shown = torch.tensor([[[[0.0, 1.0, 3.0]]]])
assert [str(view) for view in views_of("negative,gamma(1.4)")] == ["negative", "gamma(1.4)"]
assert views_of("negative")[0].apply(shown).tolist() == [[[[3.0, 2.0, 0.0]]]]

from casewise.measure.metrics import METRICS
mask = np.array([[1, 1, 0]]); label = np.array([[1, 0, 1]])
assert METRICS["sensitivity"].of(mask, label, ignore=None, spacing_mm=None) == 0.5
print("everything that was added is there")
"""


def added_to(tree: Path) -> None:
    for name, content in FILES.items():
        (tree / name).write_text(content, encoding="utf-8")
    for name, imported, line, registry in LINES:
        path = tree / name
        text = path.read_text(encoding="utf-8")
        begin = re.search(rf"^_?{registry}\b.*?(?:= \(|\{{)\n", text, re.DOTALL | re.MULTILINE)
        assert begin, f"{registry} is not a list of lines in {name}"
        text = f"{text[: begin.end()]}        {line}\n{text[begin.end() :]}"
        if imported:
            text = text.replace(
                "from __future__ import annotations\n", f"from __future__ import annotations\n{imported}\n", 1
            )
        path.write_text(text, encoding="utf-8")


def with_additions(tree: Path) -> dict[str, str]:
    """Copy the source, add the examples, and return the environment in which Python imports the copy."""
    shutil.copytree(Path(casewise.__file__).parent, tree / "src" / "casewise", ignore=shutil.ignore_patterns("*.pyc"))
    added_to(tree)
    paths = [tree / "src", ROOT / "tests", ROOT / "examples"]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def test_every_kind_of_addition_is_shown() -> None:
    assert len(FILES) == len(LINES) == 7


def test_the_examples_pass_the_checks_of_form(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    for words in (["format", "--check"], ["check"]):
        command = [sys.executable, "-m", "ruff", *words, "--no-cache", "--config", ROOT / "pyproject.toml", tmp_path]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_the_command_that_formats_leaves_the_documentation_alone() -> None:
    command = [sys.executable, "-m", "ruff", "format", "--check", "--no-cache", "docs", "benchmarks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_contract_tests_find_what_was_added(tmp_path: Path) -> None:
    environment = with_additions(tmp_path)
    tests = [ROOT / "tests" / "contracts", ROOT / "tests" / "adapt" / "test_objective_list.py"]
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-k", "calm or negative or small-edits", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:]


def test_what_is_added_as_printed_is_in_commands_calibration_report_and_archives(tmp_path: Path) -> None:
    environment = with_additions(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "everything that was added is there" in done.stdout
