"""Every field of an adaptation, a model and a deployment has an effect.

Every entry point is tried: ``guard``, ``Deployment.predict``, the work of ``predict`` and ``record`` in another
process, the service, and the command line.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import casewise.adapt.episode as episode_module
import casewise.adapt.model as model_module
import casewise.deployment as deployment_module
from casewise.adapt.adaptation import Adaptation
from casewise.adapt.episode import Episode
from casewise.adapt.model import Model
from casewise.adapt.networks import PlainUNet
from casewise.adapt.proposers.live import record_case, run_episode
from casewise.cli.options import AdaptationOptions, ModelOptions
from casewise.core.errors import BadInput, Mismatch, Refused
from casewise.core.records import Case, Policy, State
from casewise.data.folders import CaseFiles
from casewise.deployment import Deployment
from casewise.guard import guard
from casewise.judge.decide import Judge
from casewise.judge.policy import controller_of
from casewise.measure.signals.risk import RiskStatistics
from casewise.run.gather import gathered_cases
from casewise.run.predict_folder import prediction_work
from casewise.run.record_folder import RecordCase

MODEL = Model("casewise.adapt.networks:PlainUNet")
PLAIN = Adaptation("tent", 0.05, steps=1, min_area=4)
FIXED = Policy("fixed-k", "fixed-k", {"step": 1}, 1)
OTHER: dict[str, Any] = {
    "objective": "memo", "learning_rate": 0.01, "parameters": "all", "steps": 2, "seed": 5, "min_area": 9,
    "foreground": False, "max_slices": 1, "modulation": "param-subset", "statistics": RiskStatistics(1, 1, 1, 1),
    "batch_statistics": "batch", "reset": "stream",
    "signals": ("drop",), "shrink": (State(1, 0.5),),
    "keep_parameters": True, "consensus": "vote",
    "mirrored_views": True, "tuned": "weights",
    "ensemble": True, "crossfit": True,
}  # fmt: skip
NEEDS = {"modulation": {"statistics": OTHER["statistics"]}}


class Reached(Exception):
    """Thrown where the way ends."""

    def __init__(self, what: Any) -> None:
        super().__init__(str(what))
        self.what = what


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[Adaptation]:
    """Adaptations that reached an episode; it goes no further, and a deployment falls back to M0."""
    found: list[Adaptation] = []

    def begun(self: Episode, network: Any, image: Any, how: Adaptation, **others: Any) -> None:
        found.append(how)
        raise Reached(how)

    monkeypatch.setattr(Episode, "__init__", begun)
    return found


@pytest.fixture
def case() -> Case:
    return Case("heart", np.random.default_rng(0).normal(size=(1, 2, 16, 16)).cumsum(2).astype(np.float32))


@pytest.fixture
def scan(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    image = np.random.default_rng(1).normal(size=(16, 16, 2)).cumsum(0).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(image, np.diag([1.0, 1.0, 5.0, 1.0])), folder / "heart_0000.nii.gz")
    return folder


def travelled(work: Any) -> Any:
    """As it arrives in another process, on this machine or on a Ray cluster."""
    return pickle.loads(pickle.dumps(work))


def by_guard(how: Adaptation, case: Case, scan: Path, out: Path) -> Any:
    return guard(case, PlainUNet(), controller_of(FIXED), how)


def by_predict(how: Adaptation, case: Case, scan: Path, out: Path) -> Any:
    return Deployment(MODEL, FIXED, {"": how}).predict(case)


def by_record(how: Adaptation, case: Case, scan: Path, out: Path) -> Any:
    return record_case(case, MODEL.load(), {"": how})


def by_predict_work(how: Adaptation, case: Case, scan: Path, out: Path) -> Any:
    work = prediction_work(Deployment(MODEL, FIXED, {"": how}), gathered_cases(MODEL.load(), scan), out)
    return travelled(work)("heart")


def by_record_work(how: Adaptation, case: Case, scan: Path, out: Path) -> Any:
    cases: dict[str, CaseFiles] = {files.id: files for files in gathered_cases(MODEL.load(), scan)}
    return travelled(RecordCase(MODEL, {"": how}, cases))("heart")


def by_service(how: Adaptation, case: Case, scan: Path, out: Path) -> Any:
    from fastapi.testclient import TestClient

    from casewise.serve.access import ServiceSettings
    from casewise.serve.app import create_app

    app = create_app(Deployment(MODEL, FIXED, {"": how}), ServiceSettings())
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        return client.post("/segment", content=next(scan.iterdir()).read_bytes())


Way = Callable[[Adaptation, Case, Path, Path], Any]
WAYS: list[Way] = [by_guard, by_predict, by_record, by_predict_work, by_record_work, by_service]


def test_every_field_has_another_value_here() -> None:
    assert set(OTHER) == {field.name for field in fields(Adaptation)}
    assert all(value != getattr(PLAIN, name) for name, value in OTHER.items())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in OTHER if name != "reset"])  # tests/adapt/test_stream.py
def test_each_field_of_an_adaptation_reaches_the_episode(
    name: str, way: Way, arrived: list[Adaptation], case: Case, scan: Path, tmp_path: Path
) -> None:
    how = replace(PLAIN, **{name: OTHER[name]}, **NEEDS.get(name, {}))
    with suppress(Reached):
        way(how, case, scan, tmp_path / "out")
    assert getattr(arrived[0], name) == OTHER[name]


def test_an_episode_reads_every_field(case: Case) -> None:
    """A field that nothing reads would have no effect."""
    read: set[str] = set()

    class Watched(Adaptation):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    how = Watched("tent", 0.05, steps=1, batch_statistics="batch")
    read.clear()
    run_episode(PlainUNet(), torch.zeros(1, 1, 16, 16), how)
    modulated = Watched("tent", modulation="param-subset", statistics=OTHER["statistics"])
    modulated.built()
    record_case(case, MODEL.load(), {"": Watched("views:gamma(1.4)")})
    assert {field.name for field in fields(Adaptation)} <= read


@pytest.mark.parametrize(
    ("name", "value"),
    {
        "spec": "another:Net", "weights": Path("w"), "folds": (1,), "checkpoint": "best.pth", "device": "meta",
        "step_size": 0.25, "mirroring": False, "trust": True, "trust_bundle": True, "trust_architectures": ("a.B",),
        "merge": ("disc=rim+cup",),
    }.items(),
)  # fmt: skip
def test_each_field_of_a_model_reaches_the_loader(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(model_module, "load_backbone", lambda *spec, **options: (spec, options))
    monkeypatch.setattr(model_module, "merged", lambda backbone, lines: seen.append((backbone, lines)))
    model_module._loaded.cache_clear()
    try:
        for model in (MODEL, replace(MODEL, **{name: value})):
            travelled(model).load()
    finally:
        model_module._loaded.cache_clear()
    assert seen[0] != seen[1], f"{name} is dropped on the way to the loader"


def test_the_list_of_model_fields_is_complete() -> None:
    listed = test_each_field_of_a_model_reaches_the_loader.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {name for name, _ in listed} == {field.name for field in fields(Model)}


# ---- the command line ----

TYPED = {
    "objective": (["--set", "objective=memo"], "memo"), "learning_rate": (["--set", "lr=0.01"], 0.01),
    "parameters": (["--set", "parameters=all"], "all"), "steps": (["--set", "steps=2"], 2),
    "seed": (["--set", "seed=5"], 5),
    "min_area": (["--set", "min-area=9"], 9), "foreground": (["--set", "classes=true"], False),
    "max_slices": (["--set", "max-slices=1"], 1),
}  # fmt: skip
OF_VIEWS = {
    "consensus": (["--set", "consensus=vote"], "vote"), "mirrored_views": (["--set", "mirrored-views=true"], True),
}  # fmt: skip
ELSEWHERE = {"modulation", "statistics"}  # need an archive: tests/run/test_record_folder.py, tests/cli


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that stop at their deployment."""
    import casewise.run.predict_folder as predicting
    import casewise.run.record_folder as recording
    import casewise.serve.server as running

    def stop(work: Any, *others: Any, **options: Any) -> None:
        raise Reached(work)

    monkeypatch.setattr(predicting, "predict_all", stop)
    monkeypatch.setattr(recording, "record_folder", stop)
    monkeypatch.setattr(running, "run", stop)


def command_app(command: str) -> Any:
    import importlib

    return importlib.import_module(f"casewise.cli.{command}").app


def written(command: str, words: list[str], scan: Path) -> list[str]:
    own = {
        "predict": ["-i", str(scan), "-o", str(scan / "out"), "--policy", "m0"],
        "record": ["-i", str(scan), "-o", str(scan / "archive")],
        "serve": ["--policy", "m0"],
    }[command]
    return ["-m", MODEL.spec, *own, *words]


def typed(command: str, words: list[str], scan: Path) -> Any:
    with pytest.raises(Reached) as reached:
        CliRunner().invoke(command_app(command), written(command, words, scan), catch_exceptions=False)
    return reached.value.what


def recorded(words: list[str], scan: Path) -> Adaptation:
    """The adaptation that ``record`` makes candidates with."""
    (how,) = typed("record", words, scan).proposers.values()
    return how


@pytest.mark.parametrize("name", TYPED)
def test_each_option_of_the_command_line_reaches_the_adaptation(name: str, stopped: None, scan: Path) -> None:
    words, value = TYPED[name]
    assert getattr(recorded(words, scan), name) == value
    assert getattr(recorded([], scan), name) == getattr(Adaptation(), name)


@pytest.mark.parametrize("name", OF_VIEWS)
def test_each_option_of_views_reaches_views_and_is_refused_by_updates(name: str, stopped: None, scan: Path) -> None:
    (words, value), views = OF_VIEWS[name], ["--set", "objective=views:gamma(1.4)"]
    assert getattr(recorded([*views, *words], scan), name) == value
    assert getattr(recorded(views, scan), name) == getattr(Adaptation(), name)
    result = CliRunner().invoke(command_app("record"), written("record", words, scan))
    assert "no views are proposed" in str(result.exception)


@pytest.mark.parametrize(
    ("key", "said", "name", "value"),
    [
        ("no-mirrored-views", True, "mirrored_views", False), ("no-mirrored-views", False, "mirrored_views", True),
        ("mirrored_views", False, "mirrored_views", False), ("classes", True, "foreground", False),
        ("foreground", False, "foreground", False), ("foreground", True, "foreground", True),
    ],
)  # fmt: skip
def test_both_words_of_a_pair_of_flags_mean_in_a_file_what_they_say(
    key: str, said: bool, name: str, value: bool
) -> None:
    from typer.main import get_command

    from casewise.cli.config import defaults
    from casewise.cli.record import app

    tables, parameters = {"record": {key: said}}, get_command(app).params
    assert defaults(Path("casewise.toml"), tables, "record", parameters, named=True) == {name: value}


def test_every_option_of_an_adaptation_is_tried() -> None:
    assert set(TYPED) | set(OF_VIEWS) | ELSEWHERE == {field.name for field in fields(AdaptationOptions)}
    taken = {field.name for field in fields(AdaptationOptions)}
    assert taken <= {field.name for field in fields(Adaptation)}


@pytest.mark.parametrize(
    ("option", "changes"),
    {
        "weights": {"weights": Path("w")}, "folds": {"folds": (0, 1)}, "checkpoint": {"checkpoint": "best.pth"},
        "device": {"device": "meta"}, "step_size": {"step_size": 0.25}, "unmirrored": {"mirroring": False},
        "trust": {"trust": True, "trust_bundle": True, "trust_architectures": ("a.B",)},
        "model": {"spec": "another:Net"}, "merge": {"merge": ("disc=rim+cup",)},
    }.items(),
)  # fmt: skip
def test_each_option_of_a_model_reaches_the_model(option: str, changes: dict[str, Any]) -> None:
    typed_value = {
        "folds": "0 1",
        "unmirrored": True,
        "trust": ["checkpoint", "bundle", "a.B"],
        "merge": ["disc=rim+cup"],
    }
    value = typed_value.get(option, next(iter(changes.values())))
    untyped = {field.name: field.default.default for field in fields(ModelOptions)}
    plain = ModelOptions(**{**untyped, "model": MODEL.spec, "device": "cpu"})
    assert replace(plain, **{option: value}).as_model() == replace(plain.as_model(), **changes)


def test_contract_and_memory_of_the_command_line_reach_the_deployment(stopped: None, scan: Path) -> None:
    for command in ("predict", "serve"):
        found = typed(command, ["--set", "contract=warn", "--set", "max-ram=1T"], scan)
        assert (found.contract, found.max_ram) == ("warn", 2**40)


# ---- what a deployment does ----


def test_each_field_of_a_deployment_has_an_effect(case: Case) -> None:
    flat = Case("flat", np.ones((1, 2, 16, 16), np.float32))
    with pytest.raises(Refused, match=r"case flat does not meet the model's input contract: .*; correct the file"):
        Deployment(MODEL, FIXED, {"": PLAIN}).predict(flat)
    assert Deployment(MODEL, FIXED, {"": PLAIN}, contract="warn").predict(flat).findings
    with pytest.raises(BadInput, match=r"channels come first"):  # one sentence, not one for each row
        Deployment(MODEL, FIXED, {"": PLAIN}).predict(Case("last", np.zeros((48, 64, 64, 1), np.float32)))
    assert not Deployment(MODEL, FIXED, {"": PLAIN}, contract="off").predict(flat).findings
    with pytest.raises(Refused, match="max-ram allows"):
        Deployment(MODEL, FIXED, {"": PLAIN}, max_ram=1000).predict(case)
    assert Deployment(MODEL, FIXED, {"": PLAIN}).predict(case).executed == 1
    assert Deployment(MODEL).predict(case).executed == 0
    with pytest.raises(BadInput, match="perhaps"):
        Deployment(MODEL, contract="perhaps")


@dataclass(frozen=True)
class Breaks:
    """An objective that fails in its second update, in a chosen way."""

    error: Exception

    def begin(self, subject: Any) -> Any:
        done: list[int] = []

        def update() -> Any:
            if done:
                raise self.error
            done.append(1)
            return {}

        return update


@pytest.fixture
def forwards() -> Iterator[list[int]]:
    """Slices of each forward of the network."""
    sizes: list[int] = []
    network = MODEL.load().network

    def seen(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        sizes.append(len(inputs[0]))

    hook = network.register_forward_pre_hook(seen)
    yield sizes
    hook.remove()


@pytest.mark.parametrize("error", [ValueError("odd"), RuntimeError("gone"), BadInput("no"), MemoryError()], ids=repr)
def test_a_failing_adaptation_is_m0_as_it_was_cached(error: Exception, case: Case, forwards: list[int]) -> None:
    """The two slices of M0 and of step 1, one at a time as asked, and nothing after the failure."""
    how = replace(PLAIN, objective=Breaks(error), max_slices=1, steps=3)
    found = Deployment(MODEL, Policy("fixed-k", "fixed-k", {"step": 3}, 3), {"": how}).predict(case)
    assert (found.status, found.executed, found.decision.deployed) == ("fallback", 1, 0)
    assert found.mask is found.source_mask
    assert found.source_mask is found.trajectory.masks[0]
    assert found.error is error
    assert forwards == [1, 1, 1, 1]
    np.testing.assert_array_equal(found.mask, Deployment(MODEL).predict(case).mask)


def test_m0_without_adaptation_goes_through_in_the_slices_that_were_asked_for(case: Case, forwards: list[int]) -> None:
    Deployment(MODEL, proposers={"": replace(PLAIN, max_slices=1)}).predict(case)
    assert forwards == [1, 1]


def test_m0_is_predicted_without_a_graph_where_memory_does_not_suffice_for_one(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hungry(self: Any, *, where: str, keep_graph: bool) -> Any:
        raise torch.OutOfMemoryError("out of memory, injected")

    expected = Deployment(MODEL).predict(case)
    monkeypatch.setattr(episode_module.Forwards, "prediction", hungry)
    found = Deployment(MODEL, FIXED, {"": PLAIN}).predict(case)
    assert (found.status, found.executed) == ("fallback", 0)
    np.testing.assert_array_equal(found.mask, expected.mask)


# ---- what belongs together ----


def test_a_policy_of_another_rate_steps_or_model_is_refused(case: Case) -> None:
    binding = PLAIN.binding(MODEL.load())
    policy = replace(FIXED, binding=binding)
    Deployment(MODEL, policy, {"": PLAIN}).check()
    with pytest.raises(Mismatch, match=r"fitted on another learning_rate .*0\.05.*used with.*0\.1"):
        Deployment(MODEL, policy, {"": replace(PLAIN, learning_rate=0.1)}).check()
    with pytest.raises(Mismatch, match="fitted on another model"):
        Deployment(MODEL, replace(policy, binding=replace(binding, model="another")), {"": PLAIN}).check()
    other = replace(policy, binding=replace(binding, loader="scaled to 0..1"))
    with pytest.raises(
        Mismatch, match=r"another loader \(loader: fitted on 'scaled to 0\.\.1', used with '.*calibrate"
    ):
        Deployment(MODEL, other, {"": PLAIN}).check()


@dataclass(frozen=True)
class AmongTwo:
    """A controller that reads two ladders; it never gets to decide here."""

    ladders = ("first", "second")
    name = "among-two"
    needs = frozenset[str]()
    states = frozenset[State]()

    def decide(self, seen: Any) -> None:
        raise AssertionError("a ladder is missing")


@pytest.mark.parametrize("late", [False, True])
def test_m0_of_the_ladders_before_outlives_a_ladder_that_fails(
    late: bool, case: Case, forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment_module, "judge_of", lambda policy: Judge(AmongTwo()))
    second = PLAIN if late else replace(PLAIN, objective=Breaks(ValueError("odd")), steps=2)
    both = Deployment(MODEL, FIXED, {"first": PLAIN, "second": second})
    found = both.predict(case, deadline=0.0 if late else None)
    assert (found.status, found.executed) == ("fallback", 1 if late else 2)  # updates of the ladder that failed count
    assert found.mask is found.source_mask
    assert ("time limit" if late else "odd") in found.decision.reason
    assert len(forwards) == (1 if late else 4)


def test_a_network_that_was_left_in_training_mode_predicts_as_in_evaluation_mode() -> None:
    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))
    image = np.random.default_rng(0).normal(size=(1, 32, 32)).astype(np.float32)
    wanted = Deployment(network.eval()).predict(image).mask
    network.train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    assert np.array_equal(Deployment(network).predict(image).mask, wanted)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert network.training


def test_run_episode_refuses_a_backbone_and_names_guard() -> None:
    with pytest.raises(BadInput, match="guard takes both"):
        run_episode(MODEL.load(), np.zeros((1, 1, 32, 32)), "views:light")


def test_a_weights_file_alone_is_no_model() -> None:
    with pytest.raises(BadInput, match="factory"):
        Model(weights=Path("unet.pth"))


def test_an_image_may_have_any_file_name(scan: Path) -> None:
    renamed = (scan / "heart_0000.nii.gz").rename(scan / "Jos\u00e9 scan 1.nii.gz")
    assert Deployment(MODEL).predict(renamed).decision.case_id.startswith("Jose_scan_1-")
