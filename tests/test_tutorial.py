"""The README's ten lines and the notebook run as they are printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "docs" / "tutorial" / "first-steps.ipynb"


def test_the_ten_lines_of_the_readme_run_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    told: dict[str, Any] = {}
    exec(lines, told)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3
    assert printed[1].startswith("Fragmentation(regions=")
    assert printed[2].startswith("Harm(ha=")
    assert told["guarded"].mask.shape == told["label"].shape


def test_the_notebook_runs_from_top_to_bottom() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    told: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "clear the outputs before committing"
            exec("".join(cell["source"]), told)
    assert len(told["archive"].ids) == 8
