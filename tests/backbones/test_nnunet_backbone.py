"""nnU-Net as it is: what a rollback writes is what nnUNetv2_predict writes."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from miniature_nnunet import scan

from casewise.adapt.backbones import Backbone, load_backbone
from casewise.adapt.backbones.merged import merged
from casewise.adapt.forward_episode import SharedSource
from casewise.adapt.model import Model
from casewise.adapt.proposers.live import run_episode
from casewise.adapt.snapshot import fingerprint
from casewise.core.errors import BadInput
from casewise.core.records import Case, Policy
from casewise.data.folders import list_cases
from casewise.deployment import Deployment
from casewise.run.gather import gathered_cases
from casewise.run.predict_folder import prediction_work

KINDS: dict[str, dict[str, Any]] = {
    "2-D": {"dimensions": 2},
    "3-D": {"dimensions": 3},
    "regions": {"regions": True},
    "ignore label, two folds, ITK": {"ignore": True, "folds": (0, 1), "reader": "SimpleITKIO"},
    "reoriented": {"reader": "NibabelIOWithReorient", "mirroring": (0,)},
}


def nnunet_itself(model: Path, images: Path, out: Path, *, mirroring: bool = True, step_size: float = 0.5) -> None:
    """nnU-Net's predictor in this process, loaded its own way."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    out.mkdir()
    with contextlib.redirect_stdout(io.StringIO()):
        predictor = nnUNetPredictor(
            device=torch.device("cpu"), allow_tqdm=False, use_mirroring=mirroring, tile_step_size=step_size
        )
        predictor.initialize_from_trained_model_folder(str(model), None)
        pairs = [[str(path)] for path in sorted(images.iterdir())]
        predictor.predict_from_files_sequential(pairs, str(out), folder_with_segs_from_prev_stage=None)


def written(backbone: Backbone, images: Path, out: Path) -> dict[str, bytes]:
    for files in list_cases(images, ending=backbone.ending):
        reading = backbone.read(files)
        predict = backbone.prepare(reading.case).predict
        assert predict is not None
        backbone.write(predict(), reading, out / f"{files.id}.nii.gz")
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.nii.gz"))}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_m0_is_the_file_that_nnunet_writes(options: dict[str, Any], model: Any, scans: Path, tmp_path: Path) -> None:
    folder = model(**options)
    nnunet_itself(folder, scans / "images", tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    ours = written(load_backbone(str(folder)), scans / "images", tmp_path / "ours")
    assert len(ours) == 2
    assert ours == {name: (tmp_path / "theirs" / name).read_bytes() for name in ours}


def test_options_of_the_sliding_window_are_nnunets_own(model: Any, scans: Path, tmp_path: Path) -> None:
    nnunet_itself(model(), scans / "images", tmp_path / "theirs", mirroring=False, step_size=1.0)
    (tmp_path / "ours").mkdir()
    ours = written(load_backbone(str(model()), step_size=1.0, mirroring=False), scans / "images", tmp_path / "ours")
    assert ours == {name: (tmp_path / "theirs" / name).read_bytes() for name in ours}


@pytest.mark.slow
def test_m0_is_the_file_that_the_command_line_writes(model: Any, scans: Path, tmp_path: Path) -> None:
    command = "from nnunetv2.inference.predict_from_raw_data import predict_entry_point_modelfolder as run; run()"
    arguments = f"-i {scans / 'images'} -o {tmp_path / 'theirs'} -m {model()} -f 0 -device cpu -npp 1 -nps 1"
    subprocess.run([sys.executable, "-c", command, *arguments.split()], check=True, capture_output=True)
    (tmp_path / "ours").mkdir()
    ours = written(load_backbone(str(model())), scans / "images", tmp_path / "ours")
    assert ours == {name: (tmp_path / "theirs" / name).read_bytes() for name in ours}


def episode(backbone: Backbone, case: Case, **options: Any) -> Any:
    from casewise.adapt.objectives import objective_of

    prepared = backbone.prepare(case)
    return run_episode(
        backbone.network, prepared.inputs, objective_of("tent"), steps=2, head=backbone.head,
        forward=prepared.forward, predict=prepared.predict, **options,
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"dimensions": 3}, {"regions": True}, {"folds": (0, 1)}], ids=str)
def test_an_update_is_not_lost_and_the_network_is_restored(options: dict[str, Any], model: Any, scans: Path) -> None:
    backbone = load_backbone(str(model(**options)), mirroring=False)
    case = backbone.read(list_cases(scans / "images")[0]).case
    before = fingerprint(backbone.network)
    trajectory = episode(backbone, case, learning_rate=0.05)
    assert (trajectory.masks[0] != trajectory.masks[2]).any(), "nnU-Net reloaded the source weights"
    assert trajectory.masks[0].shape == case.image.shape[1:]
    assert fingerprint(backbone.network) == before == backbone.fingerprint
    again = backbone.prepare(case).predict
    assert again is not None
    np.testing.assert_array_equal(again(), trajectory.masks[0])


@pytest.mark.parametrize("slices", [1, 4])
def test_entropies_of_a_volume_as_large_as_a_patch_lie_on_its_mask_though_it_has_one_slice(
    slices: int, model: Any
) -> None:
    backbone = load_backbone(str(model()), mirroring=False)
    image, _ = scan(3, shape=(slices, 32, 32), shift=0.6)
    case = Case("a", image[None], (2.0, 1.0, 1.0))
    entropies: dict[str, Any] = {}

    def kept(running: Any) -> float:
        entropies.update(running.record.entropies)
        return 0.0

    found = episode(backbone, case, learning_rate=0.05, signals=("drop", kept))
    first, now = (entropies[f"entropy_{step}"] for step in (0, 1))
    changed = found.masks[0] != found.masks[1]
    outline = (found.masks[0] > 0) != (found.masks[1] > 0)
    assert outline.any()
    assert now.shape == found.masks[1].shape == (slices, 32, 32)
    assert found.signals[1]["entropy_on_d"] == pytest.approx(now[outline].mean())
    assert found.signals[1]["drop"] == pytest.approx((first - now)[changed].mean(), abs=1e-6)


def test_entropies_of_a_crop_that_was_padded_back_are_not_taken_for_those_of_the_image(model: Any) -> None:
    backbone = load_backbone(str(model()), mirroring=False)
    image, _ = scan(3, shape=(4, 32, 32), shift=0.6)
    image[:, :8] = 0  # nnU-Net crops this border away, and patches are padded on both sides: shifted by four rows
    case = Case("a", image[None], (2.0, 1.0, 1.0))
    for one in (backbone, merged(backbone, ["all=1+2"])):
        found = episode(one, case, learning_rate=0.05, signals=("drop",))
        assert (found.masks[0] != found.masks[1]).any()
        assert (found.signals[1]["entropy_on_d"], found.signals[1]["drop"]) == (None, None)
        assert found.signals[1]["entropy"] is not None
    ready = backbone.prepare(case)
    assert ready.pipeline is not None
    assert ready.predict is not None
    assert SharedSource(ready.pipeline).first(ready.predict).on_grid is False


def test_what_the_folder_says_is_read(model: Any) -> None:
    backbone = load_backbone(str(model(regions=True)))
    assert (backbone.head, backbone.classes, backbone.ending) == ("sigmoid", 2, ".nii.gz")
    assert backbone.labels == {0: "background", 1: "whole", 2: "core"}
    assert backbone.expects.spacing_mm == (2.0, 1.0, 1.0)
    assert load_backbone(str(model(ignore=True, folds=(0, 1), reader="SimpleITKIO"))).ignore == 3


def test_another_number_of_channels_is_refused(model: Any, scans: Path) -> None:
    backbone = load_backbone(str(model()))
    image = next((scans / "images").iterdir())
    files = list_cases(scans / "images")[0]
    with pytest.raises(BadInput, match="takes 1 channel, case case_001 has 2"):
        backbone.read(type(files)(files.id, (image, image)))


def test_a_missing_checkpoint_is_named(model: Any) -> None:
    with pytest.raises(BadInput, match=r"has checkpoint_best.pth; name another with -chk"):
        load_backbone(str(model()), checkpoint="checkpoint_best.pth")
    with pytest.raises(BadInput, match="fold_4"):
        load_backbone(str(model()), folds=[4])


@pytest.mark.parametrize("reader", ["NibabelIO", "SimpleITKIO", "NibabelIOWithReorient"])
def test_headers_are_kept_exactly_where_that_is_asked_for(reader: str, model: Any, tmp_path: Path) -> None:
    """nnU-Net writes codes of its own; --keep-header copies the image's, voxels unchanged."""
    image, _ = scan(1, shift=0.3)
    lies = np.array([[-0.8, 0, 0, 31], [0, 0, 2.5, -7], [0, 1.1, 0, 5], [0, 0, 0, 1.0]])  # another orientation
    source = tmp_path / "images" / "case_001_0000.nii.gz"
    source.parent.mkdir()
    nifti = nibabel.Nifti1Image(image.T, lies)
    nifti.set_sform(lies, code=2)
    nifti.set_qform(lies, code=3)
    nibabel.save(nifti, source)
    spec = Model(str(model(reader=reader)))
    cases, policy = gathered_cases(spec.load(), source.parent), Policy("m0", "m0", {}, 0)
    for name, keep in (("plain", False), ("kept", True)):
        deployment = Deployment(spec, policy=policy, contract="off")
        work = prediction_work(deployment, cases, tmp_path / name, keep_header=keep)
        assert work("case_001").status == "done"
    plain, kept = (nibabel.load(tmp_path / name / "case_001.nii.gz") for name in ("plain", "kept"))
    nnunet_itself(Path(spec.spec), source.parent, tmp_path / "theirs")
    theirs = (tmp_path / "theirs" / "case_001.nii.gz").read_bytes()
    assert (tmp_path / "plain" / "case_001.nii.gz").read_bytes() == theirs
    assert codes(plain) != (2, 3)
    assert codes(kept) == (2, 3)
    np.testing.assert_array_equal(np.asarray(kept.dataobj), np.asarray(plain.dataobj))
    found = nibabel.load(source)
    np.testing.assert_array_equal(kept.affine, found.affine)
    for field in ("pixdim", "xyzt_units", "srow_x", "srow_y", "srow_z", "quatern_b", "quatern_c", "quatern_d"):
        np.testing.assert_array_equal(kept.header[field], found.header[field])


def codes(image: Any) -> tuple[int, int]:
    return int(image.header["sform_code"]), int(image.header["qform_code"])
