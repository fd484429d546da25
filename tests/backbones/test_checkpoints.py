"""A checkpoint never runs code unless it was trusted by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.backbones import load_backbone
from casewise.adapt.backbones.checkpoints import convert_checkpoint, load_weights, read_checkpoint, write_safetensors
from casewise.core.errors import BadInput, CasewiseError, Refused, UnsafeInput


class Exploit:
    """Unpickling it makes a folder: a program in a file of weights."""

    def __init__(self, proof: Path) -> None:
        self.proof = str(proof)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.proof,)


@pytest.fixture
def crafted(tmp_path: Path) -> Path:
    torch.save({"network_weights": {"w": torch.ones(1)}, "x": Exploit(tmp_path / "proof")}, tmp_path / "evil.pth")
    return tmp_path / "evil.pth"


def test_a_crafted_pickle_never_executes(crafted: Path) -> None:
    with pytest.raises(UnsafeInput, match="runs code"):
        read_checkpoint(crafted)
    assert not (crafted.parent / "proof").exists()


def test_a_pickle_runs_only_with_explicit_trust(crafted: Path) -> None:
    read_checkpoint(crafted, trust=True)
    assert (crafted.parent / "proof").exists()


def test_a_crafted_model_folder_never_executes(crafted: Path, model: Any, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(model(), folder)
    crafted.replace(folder / "fold_0" / "checkpoint_final.pth")
    with pytest.raises(UnsafeInput):
        load_backbone(str(folder))
    with pytest.raises(UnsafeInput):
        convert_checkpoint(folder / "fold_0" / "checkpoint_final.pth")
    assert not (tmp_path / "proof").exists()


def test_numpy_scalars_of_nnunet_are_allowed(tmp_path: Path) -> None:
    facts = {"ema": np.float32(0.5), "losses": [np.float64(1.0)], "epoch": np.int64(3), "done": np.bool_(True)}
    torch.save({"network_weights": {"w": torch.ones(2)}, **facts}, tmp_path / "a.pth")
    found = read_checkpoint(tmp_path / "a.pth")
    assert {name: found[name] for name in facts} == facts


def test_safetensors_beside_a_pickle_is_taken_instead(crafted: Path) -> None:
    write_safetensors(crafted.with_suffix(".safetensors"), {"w": torch.zeros(3)})
    assert read_checkpoint(crafted)["w"].tolist() == [0, 0, 0]


def test_converting_keeps_the_model_and_its_twin_tensors(model: Any, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(model(), folder)
    before = load_backbone(str(folder))
    made = convert_checkpoint(folder / "fold_0" / "checkpoint_final.pth")
    (folder / "fold_0" / "checkpoint_final.pth").unlink()
    after = load_backbone(str(folder))
    assert made.name == "checkpoint_final.safetensors"
    assert after.fingerprint == before.fingerprint
    assert after.loader == before.loader


def test_weights_must_match_the_network(tmp_path: Path) -> None:
    torch.save({"state_dict": {f"module.{k}": v for k, v in nn.Linear(2, 3).state_dict().items()}}, tmp_path / "a.pth")
    load_weights(nn.Linear(2, 3), tmp_path / "a.pth")
    with pytest.raises(BadInput, match=r"a.pth does not match the network"):
        load_weights(nn.Linear(2, 4), tmp_path / "a.pth")


@pytest.mark.parametrize("prefix", ["", "model.", "net.", "module.model.", "model.0."])
def test_a_prefix_before_every_weight_is_left_out(prefix: str, tmp_path: Path) -> None:
    """PyTorch Lightning saves the attribute that holds the network before every name, and other facts beside."""
    whole = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    weights = {f"{prefix}{name}": value for name, value in whole.state_dict().items()}
    torch.save({"epoch": 3, "pytorch-lightning_version": "2.5", "state_dict": weights}, tmp_path / "a.ckpt")
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    load_weights(other, tmp_path / "a.ckpt")
    assert torch.equal(other[0].weight, whole[0].weight)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda given: given | {"loss.weight": torch.ones(2)},
            "2 weights missing in the file, such as bias; 3 weights unknown",
        ),
        (lambda given: {"model.weight": given["model.weight"]}, "2 weights missing in the file"),
        (lambda given: given | {"model.weight": torch.ones(5, 2)}, "1 weight of another shape, such as weight"),
        (
            lambda given: {"model.weight": given["model.weight"], "net.bias": given["model.bias"]},
            "such as model.weight",
        ),
    ],
)
def test_a_prefix_is_not_left_out_where_other_weights_remain(change: Any, words: str, tmp_path: Path) -> None:
    network = nn.Linear(2, 3)
    torch.save({"state_dict": change({f"model.{k}": v for k, v in network.state_dict().items()})}, tmp_path / "a.ckpt")
    with pytest.raises(BadInput, match=words):
        load_weights(network, tmp_path / "a.ckpt")


def test_other_content_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(b"nothing")
    with pytest.raises((BadInput, UnsafeInput)):
        read_checkpoint(tmp_path / "a.pth")
    with pytest.raises(BadInput, match="there is no checkpoint"):
        read_checkpoint(tmp_path / "b.pth")


def test_a_checkpoint_that_changed_after_its_conversion_is_not_ignored(tmp_path: Path) -> None:
    old, new = tmp_path / "a.pth", {"w": torch.full((2,), 7.0)}
    torch.save({"w": torch.ones(2)}, old)
    made = convert_checkpoint(old)
    assert read_checkpoint(old)["w"].tolist() == [1, 1]
    times = made.stat().st_mtime
    torch.save(new, old)
    os.utime(old, (times - 100, times - 100))  # a copy that keeps its time: only the hash tells
    with pytest.raises(
        Refused, match=r"a\.pth changed after a\.safetensors was made from it.*casewise inspect --convert"
    ):
        read_checkpoint(old)
    convert_checkpoint(old)
    assert read_checkpoint(old)["w"].tolist() == [7, 7]


def test_weights_of_other_software_beside_a_checkpoint_are_not_replaced(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pth")
    write_safetensors(tmp_path / "a.safetensors", {"w": torch.zeros(2)})
    with pytest.raises(BadInput, match=r"did not write a\.safetensors"):
        convert_checkpoint(tmp_path / "a.pth")


def test_a_conversion_by_other_software_is_checked_by_the_time_of_the_files(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pth")
    write_safetensors(tmp_path / "a.safetensors", {"w": torch.zeros(2)})
    assert read_checkpoint(tmp_path / "a.pth")["w"].tolist() == [0, 0]
    later = (tmp_path / "a.safetensors").stat().st_mtime + 10
    os.utime(tmp_path / "a.pth", (later, later))
    said = r"a\.pth is newer than a\.safetensors.*move a\.safetensors away to use a\.pth"
    with pytest.raises(Refused, match=said):
        read_checkpoint(tmp_path / "a.pth")


def test_bad_metadata_of_other_software_is_not_repaired_by_converting(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", metadata={"checkpoint": "epoch 3"})
    with pytest.raises(BadInput, match="save it without the metadata 'aliases' and 'checkpoint'"):
        read_checkpoint(tmp_path / "a.safetensors")


def test_weights_of_other_software_are_named_if_nnunet_cannot_use_them(model: Any, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(model(), folder)
    write_safetensors(folder / "fold_0" / "checkpoint_final.safetensors", {"w": torch.zeros(2)})
    with pytest.raises(BadInput, match=r"final\.safetensors is not .*; move it away to use checkpoint_final\.pth"):
        load_backbone(str(folder))


@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02}", b"\xff" * 64])
def test_a_broken_checkpoint_is_a_sentence(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CasewiseError, match=r"a\.|empty"):
        read_checkpoint(tmp_path / "a.pth")
