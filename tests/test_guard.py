"""guard: adapt step by step and deploy what the controller chooses."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from casewise import Case, guard, replay, run_episode
from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Prepared
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.snapshot import fingerprint
from casewise.archive.store import create_archive
from casewise.core.errors import BadInput, Mismatch, Refused, UnknownName, UnsafeInput
from casewise.core.records import Action, Binding, Controller, Policy, State
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.controllers.router import Bucket, Router

torch.set_num_threads(1)
RATE = 0.05


@pytest.fixture
def network():
    torch.manual_seed(4)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(), nn.Conv2d(8, 3, 1)
    )
    with torch.no_grad():
        net[-1].weight.mul_(6)
    return net


@pytest.fixture
def case():
    return Case("heart-1", np.random.default_rng(0).normal(size=(1, 4, 24, 24)).astype("float32"), group="B")


def forwards_and_updates(network):
    count = SimpleNamespace(forwards=0, graphs=0)

    def look(module, inputs, output):
        count.forwards += 1
        if output.requires_grad:
            output.register_hook(lambda _: setattr(count, "graphs", count.graphs + 1))

    network.register_forward_hook(look)
    return count


def router(low=None, mid=None, *, cut_low=0.0, cut_high=1.0):
    return Router("delta", cut_low, cut_high, low or Bucket("depth", 3), mid or Bucket("depth", 2, shrink=0.5))


CASES = {
    "rollback": (router(cut_high=0.0), Action.ROLLBACK, 1),
    "shrink": (router(), Action.SHRINK, 2),
    "keep": (router(cut_low=1.0, cut_high=1.0), Action.KEEP, 3),
    "m0": (CONTROLLERS.build("m0"), Action.ROLLBACK, 0),
    "fixed": (CONTROLLERS.build("fixed-k", step=2), Action.KEEP, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_no_update_is_made_that_the_decision_did_not_need(network, case, name):
    controller, action, executed = CASES[name]
    count = forwards_and_updates(network)
    guarded = guard(case, network, controller, Tent(), steps=4, learning_rate=RATE, min_area=2)
    assert guarded.decision.action is action
    assert guarded.decision.executed == guarded.trajectory.steps == count.graphs == executed
    assert count.forwards == executed + 1 + (action is Action.SHRINK)


def test_a_rollback_is_the_cached_mask_itself(network, case):
    guarded = guard(case, network, router(cut_high=0.0), Tent(), steps=4, learning_rate=RATE)
    assert guarded.mask is guarded.trajectory.masks[0]
    assert (guarded.decision.deployed, guarded.decision.executed) == (0, 1)


def test_a_shrink_is_predicted_from_interpolated_weights(network, case):
    guarded = guard(case, network, router(), Tent(), steps=4, learning_rate=RATE)
    batch = torch.as_tensor(case.image).transpose(0, 1)
    recorded = run_episode(network, batch, Tent(), steps=2, learning_rate=RATE, case_id=case.id, shrink=[State(2, 0.5)])
    assert guarded.decision.state == State(2, 0.5)
    assert np.array_equal(guarded.mask, recorded.mask(State(2, 0.5)))
    assert not np.array_equal(guarded.mask, recorded.masks[2])


@pytest.mark.parametrize("name", [*CASES, "gate"])
def test_a_replay_of_the_recorded_case_gives_the_same_decision_field_by_field(network, case, name, tmp_path):
    controller = CONTROLLERS.build("region-gate", threshold=0.0, min_area=2) if name == "gate" else CASES[name][0]
    options = {"learning_rate": RATE, "min_area": 2, "seed": 3}
    guarded = guard(case, network, controller, Tent(), steps=4, **options)
    batch = torch.as_tensor(case.image).transpose(0, 1)
    trajectory = run_episode(
        network, batch, Tent(), steps=4, case_id=case.id, shrink=[State(2, 0.5)], signals=["drop"], **options
    )
    archive = create_archive(tmp_path / "a", binding=Binding("m", "o", "l", "s"), steps=4, configuration={})
    archive.add(case, trajectory)
    assert replay(archive, controller) == [guarded.decision]


def test_a_gate_deploys_the_accepted_regions_alone(network, case):
    gate = CONTROLLERS.build("region-gate", threshold=0.0, min_area=2)
    guarded = guard(case, network, gate, Tent(), steps=1, learning_rate=RATE, min_area=2)
    source, adapted = guarded.trajectory.masks
    assert guarded.decision.action is Action.GATE
    assert guarded.decision.accepted
    changed = guarded.mask != source
    assert changed.any()
    assert np.array_equal(guarded.mask[changed], adapted[changed])


@dataclass(frozen=True)
class Insatiable:
    name = "insatiable"
    needs = frozenset()
    states = frozenset()

    def decide(self, seen):
        return None


def test_a_controller_that_never_decides_is_stopped_at_the_horizon(network, case):
    before = fingerprint(network)
    assert isinstance(Insatiable(), Controller)
    with pytest.raises(BadInput, match="insatiable asked for step 3 of case heart-1"):
        guard(case, network, Insatiable(), Tent(), steps=2)
    assert fingerprint(network) == before


def test_a_mistake_in_an_own_controller_is_an_error_with_its_traceback(network, case):
    @dataclass(frozen=True)
    class Typo(Insatiable):
        def decide(self, seen):
            return seen.signls

    before = fingerprint(network)
    with pytest.raises(AttributeError, match="signls"):
        guard(case, network, Typo(), "tent", steps=1)
    assert fingerprint(network) == before


def test_names_of_ready_controllers_work(network, case):
    named = guard(case, network, "frag-stop", objective="tent", steps=2, learning_rate=RATE)
    built = guard(case, network, CONTROLLERS.build("frag-stop", cap=2), "tent", steps=2, learning_rate=RATE)
    assert named.decision == built.decision


def test_arrays_are_seeded_by_their_content(network, case):
    other = case.image + 1
    ids = [guard(one, network, "m0", "tent").decision.case_id for one in (case.image, case.image.copy(), other)]
    assert ids[0] == ids[1] != ids[2]


def test_arrays_names_and_groups(network, case):
    guarded = guard(case.image, network, CONTROLLERS.build("fixed-k", step=1), "tent", steps=1, calibration_id="c1")
    assert guarded.decision.calibration_id == "c1"
    assert guarded.mask.shape == (4, 24, 24)
    seen = guard(case, network, CONTROLLERS.build("m0"), "tent", steps=1)
    assert seen.decision.group == "B"


def test_signals_that_the_controller_needs_are_measured(network, case):
    @dataclass(frozen=True)
    class Wants(Insatiable):
        needs = frozenset({"drop", "regions"})

        def decide(self, seen):
            assert all("drop" in signals for signals in seen.signals)
            return CONTROLLERS.build("fixed-k", step=1).decide(seen)

    guarded = guard(case, network, Wants(), "tent", steps=1, learning_rate=RATE)
    assert guarded.trajectory.signals[1]["drop"] is not None


def test_a_backbone_prepares_the_case_itself(network, case):
    asked = []

    def prepare(given):
        asked.append(given.id)
        inputs = torch.as_tensor(given.image).transpose(0, 1)
        return Prepared(inputs, forward=lambda x: network(2 * x))

    backbone = SimpleNamespace(network=network, head="softmax", prepare=prepare)
    guarded = guard(case, backbone, CONTROLLERS.build("m0"), "tent", steps=1)
    assert asked == ["heart-1"]
    doubled = 2 * torch.as_tensor(case.image).transpose(0, 1)
    assert np.array_equal(guarded.mask, network(doubled).argmax(1).numpy())


def test_importing_guard_does_not_import_torch():
    code = "import sys, casewise.guard; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("example", "said"), [("own_network", "mask (6, 64, 64)"), ("own_objective", "step 3: mean largest probability")]
)
def test_the_examples_run(example, said, capsys, request):
    spec = importlib.util.spec_from_file_location(example, request.config.rootpath / "examples" / f"{example}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[example] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.main()
    del sys.modules[example]
    assert said in capsys.readouterr().out


# ---- a policy brings its adaptation along ----


@pytest.fixture
def fitted(network):
    how = Adaptation("tent", RATE, steps=2, min_area=2)
    return Policy("fixed-k", "fixed-k", {"step": 2}, 2, binding=how.binding(network), adaptation=how.as_plain())


def test_a_policy_is_all_that_a_guard_needs(network, case, fitted):
    guarded = guard(case, network, fitted)
    asked = guard(case, network, CONTROLLERS.build("fixed-k", step=2), "tent", steps=2, learning_rate=RATE, min_area=2)
    assert guarded.decision == asked.decision
    assert guarded.trajectory.made_by == asked.trajectory.made_by


@pytest.mark.parametrize(
    ("asked", "error", "sentence"),
    [
        ({"learning_rate": 2 * RATE}, Mismatch, "fitted on another learning_rate"),
        ({"objective": "memo"}, Mismatch, "fitted on another objective,.*Memo"),
        ({"min_area": 3}, Mismatch, "fitted on another measure .*min_area=2.*min_area=3"),
        ({"steps": 3}, Refused, "was fitted on 2 candidates, .* makes 3"),
        ({"learning_rte": 0.1}, UnknownName, "no option of an episode is called 'learning_rte'. Did you mean"),
    ],
)
def test_a_policy_is_refused_with_other_options(network, case, fitted, asked, error, sentence):
    with pytest.raises(error, match=sentence):
        guard(case, network, fitted, **asked)


def test_a_policy_is_refused_on_another_network(network, case, fitted):
    with torch.no_grad():
        next(network.parameters()).add_(1)
    with pytest.raises(Mismatch, match="fitted on another model"):
        guard(case, network, fitted)


def test_what_does_not_change_results_may_differ_from_the_policy(network, case, fitted):
    assert np.array_equal(guard(case, network, fitted, max_slices=1).mask, guard(case, network, fitted).mask)


def test_a_policy_file_from_a_stranger_imports_nothing(network, case, fitted):
    theirs = replace(fitted, adaptation={**fitted.adaptation, "objective": "evil.module:Evil"})
    with pytest.raises(UnsafeInput, match=r"names the objective 'evil.module:Evil', which is code to import"):
        guard(case, network, theirs)


def test_a_controller_alone_needs_an_objective(network, case):
    with pytest.raises(BadInput, match="fixed-k does not name its proposers"):
        guard(case, network, CONTROLLERS.build("fixed-k", step=1))


def test_models_are_named_by_an_address_and_swapped_arguments_are_refused(case):
    address = "casewise.adapt.networks:phantom_cardiac"
    image = np.random.default_rng(0).normal(size=(1, 32, 32))
    named = guard(image, address, "frag-stop", objective="tent", steps=1)
    assert named.mask.shape == (32, 32)
    with pytest.raises(BadInput, match="got Case"):
        guard(named, case, "frag-stop", objective="tent")


def test_an_objective_may_be_given_as_its_class(network, case):
    by_class, by_object = (run_episode(network, case.image.swapaxes(0, 1), one, steps=1) for one in (Tent, Tent()))
    assert np.array_equal(by_class.masks[1], by_object.masks[1])


def test_a_folder_and_the_name_of_a_ready_controller_are_replayed(network, case, tmp_path):
    how = Adaptation("tent", steps=2)
    archive = create_archive(tmp_path / "archive", binding=how.binding(network), steps=2)
    archive.add(case, run_episode(network, case.image.swapaxes(0, 1), how, case_id=case.id))
    assert [one.case_id for one in replay(str(tmp_path / "archive"), "frag-stop")] == [case.id]


@pytest.mark.parametrize("wrong", [object(), 3, Router])
def test_what_is_no_controller_is_refused_in_a_sentence(network, case, wrong):
    with pytest.raises(BadInput, match=r"a controller must be an object with name, needs, states and decide\(seen\)"):
        guard(case, network, wrong, "tent", steps=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": "2"}, "steps must be a whole number, 0 or more, got '2'"),
        ({"learning_rate": "big"}, "a learning rate must be a number, 0 or more, got 'big'"),
        ({"learning_rate": -1.0}, "a learning rate must be a number, 0 or more, got -1.0"),
    ],
)
def test_options_that_are_no_numbers_are_refused_in_a_sentence(network, case, options, words):
    with pytest.raises(BadInput, match=words):
        guard(case, network, "frag-stop", "tent", **options)


def test_a_tensor_with_gradients_is_an_image_and_what_is_no_array_is_not(network, case):
    tensor = torch.tensor(case.image, requires_grad=True)
    same = [guard(one, network, "frag-stop", "tent", steps=1).mask for one in (tensor, case.image)]
    assert np.array_equal(*same)
    for wrong in (None, 3.0, np.zeros((1, 8, 8), complex), (case.image, case.image[0])):
        with pytest.raises(BadInput, match=r"an image must be an array of numbers \(channel, \*space\)"):
            guard(wrong, network, "frag-stop", "tent", steps=1)
