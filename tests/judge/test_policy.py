"""A policy is data: it comes back as it was, and belongs to what it was fitted on."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from worlds.cohorts import synthetic_archive

from casewise.core.errors import BadInput, Mismatch, Overlap, UnknownName
from casewise.core.records import Binding, Policy, State
from casewise.data.splits import Member
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.controllers.router import Bucket, Router
from casewise.judge.policy import (
    READY,
    check_binding,
    check_held_out,
    controller_of,
    read_policy,
    ready_policy,
    write_policy,
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return synthetic_archive(tmp_path_factory.mktemp("archive") / "a", cases=12)


def with_cuts(name):
    design = READY[name]
    return controller_of(replace(design, options={**design.options, "cut_low": 1.0, "cut_high": 2.0}))


def test_ready_policies_have_the_papers_numbers():
    """E7."""
    rollback = Bucket("rollback")
    assert with_cuts("cardiac") == Router("delta", 1, 2, Bucket("depth", 3), Bucket("depth", 2, shrink=0.5), rollback)
    assert with_cuts("prostate") == Router("regions", 1, 2, Bucket("depth", 1), Bucket("depth", 1), rollback)
    assert with_cuts("driving") == Router("delta", 1, 2, Bucket("stop", 8), Bucket("stop", 4), rollback)
    assert with_cuts("cardiac").states == {State(2, 0.5)}


def test_a_policy_survives_its_file(archive, tmp_path):
    policy = calibrate(archive, "cardiac", mode="per-group")
    again = read_policy(write_policy(tmp_path / "policy.json", policy))
    assert json.dumps(asdict(again), default=dict) == json.dumps(asdict(policy), default=dict)
    assert controller_of(again) == controller_of(policy)


def test_a_policy_is_found_in_the_folder_that_holds_it(archive, tmp_path):
    policy = calibrate(archive, "cardiac")
    assert write_policy(tmp_path, policy) == tmp_path / "policy.json"
    assert read_policy(tmp_path).calibration_id == policy.calibration_id


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"schema": 2, "name": "x"}', "\x00"])
def test_a_file_that_is_no_policy_is_refused(tmp_path, content):
    (tmp_path / "policy.json").write_text(content)
    with pytest.raises(BadInput, match="is not a policy"):
        read_policy(tmp_path)


def test_a_policy_of_another_schema_or_none_at_all_is_refused(tmp_path):
    with pytest.raises(BadInput, match="run casewise calibrate first"):
        read_policy(tmp_path)
    (tmp_path / "policy.json").write_text('{"schema": 7}')
    with pytest.raises(Mismatch, match="schema 7"):
        read_policy(tmp_path)


@pytest.mark.parametrize("field", ["model", "objective", "loader", "measure"])
def test_a_policy_is_refused_by_another_model_objective_loader_or_measure(archive, field):
    policy = calibrate(archive, "cardiac")
    check_binding(policy, archive.binding)
    with pytest.raises(Mismatch, match=f"fitted on another {field} .*calibrate again"):
        check_binding(policy, replace(archive.binding, **{field: "other"}))


def test_a_policy_without_calibration_fits_everything():
    check_binding(READY["m0"], Binding("a", "b", "c", "d"))


def test_cases_that_a_policy_was_fitted_on_are_refused_for_evaluation(archive):
    policy = calibrate(archive, "cardiac")
    check_held_out(policy, [Member("new-1"), Member("new-2")])
    with pytest.raises(Overlap, match=r"the calibration of policy 'cardiac' and evaluation share 1 case \(case-0003\)"):
        check_held_out(policy, [Member("new-1"), Member("case-0003")])


def test_another_case_of_a_calibration_patient_is_refused_by_the_patients_name(archive, tmp_path):
    policy = read_policy(write_policy(tmp_path / "policy.json", calibrate(archive, "cardiac")))
    cluster = archive.entries["case-0003"].cluster
    with pytest.raises(Overlap, match=rf"share 1 cluster \({cluster}\)"):
        check_held_out(policy, [Member("new-1", cluster=cluster)])


def test_a_design_that_was_not_calibrated_makes_no_controller():
    with pytest.raises(BadInput, match="'cardiac' is not calibrated"):
        controller_of(READY["cardiac"])
    with pytest.raises(UnknownName, match="Did you mean 'cardiac'"):
        READY["cardic"]


def test_a_hybrid_policy_has_no_single_controller(archive):
    with pytest.raises(BadInput, match="change with new cases"):
        controller_of(calibrate(archive, "cardiac", hybrid=True))


def test_a_stop_rule_without_calibration_runs_to_the_horizon():
    assert controller_of(ready_policy("frag-stop", 4, {})).cap == 4
    assert controller_of(ready_policy("fixed-k", 4, {"step": 2})).step == 2


def test_every_ready_design_names_a_controller():
    assert all(isinstance(policy, Policy) and policy.name == name for name, policy in READY.items())


def edited(file, **values):
    plain = json.loads(file.read_text())
    file.write_text(json.dumps({**plain, **values}))
    return plain


def test_an_edited_cut_point_is_noticed(archive, tmp_path):
    file = write_policy(tmp_path, calibrate(archive, "cardiac", mode="per-group"))
    read_policy(file)
    plain = edited(file)
    edited(file, options={**plain["options"], "cut_high": "inf"})
    with pytest.raises(Mismatch, match=r"policy\.json was edited after it was written"):
        read_policy(file)
    edited(file, options=plain["options"])
    read_policy(file)
    edited(file, sha256=None)
    with pytest.raises(Mismatch, match="hash mismatch"):
        read_policy(file)
    file.write_text(json.dumps({name: value for name, value in plain.items() if name != "sha256"}))
    with pytest.raises(Mismatch, match="hash mismatch"):
        read_policy(file)


NONSENSE = {
    "steps 1e9": (lambda policy: replace(policy, steps=10**9), r"has 1000000000 steps, .* from 0 to 1000"),
    "steps below 0": (lambda policy: replace(policy, steps=-1), "has -1 steps"),
    "steps in parts": (lambda policy: replace(policy, steps=2.5), "has 2.5 steps"),
    "no binding": (lambda policy: replace(policy, binding=None), "its binding does not say which model"),
    "hard cases kept": (
        lambda policy: replace(policy, options={**policy.options, "hard": {"action": "depth", "depth": 1}}),
        "does depth 1 with hard cases, the design 'cardiac' says rollback",
    ),
}


@pytest.mark.parametrize(("spoil", "sentence"), NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_refused_even_with_a_fitting_hash(archive, tmp_path, spoil, sentence):
    file = write_policy(tmp_path, spoil(calibrate(archive, "cardiac")))
    with pytest.raises(BadInput, match=sentence):
        read_policy(file)


def test_a_certificate_for_nothing_deploys_m0_without_cleanup() -> None:
    from casewise.judge.certificates.certificate import certified_policy

    policy = replace(READY["m0"], name="fitted", controller="consensus", options={"x": 1}, cleanup="largest(1)")
    none = certified_policy(policy, None)
    assert (none.controller, none.cleanup) == ("m0", "")
