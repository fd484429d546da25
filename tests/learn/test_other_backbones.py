"""Hugging Face and MONAI models take the same generic path: patches on the network's own grid, labels beside them."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from worlds.tiny_models import write_segformer

from casewise.adapt.backbones import load_backbone
from casewise.adapt.backbones.checkpoints import write_safetensors
from casewise.adapt.snapshot import fingerprint
from casewise.adapt.tuned_weights import temporary_weights
from casewise.core.records import Case
from casewise.learn.export import export
from casewise.learn.generic import GenericTask
from casewise.learn.tuning import Tuning, tune

SHORT = Tuning(updates=2, batch=2)


@pytest.fixture(autouse=True)
def third_party_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_a_segformer_is_tuned_on_the_grid_of_its_processor_and_exported(tmp_path):
    pytest.importorskip("transformers")
    backbone = load_backbone(str(write_segformer(tmp_path / "model", "road", "sky", "car")))
    picture = np.random.default_rng(0).integers(0, 255, (3, 40, 72)).astype(np.uint8)
    label = np.zeros((40, 72), np.uint8)
    label[:20], label[0] = 2, 255
    case = Case("street", picture)
    images, target = GenericTask(backbone, [case], [label], SHORT).draw()
    assert images.shape == (2, 3, 64, 64)
    assert target.shape == (2, 64, 64)
    before = fingerprint(backbone.network)
    tuned = tune(backbone, [case], [label], SHORT)
    assert fingerprint(backbone.network) == before
    assert "decode_head.classifier.weight" in tuned.values
    assert all("norm" in name for name in tuned.values if "classifier" not in name)
    again = load_backbone(str(export(backbone, tuned, tmp_path / "out")))
    with temporary_weights(backbone.network, tuned):
        assert fingerprint(backbone.network) == again.fingerprint


def test_a_monai_network_is_tuned_on_windows(tmp_path):
    nets = pytest.importorskip("monai.networks.nets")
    arguments = {
        "spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": [4, 8], "strides": [2],
        "norm": ["INSTANCE", {"affine": True}],
    }  # fmt: skip
    write_safetensors(tmp_path / "model.safetensors", nets.UNet(**arguments).state_dict())
    plain = {"network": "UNet", "arguments": arguments, "window": [8, 8, 8], "labels": {"1": "organ"}}
    (tmp_path / "network.json").write_text(json.dumps(plain))
    backbone = load_backbone(str(tmp_path))
    case = Case("volume", np.random.default_rng(0).normal(size=(1, 10, 14, 12)).astype(np.float32))
    label = np.zeros((10, 14, 12), np.uint8)
    label[3:6, 4:8, 4:8] = 1
    images, target = GenericTask(backbone, [case], [label], SHORT).draw()
    assert images.shape == (2, 1, 8, 8, 8)
    assert (target[-1] == 1).any(), "the last patch is centered on foreground"
    tuned = tune(backbone, [case], [label], SHORT)
    assert tuned.values
    out = export(backbone, tuned, tmp_path / "out")
    assert [file.name for file in out.iterdir()] == ["model.safetensors"]
