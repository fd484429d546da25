"""One bad case fails alone: an exception, a hang, a killed process."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from casewise.core.errors import BadInput
from casewise.run import local
from casewise.run.local import LocalEngine

TROUBLE = """
import os, signal, sys, time

def trouble(case_id):
    if case_id == "raise":
        raise ValueError("no\\nsecond line")
    if case_id == "exit":
        sys.exit(0)
    if case_id == "hang":
        time.sleep(600)
    if case_id == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return case_id.upper()
"""


@pytest.fixture
def trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that does what the case's name says, in a module that spawned processes can import."""
    (tmp_path / "troublesome.py").write_text(TROUBLE)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("troublesome").trouble


def outcome(engine: LocalEngine, work: Any, *cases: str) -> dict[str, tuple[object, str | None]]:
    return {result.case_id: (result.value, result.kind) for result in engine.map(work, cases)}


def test_an_exception_is_a_result_and_the_rest_continues(trouble: Any) -> None:
    found = outcome(LocalEngine(), trouble, "a", "raise", "exit", "b")
    assert found == {"a": ("A", None), "raise": (None, "ValueError"), "exit": (None, "SystemExit"), "b": ("B", None)}


def test_results_stream_before_the_last_case_starts(trouble: Any) -> None:
    results = LocalEngine().map(trouble, ["a", "hang"])
    assert next(results).value == "A"


@pytest.mark.slow
def test_a_hanging_and_a_dying_case_fail_alone(trouble: Any) -> None:
    found = outcome(LocalEngine(jobs=2, timeout_s=1, grace_s=1), trouble, "a", "hang", "die", "raise", "b")
    kinds = {"a": None, "hang": "TimeOut", "die": "Killed", "raise": "ValueError", "b": None}
    assert {case: kind for case, (_, kind) in found.items()} == kinds


def test_a_worker_that_dies_while_idle_is_replaced(trouble: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Watched(local._Worker):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(local, "_Worker", Watched)
    results = LocalEngine(jobs=1, timeout_s=60).map(trouble, ["a", "b"])
    assert next(results).value == "A"
    made[0].process.kill()  # it waits for its next case
    made[0].process.join()
    assert [(one.value, one.kind) for one in results] == [("B", None)]
    assert len(made) == 2


def test_no_process_is_no_engine() -> None:
    with pytest.raises(BadInput, match="at least 1, got 0"):
        LocalEngine(jobs=0)


def test_workers_end_with_a_run_that_was_killed_and_write_nothing_over_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "slow_work.py").write_text(
        "import time\nfrom pathlib import Path\n\n\ndef work(case_id):\n"
        "    Path(f'{case_id}-began').touch()\n    time.sleep(4)\n    Path(f'{case_id}-written').touch()\n"
    )
    program = "import slow_work\nfrom casewise.run.local import LocalEngine\n"
    program += "if __name__ == '__main__':\n    list(LocalEngine(jobs=2).map(slow_work.work, ['a', 'b']))\n"
    (tmp_path / "run.py").write_text(program)
    with subprocess.Popen([sys.executable, "run.py"], cwd=tmp_path) as run:
        while not ((tmp_path / "a-began").exists() and (tmp_path / "b-began").exists()):
            assert run.poll() is None
            time.sleep(0.02)
        run.kill()
    time.sleep(5)
    assert not list(tmp_path.glob("*-written"))


SHARED = """
import torch

class Adds:
    def __init__(self):
        self.tensor = torch.zeros(3)

    def __call__(self, case_id):
        return float(self.tensor.add_(1).sum())
"""


def test_workers_own_their_tensors_and_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    """multiprocessing would share the memory of a network between all workers and the caller."""
    pytest.importorskip("torch")
    (tmp_path / "shared.py").write_text(SHARED)
    program = (
        "print('the script runs')\nimport shared\nfrom casewise.run.local import LocalEngine\nwork = shared.Adds()\n"
    )
    program += "print([one.error or one.value for one in LocalEngine(jobs=2).map(work, ['a', 'b'])], work.tensor.sum())"
    (tmp_path / "run.py").write_text(program)
    done = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["the script runs", "[3.0, 3.0] tensor(0.)"], done.stdout + done.stderr
