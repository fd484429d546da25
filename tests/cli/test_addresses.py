"""``package.module:Name`` on the command line: yours runs when you typed it, and never because a file says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner
from worlds.cohorts import synthetic_archive

from casewise.adapt.probes import probes_of
from casewise.cli import app
from casewise.core.errors import BadInput, CasewiseError, UnknownName, UnsafeInput
from casewise.judge.policy import read_policy, write_policy

OWN = "own_controller:SmallEdits"


def said(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, CasewiseError):
        raise result.exception
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    return result.output


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return Path(synthetic_archive(tmp_path / "a", cases=12).path)


def test_a_controller_of_your_own_is_replayed_calibrated_and_read_again_when_typed(archive: Path) -> None:
    assert "12 cases" in said("replay", archive, OWN)
    said("calibrate", archive, "--policy", OWN)
    policy = json.loads((archive / "policy.json").read_text())
    assert policy["controller"] == OWN
    assert policy["binding"]["model"]
    with pytest.raises(UnsafeInput, match="add --set controller=own_controller:SmallEdits"):
        said("replay", archive, archive)
    assert "12 cases" in said("replay", archive, archive, "--set", f"controller={OWN}")


def test_options_of_a_controller_of_your_own_are_set_like_any_others(archive: Path) -> None:
    assert "keep 12" in said("replay", archive, OWN, "--option", "largest_share=1")
    assert "rollback 12" in said("replay", archive, OWN, "--option", "largest_share=-1")


def test_a_file_never_imports(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said("calibrate", archive, "--policy", "cardiac")
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    from dataclasses import replace

    write_policy(archive, replace(read_policy(archive), controller="evil:Thing", options={}))
    with pytest.raises(UnsafeInput, match="'evil:Thing', which is code to import"):
        said("replay", archive, archive)


def test_wrong_addresses_are_reported_in_a_sentence(archive: Path) -> None:
    with pytest.raises(BadInput, match=r"no controller at 'own_controller:Smal'.*'package.module:Name'"):
        said("replay", archive, "own_controller:Smal")
    with pytest.raises(BadInput, match=r"no controller at 'nowhere:X'"):
        said("calibrate", archive, "--policy", "nowhere:X")
    with pytest.raises(BadInput, match="collections:Counter is not a controller: no name and no needs and no states"):
        said("calibrate", archive, "--policy", "collections:Counter")


def test_signals_have_addresses_too_and_a_wrong_one_is_an_error_before_anything_runs() -> None:
    found: Any = probes_of(["casewise.adapt.probes.perturbations:dropout_disagreement", "drop"])
    assert list(found) == ["dropout_disagreement", "drop"]
    with pytest.raises(
        UnknownName, match=r"no signal is called 'dropout_disagrement'. Did you mean 'dropout_disagreement'\?"
    ):
        probes_of(["dropout_disagrement"])
    with pytest.raises(BadInput, match=r"no signal at 'casewise.adapt.probes.perturbations:dropout_disagrement'"):
        probes_of(["casewise.adapt.probes.perturbations:dropout_disagrement"])


def test_a_wrong_view_beside_a_right_objective_leaves_no_archive_behind(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(images / "a.png")
    model = ("-m", "worlds.streets:street_network", "-device", "cpu", "--set", "steps=1")
    words = ("record", *model, "-i", images, "-o", tmp_path / "archive", "--propose", "tent", "--propose")
    with pytest.raises(BadInput, match="no view at 'own_controller:brightr'"):
        said(*words, "views:own_controller:brightr")
    assert not (tmp_path / "archive").exists()


FAST = ("--set", "pictures=0", "--set", "resamples=100")


def test_a_controller_of_your_own_is_studied_when_typed(archive: Path, tmp_path: Path) -> None:
    evaluation = synthetic_archive(tmp_path / "e", cases=8, prefix="new", split="evaluation", seed=1).path
    said("calibrate", archive, "--policy", OWN)
    words = ("study", evaluation, "--calibration", archive, "-o", tmp_path / "report", "--only", "helphurt", *FAST)
    with pytest.raises(UnsafeInput, match="add --set controller=own_controller:SmallEdits"):
        said(*words)
    said(*words, "--set", f"controller={OWN}")
    page = (tmp_path / "report" / "report.html").read_text()
    assert "SmallEdits" in page or "small-edits" in page


def test_a_controller_of_your_own_is_served_when_typed(archive: Path) -> None:
    said("calibrate", archive, "--policy", OWN)
    words = ("serve", "-m", "casewise.adapt.networks:phantom_cardiac", "--policy", archive)
    with pytest.raises(UnsafeInput, match="add --set controller=own_controller:SmallEdits"):
        said(*words)
    with pytest.raises(BadInput, match="'SmallEdits' does not name its proposers"):  # it was read
        said(*words, "--set", f"controller={OWN}")
