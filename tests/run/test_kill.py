"""kill -9 at any moment; the next run completes the tree."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from casewise.adapt.model import Model
from casewise.core.chain import Chain
from casewise.core.records import Policy
from casewise.judge.policy import write_policy

pytestmark = pytest.mark.slow


def command(model: Model, images: Path, out: Path) -> list[str]:
    how = {"objective": "tent", "steps": 2}
    policy = Policy("fixed-k", "fixed-k", {"step": 2}, 2, adaptation=how)
    file = write_policy(out.parent / "fixed.json", policy)
    return [
        sys.executable, "-m", "casewise", "predict", "-i", str(images), "-o", str(out), "-m", model.spec, "--weights",
        str(model.weights), "--policy", str(file), "-device", "cpu",
        "--set", "save-candidates=true", "--continue_prediction",
    ]  # fmt: skip


def tree(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in ("audit.jsonl", "report.html"):
            found[name] = path.read_bytes()
            if name.startswith("casewise/") and name.endswith(".json"):
                found[name] = {key: value for key, value in json.loads(path.read_text()).items() if key != "timing"}
    return found


def test_a_killed_run_and_its_rerun_leave_the_tree_of_an_uninterrupted_run(
    model: Model, images: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command(model, images, tmp_path / "whole"), check=True, env=environment, capture_output=True)
    out = tmp_path / "out"
    for wanted in (1, 4, 9):
        process = subprocess.Popen(command(model, images, out), env=environment, stdout=subprocess.DEVNULL)
        while process.poll() is None and len(list(out.rglob("*"))) < 3 + wanted:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command(model, images, out), check=True, env=environment, capture_output=True)
    assert tree(out) == tree(tmp_path / "whole")
    assert Chain(out / "audit.jsonl").problems == []
