"""A policy is bound to what its calibration images look like: others get M0, a flag and no promise."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path

import nibabel
import numpy as np
import pytest

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.model import Model
from casewise.archive.store import Archive, open_archive
from casewise.archive.verify import verify
from casewise.core.records import Policy
from casewise.deployment import Deployment
from casewise.judge.calibration.adoption import hurt_share, unpromised
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.policy import read_policy, write_policy
from casewise.replay import replay
from casewise.run.gather import gathered_cases
from casewise.run.local import LocalEngine
from casewise.run.predict_folder import UNLIKE
from casewise.run.prediction_folder import verify_predictions
from casewise.run.record_folder import RecordCase, record_folder

HOW = Adaptation(objective="tent", learning_rate=0.05, steps=1, min_area=4)


def recorded(model: Model, images: Path, path: Path) -> Archive:
    """All scans of a folder, said to be MR."""
    cases = {files.id: replace(files, modality="MR") for files in gathered_cases(model.load(), images)}
    work = RecordCase(model, {"tent": HOW}, cases)
    assert not [one.error for one in record_folder(work, LocalEngine(), path)[1] if one.error]
    assert verify(path) == []
    return open_archive(path, ladder="tent")


@pytest.fixture
def policy(model: Model, five_images: Path, tmp_path: Path) -> Policy:
    """Calibrated on five scans, written and read again."""
    made = calibrate(recorded(model, five_images, tmp_path / "archive"), "prostate", coordinate="delta")
    return read_policy(write_policy(tmp_path / "policy.json", made))


def other_kind(folder: Path, count: int) -> Path:
    """Flat noise with thin slices."""
    folder.mkdir()
    for seed in range(count):
        image = np.random.default_rng(90 + seed).normal(size=(24, 24, 2)).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(image, np.diag([0.3, 0.3, 0.5, 1.0])), folder / f"late_{seed}_0000.nii.gz")
    return folder


def test_calibrate_binds_a_policy_to_the_look_of_its_images(policy: Policy, five_images: Path, model: Model) -> None:
    assert len(policy.appearance["patients"]) == 5
    assert {"spacing of axis 0", "intensity mean of channel 0"} <= set(policy.appearance["names"])
    found = Deployment(model, policy).predict(five_images / "case_0_0000.nii.gz")
    assert found.appearance is not None
    assert not any("unlike" in note for note in found.notes)


def test_an_image_of_another_kind_gets_m0_a_flag_and_the_reason(policy: Policy, model: Model, tmp_path: Path) -> None:
    path = other_kind(tmp_path / "late", 1) / "late_0_0000.nii.gz"
    found = Deployment(model, policy).predict(path)
    np.testing.assert_array_equal(found.mask, found.source_mask)
    assert found.flagged
    assert "this image is unlike the labelled ones: " in found.decision.reason
    unbound = Deployment(model, replace(policy, appearance={})).predict(path)
    assert not unbound.flagged


def test_replay_keeps_m0_for_the_images_for_which_a_live_run_does(
    policy: Policy, model: Model, five_images: Path, tmp_path: Path
) -> None:
    deployment = Deployment(model, policy)
    for images in (five_images, other_kind(tmp_path / "late", 3)):
        archive = recorded(model, images, tmp_path / f"of-{images.name}")
        cases = [model.load().read(files).case for files in gathered_cases(model.load(), images)]
        live = {case.id: deployment.predict(case).decision for case in cases}
        assert {one.case_id: one for one in replay(archive, policy)} == live
        assert all(one.flagged and one.rolled_back for one in live.values()) == (images != five_images)


def test_an_image_of_another_modality_gets_m0_and_a_flag(policy: Policy, model: Model, five_images: Path) -> None:
    assert policy.appearance["modalities"] == ["MR"]
    case = model.load().read(gathered_cases(model.load(), five_images)[0]).case
    deployment = Deployment(model, policy)
    assert not deployment.predict(replace(case, modality="MR")).flagged
    found = deployment.predict(replace(case, modality="CT"))
    assert found.flagged
    assert "its modality is CT, the labelled images are MR" in found.decision.reason


def test_a_folder_of_another_kind_is_reported_and_no_promise_covers_it(
    policy: Policy, model: Model, five_images: Path, tmp_path: Path
) -> None:
    done = Deployment(model, policy).predict_folder(other_kind(tmp_path / "late", 3), tmp_path / "out", overlays=False)
    assert done.warnings[0].startswith(UNLIKE)
    assert done.refusal.startswith("Refused: 3 of 3 images are unlike the labelled ones")
    assert len(done.flagged) == 3
    assert done.promise is None
    single = Deployment(model, policy).predict_folder(other_kind(tmp_path / "1", 1), tmp_path / "alone", overlays=False)
    assert len(single.flagged) == 1
    assert not single.refusal  # one image by chance outside does not stop a pipeline
    same = Deployment(model, policy).predict_folder(five_images, tmp_path / "same", overlays=False)
    assert not [one for one in same.warnings if one.startswith(UNLIKE)]


def test_predict_says_how_many_may_be_hurt_where_nothing_is_promised(
    policy: Policy, model: Model, five_images: Path, tmp_path: Path
) -> None:
    harm = asdict(hurt_share([0.02] * 10, list("abcdefghij")))
    compared = {"chosen": "medoid", "rows": [{"design": "m0", "harm": harm}, {"design": "medoid", "harm": harm}]}
    fitted = replace(policy, preflight={**policy.preflight, "comparison": compared})
    said = "Nothing is promised. On the labelled cases, 0 of 10 patients were hurt by more than 0.01; up to 21% may be"
    done = Deployment(model, fitted).predict_folder(five_images, tmp_path / "out", overlays=False)
    assert done.unpromised.startswith(said)
    assert said in done.page.read_text()
    late = Deployment(model, fitted).predict_folder(other_kind(tmp_path / "late", 3), tmp_path / "o", overlays=False)
    assert late.unpromised == ""  # the count is an estimate, and none covers this folder
    kept = replace(fitted, preflight={"comparison": {**compared, "chosen": "m0"}})
    assert unpromised(kept.preflight) == unpromised({}) == ""


def test_where_most_images_are_unlike_the_labelled_ones_no_new_mask_is_used(
    policy: Policy, model: Model, five_images: Path, tmp_path: Path
) -> None:
    changing = replace(policy, controller="fixed-k", options={"step": 1}, flag={})
    mixed, out = other_kind(tmp_path / "mixed", 3), tmp_path / "out"
    for path in sorted(five_images.iterdir())[:2]:
        shutil.copy(path, mixed)
    alone = Deployment(model, changing).predict_folder(five_images, tmp_path / "alone", overlays=False)
    assert not alone.refusal
    assert not any(one.decision.rolled_back for one in alone.entries if one.decision)
    for resume in (False, True):
        found = Deployment(model, changing).predict_folder(mixed, out, overlays=False, resume=resume)
        assert found.refusal.startswith("Refused: 3 of 5 images are unlike the labelled ones")
        for one in found.entries:
            assert one.decision is not None
            assert one.decision.rolled_back
            assert one.decision.flagged
            assert one.decision.quality is None
            assert not (out / "casewise" / "source" / f"{one.case}.nii.gz").exists()
        assert found.promise is None
        assert "Refused: 3 of 5 images" in found.page.read_text()
        assert verify_predictions(out) == []
