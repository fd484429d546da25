"""What ``casewise predict`` really wrote, reviewed by a server that a user started."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from functools import partial
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from worlds.predictions import decisions_of

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.model import Model
from casewise.core.records import Policy
from casewise.deployment import Deployment
from casewise.run.gather import gathered_cases
from casewise.run.local import LocalEngine
from casewise.run.predict_folder import predict_folder, prediction_work
from casewise.run.prediction_folder import Layout, verify_predictions
from casewise.serve.review_cases import Predictions, listed_regions
from casewise.serve.review_log import REVIEWS, Review, ReviewLog, apply_reviews


def made(folder: Path, policy: Policy, *, save_candidates: bool) -> Path:
    """Two scans, segmented by a U-Net with random weights under a policy."""
    from casewise.adapt.backbones.checkpoints import write_safetensors
    from casewise.adapt.networks import PlainUNet

    torch.set_num_threads(1)
    torch.manual_seed(3)
    write_safetensors(folder / "unet.safetensors", PlainUNet(features=(16, 32, 64, 96)).state_dict())
    model = Model("casewise.adapt.networks:PlainUNet", weights=folder / "unet.safetensors")
    (folder / "images").mkdir()
    rng = np.random.default_rng(0)
    for number in range(2):
        image = rng.normal(size=(24, 24, 2)).cumsum(0).cumsum(1).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(image, np.eye(4)), folder / "images" / f"scan_{number}_0000.nii.gz")
    how = Adaptation(objective="tent", learning_rate=0.05, steps=1, min_area=4)
    cases = gathered_cases(model.load(), folder / "images")
    deployment = Deployment(model, policy, {"": how}, contract="off")
    work = prediction_work(deployment, cases, folder / "out", save_candidates=save_candidates)
    assert [entry.status for entry in predict_folder(work, LocalEngine())] == ["done", "done"]
    return folder


@pytest.fixture
def predicted(tmp_path: Path) -> Path:
    return made(tmp_path, Policy("fixed-k", "fixed-k", {"step": 1}, 1), save_candidates=True)


def test_a_rolled_back_case_is_kept_adapted_without_a_flag_and_applied(tmp_path: Path) -> None:
    router = Policy(
        "default", "router",
        {"coordinate": "delta", "cut_low": 0.0, "cut_high": 1e-9, "low": {"action": "depth", "depth": 1},
         "mid": {"action": "depth", "depth": 1}, "hard": {"action": "rollback"}}, 1, calibration_id="c1",
    )  # fmt: skip
    out = made(tmp_path, router, save_candidates=False) / "out"
    last = (
        Layout(out, ".nii.gz").candidates("scan_0") / "1.nii.gz"
    )  # predict kept it, because nothing of it was deployed
    deployed = np.asarray(nibabel.load(out / "scan_0.nii.gz").dataobj)  # type: ignore[attr-defined]
    adapted = np.asarray(nibabel.load(last).dataobj)  # type: ignore[attr-defined]
    assert not np.array_equal(deployed, adapted)
    predictions = Predictions(out)
    about = predictions.about("scan_0")
    ReviewLog(out / REVIEWS).append(Review("scan_0", "keep-adapted", "Ada", about, adapted="1"))
    applied = {one.case: one for one in apply_reviews(out, tmp_path / "chosen")}
    assert (applied["scan_0"].taken, applied["scan_1"].taken) == ("adapted", "deployed")
    assert (tmp_path / "chosen" / "scan_0.nii.gz").read_bytes() == last.read_bytes()
    assert verify_predictions(out) == []


@pytest.mark.slow
def test_a_user_reviews_what_predict_wrote_and_stops_with_control_c(predicted):
    out = predicted / "out"
    command = [sys.executable, "-m", "casewise", "review", out, "--images", predicted / "images", "--no-browser"]
    heard = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    with subprocess.Popen(
        [*map(str, command), "--reviewer", "Ada"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=heard,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        listed = json.load(urllib.request.urlopen(f"{url}cases"))
        row = listed["cases"][0]
        detail = json.load(urllib.request.urlopen(f"{url}case/{row['id']}"))
        assert detail["image_problem"] is None
        assert detail["states"] == {"1": "step 1"}
        assert detail["area"] > 0
        said = {"case": row["id"], "decision": "keep-m0", "reviewer": "Ada", "about": row["about"], "adapted": "1"}
        headers = {"Content-Type": "application/json", "Origin": url.split("/", 3)[0] + "//" + url.split("/")[2]}
        urllib.request.urlopen(urllib.request.Request(f"{url}decide", json.dumps(said).encode(), headers))
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "1 case reviewed" in told
    assert decisions_of(out / "reviews.jsonl") == {row["id"]: "keep-m0"}
    assert verify_predictions(out) == []


def test_both_pages_count_the_same_places(predicted: Path) -> None:
    found = Predictions(predicted / "out")
    for case_id, entry in found.entries.items():
        listed = listed_regions(found.masks(case_id, found.cases[case_id].adapted), min_area=found.min_area)
        assert listed["total"] == sum(bool(one["counts"]) for one in entry.regions) > 0
