"""From a recorded archive to a certificate, and to the policy that it holds for."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest
from worlds.cohorts import SYNTHETIC, synthetic_archive

import casewise
from casewise.archive.store import Archive, create_archive
from casewise.core.errors import BadInput, Mismatch, Overlap, Refused, TooFewCases
from casewise.core.prediction_record import OUTSIDE
from casewise.core.records import Binding, Case, Trajectory
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.certificates.certificate import (
    check_certificate,
    check_feasible,
    outside_promise,
    policy_digest,
    read_certificate,
    refusal,
    write_certificate,
)
from casewise.judge.certificates.certify_designs import certify_designs
from casewise.judge.certificates.certify_gate import certify_gate, gated_case, gated_cases
from casewise.judge.certificates.certify_router import Promise, certify_router, loss_table
from casewise.judge.certificates.evidence import deployed_numbers, router_evidence
from casewise.judge.ledger import compared_as, ledger_problems, read_ledger, unlock
from casewise.judge.outcomes import edit_shares
from casewise.judge.policy import READY, calibration_case, check_held_out, no_go, read_policy, write_policy
from casewise.measure.signals.fragmentation import fragmentation
from casewise.replay import replay
from casewise.report.certificate_page import certificate_page

HA_TEN = Promise(("ha",), (0.1,))


def test_the_certified_router_never_keeps_more_than_its_router(site):
    for alpha in (0.05, 0.08, 0.1, 0.2, 0.3):
        certificate, certified = certify_router(site.archive, site.policy, Promise(("ha",), (alpha,)))
        assert certified.name == "cardiac-certified"
        assert certified.options["cut_high"] == min(site.policy.options["cut_high"], certificate.cut)
        assert certified.options["cut_low"] <= certified.options["cut_high"]
        assert certificate.bound <= alpha + 1e-12


def test_a_certified_cut_below_the_tertile_tightens_it(tmp_path):
    from casewise.judge.calibration.calibrate import calibrate

    archive = synthetic_archive(tmp_path / "harsh", cases=40, harmful=0.9, seed=3)
    policy = calibrate(archive, "cardiac")
    certificate, certified = certify_router(archive, policy, Promise(("harmed",), (0.06,)))
    assert certificate.cut < policy.options["cut_high"]
    assert certified.options["cut_high"] == certificate.cut
    assert certificate.deployed["certified"]["kept"] < certificate.deployed["before"]["kept"]


def test_the_bound_is_the_formula_over_patients(site):
    certificate, _ = certify_router(site.archive, site.policy, HA_TEN)
    evidence = router_evidence(site.archive, site.policy)
    kept = evidence.values < certificate.cut
    by_patient: dict[str, list[float]] = {}
    for patient, loss in zip(evidence.clusters, evidence.loss("ha") * kept, strict=True):
        by_patient.setdefault(patient, []).append(float(loss))
    assert certificate.units == len(by_patient) == 20
    assert certificate.cases == 40
    assert certificate.bound == pytest.approx((sum(map(np.mean, by_patient.values())) + 1) / 21)


def test_the_deployed_number_stands_beside_the_certified_one(site):
    certificate, certified = certify_router(site.archive, site.policy, HA_TEN)
    decisions = replay(site.archive, certified)
    kept = np.mean([not decision.rolled_back for decision in decisions])
    assert certificate.deployed["certified"]["kept"] == pytest.approx(kept) == pytest.approx(certificate.kept)
    assert certificate.deployed["certified"]["ha"] <= certificate.bound


def test_infeasible_is_none_and_rolls_everything_back(site):
    certificate, certified = certify_router(site.archive, site.policy, Promise(("ha",), (0.02,)))
    assert certificate.cut is None
    assert certificate.bound is None
    assert certificate.advice == (
        "Nothing is certified: 20 labelled patients are enough for alpha >= 0.048, and 0.02 was asked for, which needs "
        "at least 49. Every case is rolled back to M0."
    )
    assert all(decision.rolled_back for decision in replay(site.archive, certified))
    with pytest.raises(Refused, match=r"20 labelled patients .* needs at least 49"):
        check_feasible(certificate)


def test_the_envelope_covers_any_low_mid_cut(site):
    evidence = router_evidence(site.archive, site.policy)
    for cut_low in np.quantile(evidence.values, [0, 0.3, 0.7, 1]):
        moved = replace(site.policy, options={**site.policy.options, "cut_low": cut_low, "cut_high": 9.0})
        assert (evidence.loss("ha") >= router_evidence(site.archive, moved).own["ha"]).all()


def test_a_fixed_low_mid_cut_must_come_from_other_cases(site, second):
    asked = Promise(("ha",), (0.2,), low_mid="fixed")
    with pytest.raises(Overlap, match="remove them from one of the two"):
        certify_router(site.archive, site.policy, asked)
    certificate, _ = certify_router(second, site.policy, asked)
    enveloped, _ = certify_router(second, site.policy, replace(asked, low_mid="envelope"))
    assert certificate.feasible
    assert certificate.cut >= enveloped.cut  # the envelope is never less careful


def test_learn_then_test_needs_more_and_says_how_many(site):
    tight, policy = certify_router(site.archive, site.policy, Promise(("ha",), (0.1,), delta=0.1))
    assert tight.kind == "T6"
    assert tight.cut is None
    assert policy.controller == "m0"
    assert tight.needed > tight.units
    loose, _ = certify_router(site.archive, site.policy, Promise(("ha",), (0.3,), delta=0.1))
    assert loose.bound <= 0.1
    assert "With probability at least 0.9" in loose.statement


def test_the_test_is_chosen_without_looking_at_a_loss(site):
    for within, kind in (("mean", "betting"), ("max", "binomial")):
        asked = Promise(("harmed",), (0.5,), delta=0.1, within=within)
        assert certify_router(site.archive, site.policy, asked)[0].details["p_value"] == kind


def test_two_risks_at_once_are_never_looser_than_one(site):
    one, _ = certify_router(site.archive, site.policy, Promise(("ha",), (0.4,), delta=0.1))
    both, _ = certify_router(site.archive, site.policy, Promise(("ha", "dice"), (0.4, 0.4), delta=0.1))
    assert both.kind == "T8"
    assert both.cut is None or both.cut <= one.cut
    with pytest.raises(BadInput, match="CRC certifies one risk at a time"):
        Promise(("ha", "harmed"), (0.1, 0.1))


def test_other_policies_cannot_be_certified_by_a_cut(site):
    with pytest.raises(BadInput, match="a router whose hard bucket rolls back, got policy 'fixed-k'"):
        certify_router(site.archive, READY["fixed-k"], HA_TEN)
    with pytest.raises(Refused, match="'m0' keeps M0 for every case, so there is nothing to certify"):
        certify_router(site.archive, READY["m0"], HA_TEN)


def test_a_coordinate_standardized_on_the_same_cases_is_refused(site):
    risky = replace(site.policy, options={**site.policy.options, "coordinate": "risk"})
    with pytest.raises(Refused, match="standardized on these cases"):
        certify_router(site.archive, risky, HA_TEN)


def test_a_hybrid_policy_cannot_be_certified(site):
    hybrid = replace(site.policy, options={**site.policy.options, "hybrid": {"pool": [0.1]}})
    with pytest.raises(Refused, match="change with new cases"):
        certify_router(site.archive, hybrid, HA_TEN)


def test_per_group_cuts_are_tightened_in_every_group(site):
    from casewise.judge.calibration.calibrate import calibrate

    policy = calibrate(site.archive, "cardiac", mode="per-group")
    certificate, certified = certify_router(site.archive, policy, Promise(("ha",), (0.06,)))
    assert set(certified.groups) == set(policy.groups) == {"A", "B"}
    for group, options in certified.groups.items():
        assert options["cut_high"] == min(policy.groups[group]["cut_high"], certificate.cut)
    assert certificate.deployed["certified"]["kept"] <= certificate.deployed["before"]["kept"]


def test_without_labels_nothing_is_certified(tmp_path, site):
    blind = synthetic_archive(tmp_path / "blind", cases=6, labelled=False)
    with pytest.raises(TooFewCases, match="no labelled case"):
        certify_router(blind, site.policy, HA_TEN)


def test_a_policy_of_another_model_is_refused(site):
    foreign = replace(site.policy, binding=Binding("other", "synthetic", "synthetic", site.archive.binding.measure))
    with pytest.raises(Mismatch, match="another model"):
        certify_router(site.archive, foreign, HA_TEN)


def test_a_certificate_binds_to_its_policy_and_model(site, tmp_path):
    certificate, certified = certify_router(site.archive, site.policy, HA_TEN)
    written = read_policy(write_policy(tmp_path / "policy-certified.json", certified))
    check_certificate(certificate, written, site.archive.binding)
    loosened = replace(certified, options={**certified.options, "cut_high": 1.0})
    with pytest.raises(Mismatch, match="use the policy written with it"):
        check_certificate(certificate, loosened)
    for name in ("model", "objective", "loader", "measure"):
        foreign = replace(site.archive.binding, **{name: "other"})
        with pytest.raises(Mismatch, match=f"another {name}"):
            check_certificate(certificate, certified, foreign)


def test_a_renamed_policy_is_the_same_policy(site):
    assert policy_digest(site.policy) == policy_digest(replace(site.policy, name="x", preflight={"note": 1}))


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.9])
def test_a_certificate_survives_its_file(site, tmp_path, alpha):
    certificate, _ = certify_router(site.archive, site.policy, Promise(("ha",), (alpha,)))
    again = read_certificate(write_certificate(tmp_path, certificate))
    assert again.cut == certificate.cut  # None, a number, or infinity
    assert (again.statement, again.binding, again.policy) == (
        certificate.statement,
        certificate.binding,
        certificate.policy,
    )
    assert "Infinity" not in (tmp_path / "certificate.json").read_text()


def test_a_damaged_certificate_says_so(tmp_path):
    (tmp_path / "certificate.json").write_text("{")
    with pytest.raises(BadInput, match=r"certificate\.json cannot be read .*; run casewise certify again"):
        read_certificate(tmp_path)
    with pytest.raises(BadInput, match="run casewise certify first"):
        read_certificate(tmp_path / "nowhere.json")


def test_evaluation_cases_fill_the_reliability_diagram(site, other):
    certificate, _ = certify_router(site.archive, site.policy, HA_TEN, evaluation=other)
    assert certificate.reliability_from == "30 evaluation cases"
    fresh = router_evidence(unlock(other, purpose="test"), site.policy)
    table = loss_table(fresh, HA_TEN, "ha")
    point = next(p for p in certificate.reliability if p["alpha"] == 0.1)
    losses = fresh.loss("ha") * (fresh.values < certificate.cut)
    by_patient = [np.mean(losses[np.array(fresh.clusters) == c]) for c in sorted(set(fresh.clusters))]
    assert point["risk"] == pytest.approx(np.mean(by_patient))
    assert len(by_patient) == table.units


def test_the_gate_on_masks_agrees_with_the_formula(site):
    # in two classes raw and binarized regions coincide, so the measured curve is the closed form
    for case_id in site.archive.ids[:8]:
        case = gated_case(site.archive, case_id)
        with np.errstate(invalid="ignore", divide="ignore"):
            assert (case.deployed >= case.surrogate - 1e-12).all()
        assert case.deployed[0] == 0


def test_gate_certificates_print_surrogate_and_deployed(site, other):
    surrogate, gate = certify_gate(site.archive, READY["region-gate"], loss="surrogate", alpha=0.1, evaluation=other)
    envelope, _ = certify_gate(site.archive, READY["region-gate"], loss="envelope", alpha=0.1)
    assert (surrogate.kind, envelope.kind) == ("T1", "T5")
    assert envelope.cut >= surrogate.cut  # a higher threshold accepts less
    for certificate in (surrogate, envelope):
        assert {"ha", "surrogate"} <= set(certificate.deployed["certified"])
        assert certificate.deployed["certified"]["ha"] >= certificate.deployed["certified"]["surrogate"]
    assert "a surrogate: not the deployed HA" in surrogate.statement
    decisions = replay(site.archive, gate)
    assert 0 < sum(decision.rolled_back for decision in decisions) < len(decisions)


def test_the_scored_population_is_smaller(site):
    everybody, _ = gated_cases(site.archive)
    scored, cases = gated_cases(site.archive, population="scored")
    assert len(everybody) == 40
    assert all(len(case.scores) for case in cases)
    assert len(scored) <= len(everybody)


def without_scores(archive: Archive, path: Path, lost: Collection[str]) -> Archive:
    """The same recording, with logits on another grid in some cases: their region scores could not be computed."""
    made = create_archive(path, binding=archive.binding, steps=archive.steps, configuration=archive.configuration)
    for case_id in archive.ids:
        entry, one = archive.entry(case_id), archive.trajectory(case_id)
        if case_id in lost:
            first = {name: None if name.startswith("drop") else value for name, value in one.signals[1].items()}
            one = replace(one, signals=(one.signals[0], first, *one.signals[2:]))
        case = Case(case_id, np.empty((1, 0)), (1.0, 1.0), entry.group, entry.cluster, entry.split)
        made.add(case, one, archive.label(case_id))
    return made.seal()


def test_a_case_without_region_scores_is_rolled_back_and_the_others_are_certified(site, second, tmp_path):
    lost = gated_cases(second, population="scored")[0][0]
    partly = without_scores(second, tmp_path / "partly", {lost})
    assert len(gated_case(second, lost).scores) > 0
    assert list(gated_case(partly, lost).deployed) == [0.0]
    assert lost in gated_cases(partly)[0]
    assert lost not in gated_cases(partly, population="scored")[0]
    found, gate = certify_gate(
        site.archive, READY["region-gate"], loss="surrogate", alpha=0.3, population="scored", evaluation=partly
    )
    assert found.bound <= 0.3
    decided = {decision.case_id: decision for decision in replay(partly, gate)}
    assert (decided[lost].rolled_back, decided[lost].bucket) == (True, "unscored")
    assert OUTSIDE in outside_promise(found, decided[lost], None)


def test_where_no_case_has_region_scores_nothing_is_certified(site, tmp_path):
    none = without_scores(site.archive, tmp_path / "none", site.archive.ids)
    with pytest.raises(BadInput, match=r"no case of .* has region scores: 'drop' could not be computed"):
        certify_gate(none, READY["region-gate"], loss="surrogate", alpha=0.3)


def test_deployed_numbers_of_m0_are_zero(site):
    numbers = deployed_numbers(site.archive, READY["m0"])
    assert numbers == {"ha": 0, "harmed": 0, "dice": 0, "worse-voxels": 0, "gain": 0, "kept": 0}


def test_enough_cases_with_too_much_harm_are_not_told_that_they_are_too_few():
    said = refusal(0.3, 30, 0.2, 22, "patients")
    assert "too much harm for alpha" in said
    assert "At least" not in said
    assert "needs at least 22" in refusal(0.1, 20, 0.2, 22, "patients")


def drawn_where_nothing_is(path, *, empty: int, full: int):
    """``empty`` cases without foreground in the label, where adaptation draws a block; ``full`` ones that it mends."""
    archive = create_archive(path, binding=SYNTHETIC, steps=1, configuration={"metric": "dice", "min_area": 16})
    for number in range(empty + full):
        source, adapted, label = (np.zeros((12, 12), np.uint8) for _ in range(3))
        adapted[:5, :5] = 1
        if number >= empty:
            label[:5, :5] = source[:5, :4] = 1
            adapted[:, 5:8] = 0
        signals = {**fragmentation(source, adapted, min_area=1).as_signals(), "delta": 0.1 + number / 1000}
        trajectory = Trajectory(f"c{number:02d}", (source, adapted), ({"delta": 0.0, "regions": 0.0}, signals))
        archive.add(Case(f"c{number:02d}", np.full((1, 2), number)), trajectory, label)
    return archive.seal()


@pytest.mark.parametrize("loss", ["ha", "harmed", "dice", "worse-voxels"])
def test_no_labelled_case_is_left_out_of_a_loss(tmp_path, loss):
    archive = drawn_where_nothing_is(tmp_path / "a", empty=4, full=26)
    router = calibrate(archive, "prostate", coordinate="delta")
    evidence = router_evidence(archive, router)
    assert len(evidence.ids) == 30
    assert evidence.loss(loss)[:4].tolist() == [1.0] * 4  # something was drawn where nothing is
    assert evidence.loss(loss)[4:].max() == 0.0
    found, _ = certify_router(archive, router, Promise((loss,), (0.2,)), force=True)
    assert found.cases == 30
    assert found.deployed["before"][loss] > 0  # what study finds on the same cases is what the certificate saw


def test_harm_can_be_counted_beyond_a_margin(site):
    plain, wide = (router_evidence(site.archive, site.policy, margin=margin) for margin in (0.0, 0.03))
    lost = -np.minimum(plain.low["gain"], 0)
    assert wide.low["harmed"].tolist() == (lost > 0.03).astype(float).tolist()
    assert wide.low["harmed"].sum() < plain.low["harmed"].sum()
    found, _ = certify_router(site.archive, site.policy, Promise(("harmed",), (0.3,), margin=0.03))
    assert "falls by more than 0.03 against the original mask" in found.statement
    with pytest.raises(BadInput, match="a margin works only with the loss 'harmed'"):
        Promise(("ha",), (0.1,), margin=0.03)


def test_voxels_made_wrong_count_in_pieces_of_any_size_and_between_classes():
    archive_rows = edit_shares(np.array([[1, 1, 0, 2]]), np.array([[2, 1, 1, 2]]), np.array([[1, 1, 0, 2]]), None)
    assert archive_rows == {"swapped": 0.5, "worse_voxels": 1.0, "better_voxels": 0.0}


def test_the_second_attempt_on_the_same_labels_says_so(tmp_path):
    archive = synthetic_archive(tmp_path / "a", cases=40, harmful=0.4)
    one = calibrate(archive, "cardiac")
    first, _ = certify_router(archive, one, Promise(("ha",), (0.1,)))
    again, _ = certify_router(archive, one, Promise(("ha",), (0.1,)))
    assert (first.attempt, again.attempt, first.warnings) == (1, 1, ())  # the same question again is none
    two = calibrate(archive, "cardiac", coordinate="-msp")
    with pytest.raises(Refused, match="was compared with cardiac by delta"):
        certify_router(archive, two, Promise(("ha",), (0.1,)), force=True)  # a refused question is no attempt
    other, _ = certify_router(archive, two, Promise(("ha",), (0.1,)), force=True, together=None)
    assert other.attempt == 2
    assert any("certification attempt 2 on these labels" in said for said in other.warnings)
    third, _ = certify_router(archive.select(ids=archive.ids[:20]), one, Promise(("harmed",), (0.3,)), together=None)
    assert third.attempt == 3  # some of the same labels
    assert ledger_problems(archive.path) == []
    assert [line["compared"] for line in read_ledger(archive.path)] == [["cardiac by delta"], ["cardiac by -msp"]]


def test_designs_are_certified_together(tmp_path):
    archive = synthetic_archive(tmp_path / "a", cases=80, harmful=0.3)
    designs = [calibrate(archive, "cardiac"), calibrate(archive, "cardiac", coordinate="-msp")]
    asked = Promise(("ha",), (0.4,), delta=0.1)
    found, _ = certify_designs(archive, designs, asked, force=True)
    half = replace(asked, delta=0.05)
    alone = [certify_router(archive, one, half, force=True, together=None)[0] for one in designs]
    assert found.details["designs"] == ["cardiac by delta", "cardiac by -msp"]
    assert (
        f"it is {compared_as(designs[[one.policy_before for one in alone].index(found.policy_before)])!r}"
        in found.advice
    )
    (same,) = (one for one in alone if one.policy_before == found.policy_before)
    assert found.cut <= same.cut  # of the certified cuts the one of greatest gain, at half of delta for each design
    with pytest.raises(BadInput, match="two or more of them, got 1"):
        certify_designs(archive, designs[:1], asked)


def against(policy, helped=1, hurt=9):
    kept = {**policy.preflight["retained"], "go": False, "helped": helped, "hurt": hurt}
    return replace(policy, preflight={**policy.preflight, "retained": kept})


def test_a_no_go_is_not_certified_unless_forced_and_then_says_so(site):
    policy = against(site.policy)
    with pytest.raises(Refused, match=r"NO-GO: .* 1 were helped and 9 were hurt; adapt less .* add --set force=true"):
        certify_router(site.archive, policy, Promise())
    certificate, certified = certify_router(site.archive, policy, Promise(), force=True)
    assert "NO-GO" in certificate.warnings[0]
    assert "NO-GO" in certificate_page(certificate)
    assert no_go(certified)
    assert no_go(READY["m0"]) is None
    assert no_go(replace(policy, preflight={**policy.preflight, "guard": "closed"})) is None  # deploys M0 only


def test_a_certificate_says_when_where_and_with_what_it_was_issued(site):
    certificate, _ = certify_router(site.archive, site.policy, Promise(("ha",), (0.3,)))
    assert certificate.issued == datetime.now(timezone.utc).date().isoformat()
    assert (certificate.version, certificate.cohort, certificate.groups) == (casewise.__version__, "site", ("A", "B"))
    page = certificate_page(certificate)
    said = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert (said["Issued"], said["With"]) == (certificate.issued, f"casewise {casewise.__version__}")
    assert said["Cohort"].startswith("site, ")
    assert said["Site, vendor or condition"] == "A, B"


def test_a_case_of_another_site_is_outside_the_promise(site):
    certificate, policy = certify_router(site.archive, site.policy, Promise(("ha",), (0.3,)))
    decision = casewise.replay(site.archive, policy)[0]
    assert outside_promise(certificate, decision) is None
    assert "group C is not among" in outside_promise(certificate, replace(decision, group="C"))
    gate, _ = certify_gate(site.archive, READY["region-gate"], loss="envelope", alpha=0.5, population="scored")
    assert "this one has none" in outside_promise(gate, replace(decision, bucket="unscored"))


def test_a_calibration_case_is_recognised_by_its_image(tmp_path):
    archive = drawn_where_nothing_is(tmp_path / "a", empty=0, full=12)
    policy = calibrate(archive, "prostate", coordinate="delta")
    entry = archive.entry("c03")
    copy, namesake = replace(entry, id="new"), replace(entry, input_sha256="0" * 64)
    with pytest.raises(Overlap, match=r"under other names \(new is c03\)"):
        check_held_out(policy, [copy])
    check_held_out(policy, [namesake])  # another image of the same name
    with pytest.raises(Overlap, match="share 1 case"):
        check_held_out(policy, [entry])
    with pytest.raises(Overlap, match="share 1 case"):
        check_held_out(policy, [replace(entry, input_sha256=None)])  # nothing but the name is known
    seen = {"cluster": None, "input_sha256": entry.input_sha256}
    assert "this image is calibration case c03" in calibration_case(policy, "new", **seen)
    assert calibration_case(policy, "c03", cluster=None, input_sha256="0" * 64) is None
    assert "c03 is a calibration case" in calibration_case(policy, "c03", cluster=None, input_sha256=None)
    again = read_policy(write_policy(tmp_path / "p.json", policy))
    assert again.calibration_inputs == policy.calibration_inputs
