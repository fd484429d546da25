"""A real Ray on this machine: the local engine's bytes, worker after worker killed or not."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.model import Model
from casewise.archive.verify import verify
from casewise.core.chain import Chain
from casewise.core.errors import BadInput
from casewise.core.records import Case, Mask, Policy, State
from casewise.data.datasets.plain import write_cohort
from casewise.data.folders import with_labels
from casewise.data.phantom import cardiac_cohort
from casewise.data.splits import Cohort, Member
from casewise.deployment import Deployment
from casewise.render.mask_pictures import Preview
from casewise.run.gather import gathered_cases
from casewise.run.local import LocalEngine, Result, chosen_engine
from casewise.run.predict_folder import predict_folder, prediction_work
from casewise.run.ray import RayEngine, connected
from casewise.run.record_folder import RecordCase, record_folder

PHANTOM = Model("casewise.adapt.networks:phantom_cardiac")
HOW = Adaptation(objective="tent", learning_rate=0.01, steps=2, min_area=4)
DEEP = Policy("fixed-k", "fixed-k", {"step": 2}, 2)
DEPLOYED = Deployment(PHANTOM, DEEP, {"": HOW})
INSIDE = (slice(2, 4), slice(24, 72), slice(24, 72))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One Ray for the whole file: starting it takes seconds, and the engine joins what is there."""
    torch.set_num_threads(1)
    with connected(None):
        yield


def small(cohort: Cohort) -> Cohort:
    """The middle of two slices of every heart."""
    whole_case, whole_label = cohort.read_case, cohort.read_label
    assert whole_label is not None

    def case(member: Member) -> Case:
        found = whole_case(member)
        return replace(found, image=found.image[(slice(None), *INSIDE)])

    def label(member: Member) -> Mask:
        return whole_label(member)[INSIDE]

    return replace(cohort, read_case=case, read_label=label)


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cohort")
    return write_cohort(small(cardiac_cohort("B", 4, split="evaluation")), folder)


def recording(scans: Path) -> RecordCase:
    cases = with_labels(gathered_cases(PHANTOM.load(), scans / "images"), scans / "labels")
    return RecordCase(PHANTOM, {"": replace(HOW, shrink=(State(2, 0.5),))}, {files.id: files for files in cases})


def archived(folder: Path) -> dict[str, Any]:
    """Every byte of an archive but the seconds that each step took, and what is named after a hash over them."""
    found: dict[str, Any] = {}
    for path in sorted((folder / "cases").rglob("*.*")):
        found[str(path.relative_to(folder))] = path.read_bytes()
    timed = [name for name in found if name.endswith("entry.json")]
    assert timed
    assert all(b'"seconds"' in found[name] for name in timed)
    manifest = _timeless(json.loads((folder / "manifest.json").read_text()), "sha256")
    return {**found, **{name: _timeless(json.loads(found[name])) for name in timed}, "manifest": manifest}


def predicted(folder: Path) -> dict[str, Any]:
    """Every byte of a prediction folder but the times, and the audit log that holds them and the order of the cases."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "audit.jsonl"):
        name = str(path.relative_to(folder))
        found[name] = _timeless(json.loads(path.read_text())) if name.endswith(".json") else path.read_bytes()
    return found


CLOCKS = ("timing", "seconds", "spent")  # seconds of steps, milliseconds and memory of signals


def _timeless(plain: Any, *more: str) -> Any:
    if isinstance(plain, dict):
        return {key: _timeless(value, *more) for key, value in plain.items() if key not in {*CLOCKS, *more}}
    return [_timeless(value, *more) for value in plain] if isinstance(plain, list) else plain


def test_predictions_are_the_local_engines_byte_for_byte(cluster: None, scans: Path, tmp_path: Path) -> None:
    def run(engine: Any, out: str) -> dict[str, Any]:
        work = prediction_work(DEPLOYED, gathered_cases(PHANTOM.load(), scans / "images"), tmp_path / out)
        assert [entry.status for entry in predict_folder(work, engine)] == ["done"] * 4
        assert Chain(tmp_path / out / "audit.jsonl").problems == []
        return predicted(tmp_path / out)

    local = run(LocalEngine(), "local")
    assert run(chosen_engine("ray", jobs=2, timeout_s=None), "ray") == local
    assert len(local) >= 8


@pytest.mark.slow
def test_an_archive_is_the_local_engines_byte_for_byte(cluster: None, scans: Path, tmp_path: Path) -> None:
    for engine, name in ((LocalEngine(), "local"), (RayEngine(jobs=2), "ray")):
        _, results = record_folder(recording(scans), engine, tmp_path / name)
        assert [result.error for result in results] == [None] * 4
        assert verify(tmp_path / name) == []
    assert archived(tmp_path / "ray") == archived(tmp_path / "local")


@pytest.mark.slow
def test_a_worker_killed_between_the_mask_and_its_entry_loses_nothing(
    cluster: None, scans: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"

    def deadly(picture: Preview) -> bytes:
        """Called once the masks of a case are written; the first caller dies there."""
        if not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return b"picture"

    def run(engine: Any, out: str) -> dict[str, Any]:
        cases = gathered_cases(PHANTOM.load(), scans / "images")
        work = prediction_work(DEPLOYED, cases, tmp_path / out, draw=deadly)
        entries = list(predict_folder(work, engine))
        assert sorted(entry.case for entry in entries) == sorted(work.cases)
        return predicted(tmp_path / out)

    through_death = run(RayEngine(jobs=2), "ray")
    assert killed.exists()
    assert through_death == run(LocalEngine(), "local")


@pytest.mark.slow
def test_a_worker_killed_while_recording_loses_nothing_and_a_second_run_adds_nothing(
    cluster: None, scans: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    whole = recording(scans)

    class DiesOnce(RecordCase):
        def __call__(self, case_id: str) -> Any:
            found = super().__call__(case_id)
            if not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return found

    deadly = DiesOnce(whole.model, whole.proposers, whole.cases)
    _, results = record_folder(deadly, RayEngine(jobs=2), tmp_path / "ray")
    assert [result.error for result in results] == [None] * 4
    _, again = record_folder(whole, RayEngine(jobs=2), tmp_path / "ray")
    assert list(again) == []
    _, results = record_folder(whole, LocalEngine(), tmp_path / "local")
    list(results)
    assert archived(tmp_path / "ray") == archived(tmp_path / "local")


def trouble() -> Callable[[str], str]:
    """Does what the case's name says; made in a function, so that Ray sends the code along."""

    class Trouble:
        def __call__(self, case_id: str) -> str:
            if case_id == "raise":
                raise ValueError("no\nsecond line")
            if case_id == "hang":
                time.sleep(600)
            if case_id == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            return case_id.upper()

    return Trouble()


@pytest.mark.slow
def test_what_raises_hangs_or_always_dies_fails_alone(cluster: None) -> None:
    engine = RayEngine(jobs=2, retries=1, timeout_s=2, grace_s=1)
    found: list[Result] = list(engine.map(trouble(), ["a", "raise", "hang", "die", "b"]))
    kinds = {result.case_id: result.kind for result in found}
    assert kinds == {"a": None, "raise": "ValueError", "hang": "TimeOut", "die": "Killed", "b": None}
    assert len(found) == 5
    assert {result.case_id: result.value for result in found if not result.error} == {"a": "A", "b": "B"}
    assert next(result.error for result in found if result.case_id == "die").startswith("its worker was lost 2 times")  # type: ignore[union-attr]


@pytest.mark.slow
def test_workers_that_cannot_start_are_an_error_and_not_a_wait(cluster: None) -> None:
    class Unloadable:
        def prepare(self) -> None:
            raise ValueError("no such weights")

        def __call__(self, case_id: str) -> None:
            raise AssertionError("never called")

    with pytest.raises(BadInput, match=r"workers cannot start: .*no such weights"):
        list(RayEngine(retries=1).map(Unloadable(), ["a"]))


def test_no_cases_start_no_cluster() -> None:
    before = ray.is_initialized()
    assert list(RayEngine().map(trouble(), [])) == []
    assert ray.is_initialized() == before


@pytest.mark.parametrize(
    ("options", "said"), [({"jobs": 0}, "at least 1, got 0"), ({"retries": -1}, "0 or more, got -1")]
)
def test_nonsense_is_refused(options: dict[str, int], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        RayEngine(**options)


def test_an_address_without_a_cluster_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # other tests may share a Ray of this machine
    with (
        pytest.raises(BadInput, match=r"no Ray cluster answers at 'nonsense' .*; name one that runs"),
        connected("nonsense"),
    ):
        pass
