"""tab:newobj: a row for each objective, with its own router if its holdout was given."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds.cohorts import SYNTHETIC, synthetic_archive

from casewise.core.records import Binding
from casewise.judge.outcomes import outcomes
from casewise.study.analyses.criteria import facts, label_of, objectives
from casewise.study.study import Extras

OTHER = Binding(SYNTHETIC.model, "Grata()", SYNTHETIC.loader, SYNTHETIC.measure)


@pytest.fixture(scope="module")
def given(study, tmp_path_factory):
    """The study with two other objectives: GraTa with a holdout, TENT without; GraTa recorded no shrunk state."""
    root = tmp_path_factory.mktemp("others")
    options = {"groups": ("A", "B"), "shrink": (), "binding": OTHER}
    grata = synthetic_archive(root / "grata", cases=26, seed=5, split="evaluation", **options)
    holdout = synthetic_archive(root / "held", cases=16, seed=6, prefix="held", **options)
    tent = synthetic_archive(root / "tent", cases=26, seed=7, steps=3, split="evaluation")
    extras = Extras(others={"GraTa": grata, "TENT": tent}, holdouts={"GraTa": holdout})
    return replace(study, extras=extras.unlocked())


@pytest.fixture(scope="module")
def found(given):
    return objectives(given)


def rows_by_name(table):
    return {str(row["objective"]): row for row in table.rows}


def test_every_objective_has_a_row_of_the_papers_shape(found):
    table = found[0][0]
    assert [column.key for column in table.columns][:-1] == [
        *("objective", "dataset", "delta", "regions", "V1", "V2", "V3", "share"),
    ]
    assert list(rows_by_name(table)) == ["synthetic", "GraTa", "TENT"]
    assert all(row["V1"] in ("held", "failed") and row["n"] == 26 for row in table.rows)


def test_a_router_is_refitted_on_its_own_holdout_and_keeps_its_actions(given, found):
    ladder = rows_by_name(found[0][1])
    assert 0 < ladder["GraTa"]["rolled_back"] < 26
    assert ladder["GraTa"]["router_ha"] < ladder["GraTa"]["ha_4"]
    assert ladder["GraTa"]["budget"] in {f"fixed-{step}" for step in range(1, 5)}
    assert ladder["synthetic"]["router_ha"] == float(given.policy_rows["ha"].mean())
    assert "GraTa: mid bucket at its full depth: no shrunk state was recorded" in found[1].notes
    assert not any(state.shrink for state in given.extras.others["GraTa"].states)


def test_without_a_holdout_the_router_cells_are_not_run_and_say_what_they_need(found):
    (criteria, ladders), finding = found
    row, ladder = rows_by_name(criteria)["TENT"], rows_by_name(ladders)["TENT"]
    assert row["V3"] == "not run"
    texts = {column.key: ladders.text(2, column) for column in ladders.columns}
    assert [texts[key] for key in ("budget", "budget_ha", "router_metric", "router_ha")] == ["not run"] * 4
    assert texts["ha_4"] == "—"  # TENT recorded three steps
    assert isinstance(ladder["ha_3"], float)
    assert any(note.startswith("TENT: its router needs its own calibration archive") for note in finding.notes)


def test_an_objective_that_cannot_be_routed_says_why(given, tmp_path):
    short = synthetic_archive(tmp_path / "short", cases=26, seed=5, steps=1, shrink=(), split="evaluation")
    holdout = synthetic_archive(tmp_path / "held", cases=16, seed=6, steps=1, shrink=(), prefix="held")
    extras = Extras(others={"MEMO": short}, holdouts={"MEMO": holdout})
    _, finding = objectives(replace(given, extras=extras.unlocked()))
    assert any("needs 3 steps per case, the archive holds 1" in note for note in finding.notes)


def test_the_first_step_is_compared_with_tents_when_tent_was_given(study, given):
    assert "metric.first_minus_tent" not in facts(study)
    fact = facts(given)["metric.first_minus_tent"]
    first = given.outcomes[(given.outcomes["step"] == 1)].set_index("case")["metric"].mean()
    tent = given.extras.others["TENT"]
    theirs = outcomes(tent)
    theirs = theirs[theirs["step"] == 1].set_index("case")["metric"].mean()
    assert fact.estimate == pytest.approx(first - theirs)
    assert fact.n == 26


def test_v0_is_judged_for_each_objective_but_not_for_tent_itself(found):
    v0 = {name: row["V0"] for name, row in rows_by_name(found[0][1]).items()}
    assert v0["synthetic"] in ("held", "failed")
    assert v0["GraTa"] in ("held", "failed")
    assert v0["TENT"] == "not run"


def test_the_studied_objective_is_named_with_the_rate_that_made_its_trajectories():
    """The rate of a recording is an option beside the objective, whose own rate would mislead the reader."""
    recorded = {"objective": "Eata(margin=0.45, learning_rate=0.0005)", "learning_rate": 2e-3}
    assert label_of(recorded) == "Eata(margin=0.45, learning_rate=0.002)"
    assert label_of({**recorded, "learning_rate": None}) == recorded["objective"]
    assert label_of({}) == "this archive"
    assert label_of({"objective": "mine()", "learning_rate": 0.1}) == "mine(), learning_rate=0.1"
