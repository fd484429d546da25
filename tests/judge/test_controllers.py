"""Each controller on ladders that a person can check: boundaries of spec E."""

from __future__ import annotations

import math

import numpy as np
import pytest

from casewise.core.errors import BadInput, DegenerateStatistic, NotFinite, UnknownName
from casewise.core.records import SOURCE, Action, Observation, State
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.controllers.depth import FixedK, Source, StopRule, TauStop
from casewise.judge.controllers.region_gate import RegionGate, gated
from casewise.judge.controllers.router import Bucket, ByGroup, Router, StopRouter
from casewise.measure.signals.risk import RiskStatistics, region_drops

LOW, MID = Bucket("depth", 3), Bucket("depth", 2, shrink=0.5)


def test_m0_executes_nothing(seen, decided):
    verdict, executed = decided(Source(), seen(regions=[0, 5]))
    assert (verdict.state, verdict.action, executed) == (State(0), Action.ROLLBACK, 0)


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_fixed_budget_deploys_its_step_and_executes_no_more(seen, decided, step):
    verdict, executed = decided(FixedK(step), seen(regions=[0, 1, 2, 3, 4]))
    assert (verdict.state.step, executed) == (step, step)


@pytest.mark.parametrize(
    ("rungs", "step", "said"),
    [((), 1, "1 update"), ((), 2, "2 updates"), (("gamma(1.4)", "mean"), 2, "2 candidates")],
)
def test_a_fixed_budget_counts_updates_only_where_some_are_made(rungs, step, said):
    seen = Observation("c", None, ({}, {}, {}), rungs={"": rungs})
    assert FixedK(step).decide(seen).reason == f"every case gets {said}"


@pytest.mark.parametrize(
    ("regions", "deployed", "executed"),
    [
        ([0, 3, 2, 4, 9], 2, 3),  # first rise at 3: deploy the step before (E2)
        ([0, 3, 4, 1, 1], 1, 2),  # a rise at 2 deploys 1
        ([0, 9, 9, 9, 9], 4, 4),  # equal is no rise
        ([0, 3, 2, 1, 0], 4, 4),
        ([0, 3, 2, 1, 5], 3, 4),  # a rise at the cap
    ],
)
def test_frag_stop_deploys_the_last_step_before_the_first_rise(seen, decided, regions, deployed, executed):
    verdict, paid = decided(StopRule(4), seen(regions=regions))
    assert (verdict.state, verdict.action, paid) == (State(deployed), Action.KEEP, executed)


def test_the_rise_from_m0_to_the_first_step_does_not_stop(seen, decided):
    assert decided(StopRule(2), seen(regions=[0, 7, 7]))[0].state == State(2)


@pytest.mark.parametrize(
    ("controller", "ladder"),
    [
        (StopRule(3, "entropy"), {"entropy": [0.9, 0.5, 0.6, 0.1]}),
        (StopRule(3, "msp"), {"msp": [0.1, 0.5, 0.4, 0.9]}),
        (StopRule(3, "gradient"), {"gradient_norm": [None, 0.5, 0.6, 0.1]}),
        (StopRule(3), {"regions": [0, 5, 6, 1]}),
    ],
)
def test_each_stop_rule_turns_on_its_own_signal(seen, decided, controller, ladder):
    verdict, executed = decided(controller, seen(**ladder))
    assert (verdict.state, executed) == (State(1), 2)
    assert controller.needs == set(ladder)


def test_tau_stop_has_the_papers_count_threshold_and_a_floor_of_one_step(seen, decided):
    stop = TauStop(mean=20.1, sigma=6.8, tau=-0.16, cap=4)
    assert stop.count == pytest.approx(19.012)
    assert decided(stop, seen(regions=[0, 20, 1, 1, 1]))[0].state == State(1)  # exceeded at 1: max(1, 0)
    assert decided(stop, seen(regions=[0, 19, 19, 20, 1]))[0].state == State(2)  # exceeded at 3
    assert decided(stop, seen(regions=[0, 19, 19, 19, 19]))[0].state == State(4)  # never rolls back


def test_tau_stop_without_spread_is_refused():
    with pytest.raises(DegenerateStatistic, match="sigma 0"):
        TauStop(mean=1, sigma=0, tau=0, cap=4)


@pytest.mark.parametrize(
    ("value", "bucket", "state", "executed"),
    [
        (0.1, "low", State(3), 3),
        (0.2, "low", State(3), 3),  # u == cut_low is low: > is strict
        (0.21, "mid", State(2, 0.5), 2),
        (0.3, "hard", State(0), 1),  # u == cut_high rolls back: >= is not strict
        (0.4, "hard", State(0), 1),
    ],
)
def test_the_router_has_the_boundaries_of_algorithm_1(seen, decided, value, bucket, state, executed):
    router = Router("delta", 0.2, 0.3, LOW, MID)
    verdict, paid = decided(router, seen(delta=[0, value, 0.9, 0.9, 0.9]))
    assert (verdict.bucket, verdict.state, paid) == (bucket, state, executed)
    assert (verdict.coordinate, verdict.value, verdict.cut_low, verdict.cut_high) == ("delta", value, 0.2, 0.3)


def test_cut_points_that_coincide_leave_mid_empty_and_the_cut_itself_rolls_back(seen, decided):
    router = Router("regions", 1, 1, LOW, MID)
    assert [decided(router, seen(regions=[0, n, 9, 9]))[0].bucket for n in (0, 1, 2)] == ["low", "hard", "hard"]


def test_native_region_routing_rolls_back_every_case_with_a_region(seen, decided):
    router = Router("regions", 0, 1, LOW, MID)
    assert [decided(router, seen(regions=[0, n, 9, 9]))[0].bucket for n in (0, 1, 2)] == ["low", "hard", "hard"]


@pytest.mark.parametrize(
    ("delta", "regions", "deployed"),
    [
        (0.1, [0, 5, 4, 3, 3, 2, 1, 1, 0], 8),  # low, no rise: the cap 8
        (0.1, [0, 5, 4, 3, 9, 0, 0, 0, 0], 3),
        (0.25, [0, 5, 4, 3, 3, 9, 0, 0, 0], 4),  # mid, the cap 4 comes before the rise
        (0.25, [0, 5, 6, 0, 0, 0, 0, 0, 0], 1),  # step 1 is always kept
    ],
)
def test_the_driving_buckets_run_while_regions_do_not_rise(seen, decided, delta, regions, deployed):
    router = Router("delta", 0.2, 0.3, Bucket("stop", 8), Bucket("stop", 4))
    verdict, _ = decided(router, seen(delta=[0, delta, *[0.9] * 7], regions=regions))
    assert (verdict.state, verdict.action) == (State(deployed), Action.KEEP)


def test_the_routing_coordinate_can_be_turned_round(seen, decided):
    router = Router("-msp", -0.9, -0.8, LOW, MID)
    assert decided(router, seen(msp=[1, 0.7, 1, 1]))[0].bucket == "hard"
    assert decided(router, seen(msp=[1, 0.95, 1, 1]))[0].bucket == "low"
    assert router.needs == {"msp"}


def test_the_two_term_risk_is_a_coordinate(seen, decided):
    statistics = RiskStatistics(0.70, 0.781, 0.00028, 0.00020)
    assert statistics.risk(0, 0) == pytest.approx(-1.148, abs=5e-4)  # R1: nothing can be lower
    assert statistics.risk(2, 5e-4) == pytest.approx(1.38, abs=5e-3)
    router = Router("risk", -0.5, 1.0, LOW, MID, statistics=statistics)
    assert decided(router, seen(regions=[0, 2, 2, 2], delta=[0, 5e-4, 0, 0]))[0].bucket == "hard"
    assert router.needs == {"regions", "delta"}


@pytest.mark.parametrize(
    ("signals", "error", "words"),
    [
        ({"delta": [0, None]}, BadInput, "was not recorded"),
        ({"regions": [0, 1]}, BadInput, "recorded are regions"),
        ({"delta": [0, float("nan")]}, NotFinite, "is nan"),
    ],
)
def test_a_signal_that_is_missing_or_not_finite_is_an_error_and_never_a_decision(seen, signals, error, words):
    with pytest.raises(error, match=words):
        Router("delta", 0.2, 0.3, LOW, MID).decide(seen(**signals))


def test_impossible_routers_and_buckets_are_refused():
    with pytest.raises(BadInput, match="cut_low <= cut_high"):
        Router("delta", 2, 1, LOW, MID)
    with pytest.raises(BadInput, match="cut_low <= cut_high"):
        Router("delta", math.nan, 1, LOW, MID)
    with pytest.raises(BadInput, match="depth of at least 1"):
        Bucket("depth", 0)
    with pytest.raises(BadInput, match="only the action depth can have shrink"):
        Bucket("stop", 4, shrink=0.5)
    with pytest.raises(UnknownName, match="Did you mean 'entropy'"):
        Bucket("stop", 4, rule="entropi")


def test_a_router_names_the_shrunk_states_that_it_needs():
    assert Router("delta", 0, 1, LOW, MID).states == {State(2, 0.5)}


def test_the_stop_router_stops_where_the_papers_router_could_not(seen, decided):
    ladder = seen(delta=[0, 0.1, 0, 0, 0], regions=[0, 1, 1, 2, 2])
    corrected = StopRouter("delta", 0.2, 0.3, low_cap=4, mid_cap=2)
    assert decided(corrected, ladder)[0].state == State(2)
    assert decided(Router("delta", 0.2, 0.3, LOW, MID), ladder)[0].state == State(3)


def test_the_stop_router_shrinks_mid_from_the_step_it_stopped_at(seen, decided):
    router = StopRouter("delta", 0.2, 0.3, low_cap=4, mid_cap=3, mid_shrink=0.5)
    verdict, executed = decided(router, seen(delta=[0, 0.25, 0, 0], regions=[0, 1, 2, 2]))
    assert (verdict.state, verdict.action, executed) == (State(1, 0.5), Action.SHRINK, 2)
    assert router.states == {State(1, 0.5), State(2, 0.5), State(3, 0.5)}


def a_gate_case(**drops):
    first = {"regions": len(drops), "drop": 0.1, **{name.replace("_", "."): value for name, value in drops.items()}}
    return Observation("c", None, ({"regions": 0}, first))


def test_the_gate_accepts_a_region_strictly_above_its_threshold():
    verdict = RegionGate(0.2).decide(a_gate_case(drop_0=0.2, drop_1=0.3, drop_2=-1.0))
    assert (verdict.action, verdict.accepted, verdict.state) == (Action.GATE, (1,), State(1))


def test_a_gate_that_accepts_nothing_rolls_back():
    assert RegionGate(math.inf).decide(a_gate_case(drop_0=9.0)).action is Action.ROLLBACK
    assert RegionGate(0.0).decide(a_gate_case()).action is Action.ROLLBACK


def test_a_gate_without_scores_says_what_to_record():
    with pytest.raises(BadInput, match="record with the signal 'drop'"):
        RegionGate(0.0).decide(Observation("c", None, ({}, {"regions": 1.0})))


def test_a_gate_whose_scores_could_not_be_computed_rolls_back_and_says_so():
    verdict = RegionGate(-np.inf, keep_small=True).decide(Observation("c", None, ({}, {"regions": 1.0, "drop": None})))
    assert (verdict.state, verdict.action, verdict.bucket) == (SOURCE, Action.ROLLBACK, "unscored")
    assert "no region has a score: 'drop' could not be computed" in verdict.reason
    with pytest.raises(BadInput, match="case c was recorded without region scores"):
        RegionGate(0.0).decide(Observation("c", None, ({}, {"regions": 1.0})))
    with pytest.raises(BadInput, match="case c has views or other candidates without updates"):
        RegionGate(0.0).decide(Observation("c", None, ({}, {"regions": 1.0}), rungs={"": ("gamma(1.4)",)}))


def test_region_scores_are_means_over_raw_regions_and_the_gate_deploys_those_accepted():
    source = np.zeros((4, 8), np.uint8)
    adapted = source.copy()
    adapted[0, :4], adapted[2, :3], adapted[3, 7] = 1, 2, 1
    drop = np.full((4, 8), 0.5)
    drop[2] = -0.5
    scores = region_drops(source, adapted, drop, min_area=2)
    assert scores == {"drop": pytest.approx(0.125), "drop.0": 0.5, "drop.1": -0.5}
    output = gated(source, adapted, (0,), min_area=2)
    assert np.array_equal(np.argwhere(output), [[0, 0], [0, 1], [0, 2], [0, 3]])
    kept = gated(source, adapted, (1,), min_area=2, keep_small=True)
    assert kept[3, 7] == 1
    assert kept[2, 0] == 2
    assert not kept[0].any()


def test_the_gate_sees_changes_between_classes_that_binarized_regions_do_not():
    source, adapted = np.ones((2, 8), np.uint8), np.full((2, 8), 2, np.uint8)
    assert region_drops(source, adapted, np.ones((2, 8)), min_area=4)["drop.0"] == 1.0


def test_each_group_has_its_own_cut_points_and_an_unknown_group_is_an_error(seen, decided):
    grouped = ByGroup({"A": Router("delta", 0, 0.2, LOW, MID), "B": Router("delta", 0, 0.9, LOW, MID)})
    ladder = {"delta": [0, 0.5, 0.5, 0.5]}
    assert decided(grouped, seen(group="A", **ladder))[0].bucket == "hard"
    assert decided(grouped, seen(group="B", **ladder))[0].bucket == "mid"
    with pytest.raises(BadInput, match="of group 'C', cut-points exist for A, B"):
        decided(grouped, seen(group="C", **ladder))


def test_the_papers_step_columns_follow_from_bucket_sizes():
    """Q1-Q4: deployed and executed updates of the printed bucket sizes (A12)."""

    def steps(sizes, depths):
        cases = sum(sizes)
        deployed = sum(n * d for n, d in zip(sizes, depths, strict=True)) / cases
        executed = sum(n * max(d, 1) for n, d in zip(sizes, depths, strict=True)) / cases
        return cases, deployed, executed

    cases, deployed, executed = steps((54, 46, 130), (3, 2, 0))
    assert (cases, round(deployed, 3), round(executed, 2)) == (230, 1.104, 1.67)
    cases, deployed, executed = steps((27, 24, 42), (1, 1, 0))
    assert (cases, round(deployed, 3), executed) == (93, 0.548, 1.0)
    cases, deployed, _ = steps((48, 39, 39), (3, 2, 0))
    assert (cases, round(deployed, 2)) == (126, 1.76)
    cases, deployed, _ = steps((22, 41, 43), (3.23, 2.59, 0))
    assert (cases, round(deployed, 2)) == (106, 1.67)
    for sizes, total in (((52, 30, 18), 100), ((38, 41, 21), 100), ((31, 40, 29), 100)):
        assert sum(sizes) == total


def test_a_misspelled_controller_is_answered_with_the_right_name():
    with pytest.raises(UnknownName, match="Did you mean 'frag-stop'"):
        CONTROLLERS.build("frag-stp")
