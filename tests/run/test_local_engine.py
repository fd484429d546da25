"""One bad case fails alone: an exception, a hang, a killed process."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import pytest

from casewise.core.errors import BadInput
from casewise.run.local import LocalEngine


@dataclass(frozen=True)
class Trouble:
    """Does what the case's name says."""

    def __call__(self, case_id: str) -> str:
        if case_id == "raise":
            raise ValueError("no\nsecond line")
        if case_id == "hang":
            time.sleep(600)
        if case_id == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return case_id.upper()


def outcome(engine: LocalEngine, *cases: str) -> dict[str, tuple[object, str | None]]:
    return {result.case_id: (result.value, result.kind) for result in engine.map(Trouble(), cases)}


def test_an_exception_is_a_result_and_the_rest_goes_on() -> None:
    assert outcome(LocalEngine(), "a", "raise", "b") == {
        "a": ("A", None),
        "raise": (None, "ValueError"),
        "b": ("B", None),
    }


def test_results_stream_before_the_last_case_starts() -> None:
    results = LocalEngine().map(Trouble(), ["a", "hang"])
    assert next(results).value == "A"


@pytest.mark.slow
def test_a_hanging_and_a_dying_case_fail_alone() -> None:
    found = outcome(LocalEngine(jobs=2, timeout_s=1, grace_s=1), "a", "hang", "die", "raise", "b")
    kinds = {"a": None, "hang": "TimeOut", "die": "Killed", "raise": "ValueError", "b": None}
    assert {case: kind for case, (_, kind) in found.items()} == kinds


def test_no_process_is_no_engine() -> None:
    with pytest.raises(BadInput, match="at least 1, got 0"):
        LocalEngine(jobs=0)
