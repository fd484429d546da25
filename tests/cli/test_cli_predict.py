"""predict, record and convert as a user types them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import casewise
from casewise.adapt.backbones.checkpoints import write_safetensors
from casewise.cli import app
from casewise.core.errors import BadInput, Mismatch
from casewise.judge.outcomes import judged_sentence

FACTORY = "casewise.adapt.networks:PlainUNet"
ROOT = Path(casewise.__file__).parents[2]


def call(command: str, *arguments: object) -> Any:
    """Run a command in this process; an error that casewise raises on purpose comes through."""
    torch.set_num_threads(1)
    result = CliRunner().invoke(app, [command, *map(str, arguments)], catch_exceptions=False)
    return result


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from casewise.adapt.networks import PlainUNet

    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("weights") / "unet.safetensors"
    write_safetensors(path, PlainUNet().state_dict())
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for kind in ("images", "labels"):
        (tmp_path / kind).mkdir()
    for number in range(4):
        image = rng.normal(size=(24, 24, 2)).cumsum(0).cumsum(1).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(image, np.eye(4)), tmp_path / "images" / f"case_{number}_0000.nii.gz")
        label = (image > image.mean()).astype(np.uint8)
        nibabel.save(nibabel.Nifti1Image(label, np.eye(4)), tmp_path / "labels" / f"case_{number}.nii.gz")
    return tmp_path


def predicted(data: Path, weights: Path, *more: object, out: str = "out") -> Any:
    return call(
        "predict", "-i", data / "images", "-o", data / out, "-m", FACTORY, "--weights", weights, "-device", "cpu", *more
    )


FIXED: Sequence[object] = ("--policy", "fixed-k", "--steps", 1, "--objective", "tent", "--lr", 0.05)


def test_a_run_leaves_masks_entries_a_summary_a_report_and_a_page(data: Path, weights: Path) -> None:
    result = predicted(data, weights, *FIXED, "-l", data / "labels", "--report", data / "run.json")
    assert result.exit_code == 0
    out = data / "out"
    assert sorted(path.name for path in out.glob("*.nii.gz")) == [f"case_{number}.nii.gz" for number in range(4)]
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary) == {"foreground_mean", "mean", "metric_per_case", "adapt"}
    assert set(summary["adapt"]["cases"]) == {f"case_{number}" for number in range(4)}
    edited = [case for case in summary["adapt"]["cases"].values() if case["area"]]
    judged = sum((1 - case["unscored"]) * case["area"] for case in edited) / sum(case["area"] for case in edited)
    assert summary["adapt"]["mean"]["judged"] == pytest.approx(judged)
    report = json.loads((data / "run.json").read_text())
    assert {
        "versions",
        "model",
        "device",
        "options",
        "input",
        "output",
        "classes",
        "runtime_seconds",
        "output_files",
    } <= set(report)
    assert report["statuses"] == {"done": 4}
    page = (out / "report.html").read_text()
    assert "case_3" in page
    assert judged_sentence(judged) in page
    assert not re.search(r"https?://", page), "the page loads something from elsewhere"
    assert "Content-Security-Policy" in page


def test_the_summary_is_the_one_that_nnunet_computes(data: Path, weights: Path) -> None:
    predicted(data, weights, *FIXED, "-l", data / "labels")
    from nnunetv2.evaluation.evaluate_predictions import compute_metrics
    from nnunetv2.imageio.nibabel_reader_writer import NibabelIO

    ours = json.loads((data / "out" / "summary.json").read_text())["metric_per_case"][1]
    theirs = compute_metrics(ours["reference_file"], ours["prediction_file"], NibabelIO(), [1])["metrics"][1]
    assert ours["metrics"]["1"] == pytest.approx({name: float(value) for name, value in theirs.items()})


def test_a_failed_case_gives_exit_code_3_and_the_rest_is_done(data: Path, weights: Path) -> None:
    (data / "images" / "case_2_0000.nii.gz").write_bytes(b"\x1f\x8b broken")
    result = predicted(data, weights, "--no-adapt", "--report", data / "run.json")
    assert result.exit_code == 3
    assert len(list((data / "out").glob("*.nii.gz"))) == 3
    (failure,) = json.loads((data / "run.json").read_text())["failures"]
    assert failure["case"] == "case_2"
    assert "truncated or damaged" in failure["error"]


def test_without_a_policy_it_says_how_to_get_one(data: Path, weights: Path) -> None:
    with pytest.raises(BadInput, match=r"casewise record .* casewise calibrate .* --policy m0"):
        predicted(data, weights)
    with pytest.raises(BadInput, match=r"not calibrated.* --policy m0"):
        predicted(data, weights, "--policy", "cardiac")


def test_a_dry_run_writes_nothing(data: Path, weights: Path) -> None:
    result = predicted(data, weights, *FIXED, "--dry-run")
    assert "case_0: 1 x 2 x 24 x 24, about" in result.output
    assert "4 cases, 4 to do" in result.output
    assert not (data / "out").exists()


def test_parts_divide_the_cases(data: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predicted(data, weights, "--policy", "m0", "-num_parts", 2, "-part_id", 1)
    assert sorted(path.name for path in (data / "out").glob("*.nii.gz")) == ["case_1.nii.gz", "case_3.nii.gz"]
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "2")
    predicted(data, weights, "--policy", "m0")
    assert len(list((data / "out").glob("*.nii.gz"))) == 4


def test_record_calibrate_predict_chain_on_one_folder(data: Path, weights: Path) -> None:
    archive = data / "archive"
    recorded = call(
        "record", "-m", FACTORY, "--weights", weights, "-i", data / "images", "-l", data / "labels", "-o", archive,
        "--objective", "tent", "--lr", 0.05, "--steps", 2, "--min-area", 4, "-device", "cpu",
    )  # fmt: skip
    assert recorded.exit_code == 0
    from casewise.archive.store import open_archive
    from casewise.core.records import Policy
    from casewise.judge.policy import write_policy

    binding = open_archive(archive).binding
    write_policy(archive, Policy("fixed-k", "fixed-k", {"step": 2}, 2, binding))
    assert predicted(data, weights, "--policy", archive).exit_code == 0
    entry = json.loads((data / "out" / "casewise" / "case_0.json").read_text())
    assert entry["decision"]["deployed"] == 2
    assert entry["signals"]["2"]["delta"] == pytest.approx(open_archive(archive).ladder("case_0")[_state(2)]["delta"])
    with pytest.raises(Mismatch, match="fitted on another objective"):
        predicted(data, weights, "--policy", archive, "--lr", 0.5)


def _state(step: int) -> Any:
    from casewise.core.records import State

    return State(step)


def test_folds_take_all_values_that_follow() -> None:
    from casewise.cli.options import folds_of, joined

    assert joined(["-f", "0", "1", "2", "-o", "out"]) == ["-f", "0 1 2", "-o", "out"]
    assert joined(["-o", "out", "-f", "all"]) == ["-o", "out", "-f", "all"]
    assert folds_of("0 1") == (0, 1)
    assert folds_of("all") == ("all",)


def test_converting_writes_safetensors_beside_the_pickle(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}}, tmp_path / "a.pth")
    result = call("convert", tmp_path / "a.pth")
    assert result.output.strip() == str(tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").exists()


def test_a_wrong_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "casewise",
        "predict",
        "-i",
        str(tmp_path),
        "-o",
        str(tmp_path / "o"),
        "--policy",
        "m0",
    ]
    done = subprocess.run([*command, "-m", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("casewise: ")


def test_a_tracker_that_cannot_be_reached_is_refused_before_anything_is_written(data: Path, weights: Path) -> None:
    with pytest.raises(BadInput, match="mlflow"):
        predicted(data, weights, *FIXED, "--track", "somewhere")
    assert not (data / "out").exists()


def test_the_tutorial_runs_as_it_is_written(tmp_path: Path) -> None:
    """Every ``$`` line of docs/tutorial/nnunet.md, in order, in one folder."""
    text = (ROOT / "docs" / "tutorial" / "nnunet.md").read_text()
    lines = [line[2:] for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.startswith("$ ")]
    assert any(line.startswith("casewise certify") for line in lines)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for line in lines:
        words = shlex.split(line)
        program = [sys.executable, "-m", "casewise"] if words[0] == "casewise" else [sys.executable]
        if words[0] not in ("casewise", "python"):
            program = [shutil.which(words[0]) or words[0]]
        done = subprocess.run([*program, *words[1:]], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert (tmp_path / "out" / "report.html").exists()


def test_frag_subset_from_images_to_masks(data: Path, weights: Path) -> None:
    """E3 as a user types it: plain calibration cases, modulated ones, a policy, masks; a bare name is refused."""
    shutil.copy(data / "images" / "case_1_0000.nii.gz", data / "images" / "case_4_0000.nii.gz")
    shutil.copy(data / "labels" / "case_1.nii.gz", data / "labels" / "case_4.nii.gz")
    model: Sequence[object] = ("-m", FACTORY, "--weights", weights, "-device", "cpu")
    how = ("--objective", "tent", "--lr", 0.05, "--steps", 2, "--shrink", "", "--min-area", 4)
    shown = ("record", *model, "-i", data / "images", "-l", data / "labels", *how)
    assert call(*shown, "-o", data / "plain").exit_code == 0
    with pytest.raises(BadInput, match="--statistics belongs to a modulation"):
        call(*shown, "-o", data / "subset", "--statistics", data / "plain")
    with pytest.raises(BadInput, match="name that archive with --statistics"):
        call(*shown, "-o", data / "subset", "--modulation", "param-subset")
    modulated = ("--modulation", "param-subset", "--statistics", data / "plain")
    assert call(*shown, "-o", data / "subset", *modulated).exit_code == 0
    assert call("calibrate", data / "subset", "--policy", "frag-subset").exit_code == 0
    result = predicted(data, weights, "--policy", data / "subset", "--verbose", "--force")
    assert result.exit_code == 0, result.output
    with pytest.raises(BadInput, match="'frag-subset' is not calibrated"):
        predicted(data, weights, "--policy", "frag-subset", out="bare")
    with pytest.raises(Mismatch, match="modulation param-subset"):
        call("calibrate", data / "plain", "--policy", "frag-subset")
