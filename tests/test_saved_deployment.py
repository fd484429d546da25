"""A deployment as one folder: what comes back, what is refused, and flags and failures of the cases it segments."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import casewise.deployment as deployment_module
from casewise.adapt.adaptation import Adaptation, proposers_of
from casewise.adapt.backbones.checkpoints import write_safetensors
from casewise.adapt.model import Model
from casewise.adapt.networks import PlainUNet
from casewise.adapt.proposers.live import record_case
from casewise.archive.store import create_archive
from casewise.cli import app
from casewise.core.durable import json_sha256
from casewise.core.errors import BadInput, Mismatch, Refused, UnsafeInput
from casewise.core.records import Case, Policy, State
from casewise.deployment import Deployment
from casewise.deployment.saved import load, open_deployment, predict_command
from casewise.guard import guard
from casewise.judge.certificates.certificate import Certificate, policy_digest
from casewise.judge.decide import Judge
from casewise.judge.policy import judge_of, write_policy
from casewise.replay import replay

FACTORY = "casewise.adapt.networks:PlainUNet"
VIEWS = Adaptation("views:gamma(1.4),mirror(x)", steps=3, min_area=4)


def write_weights(path: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    write_safetensors(path, PlainUNet().state_dict())
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(FACTORY, weights=write_weights(tmp_path_factory.mktemp("model") / "unet.safetensors", 3))


@pytest.fixture(scope="module")
def case() -> Case:
    return Case("heart", np.random.default_rng(0).normal(size=(1, 2, 16, 16)).cumsum(2).astype(np.float32))


def calibrated(model: Model, controller: str = "fixed-k", **more: Any) -> Policy:
    """A policy on the views of this model, as calibration writes it."""
    options = {"step": 1} if controller == "fixed-k" else {}
    binding = VIEWS.binding(model.load())
    return Policy(controller, controller, options, 3, binding=binding, adaptation=VIEWS.as_plain(), **more)


def rewritten(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Edit deployment.json as an attacker would, who also writes the right hash."""
    plain = json.loads((folder / "deployment.json").read_text())
    del plain["sha256"]
    change(plain)
    (folder / "deployment.json").write_text(json.dumps({**plain, "sha256": json_sha256(plain)}))


@pytest.fixture
def saved(model: Model, tmp_path: Path) -> Path:
    return Deployment(model, calibrated(model), contract="warn", max_ram=2**40).save(tmp_path / "deployment")


# ---- there and back ----


def test_what_is_loaded_is_what_was_saved(saved: Path, model: Model, case: Case) -> None:
    again, before = load(saved), Deployment(model, calibrated(model), contract="warn", max_ram=2**40)
    assert replace(again, folder=None) == before
    np.testing.assert_array_equal(again.predict(case).mask, before.predict(case).mask)
    assert load(saved, contract="off", device="cpu").contract == "off"
    assert open_deployment(str(saved)).policy == before.policy
    with pytest.raises(BadInput, match="leave --policy out"):
        open_deployment(str(saved), "m0")


def test_a_file_that_is_named_like_an_address_does_not_make_it_a_folder(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil_model.py").write_text(f"import os\nos.makedirs({str(tmp_path / 'proof')!r})\n")
    rewritten(saved, lambda plain: plain["model"].update(spec="evil_model:Net"))
    for plant in (lambda path: path.touch(), lambda path: (path.unlink(), path.mkdir())):
        plant(tmp_path / "evil_model:Net")
        with pytest.raises(UnsafeInput, match="--model-at evil_model:Net"):
            load(saved)
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("device", ["toaster", "", "cuda:99", "meta", "cpu; rm -rf", "cpu\n", "mps:0\u0000"])
def test_a_device_that_is_none_is_refused_in_a_sentence(saved: Path, device: str) -> None:
    rewritten(saved, lambda plain: plain["model"].update(device=device))
    if device.startswith("cuda"):  # of the machine that wrote the folder; this one may have another
        assert load(saved).device.startswith(("cpu", "cuda"))
        return
    with pytest.raises(BadInput, match="the device must be cpu"):
        load(saved)
    assert load(saved, device="cpu").device == "cpu"


@pytest.mark.parametrize("device", ["toaster", "cuda:99"])
def test_a_model_on_a_device_that_this_machine_lacks_is_refused(model: Model, device: str) -> None:
    with pytest.raises(BadInput, match="the device must be cpu"):
        replace(model, device=device).load()


def test_saving_again_leaves_no_certificate_of_the_deployment_before(model: Model, tmp_path: Path) -> None:
    policy = calibrated(model)
    plain: dict[str, Any] = {
        "kind": "T1", "statement": "at most 10 %", "loss": "ha", "method": "crc", "alpha": 0.1, "delta": None,
        "population": "cases", "units": 50, "cases": 50, "floor": 0.02, "needed": 9, "cut": 0.3, "bound": 0.09,
        "kept": 0.5, "deployed": {}, "policy": policy_digest(policy),
    }  # fmt: skip
    first = Deployment(model, policy, certificate=Certificate(**plain))
    assert load(first.save(tmp_path / "one")).certificate == first.certificate
    assert load(Deployment(model, policy).save(tmp_path / "one")).certificate is None


def test_a_policy_that_does_not_describe_its_proposers_is_not_saved(model: Model, tmp_path: Path) -> None:
    fixed = Policy("fixed-k", "fixed-k", {"step": 1}, 3)
    with pytest.raises(BadInput, match="fixed-k"):
        Deployment(model, fixed, {"": VIEWS}).save(tmp_path / "one")
    assert not (tmp_path / "one").exists()


def test_a_network_in_memory_must_be_passed_to_load(tmp_path: Path, case: Case) -> None:
    torch.manual_seed(3)
    network = PlainUNet().eval()
    first = Deployment(network, contract="off")
    first.save(tmp_path / "one")
    with pytest.raises(BadInput, match="model=network"):
        load(tmp_path / "one")
    again = load(tmp_path / "one", model=network)
    np.testing.assert_array_equal(again.predict(case).mask, first.predict(case).mask)
    with pytest.raises(Mismatch, match="hash"):
        load(tmp_path / "one", model=PlainUNet().eval())
    with pytest.raises(BadInput, match="in memory"):
        first.save(tmp_path / "two", copy_model=True)


def test_the_command_for_new_cases_names_the_code_that_only_a_person_may_name(model: Model) -> None:
    policy, place = calibrated(model), Path("fitted")
    plain = "casewise predict -i IN -o OUT -m fitted"
    assert predict_command(place, model, policy) == plain
    assert predict_command(place, Model("mynets:unet"), policy) == f"{plain} --model-at mynets:unet"
    assert predict_command(place, PlainUNet(), policy).startswith(f"{plain} --model-at package.module:function")
    own = replace(policy, adaptation={**policy.adaptation, "objective": "mine:adapt"})
    assert predict_command(place, model, own) == f"{plain} --set objective=mine:adapt"
    assert len(repr(Deployment(PlainUNet()))) < 100


def test_a_copied_model_travels_with_the_folder_and_a_moved_one_is_found(tmp_path: Path, case: Case) -> None:
    pytest.importorskip("monai")
    folder = tmp_path / "net"
    folder.mkdir()
    torch.manual_seed(0)
    from monai.networks.nets import UNet

    options = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": [4, 8], "strides": [2]}
    (folder / "network.json").write_text(json.dumps({"network": "UNet", "arguments": options, "window": [16, 16]}))
    write_safetensors(folder / "model.safetensors", UNet(**options).state_dict())
    plain = Deployment(str(folder), contract="off")
    mask = plain.predict(case).mask
    plain.save(tmp_path / "bare")
    plain.save(tmp_path / "whole", copy_model=True)
    shutil.move(folder, tmp_path / "elsewhere")
    shutil.move(tmp_path / "whole", tmp_path / "travelled")
    np.testing.assert_array_equal(load(tmp_path / "travelled").predict(case).mask, mask)
    with pytest.raises(BadInput, match="--model-at"):
        load(tmp_path / "bare")
    moved = load(tmp_path / "bare", model=tmp_path / "elsewhere")
    np.testing.assert_array_equal(moved.predict(case).mask, mask)
    opened = open_deployment(Model(str(tmp_path / "bare")), model_at=str(tmp_path / "elsewhere"))
    np.testing.assert_array_equal(opened.predict(case).mask, mask)
    again = load(tmp_path / "travelled").save(tmp_path / "travelled")  # in place: still movable
    assert json.loads((again / "deployment.json").read_text())["model"]["spec"] == "model"
    (tmp_path / "travelled" / "model" / "more.txt").touch()
    with pytest.raises(BadInput, match=r"more\.txt"):
        moved.save(tmp_path / "travelled", copy_model=True)


# ---- what is refused ----


def test_another_model_is_refused(saved: Path, tmp_path: Path) -> None:
    other = write_weights(tmp_path / "other.safetensors", 4)
    with pytest.raises(Mismatch, match="this model has hash"):
        load(saved, weights=other)


def test_edited_files_are_refused(saved: Path) -> None:
    file, text = saved / "policy.json", (saved / "policy.json").read_text()
    file.write_text(text.replace('"step": 1', '"step": 2'))
    with pytest.raises(Mismatch, match=r"policy\.json"):
        load(saved)
    file.write_text(text)
    load(saved)
    edited = json.loads((saved / "deployment.json").read_text())
    (saved / "deployment.json").write_text(json.dumps({**edited, "force": True}))
    with pytest.raises(Mismatch, match=r"deployment\.json"):
        load(saved)


@pytest.mark.parametrize("name", ["../policy.json", "/etc/hostname", "tuned/../../policy.json"])
def test_a_file_outside_the_folder_is_refused(name: str, saved: Path) -> None:
    rewritten(saved, lambda plain: plain["files"].update({name: "0" * 64}))
    with pytest.raises(BadInput, match="outside the folder"):
        load(saved)


def test_a_policy_that_is_not_listed_is_refused(saved: Path) -> None:
    rewritten(saved, lambda plain: plain["files"].clear())
    with pytest.raises(BadInput, match=r"policy\.json"):
        load(saved)


def test_tuned_weights_outside_the_folder_are_refused(model: Model, tmp_path: Path) -> None:
    policy = calibrated(model)
    folder = Deployment(model, policy).save(tmp_path / "one")
    for place in ("../weights", "/tmp/weights"):
        outside = replace(policy, adaptation={**policy.adaptation, "tuned": place})
        with pytest.raises(UnsafeInput, match="weights"):
            proposers_of(outside, folder=folder)


def test_a_folder_runs_no_code_and_trusts_nothing(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_network.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    rewritten(saved, lambda plain: plain["model"].update(trust=True, trust_bundle=True, trust_architectures=["os.x"]))
    assert load(saved).trusted == {"checkpoint": False, "bundle": False, "architectures": []}
    assert load(saved, trust=True).trusted["checkpoint"] is True
    rewritten(saved, lambda plain: plain["model"].update(spec="evil_network:Net"))
    with pytest.raises(UnsafeInput, match="evil_network:Net"):
        load(saved)


def test_a_typed_model_gives_a_deployment_its_device_and_no_other_option(saved: Path) -> None:
    assert open_deployment(Model(str(saved), device="cpu", trust=True)).trusted["checkpoint"] is True
    with pytest.raises(BadInput, match="mirroring"):
        open_deployment(Model(str(saved), mirroring=False))


def test_an_uncertified_policy_beside_a_certified_one_and_a_bare_name_are_refused(model: Model, tmp_path: Path) -> None:
    write_policy(tmp_path / "policy.json", calibrated(model))
    assert open_deployment(model, tmp_path / "policy.json").policy.name == "fixed-k"
    write_policy(tmp_path / "policy-certified.json", replace(calibrated(model), name="fixed-k-certified"))
    with pytest.raises(Refused, match=r"policy\.json is not"):
        open_deployment(model, tmp_path / "policy.json")
    assert open_deployment(model, tmp_path / "policy.json", force=True).certificate is None
    with pytest.raises(Mismatch, match="certificate"):
        open_deployment(model, tmp_path)
    with pytest.raises(BadInput, match="not calibrated"):
        open_deployment(model, "frag-stop")
    with pytest.raises(BadInput, match="--policy m0"):
        open_deployment(model)
    assert not open_deployment(model, "m0").adapts


# ---- flags and failures ----

FLAG = {"quality": {"middle": 1.0, "ratio": 2.0, "level": 0.9}, "below": 1.0, "steps": 3}


@pytest.mark.parametrize("controller", ["m0", "fixed-k"])
def test_a_flag_flags_live_as_in_replay_also_where_m0_is_deployed(
    controller: str, model: Model, case: Case, tmp_path: Path
) -> None:
    backbone, policy = model.load(), calibrated(model, controller, flag=FLAG)
    archive = create_archive(tmp_path / "a", binding=VIEWS.binding(backbone), steps=3, configuration={"min_area": 4})
    archive.add(case, record_case(case, backbone, {"": VIEWS})[""])
    (wanted,) = replay(archive, judge_of(policy))
    found = Deployment(model, policy).predict(case)
    assert found.decision == wanted
    assert (found.flagged, found.executed, found.status) == (True, 3, "done")
    assert 0 < (found.quality_low or 0) < (found.quality or 0) < 1
    assert load(Deployment(model, policy).save(tmp_path / "d")).predict(case).decision == wanted


def test_two_ladders_with_a_flag_flag_live_as_in_replay(model: Model, case: Case, tmp_path: Path) -> None:
    from casewise.archive.store import open_archive

    hows, backbone = {"a": VIEWS, "b": Adaptation("tent", 0.05, steps=2, min_area=4)}, model.load()
    for name, made in record_case(case, backbone, hows).items():
        archive = create_archive(
            tmp_path / "a", ladder=name, binding=hows[name].binding(backbone), steps=made.steps,
            configuration={"min_area": 4},
        )  # fmt: skip
        archive.add(case, made)
    flag = {**FLAG, "ladders": ["a", "b"]}
    policy = Policy("m0", "m0", {}, 5, flag=flag, ladders={name: how.as_plain() for name, how in hows.items()})
    (wanted,) = replay(open_archive(tmp_path / "a").join(["a", "b"]), judge_of(policy))
    found = Deployment(model, policy).predict(case)
    assert found.status == "done", found.error
    assert found.decision == wanted
    assert found.flagged


@dataclass(frozen=True)
class Typo:
    """A controller with a mistake in it."""

    name = "typo"
    needs = frozenset[str]()
    states = frozenset[State]()

    def decide(self, seen: Any) -> Any:
        return seen.stepp


def test_a_mistake_in_a_controller_is_raised_by_guard_and_m0_in_a_deployment(
    model: Model, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AttributeError, match="stepp"):
        guard(case, model.load(), Typo(), VIEWS)
    monkeypatch.setattr(deployment_module, "judge_of", lambda policy: Judge(Typo()))
    found = Deployment(model, calibrated(model, flag=FLAG)).predict(case)
    assert (found.status, found.decision.rolled_back, found.flagged) == ("fallback", True, True)
    assert "stepp" in found.reason
    np.testing.assert_array_equal(found.mask, Deployment(model).predict(case).mask)


def test_the_time_of_a_case_is_kept_in_the_first_of_several_ladders(
    model: Model, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    hows = {"a": VIEWS, "b": VIEWS}
    policy = Policy(
        "m0", "m0", {}, 6, flag={**FLAG, "ladders": ["a", "b"]}, ladders={n: h.as_plain() for n, h in hows.items()}
    )
    found = Deployment(model, policy).predict(case, deadline=0.0)
    assert (found.status, found.executed) == ("fallback", 0)
    assert "time limit" in found.reason


def test_inspect_describes_a_deployment_and_a_model_and_refuses_a_changed_one(saved: Path, tmp_path: Path) -> None:
    def inspected(folder: Path) -> Any:
        return CliRunner().invoke(app, ["inspect", str(folder)])

    assert f"{saved}: deployment" in inspected(saved).output
    for name, content in {
        "dataset.json": {"labels": {"background": 0, "heart": 1}, "channel_names": {"0": "MRI"}},
        "plans.json": {},
        "fold_0/checkpoint_final.pth": {},
    }.items():
        (tmp_path / "net" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "net" / name).write_text(json.dumps(content))
    assert "nnU-Net model" in inspected(tmp_path / "net").output
    assert "casewise fit -m" in inspected(tmp_path / "net").output  # predict alone would need a policy
    (saved / "policy.json").write_text("{}")
    assert isinstance(inspected(saved).exception, Mismatch)
