"""Trackers: off by default, only to the given address, and never a patient's name."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from casewise.core.errors import BadInput, MissingExtra, UnknownName
from casewise.core.predicted import PredictedCase
from casewise.core.records import Action, Decision, State
from casewise.run.trackers import tracked, tracker_at

ENTRIES = [
    PredictedCase(
        "J_Smith_1961",
        "done",
        Decision("J_Smith_1961", Action.KEEP, State(2), executed=3, controller="router", value=0.5),
        timing={"total_s": 1.5},
        inputs={"J_Smith_1961.nii.gz": "ab"},
    ),
    PredictedCase("K_Jones", "failed", error="K_Jones.nii.gz is truncated"),
]


class Kept:
    """A tracker that keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def log(self, numbers: Any, step: int) -> None:
        self.told.append((step, dict(numbers)))

    def finish(self, summary: Any, *, failed: bool) -> None:
        self.told.append((dict(summary), failed))


def test_without_a_tracker_entries_pass_and_nothing_is_imported() -> None:
    assert tracker_at(None) is None
    assert list(tracked(ENTRIES, None)) == ENTRIES


def test_numbers_leave_and_names_do_not() -> None:
    kept = Kept()
    assert list(tracked(ENTRIES, kept)) == ENTRIES
    summary = {"action_keep": 1.0, "action_no_output": 1.0, "status_done": 1.0, "status_failed": 1.0}
    assert kept.told == [
        (0, {"deployed": 2.0, "executed": 3.0, "value": 0.5, "rolled_back": 0.0, "seconds": 1.5}),
        (1, {}),
        (summary, False),
    ]
    assert "Smith" not in str(kept.told)
    assert "Jones" not in str(kept.told)


def test_a_run_that_breaks_is_told_as_failed() -> None:
    def broken() -> Any:
        yield ENTRIES[0]
        raise OSError("disk full")

    kept = Kept()
    with pytest.raises(OSError, match="disk full"):
        list(tracked(broken(), kept))
    assert kept.told[-1] == ({"action_keep": 1.0, "status_done": 1.0}, True)


@pytest.mark.parametrize("address", ["mlflow", "mlflow+", "https://somewhere", "mlflow+databricks", "wandb+s3://x"])
def test_an_address_says_what_and_where(address: str) -> None:
    with pytest.raises(BadInput, match=r"mlflow\+URI or wandb\+URI"):
        tracker_at(address)


def test_an_unknown_tracker_is_named() -> None:
    with pytest.raises(UnknownName, match="mlfow"):
        tracker_at("mlfow+file:///tmp")


def test_a_tracker_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match="pip install wandb"):
        tracker_at("wandb+file:///nowhere")


def test_wandb_is_told_to_stay_offline_for_a_folder_and_goes_only_to_the_given_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """wandb itself is not among the tested packages: this stand-in pins the calls that its documentation names."""
    calls: list[Any] = []

    class Run:
        summary = types.SimpleNamespace(update=lambda values: calls.append(("summary", values)))

        def log(self, numbers: Any, step: int) -> None:
            calls.append((step, numbers))

        def finish(self, exit_code: int) -> None:
            calls.append(("finish", exit_code))

    def init(**options: Any) -> Run:
        calls.append(options)
        return Run()

    stand_in = types.SimpleNamespace(init=init, Settings=lambda base_url: {"base_url": base_url})
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    list(tracked(ENTRIES[:1], tracker_at(f"wandb+file://{tmp_path}")))
    assert calls[0] == {"project": "casewise", "mode": "offline", "dir": str(tmp_path)}
    assert calls[-1] == ("finish", 0)
    tracker_at("wandb+https://wandb.example")
    assert calls[-1]["settings"] == {"base_url": "https://wandb.example"}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_mlflow_writes_into_the_given_folder_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    list(tracked(ENTRIES, tracker_at(f"mlflow+file://{tmp_path / 'runs'}")))
    written = {path.name: path.read_text() for path in (tmp_path / "runs").rglob("metrics/*")}
    assert written["deployed"].split()[1:] == ["2.0", "0"]
    assert written["status_failed"].split()[1] == "1.0"
    assert not list((tmp_path / "elsewhere").iterdir())
    everything = "".join(path.read_text() for path in (tmp_path / "runs").rglob("*") if path.is_file())
    assert "Smith" not in everything
