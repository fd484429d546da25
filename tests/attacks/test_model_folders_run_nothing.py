"""A model folder from a stranger: no name in any of its files is imported or called."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from miniature_nnunet import write_model, write_scans
from typer.testing import CliRunner

from casewise.adapt.backbones import load_backbone
from casewise.adapt.backbones.architectures import GROUP
from casewise.cli.predict import app
from casewise.core.errors import BadInput, CasewiseError, UnsafeInput

NETWORK = "dynamic_network_architectures.architectures.unet.PlainConvUNet"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("trained"), steps=0)


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to poison, with a module ``evil`` that can be imported and leaves a proof when it is."""
    (tmp_path / "code").mkdir()
    run = f"import os\nos.makedirs({str(tmp_path / 'proof')!r}, exist_ok=True)\n"
    (tmp_path / "code" / "evil.py").write_text(f"{run}class Net: ...\ndef run(*args, **more): ...\n")
    (tmp_path / "code" / "hubconf.py").write_text(f"{run}def net(**more): ...\n")
    monkeypatch.syspath_prepend(tmp_path / "code")
    shutil.copytree(trained, tmp_path / "model")
    return tmp_path / "model"


def edited(folder: Path, file: str, edit: Callable[[dict[str, Any]], None]) -> None:
    plain = json.loads((folder / file).read_text())
    edit(plain)
    (folder / file).write_text(json.dumps(plain))


def in_configuration(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda plans: plans["configurations"]["2d"].update(values)


def in_architecture(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda plans: plans["configurations"]["2d"]["architecture"].update(values)


def in_arguments(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda plans: plans["configurations"]["2d"]["architecture"]["arch_kwargs"].update(values)


def leave_out(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda plain: plain.pop(name)


def hub(plans: dict[str, Any]) -> None:
    made = plans["configurations"]["2d"]["architecture"]
    made["network_class_name"] = "torch.hub.load"
    made["arch_kwargs"] = {"repo_or_dir": "code", "model": "net", "source": "local"}
    made["_kw_requires_import"] = []


POISON: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "torch.hub.load": ("plans.json", hub),
    "a module of ours": ("plans.json", in_architecture(network_class_name="evil.Net")),
    "subprocess.Popen": ("plans.json", in_architecture(network_class_name="subprocess.Popen")),
    "no class": ("plans.json", in_architecture(network_class_name=None)),
    "convolution": ("plans.json", in_arguments(conv_op="evil.run")),
    "undotted": ("plans.json", in_arguments(conv_op="evil")),
    "unlisted argument": ("plans.json", in_arguments(anything="evil.run")),
    "function of torch": ("plans.json", in_arguments(nonlin="torch.load")),
    "beside torch.nn": ("plans.json", in_arguments(nonlin="evil.LeakyReLU")),
    "preprocessor": ("plans.json", in_configuration(preprocessor_name="evil.run")),
    "preprocessor that is not a class": ("plans.json", in_configuration(preprocessor_name="join")),
    "resampling": ("plans.json", in_configuration(resampling_fn_data="recursive_find_python_class")),
    "normalization": ("plans.json", in_configuration(normalization_schemes=["os"])),
    "reader": ("plans.json", lambda plans: plans.update(image_reader_writer="evil.Net")),
    "label manager": ("plans.json", lambda plans: plans.update(label_manager="evil.Net")),
    "reader of the dataset": ("dataset.json", lambda plain: plain.update(overwrite_image_reader_writer="evil.Net")),
    "a list below the listed keys": ("plans.json", in_architecture(_kw_requires_import=[["norm_op"]])),
    "keys that are no list": ("plans.json", in_architecture(_kw_requires_import=7)),
    "a key that is not there": ("plans.json", in_architecture(_kw_requires_import=["nowhere"])),
    "features that are no numbers": ("plans.json", in_arguments(features_per_stage=["x", None, {}])),
    "strides of another length": ("plans.json", in_arguments(strides=[[1, 1]])),
    "a negative number of features": ("plans.json", in_arguments(features_per_stage=-1)),
    "a spacing of text": ("plans.json", lambda plans: plans.update(original_median_spacing_after_transp="x")),
    "no file ending": ("dataset.json", leave_out("file_ending")),
    "no labels": ("dataset.json", leave_out("labels")),
    "labels of another type": ("dataset.json", lambda plain: plain.update(labels=0.5)),
    "no configurations": ("plans.json", lambda plans: plans.update(configurations=7)),
}


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
def test_a_poisoned_model_folder_is_refused_and_runs_nothing(poison: Any, folder: Path, tmp_path: Path) -> None:
    edited(folder, *poison)
    write_scans(tmp_path, [1])
    typed = ["-i", tmp_path / "images", "-o", tmp_path / "out", "-m", folder, "--policy", "m0"]
    with pytest.raises(CasewiseError):
        CliRunner().invoke(app, [str(word) for word in typed], catch_exceptions=False)
    assert not (tmp_path / "proof").exists()


def test_a_checkpoint_that_names_its_trainer_with_a_dot_is_refused(folder: Path, tmp_path: Path) -> None:
    file = folder / "fold_0" / "checkpoint_final.pth"
    contents = torch.load(file, weights_only=False)
    torch.save({**contents, "trainer_name": "evil.Net"}, file)
    with pytest.raises(UnsafeInput, match="trainer_name in the checkpoint must be a plain name"):
        load_backbone(str(folder))
    torch.save({**contents, "trainer_name": "join"}, file)
    with pytest.raises(BadInput, match="no trainer called join"):
        load_backbone(str(folder))
    torch.save({"network_weights": {}}, file)
    with pytest.raises(BadInput, match="lacks trainer_name, init_args; name another"):
        load_backbone(str(folder))
    assert not (tmp_path / "proof").exists()


def test_the_refusal_says_which_flag_would_allow_the_class_and_the_flag_does(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "code" / "mynets.py").write_text(f"from {NETWORK.rpartition('.')[0]} import PlainConvUNet as Mine\n")
    edited(folder, "plans.json", in_architecture(network_class_name="mynets.Mine"))
    with pytest.raises(UnsafeInput, match=r"--trust mynets\.Mine"):
        load_backbone(str(folder))
    assert load_backbone(str(folder), trust_architectures=("mynets.Mine",)).classes == 3


def test_an_installed_package_offers_its_classes_on_purpose(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "code" / "mynets.py").write_text(f"from {NETWORK.rpartition('.')[0]} import PlainConvUNet as Mine\n")
    installed = tmp_path / "code" / "mynets-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mynets\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{GROUP}]\nmine = mynets:Mine\n")
    edited(folder, "plans.json", in_architecture(network_class_name="mynets.Mine"))
    assert load_backbone(str(folder)).classes == 3


@pytest.mark.parametrize("file", ["plans.json", "dataset.json", "fold_0/checkpoint_final.pth"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\x00\xff"])
def test_an_empty_or_broken_file_of_a_model_folder_is_a_sentence(file: str, content: bytes, folder: Path) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(CasewiseError, match=Path(file).name):
        load_backbone(str(folder))


def test_a_file_of_the_library_that_cannot_be_imported_affects_only_its_own_classes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dynamic-network-architectures 0.4 has one file that wants timm, which wants torchvision."""
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "transformer.py").write_text("import a_package_that_is_not_installed\n")
    home = importlib.import_module("dynamic_network_architectures.architectures")
    monkeypatch.setattr(home, "__path__", [*home.__path__, str(tmp_path / "newer")])
    assert load_backbone(folder).network is not None
    edited(folder, "plans.json", in_architecture(network_class_name=f"{home.__name__}.transformer.Net"))
    with pytest.raises(UnsafeInput, match=r"transformer\.Net"):
        load_backbone(folder)
