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
from casewise.core.errors import BadInput, UnsafeInput


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
    with pytest.raises(UnsafeInput, match="wants to run code"):
        read_checkpoint(crafted)
    assert not (crafted.parent / "proof").exists()


def test_trust_is_explicit_and_then_it_runs(crafted: Path) -> None:
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


def test_weights_must_fit(tmp_path: Path) -> None:
    torch.save({"state_dict": {f"module.{k}": v for k, v in nn.Linear(2, 3).state_dict().items()}}, tmp_path / "a.pth")
    load_weights(nn.Linear(2, 3), tmp_path / "a.pth")
    with pytest.raises(BadInput, match=r"a.pth does not fit the network"):
        load_weights(nn.Linear(2, 4), tmp_path / "a.pth")


def test_nonsense_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(b"nothing")
    with pytest.raises((BadInput, UnsafeInput)):
        read_checkpoint(tmp_path / "a.pth")
    with pytest.raises(BadInput, match="there is no checkpoint"):
        read_checkpoint(tmp_path / "b.pth")
