"""Views as a user types them: several ladders in one pass, a consensus deployed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from typer.testing import CliRunner
from worlds.tiny_models import write_unet, write_volumes

from casewise.archive.store import Archive, open_archive
from casewise.archive.verify import verify
from casewise.cli import app
from casewise.core.errors import BadInput, Mismatch
from casewise.core.records import Policy, State
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.policy import read_policy, write_policy
from casewise.replay import replay

FACTORY = "casewise.adapt.networks:PlainUNet"


def call(command: str, *arguments: object) -> Any:
    torch.set_num_threads(1)
    return CliRunner().invoke(app, [command, *map(str, arguments)], catch_exceptions=False)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_volumes(tmp_path_factory.mktemp("views"), cases=3)
    write_unet(folder / "unet.safetensors")
    return folder


def model(home: Path) -> tuple[object, ...]:
    return ("-m", FACTORY, "--weights", home / "unet.safetensors", "-device", "cpu")


def recorded(home: Path, archive: Path, *more: object) -> Any:
    cases = ("-i", home / "images", "-l", home / "labels", "-o", archive, "--set", "min-area=1")
    updates = ("--steps", 1, "--set", "shrink=") if "tent" in more else ()
    return call("record", *model(home), *cases, *updates, *more)


def fitted(archive: Archive, controller: str, options: dict[str, Any], file: Path) -> Path:
    """A policy on the candidates of an archive."""
    how = archive.configuration["adaptation"]
    return write_policy(file, Policy(controller, controller, options, archive.steps, archive.binding, how))


def test_ladders_are_recorded_in_one_pass_and_one_more_is_a_resume(home: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    done = recorded(home, archive, "--propose", "views:light", "--propose", "tent")
    assert done.exit_code == 0, done.output
    assert f"{archive}: 3 cases; 0 failed\nnext: casewise calibrate {archive} --ladder views-light" in done.output
    both = open_archive(archive)
    assert both.ladders == ("views-light", "tent")
    views, tent = both.ladder("views-light"), both.ladder("tent")
    assert (views.steps, tent.steps) == (5, 1)
    assert views.trajectory("case_0").rungs[-1] == "mean"
    assert np.array_equal(views.mask("case_0", State(0)), tent.mask("case_0", State(0)))
    again = recorded(home, archive, "--propose", "views:light", "--propose", "tent", "--propose", "two=views:random(2)")
    assert again.exit_code == 0, again.output
    assert (
        "3 cases, 3 of them recorded before; ladder two added (there before: views-light, tent); 0 failed"
        in again.output
    )
    assert open_archive(archive).ladders == ("views-light", "tent", "two")
    assert open_archive(archive).ladder("two").ids == views.ids
    assert verify(archive) == []
    alone = json.loads(recorded(home, archive, "--propose", "views:gamma(1.4)", "--json").stdout)
    assert (alone["added"], alone["cases"]) == (["views-gamma-1.4"], 3)
    listed = call("replay", archive, "fixed-k", "--option", "step=3", "--ladder", "two")
    assert listed.exit_code == 0, listed.output


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        (("--lr", 0.01), "--lr has no effect; leave it out"),
        (("--steps", 2), "--steps has no effect"),
        (("--set", "shrink=2:0.5"), "--set shrink has no effect"),
        (("--set", "parameters=all", "--lr", 1), "--lr and --set parameters have no effect; leave them out"),
        (("--set", "modulation=param-subset"), "--set modulation has no effect"),
    ],
)
def test_options_of_updates_are_refused_where_there_are_only_views(
    home: Path, tmp_path: Path, typed: tuple[object, ...], named: str
) -> None:
    for how in (("--propose", "views:light"), ("--propose", "views:light", "--propose", "a=views:ct")):
        with pytest.raises(BadInput, match=f"^nothing that is proposed makes updates, so {named}"):
            recorded(home, tmp_path / "archive", *how, *typed)
    assert not (tmp_path / "archive").exists()


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        (("--set", "consensus=vote"), "--set consensus has no effect; leave it out"),
        (("--set", "mirrored-views=false"), "--set mirrored-views has no effect; leave it out"),
        (
            ("--set", "mirrored-views=false", "--set", "consensus=vote"),
            "--set mirrored-views and --set consensus have no effect; leave them out",
        ),
    ],
)
def test_options_of_views_are_refused_where_there_are_only_updates(
    home: Path, tmp_path: Path, typed: tuple[object, ...], named: str
) -> None:
    with pytest.raises(BadInput, match=f"^no views are proposed, so {named}"):
        recorded(home, tmp_path / "archive", "--propose", "tent", *typed)
    assert not (tmp_path / "archive").exists()


def test_what_a_file_says_of_updates_is_passed_over_where_there_are_only_views(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "casewise.toml").write_text("[record]\nlr = 0.01\n")
    monkeypatch.chdir(tmp_path)
    assert recorded(home, tmp_path / "archive", "--propose", "views:gamma(1.4)").exit_code == 0


def test_views_recorded_beside_updates_are_gone_on_with_alone(home: Path, tmp_path: Path) -> None:
    views = ("--propose", "views:gamma(1.4)")
    assert recorded(home, tmp_path / "archive", *views, "--propose", "tent", "--lr", 0.01).exit_code == 0
    assert recorded(home, tmp_path / "archive", *views).exit_code == 0
    with pytest.raises(Mismatch, match=r"learning_rate was 0\.01, now 0\.02"):
        recorded(home, tmp_path / "archive", *views, "--propose", "tent", "--lr", 0.02)


def test_a_consensus_is_deployed_as_it_was_recorded(home: Path, tmp_path: Path) -> None:
    views = ("--set", "objective=views:gamma(1.4),mirror(x),random(2)", "--set", "seed=5")
    assert recorded(home, tmp_path / "archive", *views).exit_code == 0
    out = tmp_path / "masks"
    archive = open_archive(tmp_path / "archive")
    policy = fitted(archive, "consensus", {"consensus": "5", "steps": 5}, tmp_path / "policy.json")
    done = call("predict", *model(home), "-i", home / "images", "-o", out, "--policy", policy)
    assert done.exit_code == 0, done.output
    changed = 0
    for case_id in archive.ids:
        mask = np.asarray(nibabel.load(out / f"{case_id}.nii.gz").dataobj).T  # type: ignore[attr-defined]
        assert np.array_equal(mask, archive.mask(case_id, State(5)))
        changed += int((mask != archive.mask(case_id, State(0))).sum())
    assert changed


def test_views_are_read_until_their_consensus_has_settled(home: Path, tmp_path: Path) -> None:
    views = ("--set", "objective=running:gamma(1.1),gamma(1.2),gamma(1.3),gamma(1.4),gamma(1.5),gamma(1.6)")
    out = tmp_path / "masks"
    assert recorded(home, tmp_path / "archive", *views).exit_code == 0
    archive = open_archive(tmp_path / "archive")
    policy = fitted(archive, "settled", {"cap": 6}, tmp_path / "policy.json")
    done = call("predict", *model(home), "-i", home / "images", "-o", out, "--policy", policy)
    assert done.exit_code == 0, done.output
    for decision in replay(archive, CONTROLLERS.build("settled", cap=6)):
        mask = np.asarray(nibabel.load(out / f"{decision.case_id}.nii.gz").dataobj).T  # type: ignore[attr-defined]
        assert np.array_equal(mask, archive.mask(decision.case_id, decision.state))
        assert decision.executed == decision.state.step


def test_a_policy_brings_its_views_along(home: Path, tmp_path: Path) -> None:
    views = ("--set", "objective=views:gamma(1.4),mirror(x)", "--set", "consensus=vote")
    assert recorded(home, tmp_path / "archive", *views).exit_code == 0
    archive, out = open_archive(tmp_path / "archive"), tmp_path / "masks"
    policy = fitted(archive, "consensus", {"consensus": "3", "steps": 3}, tmp_path / "policy.json")
    done = call("predict", *model(home), "-i", home / "images", "-o", out, "--policy", policy)
    assert done.exit_code == 0, done.output
    mask = np.asarray(nibabel.load(out / "case_0.nii.gz").dataobj).T  # type: ignore[attr-defined]
    assert np.array_equal(mask, archive.mask("case_0", State(3)))
    read = read_policy(policy)
    write_policy(policy, replace(read, adaptation={**read.adaptation, "consensus": "medoid"}))
    with pytest.raises(Mismatch, match="another consensus"):
        call("predict", *model(home), "-i", home / "images", "-o", tmp_path / "b", "--policy", policy)


def test_a_file_cannot_name_a_view_that_is_code(home: Path) -> None:
    from casewise.adapt.adaptation import Adaptation
    from casewise.core.errors import UnsafeInput

    assert Adaptation.from_plain({"objective": "views:light"}).objective == "views:light"
    with pytest.raises(UnsafeInput, match="code to import"):
        Adaptation.from_plain({"objective": "views:os:system"})


def test_a_consensus_of_nothing_is_refused(home: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="'consensus' is not calibrated"):
        call("predict", *model(home), "-i", home / "images", "-o", tmp_path / "out", "--policy", "consensus")
    with pytest.raises(BadInput, match="give only one of them"):
        recorded(home, tmp_path / "a", "--set", "objective=tent", "--propose", "views:light")


def test_a_calibrated_policy_of_a_named_ladder_is_deployed(home: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    assert recorded(home, archive, "--propose", "some=views:gamma(1.4),mirror(x)", "--propose", "tent").exit_code == 0
    view = open_archive(archive).ladder("some")
    adaptation = view.configuration["adaptation"]
    made = Policy("consensus", "consensus", {"consensus": "3", "steps": 3}, 3, view.binding, adaptation, ladder="some")
    write_policy(archive, made)
    out = tmp_path / "masks"
    done = call("predict", *model(home), "-i", home / "images", "-o", out, "--policy", archive)
    assert done.exit_code == 0, done.output
    mask = np.asarray(nibabel.load(out / "case_1.nii.gz").dataobj).T  # type: ignore[attr-defined]
    assert np.array_equal(mask, view.mask("case_1", State(3)))
    replayed = {one.case_id: one for one in replay(open_archive(archive), made)}
    assert replayed["case_1"].state == State(3, ladder="some")
