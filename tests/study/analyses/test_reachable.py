"""Every analysis is in the report, by default or with an option, and its numbers are right."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner
from worlds.cohorts import synthetic_archive

from casewise.archive.store import create_archive, open_archive
from casewise.cli.study import app
from casewise.core.errors import BadInput, DegenerateTertiles
from casewise.core.records import Binding, Case, Trajectory
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.policy import write_policy
from casewise.study.analyses import ANALYSES
from casewise.study.analyses.association import fragmentation_state, states
from casewise.study.analyses.criteria import gradient_checks
from casewise.study.analyses.cut_points import reproduced
from casewise.study.study import Extras, Study

BOUND = Binding("model", "objective", "loader", "measure")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("reachable")
    holdout = synthetic_archive(root / "holdout", cases=20, seed=1, prefix="held")
    synthetic_archive(root / "stream", cases=12, seed=2, prefix="case", split="evaluation")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateTertiles)
        write_policy(root / "holdout", calibrate(holdout, "cardiac"))
    return root


def studied(folders, out, *words):
    fixed = [folders / "stream", "-c", folders / "holdout", "-o", out, "--set", "resamples=100", "--set", "pictures=0"]
    outcome = CliRunner().invoke(app, [str(word) for word in (*fixed, *words)])
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    assert outcome.exit_code == 0, outcome.output
    return json.loads((out / "results.json").read_text())["findings"]


def test_every_analysis_runs_from_the_command_line(folders, tmp_path):
    names = ("association", "controls", "cost", "sensitivity")
    found = studied(folders, tmp_path / "r", *(word for name in names for word in ("--only", name)))
    for name in ("association.state", "controls.substitution", "cost.firing", "sensitivity.again"):
        assert found[name]["rows"], name
    assert "controls.substitute" not in found  # needs its option
    tables = {file.stem for file in (tmp_path / "r" / "tables").glob("*.csv")}
    assert {"state", "substitution", "firing", "refit-check"} <= tables


def test_substitute_arms_give_every_kept_case_what_one_method_deployed(folders, tmp_path):
    found = studied(
        folders, tmp_path / "r", "--only", "controls", "--only", "deployment", "--set", "substitute=fixed-3"
    )
    rows = {row["selector"]: row for row in found["controls.substitute"]["rows"] if row["scope"] == "all"}
    study = Study.of(*(open_archive(folders / name) for name in ("stream", "holdout")), policy_of(folders))
    kept = ~study.policy_rows.set_index("case")["rolled_back"]
    by_hand = study.methods["fixed-3"].set_index("case")["ha"].where(kept, 0.0).mean()
    assert rows["deployed"]["ha"] == pytest.approx(by_hand)
    page = (tmp_path / "r" / "report.html").read_text()
    assert "Does not reproduce the deployed router" in page
    with pytest.raises(BadInput, match=r"substitute arms need a method of this study \(fixed-1, .*got 'nothing'"):
        studied(folders, tmp_path / "s", "--only", "controls", "--set", "substitute=nothing")


def policy_of(folders):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateTertiles)
        return calibrate(open_archive(folders / "holdout"), "cardiac")


# ---- fitted again ----


@pytest.mark.parametrize("mode", ["union", "per-group", "robust"])
def test_fitted_again_every_case_falls_into_the_same_bucket(folders, mode):
    holdout = open_archive(folders / "holdout")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateTertiles)
        policy = calibrate(holdout, "cardiac", mode=mode)
    study = Study.of(open_archive(folders / "stream"), holdout, policy, resamples=100)
    found = reproduced(study)
    assert found.made == {"same": 12, "cases": 12, "reproduced": True}
    assert (found.table["difference"] == 0).all()


def test_other_cut_points_are_noticed(folders):
    policy = policy_of(folders)
    study = Study.of(open_archive(folders / "stream"), open_archive(folders / "holdout"), policy, resamples=100)
    for moved, why in ((0.5, "the deployed cut-points are lower, as a certificate makes them"), (2.0, "was changed")):
        cuts = {name: moved * policy.options[name] for name in ("cut_low", "cut_high")}
        other = replace(policy, options={**policy.options, **cuts})
        again = reproduced(Study.of(study.evaluation, study.calibration, other, resamples=100))
        assert not again.made["reproduced"]
        assert why in again.notes[0]


# ---- the state, classes, GraTa ----


def test_the_state_is_five_numbers_of_each_step():
    frame = pd.DataFrame(
        {"case": "a", "step": [0, 1, 2], "shrink": 0.0, "regions": [0, 3, 2], "delta": [0, 0.2, 0.5]}
    ).assign(entropy_on_d=[0.0, 0.7, 0.6])
    assert states(frame).to_numpy().tolist() == [["a", 1, 3, 3, 0.2, 0.2, 0.7], ["a", 2, 2, -1, 0.5, 0.3, 0.6]]
    assert fragmentation_state(frame).row(step=2)["regions_change"] == -1


def test_the_first_step_of_one_case_is_not_counted_from_the_case_before():
    two = pd.DataFrame({"case": ["a", "a", "b", "b"], "step": [0, 1, 0, 1], "shrink": 0.0, "regions": [0, 5, 0, 2]})
    found = states(two.assign(delta=0.0))
    assert found["regions_change"].tolist() == [5, 2]


def recorded_with(path, cosines, **more):
    """An archive whose updates reported these cosines."""
    archive = create_archive(path, binding=BOUND, steps=len(cosines), configuration={})
    mask = np.zeros((1, 4), np.uint8)
    reports = tuple(
        {"cosine": c, "multiplier": 0.25 * (1 + c) ** 2, "entropy_loss": 0.1, "consistency_loss": 0.2, **more}
        for c in cosines
    )
    masks, signals = (mask,) * (len(cosines) + 1), ({"delta": 0.0},) * (len(cosines) + 1)
    archive.add(Case("x", np.zeros((1, 1, 4))), Trajectory("x", masks, signals, diagnostics=reports), mask)
    return archive.seal()


@pytest.mark.parametrize(
    ("cosines", "more", "failing"),
    [
        ((-0.5, 0.2, 0.95), {}, []),
        ((-0.5, 0.2, 0.4), {}, ["the multiplier spans its range"]),  # the paper's own arm: at most 0.53
        ((-1.0, 0.2, 0.95), {}, ["the rate never becomes zero"]),
        ((0.3, 0.3, 0.3), {}, ["the cosine differs between updates", "the multiplier spans its range"]),
        ((-0.5, 0.0, 0.95), {}, ["both gradients exist"]),
        ((-0.5, 0.2, 0.95), {"consistency_loss": 0.0}, ["both losses are above zero"]),
    ],
)
def test_each_way_in_which_grata_can_be_degenerate_is_found(tmp_path, cosines, more, failing):
    found = gradient_checks({"GraTa": recorded_with(tmp_path / "a", cosines, **more)})
    assert len(found.table) == 5
    assert found.table.loc[~found.table["holds"].astype(bool), "check"].tolist() == failing


def test_the_mean_rate_follows_from_mean_and_spread_of_the_cosine(tmp_path):
    cosines = np.array([-0.6, -0.3, 0.1, 0.5])
    note = gradient_checks({"GraTa": recorded_with(tmp_path / "a", cosines)}).notes[0]
    expected = 0.25 * ((1 + cosines.mean()) ** 2 + cosines.std() ** 2)
    assert f"{expected:.3f} of its base" in note


def test_other_objectives_have_no_such_table(folders):
    study = Study.of(
        open_archive(folders / "stream"), open_archive(folders / "holdout"), policy_of(folders), resamples=100
    )
    assert "grata-checks" not in {one.id for one in ANALYSES["objectives"](study).tables}
    grata = recorded_with(folders / "grata", (-0.2, 0.1))
    with_it = gradient_checks({"synthetic": study.evaluation, "GraTa": grata})
    assert set(with_it.table["objective"]) == {"GraTa"}
    assert Extras().substitute == ""
