"""casewise study on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
from PIL import Image
from typer.testing import CliRunner
from worlds.cohorts import SYNTHETIC, synthetic_archive

from casewise.archive.store import create_archive, open_archive
from casewise.cli.study import app
from casewise.core.errors import BadInput, DegenerateTertiles, Mismatch, Overlap
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.policy import read_policy, write_policy

FAST = ["--only", "helphurt", "--set", "pictures=2", "--set", "resamples=100"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli")
    holdout = synthetic_archive(root / "holdout", cases=12, seed=1, prefix="held")
    synthetic_archive(root / "stream", cases=10, seed=2, prefix="case", split="evaluation")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateTertiles)
        write_policy(root / "holdout", calibrate(holdout, "cardiac"))
    return root


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_two_folders_are_enough(folders):
    outcome = run(folders / "stream", "--calibration", folders / "holdout", *FAST)
    assert outcome.exit_code == 0, outcome.output
    assert "cases worse" in outcome.output
    assert f"Open {folders / 'stream' / 'report' / 'report.html'}" in outcome.output
    assert (folders / "stream" / "report" / "results.json").exists()


def test_a_second_study_takes_the_place_of_the_first(folders, tmp_path):
    words = [folders / "stream", "-c", folders / "holdout", "-o", tmp_path / "report", *FAST]
    for seed in (7, 8):
        assert run(*words, "--set", f"seed={seed}").exit_code == 0
    results = json.loads((tmp_path / "report" / "results.json").read_text())
    assert results["provenance"]["bootstrap"]["seed"] == 8
    assert not list(tmp_path.glob(".report*"))


def test_an_archive_of_another_objective_becomes_a_row(folders, tmp_path):
    synthetic_archive(tmp_path / "memo", cases=10, seed=5, prefix="case", split="evaluation")
    out = tmp_path / "report"
    words = ["-c", folders / "holdout", "-o", out, "--other", f"MEMO={tmp_path / 'memo'}", "--only", "deployment"]
    assert run(folders / "stream", *words, "--set", "resamples=100", "--set", "pictures=0").exit_code == 0
    assert "MEMO" in (out / "tables" / "methods.csv").read_text()


def test_further_archives_fill_their_sections(folders, tmp_path):
    out = tmp_path / "report"
    stream, holdout = folders / "stream", folders / "holdout"
    words = ["-c", holdout, "-o", out, "--set", "resamples=100", "--set", "pictures=0"]
    words += ["--rerun", stream, "--backbone", f"other={stream}", "--other-modality", stream, "--frozen", holdout]
    words += ["--sweep", f"1e-4={stream}", "--sweep", f"5e-4={stream},{holdout}"]
    for name in ("rerun", "backbones", "scale", "frozen", "learning-rates"):
        words += ["--only", name]
    outcome = run(stream, *words)
    assert outcome.exit_code == 0, outcome.output
    tables = {file.stem for file in (out / "tables").glob("*.csv")}
    assert {"alignment", "coherence", "scale-probe", "frozen", "learning-rates"} <= tables


def test_images_become_the_input_column(folders, tmp_path):
    images, out = tmp_path / "images", tmp_path / "report"
    images.mkdir()
    for number in range(10):
        Image.new("L", (48, 48), 90).save(images / f"case-{number:04d}.png")
    words = [
        "-c",
        folders / "holdout",
        "-o",
        out,
        "--only",
        "qualitative",
        "--set",
        "resamples=100",
        "--set",
        "pictures=0",
    ]
    for extra, missing in ((["--images", images], False), ([], True)):
        outcome = run(folders / "stream", *words, *extra)
        assert outcome.exit_code == 0, outcome.output
        results = json.loads((out / "results.json").read_text())
        assert ("input column of the pictures" in results["not_run"]) == missing


def test_wrong_pairs_are_explained(folders):
    with pytest.raises(BadInput, match=r"--other takes NAME=ARCHIVE, got 'memo'"):
        raise run(folders / "stream", "-c", folders / "holdout", "--other", "memo").exception
    with pytest.raises(BadInput, match="RATE=ARCHIVE"):
        raise run(folders / "stream", "-c", folders / "holdout", "--sweep", "fast=x").exception


def test_an_archive_of_another_learning_rate_is_refused_in_a_sweep(folders, tmp_path):
    configuration = {**open_archive(folders / "stream").configuration, "learning_rate": 0.002}
    create_archive(tmp_path / "fast", binding=SYNTHETIC, steps=4, configuration=configuration).seal()
    with pytest.raises(Mismatch, match=r"fast: recorded at 0.002; give --sweep 0.002="):
        raise run(folders / "stream", "-c", folders / "holdout", "--sweep", f"0.1={tmp_path / 'fast'}").exception


def test_overlapping_archives_are_the_callers_mistake(folders):
    with pytest.raises(Overlap):
        raise run(folders / "holdout", "-c", folders / "holdout").exception


def test_help_names_outputs_options_and_an_example(folders):
    outcome = run("--help")
    for words in (
        "report.html",
        "not run",
        "exposures.jsonl",
        "--only",
        "casewise study evaluation --calibration holdout",
    ):
        assert words in " ".join(outcome.output.split())


def test_the_program_knows_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "casewise", "study", "--help"], capture_output=True, text=True, check=True
    )
    assert "EVALUATION" in done.stdout


def test_a_no_go_is_printed(folders, tmp_path):
    policy = read_policy(folders / "holdout")
    kept = {"go": False, "helped": 2, "hurt": 7}
    write_policy(tmp_path, replace(policy, preflight={**policy.preflight, "retained": kept, "guard": None}))
    words = ["-c", folders / "holdout", "-p", tmp_path, "-o", tmp_path / "report", "--only", "cost"]
    outcome = run(folders / "stream", *words, "--set", "resamples=100", "--set", "pictures=0")
    assert outcome.exit_code == 0, outcome.output
    assert "! NO-GO: " in outcome.stderr


def test_the_first_step_can_be_included(folders, tmp_path):
    words = [folders / "stream", "-c", folders / "holdout", "--only", "association"]
    asked = {"plain": (), "more": ("--set", "include-first-step=true")}
    found = {}
    for name, options in asked.items():
        outcome = run(*words, "-o", tmp_path / name, "--set", "resamples=100", "--set", "pictures=0", *options)
        assert outcome.exit_code == 0, outcome.output
        found[name] = json.loads((tmp_path / name / "results.json").read_text())["findings"]
    rows = {
        name: next(
            row["rows"] for row in one["association"]["rows"] if (row["kind"], row["signal"]) == ("difference", "delta")
        )
        for name, one in found.items()
    }
    assert rows["more"] - rows["plain"] == 10  # one more difference of each case
    assert "from k = 1 on" in (tmp_path / "more" / "report.html").read_text()


def test_a_router_with_a_flag_is_calibrated_and_studied(tmp_path):
    from casewise.cli import app as commands

    holdout = synthetic_archive(tmp_path / "a", cases=24)
    evaluation = synthetic_archive(tmp_path / "e", cases=8, prefix="new", split="evaluation", seed=1)
    for words in (
        ("calibrate", holdout.path, "--policy", "cardiac", "--flag-below", 0.7, "--confidence", 0.8),
        ("study", evaluation.path, "-c", holdout.path, "-o", tmp_path / "report", "--set", "resamples=100"),
    ):
        done = CliRunner().invoke(commands, [str(word) for word in words], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert (tmp_path / "report" / "report.html").is_file()
