"""File names as people have them, and pictures that cannot be drawn: no mask is lost to either."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner

from casewise.archive.store import open_archive
from casewise.core.errors import CasewiseWarning
from casewise.core.records import Policy, made_case_id
from casewise.data.datasets.plain import plain
from casewise.data.folders import list_cases, with_labels
from casewise.judge.policy import write_policy
from casewise.study.compare import check_place

MODEL = "casewise.adapt.networks:phantom_cardiac"
NAMES = ("Fall Müller (1)", "病人 1", "patient;rm -rf", "=cmd()", "a" * 180, "-leading", "Fall Muller (1)", "plain_1")


def scan(path: Path, slices: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    voxels = np.random.default_rng(len(path.name)).normal(size=(16, 16, slices)).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(voxels, np.diag([1.5, 1.5, 8, 1])), path)
    return path


def predict(root: Path, *words: object) -> tuple[Any, dict[str, Any]]:
    app = importlib.import_module("casewise.cli.predict").app
    typed = ["-i", root / "images", "-o", root / "out", "-m", MODEL, "-device", "cpu", "--set", "contract=off", *words]
    done = CliRunner().invoke(app, [str(word) for word in typed], catch_exceptions=False)
    found = {path.stem: json.loads(path.read_text()) for path in (root / "out" / "casewise").glob("*.json")}
    return done, found


def test_spaces_and_letters_of_all_languages_become_ids_that_are_written_down(tmp_path: Path) -> None:
    for name in NAMES:
        scan(tmp_path / "images" / f"{name}.nii.gz")
        scan(tmp_path / "labels" / f"{name}.nii.gz")
    (tmp_path / "images" / "._plain_1.nii.gz").write_bytes(b"what macOS leaves behind")
    done, found = predict(tmp_path, "--policy", "m0")
    assert done.exit_code == 0
    assert {entry["name"] for entry in found.values()} == set(NAMES)
    for case_id, entry in found.items():
        assert case_id == made_case_id(entry["name"])
        assert (tmp_path / "out" / f"{case_id}.nii.gz").is_file()
        assert list(entry["inputs"]) == [f"{entry['name']}.nii.gz"]
    cases = with_labels(list_cases(tmp_path / "images"), tmp_path / "labels")
    assert all(case.label is not None and case.label.name == case.images[0].name for case in cases)


def test_an_id_is_the_name_where_it_can_be_and_names_that_look_alike_stay_apart() -> None:
    assert made_case_id("case_001.v2") == "case_001.v2"
    made = {made_case_id(name) for name in ("Müller 1", "Muller 1", "Müller  1", "müller 1")}
    assert len(made) == 4
    assert made_case_id("../../etc/passwd").startswith("etc_passwd-")


def test_files_that_differ_in_their_ending_only_are_two_cases(tmp_path: Path) -> None:
    for name in ("a.nii", "a.nii.gz", "b.nii.gz"):
        scan(tmp_path / "images" / name)
    assert [case.id for case in list_cases(tmp_path / "images")] == ["a.nii", "a.nii.gz", "b"]


def test_sites_that_name_their_cases_alike_do_not_collide(tmp_path: Path) -> None:
    for site in ("BMC", "UCL"):
        scan(tmp_path / site / "images" / "case_1.nii.gz")
    cohort = plain(tmp_path)
    assert {member.id: member.group for member in cohort.members.values()} == {
        "BMC_case_1": "BMC",
        "UCL_case_1": "UCL",
    }


@pytest.mark.parametrize("command", ["predict", "record"])
@pytest.mark.parametrize("what", ["link to a missing file", "link to itself", "pipe", "folder"])
def test_a_link_to_a_missing_file_and_a_pipe_and_a_folder_fail_alone(command: str, what: str, tmp_path: Path) -> None:
    scan(tmp_path / "images" / "good.nii.gz")
    link = tmp_path / "images" / "link.nii.gz"
    if what == "pipe":
        os.mkfifo(link)  # opening it would wait for ever
    elif what == "folder":
        link.mkdir()
    elif what == "link to itself":
        link.symlink_to(link.name)
    else:
        link.symlink_to(tmp_path / "elsewhere" / "gone.nii.gz")
    said = f"link.nii.gz is a {what}".replace("link to itself", "link to a missing file")
    if what == "pipe":
        said = "link.nii.gz is a folder, a pipe or a socket"
    if command == "record":
        app = importlib.import_module("casewise.cli.record").app
        words = ["-i", tmp_path / "images", "-o", tmp_path / "archive", "-m", MODEL, "--steps", 1]
        done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
        assert open_archive(tmp_path / "archive").ids == ("good",)
        assert said in done.output
    else:
        done, found = predict(tmp_path, "--policy", "m0")
        assert (found["good"]["status"], found["link"]["status"]) == ("done", "failed")
        assert said in found["link"]["error"]
        assert not (tmp_path / "out" / "link.nii.gz").exists()
    assert done.exit_code == 3


@pytest.mark.parametrize("adapts", [False, True])
def test_a_volume_of_one_slice_has_a_mask_and_a_picture(adapts: bool, tmp_path: Path) -> None:
    scan(tmp_path / "images" / "one.nii.gz", slices=1)
    fixed = Policy("fixed-k", "fixed-k", {"step": 1}, 1, adaptation={"objective": "tent", "steps": 1})
    done, found = predict(tmp_path, "--policy", write_policy(tmp_path / "fixed.json", fixed) if adapts else "m0")
    assert done.exit_code == 0
    assert found["one"]["status"] == "done"
    assert (tmp_path / "out" / "casewise" / "overlays" / "one.png").is_file()
    assert nibabel.load(tmp_path / "out" / "one.nii.gz").shape == (16, 16, 1)


def test_a_picture_that_cannot_be_drawn_never_costs_a_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan(tmp_path / "images" / "a.nii.gz")
    monkeypatch.setattr("casewise.run.predict_folder.overlay_png", lambda preview: 1 / 0)
    with pytest.warns(CasewiseWarning, match=r"the picture of case a cannot be drawn .*; its mask was written"):
        done, found = predict(tmp_path, "--policy", "m0")
    assert done.exit_code == 0
    assert found["a"]["status"] == "done"
    assert (tmp_path / "out" / "a.nii.gz").is_file()


def test_a_label_and_a_folder_that_link_to_themselves_end_no_command(tmp_path: Path) -> None:
    for name in ("a", "b"):
        scan(tmp_path / "images" / f"{name}.nii.gz")
    label = tmp_path / "labels" / "a.nii.gz"
    label.parent.mkdir()
    for link in (label, tmp_path / "loop"):
        link.symlink_to(link.name)
    done, found = predict(tmp_path, "--policy", "m0", "-l", tmp_path / "labels")
    assert done.exit_code == 3
    assert {entry["status"] for entry in found.values()} == {"done"}
    seen = CliRunner().invoke(importlib.import_module("casewise.cli.inspect").app, [str(tmp_path)])
    assert "a.nii.gz is not a file" in seen.output
    check_place(tmp_path / "loop", [tmp_path / "images"])  # making the folder then fails in a sentence
