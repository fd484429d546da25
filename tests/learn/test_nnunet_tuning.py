"""nnU-Net models are tuned nnU-Net's way: its patches, transforms, loss, regions, ignore label; and exported whole."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from miniature_nnunet import scan, write_model

from casewise.adapt.backbones import load_backbone
from casewise.adapt.snapshot import fingerprint
from casewise.adapt.tuned_weights import temporary_weights
from casewise.core.errors import BadInput, Mismatch
from casewise.core.records import Case
from casewise.learn.export import export
from casewise.learn.nnunet_task import NnUNetTask
from casewise.learn.tuning import Tuning, tune

pytest.importorskip("nnunetv2")
os.environ.setdefault("nnUNet_compile", "f")

SHORT = Tuning(updates=2, batch=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = {}

    def make(**options):
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = write_model(tmp_path_factory.mktemp("model"), steps=4, **options)
        return made[key]

    return make


def hearts(count=2, shift=0.6):
    pairs = [scan(seed, shift=shift) for seed in range(count)]
    cases = [Case(f"c{k}", image[None], (2.0, 1.0, 1.0), cluster=f"p{k}") for k, (image, _) in enumerate(pairs)]
    return cases, [label for _, label in pairs]


@pytest.mark.parametrize(
    ("options", "channels", "depth"),
    [({}, 1, 2), ({"dimensions": 3}, 1, 2), ({"regions": True}, 2, 2), ({"ignore": True}, 1, 2)],
)
def test_patches_targets_and_loss_are_nnunets(model, options, channels, depth):
    backbone = load_backbone(str(model(**options)))
    cases, labels = hearts()
    if backbone.ignore is not None:
        labels[0] = np.where(labels[0] == 2, backbone.ignore, labels[0]).astype(np.uint8)
    task = NnUNetTask(backbone, cases, labels, SHORT)
    inputs, target = task.draw()
    assert inputs.shape == (2, 1, *backbone.predictor.configuration_manager.patch_size)
    assert [part.shape[1] for part in target] == [channels] * depth
    assert target[0].shape[2:] == inputs.shape[2:]
    before = fingerprint(backbone.network)
    tuned = tune(backbone, cases, labels, SHORT)
    assert fingerprint(backbone.network) == before
    assert not backbone.network.decoder.deep_supervision, "given back as it was found"
    heads = {name for name in tuned.values if "seg_layers" in name}
    assert heads == {f"decoder.seg_layers.{k}.{what}" for k in range(depth) for what in ("weight", "bias")}
    assert {type(backbone.network.get_submodule(name.rpartition(".")[0])).__name__ for name in tuned.values} <= {
        "InstanceNorm2d", "InstanceNorm3d", "Conv2d", "Conv3d",
    }  # fmt: skip


def test_tuning_helps_on_the_shifted_scans(model):
    backbone = load_backbone(str(model()))
    cases, labels = hearts(4)
    tuned = tune(backbone, cases[:3], labels[:3], Tuning(updates=20, batch=4, learning_rate=1e-2))

    def error():
        return float((backbone.prepare(cases[3]).pipeline.source()[0] != labels[3]).mean())

    before = error()
    with temporary_weights(backbone.network, tuned):
        assert error() < before
    assert error() == before


def test_the_seed_says_everything(model):
    backbone, (cases, labels) = load_backbone(str(model())), hearts()
    one, other = (tune(backbone, cases, labels, SHORT).values for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_every_fold_of_an_ensemble_is_tuned_and_exported(model, tmp_path):
    backbone = load_backbone(str(model(folds=(0, 1))))
    cases, labels = hearts()
    tuned = tune(backbone, cases, labels, SHORT)
    assert {name.split(".")[1] for name in tuned.values} == {"0", "1"}
    again = load_backbone(str(export(backbone, tuned, tmp_path / "out")))
    with temporary_weights(backbone.network, tuned):
        expected = backbone.prepare(cases[0]).predict()
        assert fingerprint(backbone.network) == again.fingerprint
    assert np.array_equal(again.prepare(cases[0]).predict(), expected)


def test_an_exported_folder_is_read_by_nnunet_itself(model, tmp_path):
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    backbone, (cases, labels) = load_backbone(str(model())), hearts()
    tuned = tune(backbone, cases, labels, SHORT)
    folder = export(backbone, tuned, tmp_path / "out")
    predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(folder), (0,), "checkpoint_final.pth")
    name, value = next(iter(tuned.values.items()))
    assert torch.allclose(predictor.list_of_parameters[0][name], value, atol=1e-6)
    with pytest.raises(BadInput, match="not empty"):
        export(backbone, tuned, folder)
    with pytest.raises(Mismatch):
        export(backbone, replace(tuned, model="0" * 64), tmp_path / "other")


def test_inspect_exports_the_tuned_model_of_a_deployment_and_members_take_it(model, tmp_path):
    """The exported nnU-Net folder predicts the mask of the tuned weights, also as a member."""
    from typer.testing import CliRunner

    from casewise.adapt.adaptation import Adaptation
    from casewise.adapt.model import Model
    from casewise.adapt.proposers.live import record_case
    from casewise.cli import app
    from casewise.core.records import Policy
    from casewise.deployment import Deployment

    spec, (cases, labels) = model(), hearts()
    backbone = load_backbone(str(spec))
    tuned = tune(backbone, cases, labels, Tuning(updates=6, batch=2, learning_rate=3e-2))
    (tmp_path / "weights").mkdir()
    tuned.write(tmp_path / "weights" / "fold-0.safetensors")
    how = Adaptation("tuned:1", tuned=str(tmp_path / "weights"))
    policy = Policy(
        "fixed-k", "fixed-k", {"step": 1}, 1, binding=how.binding(backbone), adaptation={**how.as_plain(), "steps": 1}
    )
    saved = Deployment(Model(str(spec)), policy, {"": how}).save(tmp_path / "deployment")
    done = CliRunner().invoke(app, ["inspect", str(saved), "--export", str(tmp_path / "out")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    expected = record_case(cases[0], backbone, {"": how})[""].masks[1]
    assert not np.array_equal(expected, backbone.prepare(cases[0]).predict()), "tuning moved the mask"
    assert np.array_equal(load_backbone(str(tmp_path / "out")).prepare(cases[0]).predict(), expected)
    member = record_case(cases[0], backbone, {"": Adaptation(f"members:{tmp_path / 'out'}")})[""]
    assert np.array_equal(member.masks[1], expected)
    plain = Deployment(Model(str(spec))).save(tmp_path / "plain")
    for command, sentence in ((["--export", str(tmp_path / "no")], "no tuned weights"),):
        failed = CliRunner().invoke(app, ["inspect", str(plain), *command])
        assert sentence in str(failed.exception)


def test_labels_of_regions_and_unknown_values(model):
    backbone, (cases, labels) = load_backbone(str(model(regions=True))), hearts()
    with pytest.raises(BadInput, match="c0 holds 5"):
        tune(backbone, cases, [labels[0] * 5, labels[1]], SHORT)


def test_no_results_folder_is_left_behind(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backbone, (cases, labels) = load_backbone(str(model())), hearts()
    NnUNetTask(backbone, cases, labels, SHORT)
    assert not list(Path().iterdir())
