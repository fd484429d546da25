"""MLflow or Weights & Biases beside a run, for who wants it: off by default, and only to the address that was given.

An address is ``mlflow+URI`` or ``wandb+URI``, such as ``mlflow+file:///data/runs`` or ``wandb+https://wandb.example``.
Neither case names nor file names leave: a case is its number in the run and a handful of numbers about its decision.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from casewise.core.errors import BadInput, MissingExtra
from casewise.core.predicted import PredictedCase
from casewise.core.registry import Registry

PROJECT = "casewise"
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "WANDB_ERROR_REPORTING": "false"}
"""What both libraries would otherwise tell their makers."""


class Tracker(Protocol):
    """Where numbers go."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Numbers of one case."""
        ...

    def finish(self, summary: Mapping[str, float], *, failed: bool) -> None:
        """The last thing a run says."""
        ...


def tracked(entries: Iterable[PredictedCase], tracker: Tracker | None) -> Iterator[PredictedCase]:
    """Pass the entries of ``predict_folder`` through, and tell the tracker about each; None tells nobody."""
    if tracker is None:
        yield from entries
        return
    counted: Counter[str] = Counter()
    done = False
    try:
        for step, entry in enumerate(entries):
            tracker.log(numbers_of(entry), step)
            counted.update((f"status_{entry.status}", f"action_{entry.action or 'no_output'}"))
            yield entry
        done = True
    finally:
        tracker.finish({name: float(count) for name, count in sorted(counted.items())}, failed=not done)


def numbers_of(entry: PredictedCase) -> dict[str, float]:
    """What may leave: depth deployed and executed, the coordinate's value, rolled back or not, seconds.

    >>> from casewise.core.records import Action, Decision, State
    >>> decision = Decision("J_Smith", Action.KEEP, State(2), 3, "router", value=0.25)
    >>> numbers_of(PredictedCase("J_Smith", "done", decision))
    {'deployed': 2.0, 'executed': 3.0, 'value': 0.25, 'rolled_back': 0.0}
    """
    found: dict[str, float | None] = {}
    if entry.decision is not None:
        found = {name: getattr(entry.decision, name) for name in ("deployed", "executed", "value", "rolled_back")}
    found["seconds"] = entry.timing.get("total_s")
    return {name: float(value) for name, value in found.items() if value is not None}


class Mlflow:
    """A run on an MLflow server or in a folder; a client of its own, so nothing global is set."""

    def __init__(self, uri: str) -> None:
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the user chose a folder; MLflow prefers sqlite
        client = _imported("mlflow").MlflowClient(tracking_uri=uri)
        there = client.get_experiment_by_name(PROJECT)
        experiment = client.create_experiment(PROJECT) if there is None else there.experiment_id
        self._client = client
        self._run = client.create_run(experiment).info.run_id

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Numbers of one case."""
        for name, value in numbers.items():
            self._client.log_metric(self._run, name, value, step=step)

    def finish(self, summary: Mapping[str, float], *, failed: bool) -> None:
        """Counts, then the run's status."""
        for name, value in summary.items():
            self._client.log_metric(self._run, name, value)
        self._client.set_terminated(self._run, status="FAILED" if failed else "FINISHED")


class Wandb:
    """A run on a Weights & Biases server, or offline in a folder for ``file://``."""

    def __init__(self, uri: str) -> None:
        wandb = _imported("wandb")
        if uri.startswith("file://"):
            place = {"mode": "offline", "dir": uri.removeprefix("file://")}
        else:
            place = {"mode": "online", "settings": wandb.Settings(base_url=uri)}
        self._run = wandb.init(project=PROJECT, **place)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Numbers of one case."""
        self._run.log(dict(numbers), step=step)

    def finish(self, summary: Mapping[str, float], *, failed: bool) -> None:
        """Counts, then the exit code."""
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(failed))


TRACKERS: Registry[Callable[[str], Tracker]] = Registry("tracker", {"mlflow": Mlflow, "wandb": Wandb})


def tracker_at(address: str | None) -> Tracker | None:
    """The tracker that an address names; None for None."""
    if address is None:
        return None
    kind, plus, uri = address.partition("+")
    scheme = uri.partition("://")[0]
    if not plus or scheme not in ("file", "sqlite", "http", "https"):
        raise BadInput(
            f"a tracker is mlflow+URI or wandb+URI with file://, sqlite://, http:// or https://, such as "
            f"mlflow+file:///data/runs; got {address!r}"
        )
    return TRACKERS[kind](uri)


def _imported(name: str) -> Any:
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(f"{name} cannot be imported ({error}); pip install {name}") from error
