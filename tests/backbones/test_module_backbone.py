"""Any module: slices as a batch, padding that is taken off again, a factory by its address."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from casewise.adapt.augmentations import WEAK_VIEWS, LightView
from casewise.adapt.backbones import load_backbone
from casewise.adapt.backbones.module import Module, of_network
from casewise.adapt.logits import network_logits
from casewise.adapt.proposers.live import run_episode
from casewise.adapt.snapshot import fingerprint
from casewise.core.errors import BadInput, UnknownName
from casewise.core.records import Case
from casewise.data.folders import CaseFiles
from casewise.data.pictures import write_label_picture
from casewise.deployment import Deployment


def flat() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 3, 1))


def test_slices_of_a_volume_are_a_batch_for_a_flat_network() -> None:
    backbone = of_network(flat())
    assert (backbone.dimensions, backbone.classes, backbone.expects.channels) == (2, 3, 1)
    prepared = backbone.prepare(Case("a", np.random.default_rng(0).normal(size=(1, 5, 8, 6)).astype(np.float32)))
    assert prepared.inputs.shape == (5, 1, 8, 6)


def test_one_image_stays_one_image() -> None:
    volume = of_network(nn.Sequential(nn.Conv3d(1, 2, 1)))
    assert volume.prepare(Case("a", np.ones((1, 4, 8, 6)))).inputs.shape == (1, 1, 4, 8, 6)
    assert of_network(flat()).prepare(Case("a", np.ones((1, 8, 6)))).inputs.shape == (1, 1, 8, 6)
    with pytest.raises(BadInput, match="3-D network needs an image"):
        volume.prepare(Case("a", np.ones((1, 8, 6))))


def test_padding_is_taken_off_the_logits() -> None:
    prepared = Module(flat(), classes=3, dimensions=2, multiple=8).prepare(Case("a", np.ones((1, 13, 6))))
    assert prepared.inputs.shape == (1, 1, 13, 6)
    assert prepared.forward is not None
    assert prepared.forward(prepared.inputs).shape == (1, 3, 13, 6)


@pytest.mark.parametrize("view", WEAK_VIEWS, ids=str)
def test_a_mirrored_or_turned_picture_meets_its_own_voxels_again_though_the_network_pads(view: LightView) -> None:
    """MEMO, CoTTA, GraTa and agreement turn inputs and take logits back; a voxel-wise network must not notice."""
    seen = []
    voxelwise = nn.Conv2d(1, 3, 1)
    voxelwise.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape[2:])))
    image = np.random.default_rng(0).normal(size=(1, 13, 6)).astype(np.float32)
    prepared = Module(voxelwise, classes=3, dimensions=2, multiple=8).prepare(Case("a", image))
    assert prepared.forward is not None
    with torch.no_grad():
        plain = prepared.forward(prepared.inputs)
        back = view.invert(prepared.forward(view.apply(prepared.inputs)))
    assert set(seen) <= {(16, 8), (8, 16)}  # what the network sees is padded
    torch.testing.assert_close(back, plain)


def test_a_network_of_one_channel_takes_gray_pictures(tmp_path: Path) -> None:
    deep = np.arange(20, dtype=np.uint16).reshape(4, 5) * 3000
    for name, values in {
        "g": (deep // 300).astype(np.uint8),
        "deep": deep,
        "c": np.full((4, 5, 3), 7, np.uint8),
    }.items():
        Image.fromarray(values).save(tmp_path / f"{name}.png")
    one, three = (Module(nn.Conv2d(n, 2, 1), classes=2, dimensions=2, intensity="as-is") for n in (1, 3))
    files = {name: CaseFiles.of(tmp_path / f"{name}.png") for name in ("g", "deep", "c")}
    assert np.array_equal(one.read(files["g"]).case.image[0], deep // 300)
    assert np.array_equal(one.read(files["deep"]).case.image[0], deep)
    assert one.read(files["c"]).case.image.shape == (1, 4, 5)
    assert three.read(files["g"]).case.image.shape == (3, 4, 5)


def test_a_factory_is_loaded_by_its_address_with_weights(tmp_path: Path) -> None:
    from casewise.adapt.backbones.checkpoints import write_safetensors
    from casewise.adapt.networks import PlainUNet

    network = PlainUNet()
    write_safetensors(tmp_path / "w.safetensors", network.state_dict())
    backbone = load_backbone("casewise.adapt.networks:PlainUNet", weights=tmp_path / "w.safetensors")
    assert backbone.fingerprint == fingerprint(network)
    assert not backbone.network.training


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no.such.module:make", "no model at .no.such.module:make"),
        ("casewise.adapt.networks:nothing", "no attribute .nothing"),
        ("casewise.core.seeds:seed_of", "missing"),
        ("neither this nor that", "must be an existing folder"),
    ],
)
def test_a_wrong_address_says_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises((BadInput, TypeError), match=message):
        load_backbone(spec)


@pytest.mark.parametrize(("asked", "meant"), [("views:MRI", "mri"), ("EATA", "eata"), ("views:foto", "photo")])
def test_a_name_in_other_letters_suggests_the_known_one(asked: str, meant: str) -> None:
    with pytest.raises(UnknownName, match=f"Did you mean '{meant}'"):
        run_episode(flat(), np.zeros((1, 1, 8, 8), np.float32), asked)


def test_an_unknown_intensity_names_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="imagenet"):
        Module(flat(), classes=3, dimensions=2, intensity="imagnet")


def test_nan_and_channels_are_refused() -> None:
    backbone = of_network(flat())
    with pytest.raises(BadInput, match="NaN or infinite"):
        backbone.prepare(Case("a", np.full((1, 8, 8), np.nan)))
    with pytest.raises(BadInput, match=r"takes 1 channel, case a has 2.*shape.* is .2, 8, 8.*channels come first"):
        backbone.prepare(Case("a", np.ones((2, 8, 8))))


def test_a_folder_that_is_no_model_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(BadInput, match=r"not a model folder.*holiday.jpg"):
        load_backbone(str(tmp_path))


def test_a_weights_file_says_that_it_names_no_network(tmp_path: Path) -> None:
    (tmp_path / "unet.pth").touch()
    with pytest.raises(BadInput, match=r"unet.pth is a file.*--weights"):
        load_backbone(str(tmp_path / "unet.pth"))


class Halves(nn.Module):
    """Halves the image three times and cannot add the parts of a side that is no multiple of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        fine = self.first(image)
        small = nn.functional.max_pool2d(fine, 8)
        return fine + nn.functional.interpolate(small, scale_factor=8)


def test_a_size_that_the_network_cannot_take_is_one_sentence_with_the_way_out() -> None:
    image = np.random.default_rng(0).normal(size=(1, 13, 22)).astype(np.float32)
    for attempt in (
        lambda: run_episode(Halves(), image[None], "tent", steps=1, parameters="all"),
        lambda: run_episode(Halves(), image[None], "views:light"),
        lambda: Deployment(Halves()).predict(image),
    ):
        with pytest.raises(BadInput, match=r"cannot take an image of 13 x 22 .*Module\(network, \.\.\., multiple=8\)"):
            attempt()
    padded = Module(Halves(), classes=3, dimensions=2, intensity="as-is", multiple=8)
    assert Deployment(padded).predict(image).mask.shape == (13, 22)


@pytest.mark.parametrize(
    ("channels", "last"), [(3, nn.Softmax(1)), (1, nn.Sigmoid()), (2, nn.Sigmoid())], ids=["softmax", "one", "sigmoid"]
)
def test_probabilities_are_refused(channels: int, last: nn.Module) -> None:
    torch.manual_seed(0)
    sure = nn.Conv2d(1, channels, 1)
    nn.init.normal_(sure.weight, std=20)
    image = np.random.default_rng(0).normal(size=(1, 8, 8)).astype(np.float32)
    for method in ("tent", "views:light"):
        assert run_episode(sure, image[None], method, steps=1, parameters="all").steps
        with pytest.raises(BadInput, match=r"between 0 and 1.*needs logits"):
            run_episode(nn.Sequential(sure, last), image[None], method, steps=1, parameters="all")


def test_small_logits_and_equal_logits_are_no_probabilities() -> None:
    shape = (1, 1, 4, 4)
    for logits in (
        torch.rand(1, 3, 4, 4) * 0.8,
        torch.zeros(shape),
        torch.full(shape, 0.5),
        torch.rand(shape) * 1.5 - 1,
    ):
        assert network_logits(nn.Identity(), logits) is logits


def test_a_bare_network_reads_no_files_because_nothing_says_how_to_scale_them(tmp_path: Path) -> None:
    write_label_picture(tmp_path / "a.png", np.arange(64, dtype=np.uint8).reshape(8, 8))
    with pytest.raises(BadInput, match=r'Module\(network, classes=3, dimensions=2, intensity="zscore"\)'):
        Deployment(nn.Conv2d(3, 3, 1)).predict(tmp_path / "a.png")
    scaled = Module(nn.Conv2d(3, 3, 1), classes=3, dimensions=2, intensity="unit")
    assert Deployment(scaled).predict(tmp_path / "a.png").mask.shape == (8, 8)


def doubled(image: np.ndarray) -> np.ndarray:
    return image * 2


def test_intensities_may_be_scaled_by_a_function_of_the_user() -> None:
    backbone = Module(flat(), classes=3, dimensions=2, intensity=doubled)
    assert float(backbone.prepare(Case("a", np.ones((1, 8, 6)))).inputs.max()) == 2
    assert "intensity=doubled" in backbone.loader
    assert "intensity=partial" in Module(flat(), classes=3, dimensions=2, intensity=partial(doubled)).loader
    assert "Conv2d" not in repr(backbone), "the repr of a network is hundreds of lines"


def test_folds_are_those_of_an_nnunet() -> None:
    with pytest.raises(BadInput, match="folds of an nnU-Net"):
        load_backbone("casewise.adapt.networks:phantom_cardiac", folds=(0, 1))
