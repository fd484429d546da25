"""Several ladders, one M0: each is written whole or not at all, and each looks like an archive of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
from typer.testing import CliRunner
from worlds.cohorts import SYNTHETIC, synthetic_archive

from casewise.archive.store import create_archive, open_archive
from casewise.archive.verify import verify
from casewise.cli import app
from casewise.core.errors import BadInput, DamagedArchive, Mismatch
from casewise.core.records import SOURCE, Action, Binding, Case, Decision, State, Trajectory, Verdict
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.controllers.depth import FixedK
from casewise.judge.outcomes import outcomes
from casewise.replay import replay

TENT, VIEWS = Binding("model", "tent", "loader", "measure"), Binding("model", "views", "loader", "measure")
M0 = np.array([[0, 1, 1], [0, 0, 1]], np.uint8)


def a_case(case_id="one", **more):
    return Case(case_id, np.arange(6.0).reshape(1, 2, 3), **more)


def a_ladder(*masks, case_id="one", **more):
    every = (M0, *(np.asarray(mask, np.uint8) for mask in masks))
    return Trajectory(case_id, every, tuple({"delta": float((mask != M0).mean())} for mask in every), **more)


def two_ladders(path):
    label = np.array([[0, 1, 1], [0, 1, 1]], np.uint8)
    tent = create_archive(path, binding=TENT, steps=1, ladder="tent")
    tent.add(a_case(split="calibration"), a_ladder(M0 * 0), label)
    tent.seal()
    views = create_archive(path, binding=VIEWS, steps=2, ladder="views")
    views.add(a_case(split="calibration"), a_ladder(M0, [[1, 1, 1], [0, 0, 1]], rungs=("mirror", "mean")), label)
    return views.seal()


def test_a_state_says_its_ladder_and_m0_belongs_to_all():
    assert str(State(2, 0.5, "tent")) == "tent:2~0.5"
    assert State(2).on("tent").on("") == State(2)
    assert State(0).on("tent") == SOURCE
    assert State(2).as_dict() == {"step": 2, "shrink": 0.0}
    assert State(1, ladder="views").as_dict()["ladder"] == "views"
    with pytest.raises(BadInput, match="all ladders share"):
        State(0, ladder="tent")
    with pytest.raises(BadInput, match="the name of a ladder"):
        State(1, ladder="../up")


def test_a_decision_on_a_ladder_survives_json():
    made = Decision("one", Action.KEEP, State(2, 0.5, "tent"), 4, "fixed-k")
    assert Decision.from_dict(json.loads(json.dumps(made.as_dict()))) == made


def test_each_ladder_reads_like_an_archive_and_m0_is_stored_once(tmp_path):
    two_ladders(tmp_path)
    archive = open_archive(tmp_path)
    assert archive.ladders == ("tent", "views")
    tent, views = archive.ladder("tent"), archive.ladder("views")
    assert (tent.steps, views.steps) == (1, 2)
    assert (tent.binding, views.binding) == (TENT, VIEWS)
    assert not tent.mask("one", State(1)).any()
    assert np.array_equal(views.mask("one", State(2)), [[1, 1, 1], [0, 0, 1]])
    assert np.array_equal(views.mask("one", SOURCE), M0)
    assert np.array_equal(tent.mask("one", State(2, ladder="views")), views.mask("one", State(2)))
    assert views.trajectory("one").rungs == ("mirror", "mean")
    assert np.array_equal(archive.label("one"), views.label("one"))
    assert tent.digest != views.digest
    assert verify(tmp_path) == []
    stored = np.load(tmp_path / "cases/one/ladder-views/masks.npz")
    assert stored["counts"].tolist() == [0, 0, 1]  # no M0, a view that equals it, one voxel


def test_where_several_are_held_one_must_be_chosen(tmp_path):
    two_ladders(tmp_path)
    archive = open_archive(tmp_path)
    with pytest.raises(BadInput, match=r"several ladders \('tent', 'views'\); choose one with --ladder"):
        _ = archive.steps
    with pytest.raises(BadInput, match="has no ladder 'tnt'; it has 'tent', 'views'"):
        archive.ladder("tnt")
    assert open_archive(tmp_path, ladder="tent").steps == 1


def test_the_only_ladder_needs_no_name(tmp_path):
    create_archive(tmp_path, binding=TENT, steps=1, ladder="tent").add(a_case(), a_ladder(M0)).seal()
    assert open_archive(tmp_path).steps == 1


def test_a_ladder_with_another_m0_is_refused_and_leaves_nothing_behind(tmp_path):
    two_ladders(tmp_path)
    third = create_archive(tmp_path, binding=replace(TENT, objective="cotta"), steps=1, ladder="cotta")
    other = replace(a_ladder(M0), masks=(M0 + 1, M0))
    with pytest.raises(Mismatch, match=r"M0 of case one differs from that in .* ladder 'cotta' was not added"):
        third.add(a_case(split="calibration"), other)
    assert not (tmp_path / "cases/one/ladder-cotta").exists()
    assert verify(tmp_path) == []


def test_a_ladder_of_another_model_or_measure_is_refused(tmp_path):
    two_ladders(tmp_path)
    with pytest.raises(Mismatch, match="another model, so ladder 'cotta' cannot be added"):
        create_archive(tmp_path, binding=replace(TENT, model="other"), steps=1, ladder="cotta")
    with pytest.raises(Mismatch, match="another metric"):
        create_archive(tmp_path, binding=TENT, steps=1, ladder="cotta", configuration={"metric": "miou"})
    with pytest.raises(Mismatch, match="needs a name"):
        create_archive(tmp_path, binding=TENT, steps=1)


def test_a_ladder_can_be_added_to_an_archive_of_before_and_is_a_resume(tmp_path):
    synthetic_archive(tmp_path, cases=3)
    before = open_archive(tmp_path)
    configuration = {"metric": "dice", "min_area": 16, "foreground": True}
    options = {"binding": replace(SYNTHETIC, objective="views"), "steps": 1, "configuration": configuration}
    for _ in range(2):  # the second time finds the case that is there
        more = create_archive(tmp_path, ladder="views", **options)
        source = before.trajectory("case-0000")
        case = Case("case-0000", np.empty((1, 0)), (1.0, 1.0), "A", "case-cluster-0000", "calibration")
        more.add(case, replace(source, masks=source.masks[:2], signals=source.signals[:2], shrunk={}))
    more.seal()
    after = open_archive(tmp_path)
    assert after.ladders == ("", "views")
    assert after.steps == before.steps  # what read the archive before reads the same ladder
    assert after.digest == before.digest
    assert after.ladder("views").ids == ("case-0000",)
    assert verify(tmp_path) == []


def test_a_ladder_that_is_lost_or_contradicts_its_case_is_noticed(tmp_path):
    two_ladders(tmp_path)
    file = tmp_path / "cases/one/ladder-views/entry.json"
    entry = json.loads(file.read_text())
    file.write_text(json.dumps({**entry, "input_sha256": "other"}))
    with pytest.raises(DamagedArchive, match="contradicts its case on input_sha256"):
        open_archive(tmp_path)
    file.unlink()
    with pytest.raises(DamagedArchive, match="lost ladder 'views' of case one"):
        open_archive(tmp_path)


def test_an_edited_mask_of_a_ladder_is_found(tmp_path):
    two_ladders(tmp_path)
    file = tmp_path / "cases/one/ladder-views/masks.npz"
    file.write_bytes(file.read_bytes()[:-3])
    assert verify(tmp_path) == ["ladder views, case one: masks.npz was changed or cut after it was written"]


def test_replay_calibrate_and_outcomes_work_on_any_ladder(tmp_path):
    archive = synthetic_archive(tmp_path / "one", cases=12)
    configuration = dict(archive.configuration)
    named = create_archive(tmp_path / "two", binding=SYNTHETIC, steps=4, configuration=configuration, ladder="tent")
    for case_id in archive.ids:
        entry = archive.entry(case_id)
        case = Case(case_id, np.empty((1, 0)), entry.spacing_mm, entry.group, entry.cluster, entry.split)
        named.add(case, archive.trajectory(case_id), archive.label(case_id))
    named.seal()
    there = open_archive(tmp_path / "two")
    policy = calibrate(there, "default")
    assert policy.ladder == "tent"
    assert policy.options == calibrate(archive, "default").options
    mine, plain = replay(there, policy), replay(archive, replace(policy, ladder=""))
    assert [replace(one, state=one.state.on("")) for one in mine] == plain
    assert {one.state.ladder for one in mine if one.state.step} == {"tent"}
    columns = ["case", "step", "shrink", "metric", "ha"]
    assert outcomes(there)[columns].equals(outcomes(archive)[columns])


@dataclass(frozen=True)
class Smallest:
    """Deploys the last candidate with the smallest change, of two ladders."""

    ladders = ("tent", "views")
    name = "smallest"
    needs = frozenset({"delta"})
    states = frozenset()

    def decide(self, seen):
        ends = {name: signals[-1]["delta"] for name, signals in seen.ladders.items()}
        best = min(ends, key=ends.get)
        return Verdict(State(len(seen.ladders[best]) - 1, ladder=best), Action.KEEP, coordinate="delta")


def test_a_controller_may_read_several_ladders(tmp_path):
    two_ladders(tmp_path)
    archive = open_archive(tmp_path)
    (made,) = replay(archive, Smallest())
    assert made.state == State(2, ladder="views")
    assert made.executed == 3
    assert made.state_hash == archive.ladder("views").entry("one").mask_sha256["2"]


def test_several_ladders_in_view_have_one_binding_and_every_case_has_each(tmp_path):
    both = open_archive(two_ladders(tmp_path / "a").path).join(["views", "tent"])
    options = {"tent": {"objective": "tent", "steps": 1}, "views": {"objective": "views", "steps": 2}}
    assert both.binding == replace(TENT, objective="tent, views", options=options)
    assert both.binding == both.join(["tent", "views"]).binding
    assert (both.steps, both.ids) == (3, ("one",))
    assert both.digest not in (both.ladder("tent").digest, both.ladder("views").digest)
    assert both.ladder("tent").steps == 1
    with pytest.raises(BadInput, match="joining needs at least two ladders, got tent"):
        both.join(["tent"])
    more = create_archive(tmp_path / "a", binding=TENT, steps=1, ladder="tent")
    more.add(a_case("two"), a_ladder(M0 * 0, case_id="two"))
    with pytest.raises(BadInput, match=r"1 cases of .* lack ladder 'views' \(two\); record it for them"):
        open_archive(tmp_path / "a").join(["tent", "views"])


def test_the_command_line_asks_for_a_ladder(tmp_path):
    two_ladders(tmp_path)
    refused = CliRunner().invoke(app, ["replay", str(tmp_path), "fixed-k", "--option", "step=1"])
    assert "choose one with --ladder" in str(refused.exception)
    done = CliRunner().invoke(app, ["replay", str(tmp_path), "fixed-k", "--option", "step=1", "--ladder", "tent"])
    assert done.exit_code == 0, done.output
    assert replay(open_archive(tmp_path, ladder="tent"), FixedK(1))[0].state == State(1, ladder="tent")
