"""MONAI networks behind MONAI's own sliding window; bundles only when they are trusted."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from casewise.adapt.backbones import load_backbone
from casewise.adapt.backbones.checkpoints import write_safetensors
from casewise.adapt.objectives import objective_of
from casewise.adapt.proposers.live import run_episode
from casewise.core.errors import BadInput, NothingToAdapt, UnknownName, UnsafeInput
from casewise.core.records import Case

NETWORKS: dict[str, dict[str, Any]] = {
    "SegResNet": {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "init_filters": 8, "blocks_down": [1, 1],
                  "blocks_up": [1]},
    "UNet": {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": [4, 8], "strides": [2],
             "norm": ["INSTANCE", {"affine": True}]},
    "SwinUNETR": {"in_channels": 1, "out_channels": 2, "feature_size": 12, "depths": [1, 1, 1, 1],
                  "num_heads": [1, 1, 1, 1], "spatial_dims": 2},
}  # fmt: skip


@pytest.fixture(autouse=True)
def third_party_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def network_folder(folder: Path, name: str, window: list[int], **changes: Any) -> Path:
    import monai.networks.nets as nets

    arguments = {**NETWORKS[name], **changes}
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", getattr(nets, name)(**arguments).state_dict())
    plain = {"network": name, "arguments": arguments, "window": window, "overlap": 0.5, "labels": {"1": "organ"}}
    (folder / "network.json").write_text(json.dumps(plain))
    return folder


@pytest.mark.parametrize(
    ("name", "window"), [("SegResNet", [8, 16, 16]), ("UNet", [8, 16, 16]), ("SwinUNETR", [64, 64])]
)
def test_the_mask_is_that_of_monais_sliding_window_and_it_adapts(name: str, window: list[int], tmp_path: Path) -> None:
    from monai.inferers import sliding_window_inference

    backbone = load_backbone(str(network_folder(tmp_path / "m", name, window)))
    shape = (1, 12, 24, 20) if len(window) == 3 else (1, 70, 64)
    case = Case("a", np.random.default_rng(0).normal(size=shape).astype(np.float32))
    prepared = backbone.prepare(case)
    assert prepared.predict is not None
    assert prepared.inputs.shape[2:] == tuple(window)
    scaled = torch.as_tensor((case.image - case.image.mean()) / case.image.std())[None]
    with torch.inference_mode():
        logits = sliding_window_inference(scaled, window, 4, backbone.network, overlap=0.5, mode="gaussian")
    np.testing.assert_array_equal(prepared.predict(), logits.argmax(1)[0].numpy())
    trajectory = run_episode(
        backbone.network, prepared.inputs, objective_of("tent"), steps=1, learning_rate=0.2, head=backbone.head,
        predict=prepared.predict,
    )  # fmt: skip
    assert trajectory.masks[0].shape == shape[1:]
    assert (trajectory.masks[0] != trajectory.masks[1]).any()


def test_a_network_without_scales_says_why_nothing_moves(tmp_path: Path) -> None:
    backbone = load_backbone(str(network_folder(tmp_path / "m", "UNet", [8, 16, 16], norm="INSTANCE")))
    prepared = backbone.prepare(Case("a", np.random.default_rng(0).normal(size=(1, 8, 16, 16))))
    with pytest.raises(NothingToAdapt, match="affine=False"):
        run_episode(backbone.network, prepared.inputs, objective_of("tent"), steps=1, predict=prepared.predict)


def test_an_unknown_network_or_a_missing_key_is_named(tmp_path: Path) -> None:
    folder = network_folder(tmp_path / "m", "UNet", [8, 16, 16])
    plain = json.loads((folder / "network.json").read_text())
    (folder / "network.json").write_text(json.dumps({**plain, "network": "SegResNett"}))
    with pytest.raises(UnknownName, match="Did you mean 'SegResNet'"):
        load_backbone(str(folder))
    (folder / "network.json").write_text(json.dumps({"network": "UNet", "arguments": {}}))
    with pytest.raises(BadInput, match="needs window"):
        load_backbone(str(folder))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    import monai.networks.nets as nets

    folder = tmp_path / "bundle"
    for name in ("configs", "models"):
        (folder / name).mkdir(parents=True)
    marker = f"$__import__('pathlib').Path({str(tmp_path / 'proof')!r}).touch() or 8"
    arguments = {**NETWORKS["SegResNet"], "init_filters": marker}
    inference = {"network_def": {"_target_": "SegResNet", **arguments}, "inferer": {"roi_size": [8, 16, 16]}}
    (folder / "configs" / "inference.json").write_text(json.dumps(inference))
    channels = {"0": "background", "1": "spleen"}
    data = {
        "inputs": {"image": {"num_channels": 1, "spatial_shape": [8, 16, 16]}},
        "outputs": {"pred": {"num_channels": 2, "channel_def": channels}},
    }
    (folder / "configs" / "metadata.json").write_text(json.dumps({"version": "1", "network_data_format": data}))
    network = nets.SegResNet(**NETWORKS["SegResNet"])
    torch.save(network.state_dict(), folder / "models" / "model.pt")
    return folder


def test_a_bundle_is_code_and_runs_only_when_it_is_trusted(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsafeInput, match=r"is a MONAI bundle .* --trust bundle"):
        load_backbone(str(bundle))
    assert not (tmp_path / "proof").exists()
    backbone = load_backbone(str(bundle), trust_bundle=True)
    assert (tmp_path / "proof").exists()
    assert backbone.labels == {0: "background", 1: "spleen"}
    assert backbone.prepare(Case("a", np.ones((1, 8, 16, 16)))).inputs.shape == (1, 1, 8, 16, 16)
