"""The lines that users type, one after the other, on a small network and through a miniature nnU-Net."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from miniature_nnunet import write_model, write_scans
from monai.data import MetaTensor
from worlds.cohorts import synthetic_archive
from worlds.discs import disc, eroding_model

import casewise
from casewise.data.folders import CaseFiles
from casewise.learn.tuning import Tuning

torch.set_num_threads(1)
SHORT = Tuning(updates=3, batch=2)


@dataclass(frozen=True)
class World:
    """What a user has: a model, labelled cases of known patients, and new images."""

    model: Any
    network: Any  # to guard with, and to load with where the model is not a folder
    images: Any
    labels: Any
    patients: list[str]
    new: Path
    image: Any
    given: dict[str, Any]


def small_network(root: Path) -> World:
    discs = [disc(number, 2, 24) for number in range(10)]
    for number in (20, 21):
        write_disc(root / "IN" / f"case{number}.nii.gz", disc(number, 2, 24)[0])
    model = eroding_model()
    patients = [f"p{number}" for number in range(10)]
    given = {"learn": False, "views": "light"}
    images, labels = [image for image, _ in discs], [label for _, label in discs]
    return World(model, model, images, labels, patients, root / "IN", disc(30, 2, 24)[0], given)


def miniature_nnunet(root: Path) -> World:
    write_model(root / "model")
    names = write_scans(root / "holdout", range(10), shift=0.4)
    write_scans(root / "new", (20, 21), shift=0.4)
    images, labels = (sorted((root / "holdout" / name).glob("*.nii.gz")) for name in ("images", "labels"))
    given = {"tuning": SHORT, "views": ""}
    image = root / "new" / "images" / "case_020_0000.nii.gz"
    network = casewise.Model(str(root / "model")).load()
    return World(str(root / "model"), network, images, labels, names, root / "new" / "images", image, given)


def write_disc(path: Path, image: np.ndarray) -> None:
    path.parent.mkdir(exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(image.transpose(2, 1, 0), np.eye(4)), path)


def test_an_archive_is_calibrated_and_certified_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    synthetic_archive(tmp_path / "archive", cases=24)
    casewise.write_policy("archive/", casewise.calibrate("archive/", "cardiac"))
    certificate, certified = casewise.certify("archive/", loss="ha", alpha=0.1)
    assert (certificate.loss, certificate.alpha) == ("ha", 0.1)
    assert certified.name


@pytest.mark.parametrize("made", [small_network, miniature_nnunet])
def test_the_lines_run_as_they_are_written(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    world = made(tmp_path)
    deployment = casewise.fit(
        world.model, world.images, world.labels, patients=world.patients, out="fitted", jobs=1, **world.given
    )
    result = deployment.predict(world.image)
    assert result.mask.shape == result.source_mask.shape
    assert result.decision.reason == result.reason
    assert result.quality is None or 0 <= result.quality <= 1
    assert result.flagged in (True, False)

    found = deployment.predict_folder(world.new, "OUT")
    assert found.is_done
    assert len(list(Path("OUT").glob("*.nii.gz"))) == 2

    deployment.save("deployment/")
    again = casewise.load("deployment/", **({} if isinstance(world.model, str) else {"model": world.network}))
    np.testing.assert_array_equal(again.predict(world.image).mask, result.mask)

    case = world.image
    if isinstance(case, Path):
        case = world.network.read(CaseFiles("case_020", (case,))).case
        with pytest.raises(casewise.BadInput, match="spacing"):
            deployment.predict(case.image)
    guarded = casewise.guard(case, world.network, "frag-stop", objective="tent")
    assert guarded.decision.controller == "frag-stop"

    assert casewise.calibrate("fitted/archive").calibration_cases

    for name in ("old", "new-masks", "truth"):
        Path(name).mkdir()
        for mask in Path("OUT").glob("*.nii.gz"):
            Path(name, mask.name).write_bytes(mask.read_bytes())
    compared = casewise.compare("old/", "new-masks/", labels="truth/")
    assert len(compared.cases) == 2
    assert compared.summary
    assert compared.verdict is None or str(compared.verdict)
    inferer = casewise.monai.GuardedInferer(deployment)
    inputs = torch.as_tensor(getattr(case, "image", case), dtype=torch.float32)[None]
    if not isinstance(case, np.ndarray):
        inputs = MetaTensor(inputs, affine=torch.diag(torch.tensor([*case.spacing_mm, 1.0])))
    assert inferer(inputs, deployment.backbone.network).shape[2:] == inputs.shape[2:]
