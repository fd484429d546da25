"""Phantom hearts with their source model and simulated streets, from files to a policy and to a report."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner
from worlds.streets import driving_cohort

from casewise.archive.store import open_archive
from casewise.cli import app
from casewise.core.records import SOURCE
from casewise.data import nifti
from casewise.data.datasets.plain import write_cohort
from casewise.data.phantom import cardiac_cohort
from casewise.judge.outcomes import outcomes
from casewise.judge.policy import read_policy
from casewise.measure.metrics.overlap import dice, miou

STREETS = "worlds.streets:street_network"


def call(command: str, *arguments: object) -> Any:
    torch.set_num_threads(1)
    result = CliRunner().invoke(app, [command, *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def streets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight scenes in fog, recorded with every class told apart."""
    home = tmp_path_factory.mktemp("streets")
    folder = write_cohort(driving_cohort("fog", 8, split="calibration"), home / "fog")
    cases = ("-i", folder / "images", "-l", folder / "labels", "--groups", folder / "cases.csv")
    how = ("--set", "objective=tent", "--lr", 1e-3, "--steps", 2, "--set", "shrink=", "--set", "min-area=20")
    classes = ("--set", "classes=true", "--metric", "miou")
    call("record", "-m", STREETS, *cases, *how, *classes, "-o", home / "fog-archive")
    return home


def test_streets_are_judged_by_all_their_classes(streets: Path) -> None:
    archive = open_archive(streets / "fog-archive")
    assert archive.configuration["foreground"] is False
    scored = outcomes(archive)
    name = archive.ids[0]
    by_hand = miou(archive.mask(name, SOURCE), archive.label(name), ignore=255)  # the road, 0, is a class like others
    assert scored.set_index(["case", "step"]).loc[(name, 0), "metric"] == by_hand
    assert set(scored.loc[scored["step"] == 0, "ha"]) == {0.0}
    assert scored.loc[scored["step"] == 2, "delta"].gt(0).all()


def test_a_policy_for_streets_decides_on_new_scenes(streets: Path) -> None:
    call("calibrate", streets / "fog-archive", "--policy", "default")
    assert read_policy(streets / "fog-archive").binding is not None
    folder = write_cohort(driving_cohort("fog", 2, split="target"), streets / "target")
    out = streets / "masks"
    call("predict", "-m", STREETS, "-i", folder / "images", "-o", out, "--policy", streets / "fog-archive")
    entries = [json.loads(file.read_text()) for file in sorted((out / "casewise").glob("target*.json"))]
    assert [entry["status"] for entry in entries] == ["done", "done"]
    assert all(entry["decision"]["reason"] for entry in entries)


def test_the_demo_fits_predicts_and_says_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from casewise.cli import demo

    for name, few in {"UPDATES": 2, "HOME": 2, "LABELLED": 9, "NEW": 2, "OTHER": 1}.items():
        monkeypatch.setattr(demo, name, few)
    answer = json.loads(call("demo", "-o", tmp_path, "-j", 1, "--json").stdout)
    assert answer["page"] == str(tmp_path / "demo.html")
    assert [line.split()[1] for line in answer["commands"]] == ["fit", "predict"]
    first, second, third, last = answer["sentences"]
    rows, hearts = answer["rows"], answer["hearts"]
    ours = [one["dice"] for one in hearts if not one["other"]]
    before, after = (sum(one[way] for one in ours) / 2 for way in ("m0", "deployed"))
    assert (len(hearts), len(ours)) == (3, 2)
    assert f"{answer['home']:.3f} on the scanner of its training images and {before:.3f} on 2 new hearts" in first
    assert rows[list(rows)[-1]]["dice"] == pytest.approx(after)
    assert f": {after:.3f}." in second
    assert "of 2 hearts lose more than a point" in third
    lost = sum(one["deployed"] < one["m0"] - 0.01 for one in ours)
    promised = (tmp_path / "deployment" / "certificate.json").is_file()
    assert (f"{lost} of 2 did" in last) if promised else last.startswith("Nothing is promised")
    page = (tmp_path / "demo.html").read_text()
    assert all(sentence in html.unescape(page) for sentence in answer["sentences"])
    assert "These cases are simulated" in page
    for link in re.findall(r'href="([a-z][^"]*)"', page):
        assert link.startswith("data:") or (tmp_path / link).is_file()
    assert (tmp_path / "masks.png").read_bytes().startswith(b"\x89PNG")
    truth, written = (nifti.read_label(tmp_path / part / "new_B_000.nii.gz") for part in ("data/new/labels", "masks"))
    assert next(one for one in hearts if one["case"] == "new_B_000")["dice"]["deployed"] == dice(written, truth)


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
