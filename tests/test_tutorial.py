"""The tutorials, the README's lines of Python and the notebook run as they are printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TUTORIALS = ROOT / "docs" / "tutorial"


def ran(name: str, folder: Path) -> dict[str, str]:
    """Save the Python files of a tutorial, run its ``$`` lines in order in a folder; what each line printed."""
    text = (TUTORIALS / name).read_text(encoding="utf-8")
    for file, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        (folder / file).write_text(code, encoding="utf-8")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    printed = {}
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if not line.startswith("$ "):
            continue
        program, *words = shlex.split(line[2:])
        start = {"casewise": [sys.executable, "-m", "casewise"], "python": [sys.executable]}[program]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*start, *words], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        printed[line[2:]] = done.stdout
    return printed


@pytest.mark.slow  # tunes a miniature nnU-Net five times
def test_the_tutorial_of_hospitals_runs(tmp_path: Path) -> None:
    pytest.importorskip("nnunetv2")
    assert len(ran("hospital.md", tmp_path)) == 7
    for page in ("deployment/fit.html", "out/report.html", "comparison/report.html"):
        assert (tmp_path / page).is_file(), page


@pytest.mark.slow
def test_the_tutorial_of_researchers_runs(tmp_path: Path) -> None:
    printed = ran("research.md", tmp_path)
    assert "| M0 |" in next(text for line, text in printed.items() if line.startswith("casewise bench"))
    assert (tmp_path / "report" / "report.html").is_file()


def test_the_tutorial_of_new_versions_runs(tmp_path: Path) -> None:
    ran("new-version.md", tmp_path)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["verdict"] == "accepted"


def test_the_lines_of_the_readme_run_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(lines, names)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3
    assert printed[1].startswith("Fragmentation(regions=")
    assert printed[2].startswith("Harm(ha=")
    assert names["guarded"].mask.shape == names["label"].shape


def test_the_notebook_runs_from_top_to_bottom() -> None:
    cells = json.loads((TUTORIALS / "first-steps.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "clear the outputs before committing"
            exec("".join(cell["source"]), names)
    assert names["result"].mask.shape == names["label"].shape
    assert (names["deployment"].folder / "fit.html").is_file()
