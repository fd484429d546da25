"""A small U-Net with weights on disk, and a handful of scans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones.checkpoints import write_safetensors
from casewise.adapt.model import Model
from casewise.core.records import Policy
from casewise.deployment import Deployment
from casewise.run.gather import gathered_cases
from casewise.run.predict_case import PredictCase
from casewise.run.predict_folder import prediction_work

FACTORY = "casewise.adapt.networks:PlainUNet"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A U-Net with fixed random weights: its masks are nonsense, and the same every time."""
    from casewise.adapt.networks import PlainUNet

    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("weights") / "unet.safetensors"
    write_safetensors(path, PlainUNet(features=(16, 32, 64, 96)).state_dict())
    return Model(FACTORY, weights=path)


def write_scan(path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    image = rng.normal(size=(24, 24, 2)).cumsum(0).cumsum(1).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(image, np.diag([1.0, 1.0, 5.0, 1.0])), path)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Three cases in nnU-Net's naming."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(3):
        write_scan(folder / f"case_{number}_0000.nii.gz", number)
    return folder


@pytest.fixture
def five_images(images: Path) -> Path:
    """Five cases: the fewest that anything is fitted on."""
    for number in (3, 4):
        write_scan(images / f"case_{number}_0000.nii.gz", number)
    return images


FIXED = Policy("fixed-k", "fixed-k", {"step": 1}, 1)
HOW = Adaptation(objective="tent", learning_rate=0.05, steps=1, min_area=4)

Maker = Callable[..., PredictCase]


@pytest.fixture
def work(model: Model, images: Path, tmp_path: Path) -> Maker:
    """``work(policy=..., contract="warn", ...)``: the work of a prediction of ``images`` into ``tmp_path / "out"``."""

    def make(policy: Policy = FIXED, out: str = "out", **options: Any) -> PredictCase:
        how = options.pop("adaptation", HOW)
        names = ("contract", "watch", "max_ram", "certificate", "force")
        own = {key: options.pop(key) for key in names if key in options}
        deployment = Deployment(model, policy, {"": how}, **own)
        return prediction_work(deployment, gathered_cases(model.load(), images), tmp_path / out, **options)

    return make
