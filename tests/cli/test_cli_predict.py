"""predict, record and convert as a user types them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner
from worlds.commands import typed
from worlds.tiny_models import write_unet, write_volumes

import casewise
from casewise.adapt.adaptation import Adaptation
from casewise.archive.store import open_archive
from casewise.cli import app
from casewise.core.errors import BadInput, Mismatch
from casewise.core.records import Policy, State
from casewise.judge.outcomes import judged_sentence
from casewise.judge.policy import write_policy

FACTORY = "casewise.adapt.networks:PlainUNet"
ROOT = Path(casewise.__file__).parents[2]


def call(command: str, *arguments: object) -> Any:
    """Run a command in this process; an error that casewise raises on purpose comes through."""
    torch.set_num_threads(1)
    result = CliRunner().invoke(app, [command, *map(str, arguments)], catch_exceptions=False)
    return result


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_unet(tmp_path_factory.mktemp("weights") / "unet.safetensors")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_volumes(tmp_path, cases=4)


def predicted(data: Path, weights: Path, *more: object, out: str = "out") -> Any:
    return call(
        "predict", "-i", data / "images", "-o", data / out, "-m", FACTORY, "--weights", weights, "-device", "cpu", *more
    )


@pytest.fixture
def fixed(data: Path) -> Sequence[object]:
    """A policy that deploys step 1 of TENT."""
    how = Adaptation("tent", learning_rate=0.05, steps=1).as_plain()
    return "--policy", write_policy(data / "fixed.json", Policy("fixed-k", "fixed-k", {"step": 1}, 1, adaptation=how))


def test_a_run_leaves_masks_entries_a_summary_a_report_and_a_page(
    data: Path, weights: Path, fixed: Sequence[object]
) -> None:
    result = predicted(data, weights, *fixed, "-l", data / "labels", "--set", f"report={data / 'run.json'}")
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


def test_the_summary_is_the_one_that_nnunet_computes(data: Path, weights: Path, fixed: Sequence[object]) -> None:
    predicted(data, weights, *fixed, "-l", data / "labels")
    from nnunetv2.evaluation.evaluate_predictions import compute_metrics
    from nnunetv2.imageio.nibabel_reader_writer import NibabelIO

    ours = json.loads((data / "out" / "summary.json").read_text())["metric_per_case"][1]
    theirs = compute_metrics(ours["reference_file"], ours["prediction_file"], NibabelIO(), [1])["metrics"][1]
    assert ours["metrics"]["1"] == pytest.approx({name: float(value) for name, value in theirs.items()})


def test_a_failed_case_gives_exit_code_3_and_the_rest_is_done(data: Path, weights: Path) -> None:
    (data / "images" / "case_2_0000.nii.gz").write_bytes(b"\x1f\x8b broken")
    result = predicted(data, weights, "--policy", "m0", "--set", f"report={data / 'run.json'}")
    assert result.exit_code == 3
    assert len(list((data / "out").glob("*.nii.gz"))) == 3
    (failure,) = json.loads((data / "run.json").read_text())["failures"]
    assert failure["case"] == "case_2"
    assert "truncated or damaged" in failure["error"]


def test_without_a_policy_it_says_how_to_get_one(data: Path, weights: Path) -> None:
    with pytest.raises(BadInput, match=r"casewise fit .* --policy m0"):
        predicted(data, weights)
    with pytest.raises(BadInput, match=r"not calibrated.* --policy m0"):
        predicted(data, weights, "--policy", "cardiac")


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
        "--set", "objective=tent", "--lr", 0.05, "--steps", 2, "--set", "min-area=4", "-device", "cpu",
    )  # fmt: skip
    assert recorded.exit_code == 0
    there = open_archive(archive)
    how = there.configuration["adaptation"]
    write_policy(archive, Policy("fixed-k", "fixed-k", {"step": 2}, 2, there.binding, adaptation=how))
    assert predicted(data, weights, "--policy", archive).exit_code == 0
    entry = json.loads((data / "out" / "casewise" / "case_0.json").read_text())
    assert entry["decision"]["deployed"] == 2
    assert entry["signals"]["2"]["delta"] == pytest.approx(there.signals_of("case_0")[State(2)]["delta"])
    slower = {**how, "learning_rate": 0.5}
    write_policy(archive, Policy("fixed-k", "fixed-k", {"step": 2}, 2, there.binding, adaptation=slower))
    with pytest.raises(Mismatch, match="fitted on another learning_rate"):
        predicted(data, weights, "--policy", archive)


def test_folds_take_all_values_that_follow() -> None:
    from casewise.cli.options import folds_of, joined

    assert joined(["-f", "0", "1", "2", "-o", "out"]) == ["-f", "0 1 2", "-o", "out"]
    assert joined(["-o", "out", "-f", "all"]) == ["-o", "out", "-f", "all"]
    assert folds_of("0 1") == (0, 1)
    assert folds_of("all") == ("all",)


def test_converting_writes_safetensors_beside_the_pickle(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}}, tmp_path / "a.pth")
    result = call("inspect", tmp_path / "a.pth", "--convert")
    assert result.output.strip() == str(tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").exists()


def test_a_wrong_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = typed("predict", "-i", tmp_path, "-o", tmp_path / "o", "--policy", "m0", "-m", tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("casewise: ")


def test_frag_subset_from_images_to_masks(data: Path, weights: Path) -> None:
    """E3 as a user types it: plain calibration cases, modulated ones, a policy, masks; a bare name is refused."""
    shutil.copy(data / "images" / "case_1_0000.nii.gz", data / "images" / "case_4_0000.nii.gz")
    shutil.copy(data / "labels" / "case_1.nii.gz", data / "labels" / "case_4.nii.gz")
    model: Sequence[object] = ("-m", FACTORY, "--weights", weights, "-device", "cpu")
    how = ("--set", "objective=tent", "--lr", 0.05, "--steps", 2, "--set", "shrink=", "--set", "min-area=4")
    shown = ("record", *model, "-i", data / "images", "-l", data / "labels", *how)
    assert call(*shown, "-o", data / "plain").exit_code == 0
    with pytest.raises(BadInput, match="statistics works only with a modulation"):
        call(*shown, "-o", data / "subset", "--set", f"statistics={data / 'plain'}")
    with pytest.raises(BadInput, match="name that archive with --set statistics"):
        call(*shown, "-o", data / "subset", "--set", "modulation=param-subset")
    modulated = ("--set", "modulation=param-subset", "--set", f"statistics={data / 'plain'}")
    assert call(*shown, "-o", data / "subset", *modulated).exit_code == 0
    assert call("calibrate", data / "subset", "--policy", "frag-subset").exit_code == 0
    result = predicted(data, weights, "--policy", data / "subset", "--set", "verbose=true", "--set", "force=true")
    assert result.exit_code == 0, result.output
    with pytest.raises(BadInput, match="'frag-subset' is not calibrated"):
        predicted(data, weights, "--policy", "frag-subset", out="bare")
    with pytest.raises(Mismatch, match="modulation param-subset"):
        call("calibrate", data / "plain", "--policy", "frag-subset")
