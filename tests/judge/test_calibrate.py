"""Calibration: what is fitted, what is said before deployment, and what is refused."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from worlds.candidates import views_archive
from worlds.cohorts import SYNTHETIC, synthetic_archive

import casewise
from casewise.adapt.modulation import MODES
from casewise.archive.store import create_archive
from casewise.core.errors import (
    BadInput,
    CasewiseWarning,
    DegenerateStatistic,
    DegenerateTertiles,
    Mismatch,
    Overlap,
    TooFewCases,
    UnknownName,
)
from casewise.core.records import Case, Trajectory
from casewise.judge.calibration.calibrate import _settled, calibrate
from casewise.judge.calibration.cuts import stream_of
from casewise.judge.calibration.fixed_budget import budget, budgets, shape, tau
from casewise.judge.calibration.preflight import in_words, reach_of
from casewise.judge.monitors.quota import quota_drift, quota_of
from casewise.judge.outcomes import outcomes
from casewise.judge.policy import MODULATIONS, READY, check_held_out, controller_of


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return synthetic_archive(tmp_path_factory.mktemp("holdout") / "a", cases=18)


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation") / "e"
    return synthetic_archive(folder, cases=20, prefix="eval", split="evaluation", seed=7)


def hand_made(tmp_path, regions, group=lambda n: "A", split=None):
    """Cases whose step-1 edit has a given number of regions of 16 voxels, on a line of 4 x 200."""
    archive = create_archive(tmp_path, binding=SYNTHETIC, steps=1, configuration={"min_area": 16})
    for number, count in enumerate(regions):
        source = np.zeros((4, 200), np.uint8)
        adapted = source.copy()
        for region in range(count):
            adapted[:, 6 * region : 6 * region + 4] = 1
        signals = {"regions": float(count), "delta": 16 * count / 800 + number * 1e-6, "entropy": 0.1 + number % 2}
        empty = {"regions": 0.0, "delta": 0.0, "entropy": 0.1 + number % 2}
        trajectory = Trajectory(f"c{number:02d}", (source, adapted), (empty, signals))
        archive.add(Case(f"c{number:02d}", np.empty((1, 0)), group=group(number), split=split), trajectory)
    return archive


def ladder_frame(ha, metric):
    """A frame of six equal cases with a given ladder, k = 0..K."""
    rows = [
        {
            "case": f"c{case}",
            "step": step,
            "shrink": 0.0,
            "ha": ha[step],
            "metric": metric[step],
            "regions": step + case,
        }
        for case in range(6)
        for step in range(len(ha))
    ]
    return pd.DataFrame(rows)


def test_cut_points_are_percentiles_of_the_step_one_coordinate(archive):
    policy = calibrate(archive, "cardiac")
    signals = archive.signals()
    first = signals.loc[(signals["step"] == 1) & (signals["shrink"] == 0), "delta"]
    expected = np.percentile(first, [33.33, 66.67])
    assert (policy.options["cut_low"], policy.options["cut_high"]) == tuple(expected)
    assert policy.binding == archive.binding
    assert policy.calibration_cases == archive.ids
    assert policy.steps == 4


def test_cut_points_need_no_label(tmp_path, archive):
    blind = calibrate(synthetic_archive(tmp_path, cases=18, labelled=False), "cardiac")
    assert blind.options == calibrate(archive, "cardiac").options
    assert blind.preflight["retained"]["go"] is None
    assert any("unknown whether" in line for line in blind.preflight["concerns"])


def test_the_driving_design_brings_its_own_percentiles(tmp_path):
    archive = synthetic_archive(tmp_path, cases=12, steps=8)
    assert calibrate(archive, "driving").preflight["convention"] == "driving"
    assert calibrate(archive, "cardiac").preflight["convention"] == "medical"
    assert calibrate(archive, "driving", percentiles="medical").preflight["convention"] == "medical"


def test_the_calibration_id_changes_with_the_cases(archive):
    one = calibrate(archive, "cardiac")
    fewer = calibrate(archive.select(ids=archive.ids[:-1]), "cardiac")
    assert one.calibration_id != fewer.calibration_id
    assert one.calibration_id == calibrate(archive, "prostate", coordinate="delta").calibration_id


@pytest.mark.parametrize("cases", [0, 1, 4])
def test_too_few_cases_are_refused_with_the_number_needed(tmp_path, cases):
    with pytest.raises(TooFewCases, match=rf"at least 5 cases, .* has {cases}; record 5 or more"):
        calibrate(synthetic_archive(tmp_path, cases=cases), "cardiac")


def test_evaluation_cases_are_never_calibrated_on(evaluation):
    with pytest.raises(Overlap, match="20 of 20 cases are marked as evaluation"):
        calibrate(evaluation, "cardiac")


def test_a_case_of_no_split_beside_marked_ones_is_left_out_and_named(tmp_path):
    synthetic_archive(tmp_path, cases=6, prefix="cal", split="calibration")
    mixed = synthetic_archive(tmp_path, cases=1, prefix="lost", split=None)
    with pytest.warns(
        CasewiseWarning, match=r"holds 1 case of no split \(lost\S*\), while others are marked: left out"
    ):
        policy = calibrate(mixed, "cardiac")
    assert policy.preflight["cases"] == 6


def test_only_the_calibration_cases_of_a_mixed_archive_are_used(tmp_path):
    synthetic_archive(tmp_path, cases=6, prefix="cal")
    mixed = synthetic_archive(tmp_path, cases=6, prefix="eval", split="evaluation")
    assert len(mixed.ids) == 12
    assert set(calibrate(mixed, "cardiac").calibration_cases) == {f"cal-{n:04d}" for n in range(6)}


def test_shared_cases_between_calibration_and_evaluation_are_refused(archive, tmp_path):
    shared = synthetic_archive(tmp_path, cases=3, split="evaluation")
    with pytest.raises(Overlap, match=r"share 3 cases \(case-0000, case-0001, case-0002\)"):
        check_held_out(calibrate(archive, "cardiac"), shared.entries.values())


def torn_archive(path, split):
    """Every patient's first visit calibrates, the second is of another split."""
    archive = synthetic_archive(path, cases=12, split=None)
    for number, name in enumerate(archive.ids):
        entry = archive.path / "cases" / name / "entry.json"
        marked = "calibration" if number % 2 == 0 else split
        entry.write_text(json.dumps({**json.loads(entry.read_text()), "split": marked}))
    return casewise.open_archive(path)


def test_a_patient_in_both_splits_of_one_archive_is_refused(tmp_path):
    with pytest.raises(Overlap, match=r"share 6 clusters \(case-cluster-0000, "):
        calibrate(torn_archive(tmp_path, "evaluation"), "cardiac")


def test_another_visit_of_a_calibration_patient_is_no_evaluation_case(tmp_path):
    torn = torn_archive(tmp_path, "follow-up")
    with pytest.raises(Overlap, match=r"'cardiac' and evaluation share 6 clusters \(case-cluster-0000, "):
        check_held_out(calibrate(torn, "cardiac"), torn.select(split="follow-up").entries.values())


def test_a_coordinate_without_spread_is_refused_and_a_fit_one_is_named(tmp_path):
    with pytest.raises(DegenerateStatistic, match=r"regions is 1 on all 6 .*'delta' does not degenerate"):
        calibrate(hand_made(tmp_path, [1] * 6), "prostate")


def test_degenerate_tertiles_warn_name_another_coordinate_and_are_stored(tmp_path):
    archive = hand_made(tmp_path, [0] * 10 + [1] * 6 + [2] * 4)
    with pytest.warns(DegenerateTertiles, match=r"cut-points 0 and 1 leave mid empty .*'delta' does not degenerate"):
        policy = calibrate(archive, "prostate")
    assert policy.preflight["degenerate"]
    assert policy.preflight["recommended_coordinate"] == "delta"
    assert policy.preflight["coordinates"]["regions"]["unfit"]
    assert policy.preflight["buckets"]["mid"]["cases"] == 0
    assert any("is unfit" in line for line in in_words(policy))


def test_a_coordinate_that_falls_with_risk_must_be_turned_round(archive):
    with pytest.raises(BadInput, match="route on '-msp'"):
        calibrate(archive, "cardiac", coordinate="msp")
    assert calibrate(archive, "cardiac", coordinate="-msp").options["cut_low"] < 0


def test_an_unknown_or_unrecorded_coordinate_is_named(archive):
    with pytest.raises(UnknownName, match="Did you mean 'delta'"):
        calibrate(archive, "cardiac", coordinate="detla")
    with pytest.raises(BadInput, match="has no signal 'augmentation_disagreement'"):
        calibrate(archive, "cardiac", coordinate="augmentation_disagreement")


def test_a_signal_that_some_cases_lack_is_refused_with_their_names(tmp_path):
    archive = hand_made(tmp_path, [1, 2, 3, 4, 5, 6])
    bare = Trajectory("z", (np.zeros((4, 200), int), np.ones((4, 200), int)), ({}, {"delta": 1.0}))
    archive.add(Case("z", np.empty((1, 0))), bare)
    with pytest.raises(BadInput, match=r"'entropy' is not computable at step 1 for 1 of 7 calibration cases \(z\)"):
        calibrate(archive, replace(READY["prostate"], options={**READY["prostate"].options, "coordinate": "entropy"}))


def test_the_risk_coordinate_carries_its_statistics(archive):
    policy = calibrate(archive, "cardiac", coordinate="risk")
    assert policy.options["statistics"] == policy.preflight["statistics"]
    assert controller_of(policy).needs == {"regions", "delta"}
    assert len(casewise.replay(archive, policy)) == 18


def test_a_design_deeper_than_the_archive_is_refused(archive):
    with pytest.raises(BadInput, match="needs 8 steps per case, the archive holds 4; record with steps=8"):
        calibrate(archive, "driving")


def test_a_design_that_shrinks_needs_shrunk_states_or_the_word_unshrunk(tmp_path):
    archive = synthetic_archive(tmp_path, cases=6, shrink=())
    with pytest.raises(BadInput, match=r"deploys state 2~0.5, .*shrink=2:0.5, or .*unshrunk"):
        calibrate(archive, "cardiac")
    policy = calibrate(archive, "cardiac", unshrunk=True)
    assert controller_of(policy).mid.shrink == 0
    with pytest.raises(BadInput, match=r"have no interpolated states, so calibrate with .*unshrunk=true$"):
        calibrate(views_archive(tmp_path / "views"), "cardiac")


def test_each_mode_of_cut_points_follows_its_definition(tmp_path):
    """S2: B is three times as frequent as A and has larger values."""
    regions = [1, 2, 3, 4, 5, 6] + [10, 11, 12, 13, 14, 15] * 3
    archive = hand_made(tmp_path, regions, group=lambda n: "A" if n < 6 else "B")
    design = READY["prostate"]
    own = calibrate(archive, design, mode="per-group").groups
    a, b = np.array(regions[:6]), np.array(regions[6:])
    assert own["A"]["cut_high"] == np.percentile(a, 66.67)
    assert own["B"]["cut_high"] == np.percentile(b, 66.67)
    robust = calibrate(archive, design, mode="robust").options
    assert (robust["cut_low"], robust["cut_high"]) == (own["A"]["cut_low"], own["A"]["cut_high"])
    union = calibrate(archive, design, mode="union").options
    assert union["cut_high"] == np.percentile(regions, 66.67)


def test_a_group_with_too_few_cases_is_refused_by_name(tmp_path):
    archive = hand_made(tmp_path, range(1, 8), group=lambda n: "A" if n else "B")
    with pytest.raises(TooFewCases, match="cut-points of group B need at least 5 calibration cases, got 1"):
        calibrate(archive, "prostate", mode="per-group")


def test_cases_without_a_group_cannot_be_calibrated_by_group(tmp_path):
    archive = hand_made(tmp_path, range(1, 8), group=lambda n: None)
    with pytest.raises(BadInput, match="have no group"):
        calibrate(archive, "prostate", mode="robust")


def test_the_budget_follows_the_rule_and_ties_go_to_the_smallest_step():
    """G2."""
    frame = ladder_frame(ha=[0, 0.2, 0.1, 0.1, 0.3], metric=[0.5, 0.5, 0.6, 0.9, 0.9])
    assert budgets(frame) == {"ha": 2, "metric": 3, "ha-half-metric": 3, "ha-metric": 3}
    with pytest.raises(UnknownName, match="no budget rule"):
        budget(frame, "dice")


@pytest.mark.parametrize(
    ("ha", "dips"), [([0, 0.2, 0.1, 0.3], True), ([0, 0.1, 0.2, 0.3], False), ([0, 0.3, 0.2, 0.1], False)]
)
def test_the_ladder_dips_only_when_it_falls_first_and_rises_after(ha, dips):
    """G6."""
    assert shape(ladder_frame(ha, [0.5] * 4))["dips_before_it_rises"] is dips


def test_tau_is_the_median_risk_at_the_oracle_step():
    """F6: the best step is 2 for every case; regions there are 2..7, mean 3.5 at step 1."""
    found = tau(ladder_frame(ha=[0] * 4, metric=[0.9, 0.1, 0.5, 0.5]))
    sigma = np.arange(6).std()
    assert (found["mean"], found["sigma"]) == (3.5, pytest.approx(sigma))
    assert found["tau"] == pytest.approx((4.5 - 3.5) / sigma)


def test_fixed_budgets_and_tau_need_labels(tmp_path):
    blind = synthetic_archive(tmp_path, cases=6, labelled=False)
    for design in ("fixed-k", "tau-stop"):
        with pytest.raises(TooFewCases, match="at least 5 labelled calibration cases, got 0"):
            calibrate(blind, design)


@pytest.mark.parametrize("design", MODULATIONS)
def test_modulated_designs_need_trajectories_of_their_modulation(tmp_path, design):
    mode = MODULATIONS[design]
    for number, other in enumerate([None, *(other for other in MODES if other != mode)]):
        binding = replace(SYNTHETIC, objective="Eata", options={"modulation": other})
        with pytest.raises(Mismatch, match=f"modulation {mode}, "):
            calibrate(synthetic_archive(tmp_path / str(number), cases=6, binding=binding), design)
    binding = replace(SYNTHETIC, objective="Eata", options={"modulation": mode})
    policy = calibrate(synthetic_archive(tmp_path / "own", cases=6, binding=binding), design)
    assert controller_of(policy).name == "frag-stop"


def test_the_preflight_counts_helped_and_hurt_of_what_is_retained(archive):
    policy = calibrate(archive, "frag-stop")
    frame = outcomes(archive)
    rows = casewise.judge.outcomes.deployed(frame, casewise.replay(archive, policy))
    kept = policy.preflight["retained"]
    assert (kept["helped"], kept["hurt"]) == (int((rows["change"] > 0).sum()), int((rows["change"] < 0).sum()))
    assert kept["go"] is (kept["helped"] > kept["hurt"])
    assert kept["kept"] == 18


def test_a_policy_that_hurts_more_than_it_helps_is_a_no_go(tmp_path):
    archive = create_archive(tmp_path, binding=SYNTHETIC, steps=1, configuration={})
    label = np.zeros((8, 8), np.uint8)
    label[2:6, 2:6] = 1
    for number in range(6):
        worse = label.copy()
        worse[0, : number + 1] = 1
        signals = ({"delta": 0.0}, {"delta": (number + 1) / 64})
        archive.add(Case(f"c{number}", np.empty((1, 0))), Trajectory(f"c{number}", (label, worse), signals), label)
    policy = calibrate(archive, "prostate", coordinate="delta")
    assert policy.preflight["retained"]["go"] is False
    assert policy.preflight["concerns"][0].startswith("NO-GO: of the retained cases 0 were helped and 4 were hurt")
    assert any(line.endswith("NO-GO") for line in in_words(policy))
    assert any(line.startswith("HA is 0 at every step") for line in policy.preflight["concerns"])


def test_the_conformal_floor_of_the_papers_holdouts():
    """L6, Q20."""
    assert reach_of(8)["floor"] == pytest.approx(1 / 9)
    assert 0.10 not in reach_of(8)["feasible"]
    assert 0.10 in reach_of(9)["feasible"]
    assert reach_of(20)["needed"] == {"0.05": 19, "0.10": 9, "0.15": 6, "0.20": 4, "0.30": 3}


def test_the_usability_of_m0_is_measured_against_the_source_domain(archive):
    metric = outcomes(archive).query("step == 0")["metric"].mean()
    usable = calibrate(archive, "frag-stop", source_metric=metric + 0.04).preflight["source"]
    assert usable["usable"] is True
    policy = calibrate(archive, "frag-stop", source_metric=metric + 0.06)
    assert policy.preflight["source"]["usable"] is False
    assert any("M0 is not usable" in line for line in policy.preflight["concerns"])


def test_hybrid_cut_points_move_with_the_stream_and_seed_only_ones_do_not(archive, tmp_path):
    evaluation = synthetic_archive(tmp_path / "e", cases=20, prefix="eval", split="evaluation", seed=7, per_cluster=1)
    hybrid = calibrate(archive, "cardiac", hybrid=True)
    decisions = casewise.replay(evaluation, hybrid)
    seed_only = casewise.replay(evaluation, calibrate(archive, "cardiac"))
    assert len({one.cut_high for one in seed_only}) == 1
    assert len({one.cut_high for one in decisions[:15]}) == 1  # fifteen cases of warm-up
    assert decisions[15].cut_high != decisions[14].cut_high
    stream = stream_of(hybrid)
    for one in decisions[:-1]:
        stream = stream.after(one.case_id, one.value)
    assert stream.controller.cut_high == decisions[-1].cut_high
    assert any("change with new cases" in line for line in in_words(hybrid))


def test_a_window_forgets_old_cases(archive):
    stream = stream_of(calibrate(archive, "cardiac", hybrid=True, window=5))
    values = (2 * stream.monitor.calibration)[:15]  # nine patients of two scans
    for t, value in enumerate((*values, *[0.5] * 5)):
        stream = stream.after(f"new-{t}", value)
    assert stream.controller.cut_low == stream.controller.cut_high == 0.5


def test_hybrid_is_for_one_pair_of_cut_points(archive):
    with pytest.raises(BadInput, match="one pair of cut-points"):
        calibrate(archive, "cardiac", mode="per-group", hybrid=True)


def test_the_papers_exposures_travel_with_its_designs(archive):
    """F12."""
    assert len(calibrate(archive, "cardiac").exposures) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateTertiles)
        assert calibrate(archive, "prostate").exposures == ()


@pytest.mark.parametrize("design", ["m0", "fixed-k", "frag-stop", "tau-stop", "region-gate", "stop-router", "default"])
def test_every_design_can_be_put_in_words(archive, design):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateTertiles)
        policy = calibrate(archive, replace(READY[design], options={**READY[design].options}))
    lines = in_words(policy)
    assert lines[0].startswith(f"policy {design}")
    assert any("smallest risk that certify can promise" in line for line in lines)


def test_buckets_of_groups_are_those_of_their_own_cuts(archive):
    policy = calibrate(archive, "cardiac", mode="per-group")
    decided = casewise.replay(archive, policy)
    counts = {name: sum(one.bucket == name for one in decided) for name in ("low", "mid", "hard")}
    assert {name: row["cases"] for name, row in policy.preflight["buckets"].items()} == counts


def test_the_floor_counts_patients(archive):
    found = calibrate(archive, "cardiac").preflight
    assert (found["labelled"], found["patients"]) == (18, 9)
    assert found["conformal"]["floor"] == 1 / 10


def test_bucket_shares_unlike_calibration_are_noticed(tmp_path):
    calm = synthetic_archive(tmp_path / "a", cases=40, harmful=0.5)
    wild = synthetic_archive(tmp_path / "b", cases=40, harmful=1.0, prefix="new", split="evaluation", seed=3)
    same = synthetic_archive(tmp_path / "c", cases=40, harmful=0.5, prefix="new", split="evaluation", seed=4)
    policy = calibrate(calm, "cardiac")
    said = [quota_drift(policy, quota_of(casewise.replay(other, policy))) for other in (wild, same)]
    assert said[0].startswith("QUOTA: the buckets differ")
    assert said[1] is None


def test_ties_that_leave_no_thirds_take_the_fallback():
    first = pd.DataFrame({"case": list("abcdefghijkl"), "largest": [1.0] * 7 + [2.0, 3, 4, 5, 6], "delta": range(12)})
    settled = _settled(first, {"coordinate": "largest", "fallback": "delta"}, "medical")
    assert settled["coordinate"] == "delta"  # 7 of 12 low
