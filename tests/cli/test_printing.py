"""Answers as JSON, progress off a terminal, and a policy that is never overwritten in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from worlds.cohorts import synthetic_archive

from casewise.cli import app
from casewise.cli.printing import Progress
from casewise.data.datasets.plain import write_cohort
from casewise.data.phantom import cardiac_cohort


def said(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, f"{result.output} {result.exception!r}"
    return result.stdout


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return Path(synthetic_archive(tmp_path / "a", cases=12).path)


def test_every_answer_is_also_json(archive: Path, tmp_path: Path) -> None:
    assert json.loads(said("plan", "--json"))["crc_cases"] > 0
    assert json.loads(said("calibrate", archive, "--policy", "cardiac", "--json"))["name"] == "cardiac"
    assert len(json.loads(said("replay", archive, archive, "--json"))["decisions"]) == 12
    assert json.loads(said("verify", archive, "--json")) == {"folder": str(archive), "whole": True, "problems": []}
    assert "statement" in json.loads(said("certify", archive, "--alpha", "0.6", "--json"))
    state = ("--state", tmp_path / "watch.json")
    assert json.loads(said("monitor", "--calibration", archive, *state, "--json"))["alarms"] == {}


def test_what_makes_archives_and_tables_answers_as_json_too(tmp_path: Path) -> None:
    write_cohort(cardiac_cohort("B", 2, split="evaluation"), tmp_path / "data")
    images, labels = tmp_path / "data" / "images", tmp_path / "data" / "labels"
    model = ("-m", "casewise.adapt.networks:phantom_cardiac")
    recorded = json.loads(said("record", "-i", images, *model, "-o", tmp_path / "a", "--steps", "1", "--json"))
    assert recorded["archive"] == str(tmp_path / "a")
    masks = ("--old", labels, "--new", labels)
    imported = json.loads(said("import", *masks, "-o", tmp_path / "b", "--json"))
    assert imported["archive"] == str(tmp_path / "b")
    seen = json.loads(said("qc", labels, labels, labels, "-o", tmp_path / "qc", "--json"))
    assert [case["agreement"] for case in seen["cases"]] == [1, 1]


def test_a_policy_that_says_something_else_is_moved_aside(archive: Path) -> None:
    said("calibrate", archive, "--policy", "cardiac")
    first = (archive / "policy.json").read_text()
    assert "the policy that was there" not in said("calibrate", archive, "--policy", "cardiac")
    told = said("calibrate", archive, "--policy", "frag-stop")
    assert f"the policy that was there is now {archive / 'policy-previous-1.json'}" in told
    assert (archive / "policy-previous-1.json").read_text() == first


def test_progress_off_a_terminal_says_how_long_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(3, every_s=0.0) as progress:
        for name in ("a", "b", "c"):
            progress.step(f"{name}: done")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("1 of 3 cases, about ")
    assert lines[0].endswith(" left")
    assert lines[2].startswith("3 of 3 cases, ")


def test_a_long_run_does_not_flood_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1000) as progress:
        for number in range(1000):
            progress.step(f"{number}")
    assert len(capsys.readouterr().err.splitlines()) == 2  # the first and the last


def test_quiet_says_only_what_went_wrong_and_verbose_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    for options, expected in (({"quiet": True}, ["b: failed"]), ({"verbose": True}, ["a: done", "b: failed"])):
        with Progress(2, **options) as progress:
            progress.step("a: done")
            progress.step("b: failed", bad=True)
        assert capsys.readouterr().err.splitlines() == expected


def test_the_log_file_gets_every_line_and_why_a_run_stopped(tmp_path: Path) -> None:
    def stopped() -> None:
        with Progress(2, quiet=True, log_file=tmp_path / "run" / "log.txt") as progress:
            progress.step("a: done")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
    assert lines[0].endswith("+00:00 a: done")
    assert "stopped: KeyboardInterrupt" in lines[1]
