"""Other models as candidates, as a user types them: what is wrong with one is said by name and costs no other case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from typer.testing import CliRunner
from worlds.datasets import write_data
from worlds.members import ODD

from casewise.cli import app
from casewise.core.errors import Mismatch

MODEL = ("-m", "worlds.members:model", "-device", "cpu")


def call(command: str, *arguments: object) -> Any:
    torch.set_num_threads(1)
    return CliRunner().invoke(app, [command, *map(str, arguments)], catch_exceptions=False)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty cases; case_03 and case_12 are odd."""
    folder = write_data(tmp_path_factory.mktemp("members") / "data", 20)
    for name in ("case_03", "case_12"):
        image = np.random.default_rng(int(name[-2:])).normal(size=(ODD, 24, 2)).cumsum(0).cumsum(1).astype(np.float32)
        for kind, voxels in (("images", image), ("labels", (image > image.mean()).astype(np.uint8))):
            ending = "_0000.nii.gz" if kind == "images" else ".nii.gz"
            nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), folder / kind / f"{name}{ending}")
    return folder


def recorded(home: Path, archive: Path, *members: str) -> Any:
    propose = "members:" + ",".join(f"worlds.members:{name}" for name in members)
    cases = ("-i", home / "images", "-l", home / "labels", "-o", archive)
    return call("record", *MODEL, *cases, "--set", "min-area=1", "--propose", f"others={propose}"), propose


def predicted(home: Path, archive: Path, propose: str, out: Path) -> tuple[Any, dict[str, Any]]:
    how = ("--policy", archive, "--set", f"objective={propose}", "--set", "force=true")
    done = call("predict", *MODEL, "-i", home / "images", "-o", out, *how)
    return done, json.loads((out / "casewise" / "case_12.json").read_text())


def test_a_member_that_fails_on_a_case_is_named_and_affects_no_other_case(home: Path, tmp_path: Path) -> None:
    done, propose = recorded(home, tmp_path / "archive", "good", "fails")
    said = "member worlds.members:fails failed on case case_03: KeyError: 'some layer'; repair it, or record"
    assert (done.exit_code, said in done.output, "18 cases" in done.output) == (3, True, True), done.output
    assert call("calibrate", tmp_path / "archive", "--policy", "consensus").exit_code == 0
    done, odd = predicted(home, tmp_path / "archive", propose, tmp_path / "out")
    assert (done.exit_code, odd["status"]) == (3, "fallback")
    assert "member worlds.members:fails failed on case case_12" in odd["error"]
    assert len(list((tmp_path / "out").glob("*.nii.gz"))) == 20


def test_a_member_that_cannot_be_read_is_reported_and_has_no_vote(home: Path, tmp_path: Path) -> None:
    done, propose = recorded(home, tmp_path / "archive", "undefined")
    left_out = "worlds.members:undefined was left out: its probabilities are not finite for case"
    assert (done.exit_code, f"case_03: {left_out} case_03" in done.output) == (0, True), done.output
    fitted = call("calibrate", tmp_path / "archive", "--policy", "consensus", "--flag-below", 0.5)
    assert fitted.exit_code == 0, fitted.output
    _, odd = predicted(home, tmp_path / "archive", propose, tmp_path / "out")
    assert f"{left_out} case_12" in odd["notes"]
    assert (odd["decision"]["action"], odd["decision"]["flagged"]) == ("rollback", True)
    assert odd["decision"]["reason"].startswith("M0: there is no other candidate")
    assert "was left out" in (tmp_path / "out" / "report.html").read_text()
    done = call("bench", home, *MODEL, "-o", tmp_path / "bench", "--propose", propose)
    assert f"{left_out} case_03" in done.output, done.output


def test_a_member_of_images_in_another_orientation_is_refused_by_name(home: Path, tmp_path: Path) -> None:
    with pytest.raises(
        Mismatch, match=r"member worlds\.members:turned has images in another orientation: turned to one"
    ):
        recorded(home, tmp_path / "archive", "turned")
    assert not (tmp_path / "archive").exists()
