"""The embedded phantoms and their embedded source models, from files to a policy and to a report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from casewise.archive.store import open_archive
from casewise.cli import app
from casewise.core.records import SOURCE
from casewise.data.datasets.plain import write_cohort
from casewise.data.phantom import driving_cohort
from casewise.judge.outcomes import outcomes
from casewise.judge.policy import read_policy
from casewise.measure.metrics.overlap import miou

STREETS = "casewise.adapt.networks:phantom_driving"


def call(command: str, *arguments: object) -> Any:
    torch.set_num_threads(1)
    result = CliRunner().invoke(app, [command, *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def streets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight scenes in fog and eight in clear weather, recorded with every class told apart."""
    home = tmp_path_factory.mktemp("streets")
    for weather in ("fog", "clear"):
        folder = write_cohort(driving_cohort(weather, 8, split="calibration"), home / weather)
        cases = ("-i", folder / "images", "-l", folder / "labels", "--groups", folder / "cases.csv")
        how = ("--objective", "tent", "--lr", 1e-3, "--steps", 2, "--shrink", "", "--min-area", 20)
        call("record", "-m", STREETS, *cases, *how, "--classes", "--metric", "miou", "-o", home / f"{weather}-archive")
    return home


def test_the_driving_phantom_is_judged_by_all_its_classes(streets: Path) -> None:
    archive = open_archive(streets / "fog-archive")
    assert archive.configuration["foreground"] is False
    scored = outcomes(archive)
    name = archive.ids[0]
    by_hand = miou(archive.mask(name, SOURCE), archive.label(name), ignore=255)  # the road, 0, is a class like others
    assert scored.set_index(["case", "step"]).loc[(name, 0), "metric"] == by_hand
    assert set(scored.loc[scored["step"] == 0, "ha"]) == {0.0}
    assert scored.loc[scored["step"] == 2, "delta"].gt(0).all()


def test_fog_is_a_shift_for_a_model_that_saw_clear_weather(streets: Path) -> None:
    fog, clear = (outcomes(open_archive(streets / f"{weather}-archive")) for weather in ("fog", "clear"))
    source = [scored.loc[scored["step"] == 0, "metric"].mean() for scored in (fog, clear)]
    assert source[0] < source[1] - 0.05


def test_a_policy_of_the_driving_phantom_decides_on_new_scenes(streets: Path) -> None:
    call("calibrate", streets / "fog-archive", "--policy", "default")
    assert read_policy(streets / "fog-archive").binding is not None
    folder = write_cohort(driving_cohort("fog", 2, split="target"), streets / "target")
    out = streets / "masks"
    call("predict", "-m", STREETS, "-i", folder / "images", "-o", out, "--policy", streets / "fog-archive")
    entries = [json.loads(file.read_text()) for file in sorted((out / "casewise").glob("target*.json"))]
    assert [entry["status"] for entry in entries] == ["done", "done"]
    assert all(entry["decision"]["reason"] for entry in entries)


def test_the_demo_says_in_one_sentence_what_happened_and_leaves_a_report(tmp_path: Path) -> None:
    said = call("demo", "-o", tmp_path, "--calibration", 6, "--target", 4, "-j", 1).output
    shown = re.search(
        r"4 steps of EATA on 4 cases moved the mean Dice by ([+-]0\.\d{4}) and made (\d+)% of the cases worse; "
        r"harmful accepted area is (0\.\d{3}) after step 4, (0\.\d{3}) at the budget .* and (0\.\d{3}) under the "
        r"router, which rolls (\d+)% back\.",
        said,
    )
    assert shown, said
    page = (tmp_path / "report" / "report.html").read_text()
    assert "phantom" in page
    scored = outcomes(open_archive(tmp_path / "target-archive"))
    last = scored[(scored["step"] == 4) & (scored["shrink"] == 0)]
    assert float(shown[3]) == pytest.approx(last["ha"].mean(), abs=5e-4)
