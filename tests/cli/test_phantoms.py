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
from casewise.data.phantom import cardiac_cohort, driving_cohort
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


def test_the_demo_says_what_was_gained_whom_it_hurt_who_is_flagged_and_what_is_promised(tmp_path: Path) -> None:
    few = ("--calibration", 9, "--target", 3, "--views", "light", "--steps", 1, "-j", 1)
    answer = json.loads(call("demo", "-o", tmp_path, *few, "--json").stdout)  # what it prints else is "said"
    assert answer["page"] == str(tmp_path / "report" / "report.html")
    assert answer["source_here"] < answer["source_at_home"]
    assert [line.split()[1] for line in answer["commands"]] == ["record", "calibrate", "certify", "predict"]
    said = answer["said"]
    assert "A phantom is a phantom" in said
    assert re.search(
        r"Dice 0\.9\d\d on the scanner that it was trained on and 0\.\d{3} on the new one \(3 cases\)", said
    )
    shown = re.search(r"casewise \(consensus\) +([+-]0\.\d{4}) \[[+-]0\.\d{4}, [+-]0\.\d{4}\] +(\d) : (\d)", said)
    assert shown, said
    assert re.search(r"TENT on every case +[+-]0\.\d{4}", said)
    for word in ("Hurt:", "Flagged:", "Promised:"):
        assert word in said
    page = (tmp_path / "report" / "report.html").read_text()
    assert "phantom" in page
    assert "TENT on every case: " in page  # what fixed adaptation does stands beside it
    scored = outcomes(open_archive(tmp_path / "target-archive", ladder="views-light"))
    metric = scored.set_index(["case", "step"])["metric"].unstack()
    change = metric[scored["step"].max()] - metric[0]
    assert float(shown[1]) == pytest.approx(change.mean(), abs=5e-5)
    assert (int(shown[2]), int(shown[3])) == ((change > 0).sum(), (change < 0).sum())


def test_the_new_scanner_costs_the_source_model_several_points_and_views_win_some_back(tmp_path: Path) -> None:
    dice_of = {}
    for vendor in ("A", "B"):
        folder = write_cohort(cardiac_cohort(vendor, 5, split="calibration"), tmp_path / vendor)
        cases = ("-i", folder / "images", "-l", folder / "labels")
        model = "casewise.adapt.networks:phantom_cardiac"
        call("record", "-m", model, *cases, "--propose", "views:light", "-o", tmp_path / f"{vendor}-archive")
        scored = outcomes(open_archive(tmp_path / f"{vendor}-archive", ladder="views-light"))
        dice_of[vendor] = scored.groupby("step")["metric"].mean()
    assert dice_of["A"][0] > dice_of["B"][0] + 0.02
    assert dice_of["B"].iloc[-1] > dice_of["B"][0]
