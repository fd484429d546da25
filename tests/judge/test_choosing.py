"""Choose, merge and flag: controllers, live numbers against independent computations, and compared designs."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner
from worlds.candidates import VIEWS, views_archive

import casewise
from casewise.archive.store import create_archive
from casewise.cli import app
from casewise.core.errors import BadInput, Refused, TooFewCases
from casewise.core.records import SOURCE, Action, Case, Decision, Observation, State, Trajectory
from casewise.judge.calibration import designs
from casewise.judge.calibration.adoption import chance_of_best, hurt_share, mean_low, patients_for_chance
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.calibration.design_comparison import (
    Fits,
    _at_more_harm,
    _best,
    _rows,
    compare_designs,
    fitted_choice,
)
from casewise.judge.calibration.designs import (
    DESIGNS,
    Deployed,
    Known,
    answer,
    designs_for,
    fit_choose,
    folds,
    gather,
)
from casewise.judge.calibration.preflight import in_words
from casewise.judge.calibration.quality import quality_of
from casewise.judge.controllers.choose import AgreementRule, Choose, added, candidate_signals, state_of, with_agreement
from casewise.judge.controllers.depth import FixedK
from casewise.judge.controllers.flag import Flag, Quality
from casewise.judge.controllers.merge import Merge, merged, pieces_of
from casewise.judge.decide import Setting, candidate_masks, deployed_mask, setting_of
from casewise.judge.policy import check_go, read_policy, write_policy
from casewise.measure.metrics.overlap import dice
from casewise.measure.signals.fragmentation import fragmentation
from casewise.replay import replay


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return views_archive(tmp_path_factory.mktemp("views") / "a", cases=24)


@pytest.fixture(scope="module")
def setting(archive):
    return setting_of(archive)


@pytest.fixture(scope="module")
def known(archive, setting):
    return gather(archive, setting)


def one_row(*rows):
    """An observation and masks of one case from rows of labels; M0 first."""
    masks = {State(step): np.array([row]) for step, row in enumerate(rows)}
    return Observation("case", None, [{} for _ in rows]), masks


A, B, C = [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]


def test_a_state_is_read_as_it_is_written():
    for state in (SOURCE, State(3), State(2, 0.5), State(4).on("views")):
        assert state_of(str(state)) == state
    with pytest.raises(BadInput, match=r"named like '3', '2~0.5' or 'views:3', got 'x'"):
        state_of("x")


def test_highest_agreement_takes_the_mask_in_the_middle():
    seen, masks = one_row(A, B, C, B)
    rule = AgreementRule(steps=3, consensus="3", rule="agreement")
    assert rule.decide(Observation("case", None, seen.signals[:2])) is None  # not all candidates are there
    verdict = rule.decide(rule.compared(seen, masks))
    assert verdict.state == State(3)
    assert verdict.action is Action.KEEP
    medoid = AgreementRule(steps=3, consensus="3", rule="medoid")
    assert medoid.decide(medoid.compared(seen, masks)).state == State(1)  # among single opinions


def test_a_reason_names_the_view_and_not_its_number():
    seen, masks = one_row(A, B, C, B)
    named = replace(seen, rungs={"": ("gamma(1.4)", "flip", "mean")})
    middle = AgreementRule(steps=3, consensus="3", rule="agreement")
    assert middle.decide(middle.compared(named, masks)).reason.startswith("mean agrees most with the others")
    assert middle.decide(middle.compared(seen, masks)).reason.startswith("candidate 3 agrees most with the others")
    medoid = replace(middle, rule="medoid")
    assert medoid.decide(medoid.compared(named, masks)).reason.startswith("gamma(1.4) agrees most")
    cut = replace(middle, cut_high=0.1)
    assert cut.decide(cut.compared(named, masks)).reason.startswith(
        "M0: the edit of mean (0.2000) is not below the cut"
    )
    chosen = Choose(steps=3, consensus="3", weights=(1.0, 0.0, 0.0), anchor="2")
    assert "mean is expected to gain +0.1238 over flip" in chosen.decide(chosen.compared(named, masks)).reason
    several = replace(named, rungs={"views": ("flip",), "tent": ()})
    assert [several.called(state) for state in (SOURCE, State(1).on("views"), State(1).on("tent"))] == [
        "M0", "views: flip", "candidate tent:1",
    ]  # fmt: skip


def test_consensus_only_where_m0_agrees_little():
    seen, masks = one_row(A, B, C, B)
    for threshold, state in ((0.5, SOURCE), (0.9, State(3))):
        rule = AgreementRule(steps=3, consensus="3", rule="low-agreement", threshold=threshold)
        verdict = rule.decide(rule.compared(seen, masks))
        assert verdict.state == state
        assert f"agrees with the others with Dice {(4 / 5 + 4 / 6) / 2:.3f}" in verdict.reason


def test_an_edit_that_reaches_the_cut_goes_back():
    seen, masks = one_row(A, B, C, B)
    for cut, state in ((0.21, State(3)), (0.19, SOURCE)):  # 1 - Dice(A, B) = 1/5
        rule = AgreementRule(steps=3, consensus="3", rule="consensus", cut_high=cut)
        verdict = rule.decide(rule.compared(seen, masks))
        assert verdict.state == state
        assert verdict.value == pytest.approx(0.2)


def test_a_rule_that_was_shown_no_masks_says_so():
    seen, _ = one_row(A, B, C, B)
    with pytest.raises(BadInput, match="case case has no signal 'likeness'; show the masks of all"):
        AgreementRule(steps=3, consensus="3", rule="medoid").decide(seen)


def test_choose_leaves_its_anchor_only_for_what_is_surely_better():
    seen, masks = one_row(A, B, C, B)
    sure = Choose(steps=3, consensus="3", weights=(1.0, 0.0, 0.0))
    shown = sure.compared(seen, masks)
    assert sure.decide(shown).state == State(3)  # the largest gain of agreement
    gains = {str(state): round(gain, 3) for state, (gain, _) in sure.expected(shown).items()}
    assert gains == {"1": 0.095, "2": 0.029, "3": 0.152}  # B: (4/5 + 6/7)/2, C: (4/6 + 6/7)/2, vote: (4/5 + 1 + 6/7)/3
    unsure = replace(sure, replicates=(((9.0, 0, 0), ()), ((-9.0, 0, 0), ())))
    assert unsure.decide(shown).state == SOURCE
    assert "M0: no other candidate is surely better" in unsure.decide(shown).reason


def test_choose_compares_with_its_anchor_and_may_go_back_to_m0():
    seen, masks = one_row(A, B, C, B)
    second = Choose(steps=3, consensus="3", weights=(1.0, 0.0, 0.0), anchor="2")
    shown = second.compared(seen, masks)
    gains = {str(state): round(gain, 3) for state, (gain, _) in second.expected(shown).items()}
    assert gains == {"0": -0.029, "1": 0.067, "3": 0.124}  # of each against candidate 2
    assert second.decide(shown).state == State(3)
    harmful = replace(second, weights=(-1.0, 0.0, 0.0), anchor="3")
    assert harmful.decide(shown).state == SOURCE
    assert "M0 is expected to gain +0.1524 over candidate 3" in harmful.decide(shown).reason
    both_unsure = replace(harmful, replicates=(((-9.0, 0, 0), ()), ((9.0, 0, 0), ())))
    assert both_unsure.decide(shown).state == State(3)  # no gain is sure, so the anchor stays
    never = replace(harmful, spread=float("inf"))
    assert never.expected(shown) == {}
    assert never.decide(shown).state == State(3)
    with pytest.raises(BadInput, match="the spread must be 0 or more"):
        replace(second, spread=-1.0)


def test_departures_are_tried_on_clusters_left_out_before_they_are_used(known, setting):
    """Signals that are shuffled between cases carry nothing: what is left is the best fixed candidate."""
    consensus = state_of(setting.consensus)
    gains = np.array([one.metric[consensus] - one.source for one in known])
    assert gains.mean() > 0
    assert (gains < -0.01).mean() > 0.1
    assert fit_choose(known, setting).anchor == "0"  # the consensus gains, and hurts more than one in ten
    kind = [replace(one, metric={**one.metric, consensus: max(one.metric[consensus], one.source)}) for one in known]
    assert fit_choose(kind, setting).anchor == setting.consensus
    shuffled = [replace(one, seen=other.seen) for one, other in zip(kind, [*kind[7:], *kind[:7]], strict=True)]
    assert fit_choose(shuffled, setting).spread == float("inf")
    few = [one for one in known if one.cluster in sorted({one.cluster for one in known})[:2]]
    assert fit_choose(few, setting).spread == float("inf")  # two clusters are too few to test departures
    helped = [replace(one, metric={**one.metric, State(1): 1.0}) for one in known]
    assert fit_choose(helped, setting).anchor == "1"


def test_where_nothing_agrees_there_is_nothing_to_learn_and_m0_is_kept(tmp_path, known, setting):
    """A model that segments nothing: masks are empty, no pair agrees, and no feature is defined."""

    def mute(one):
        return replace(one, seen=replace(one.seen, signals=[{} for _ in one.seen.signals]))

    found = fit_choose([mute(one) for one in known], setting)
    assert found.own == ()
    assert set(found.weights) == {0.0}
    nothing = calibrate(views_archive(tmp_path / "nothing", cases=12, empty=True), "default")
    assert nothing.controller == "m0"
    some = fit_choose([one if one.cluster == known[0].cluster else mute(one) for one in known], setting)
    assert some.spread == float("inf")


def test_pieces_are_components_of_one_class_pair():
    source, edit = np.array([[1, 1, 0, 0, 0]]), np.array([[2, 2, 2, 0, 1]])
    found = pieces_of(source, edit)
    assert list(zip(found.before.tolist(), found.after.tolist(), found.sizes.tolist(), strict=True)) == [
        (0, 1, 1), (0, 2, 1), (1, 2, 2),
    ]  # fmt: skip
    assert merged(source, edit, (1,)).tolist() == [[1, 1, 2, 0, 0]]
    assert merged(source, edit, ()).tolist() == source.tolist()
    assert merged(source, edit, (0, 1, 2)).tolist() == edit.tolist()
    assert len(pieces_of(source, source).sizes) == 0


def test_the_gain_of_a_merge_agrees_with_a_second_computation(archive, setting, known):
    """Counts of pieces against Dice of the mask itself, for random sets of pieces."""
    rng = np.random.default_rng(0)
    for one in known[:6]:
        masks, label = candidate_masks(archive, one.case_id), archive.label(one.case_id)
        consensus = masks[state_of(setting.consensus)]
        for share in (0.0, 0.3, 1.0):
            edit = one.edits[state_of(setting.consensus)]
            accepted = rng.random(len(edit.features)) < share
            mask = merged(masks[SOURCE], consensus, tuple(np.flatnonzero(accepted).tolist()))
            assert edit.metric_of(accepted) == pytest.approx(dice(mask, label))


@pytest.mark.parametrize("design", list(DESIGNS))
def test_what_a_design_deploys_is_what_replay_deploys(design, archive, setting, known):
    controller = DESIGNS[design](known, setting)
    for decision, one in zip(casewise.replay(archive, controller), known, strict=True):
        assert decision.case_id == one.case_id
        told = answer(one, controller)
        assert told.state == str(decision.state)
        mask = deployed_mask(archive, controller, decision)
        assert told.metric == pytest.approx(dice(mask, archive.label(one.case_id)))
        assert Decision.from_dict(decision.as_dict()) == decision


def test_a_controller_on_a_named_ladder_decides_the_same(tmp_path, archive, setting):
    named = views_archive(tmp_path / "named", cases=8, ladder="views")
    archive, own = archive.select(ids=named.ids), setting_of(named, ladders=("views",))
    assert own.consensus == "views:6"
    for design in ("highest-agreement", "choose", "merge"):
        plain, among = (DESIGNS[design](gather(a, s), s) for a, s in ((archive, setting), (named, own)))
        for one, two in zip(casewise.replay(archive, plain), casewise.replay(named, among), strict=True):
            assert str(two.state) == (f"views:{one.state}" if one.state.step else "0")
            assert one.state_hash == two.state_hash


def test_no_cluster_is_divided():
    clusters = [f"c{k // 3}" for k in range(60)]
    seen = []
    for inside, out in folds(clusters):
        assert not {clusters[i] for i in inside} & {clusters[i] for i in out}
        seen += out
    assert sorted(seen) == list(range(60))
    with pytest.raises(TooFewCases, match="others score it, which needs 3"):
        folds(["a", "a"])


def test_a_case_never_helps_to_fit_what_decides_on_it(known, setting):
    shown = []

    def spy(some, given):
        shown.append({one.cluster for one in some})
        return DESIGNS["consensus"](some, given)

    scored = Fits(known, setting, {"spy": spy}).cross_fitted("spy")
    for fold, (_, out) in zip(shown, folds([one.cluster for one in known]), strict=True):
        assert not fold & {scored[i].cluster for i in out}


def test_the_hint_about_harm_names_what_would_be_taken():
    patients = [f"p{number}" for number in range(20)]
    gains = {"m0": np.zeros(20), "tuned/1": np.full(20, 0.2), "tuned/average": np.full(20, 0.1)}
    gains["tuned/1"][:5] = gains["tuned/average"][:3] = -0.02
    made = {
        name: [Deployed(one, one, "", False, 0.5, 0.5 + gain, {}) for one, gain in zip(patients, found, strict=True)]
        for name, found in gains.items()
    }
    rows = _rows(made, 0.2, 0.1)
    assert rows[1].low > rows[2].low
    said = _at_more_harm(rows)
    assert "tuned/average gains +0.0820" in said
    assert "--set allowed-hurt=0.15 takes it" in said
    assert _best(_rows(made, 0.2, 0.15)) == "tuned/average"


def test_views_around_the_truth_are_taken_and_misled_ones_are_not(tmp_path, known, setting):
    some = {name: DESIGNS[name] for name in ("m0", "consensus", "highest-agreement")}
    strict = compare_designs(known, setting, some, allowed_hurt=0.0)
    assert strict.chosen == "m0"  # somebody is hurt by more than a point
    more = float(strict.why.split("--set allowed-hurt=")[1].split()[0])  # says what it would take
    assert compare_designs(known, setting, some, allowed_hurt=more).chosen in strict.why.split("; ")[-1]
    assert compare_designs(known, setting, some, allowed_hurt=more - 0.01).chosen == "m0"
    found = compare_designs(known, setting, some, allowed_hurt=0.4)
    assert found.chosen in ("consensus", "highest-agreement")
    rows = {row.design: row for row in found.rows}
    assert rows["m0"].gain == 0
    assert rows["consensus"].gain > 0.02
    wrong = views_archive(tmp_path / "wrong", misled=True)
    own = setting_of(wrong)
    against = compare_designs(gather(wrong, own), own)
    assert against.chosen == "m0"
    assert "no design passes" in against.why
    worst = {row.design: row for row in against.rows}
    assert worst["consensus"].gain < -0.05
    assert worst["choose"].gain > -0.03  # the fitted model expects no gain
    assert worst["merge"].gain > -0.03


def gains_known(gains):
    """One case and one candidate for each gain, every case a patient of its own."""
    signals = [{"agreement": 0.9}, {"agreement": 0.9}]
    return [
        Known(f"case-{k}", f"patient-{k}", Observation(f"case-{k}", None, signals), worth, {}, {})
        for k, worth in enumerate({SOURCE: 0.5, State(1): 0.5 + gain} for gain in gains)
    ]


@pytest.mark.parametrize(
    ("smaller", "larger", "chosen"),
    [
        ("consensus", "choose", "consensus"),  # choose is fitted to these patients
        ("consensus+largest", "merge+largest", "consensus+largest"),
        ("consensus", "medoid", "medoid"),  # neither is fitted: the larger lower bound
        ("tuned/average", "tuned/1", "tuned/average"),
        ("tuned/average", "choose", "tuned/average"),
        ("m0", "choose", "choose"),  # nothing else passes
    ],
)
def test_the_average_comes_first_and_fitted_designs_last(smaller, larger, chosen):
    signals = [{"agreement": 0.9}] * 3
    known = [
        Known(f"case-{k}", f"patient-{k}", Observation(f"case-{k}", None, signals), worth, {}, {})
        for k, worth in enumerate({SOURCE: 0.5, State(1): 0.53 + k / 999, State(2): 0.56 + k / 999} for k in range(8))
    ]
    depths = {"m0": 0, smaller: 0 if smaller == "m0" else 1, larger: 2}
    some = {name: lambda known, setting, depth=depth: FixedK(depth) for name, depth in depths.items()}
    found = compare_designs(known, Setting(2, "1"), some)
    assert not found.row(larger).fails
    assert found.chosen == chosen
    assert (f"{larger} passes too" in found.why) == (chosen != larger)
    assert ("largest lower bound" in found.why) == (chosen == larger)  # it was claimed of the smaller one, too


def test_a_design_that_hurts_more_than_it_helps_is_not_taken():
    """Four gain ten points, six lose a fifth of one: surely a gain in the mean, and a NO-GO at predict."""
    some = {"m0": DESIGNS["m0"], "update": lambda known, setting: FixedK(1)}
    found = compare_designs(gains_known([0.1] * 4 + [-0.002] * 6), Setting(1, "1"), some)
    row = found.rows[1]
    assert row.low > 0
    assert row.hurt_by_a_point == 0
    assert (row.helped, row.hurt) == (4, 6)
    assert found.chosen == "m0"
    assert "it helps 4 cases and hurts 6" in found.why
    assert compare_designs(gains_known([0.1] * 6 + [-0.002] * 4), Setting(1, "1"), some).chosen == "update"


def test_three_patients_cannot_show_a_gain_and_the_reason_says_so():
    some = {"m0": DESIGNS["m0"], "update": lambda known, setting: FixedK(1)}
    found = compare_designs(gains_known([0.1, 0.11, 0.12]), Setting(1, "1"), some)
    assert (found.chosen, found.rows[1].p, found.nested) == ("m0", 0.125, None)
    assert "smallest possible p is 0.125" in found.why
    assert patients_for_chance(0.05) == 5
    five = compare_designs(gains_known([0.1, 0.11, 0.12, 0.1, 0.13]), Setting(1, "1"), some)
    assert (five.chosen, five.rows[1].p) == ("update", 1 / 32)
    assert five.nested.gain == pytest.approx(0.112)
    assert "no interval is given" in five.nested.sentence()


def test_m0_is_kept_where_the_choice_repeated_without_each_patient_loses():
    """Without any of the five that gain, p is above the limit; only without the one that loses it passes."""
    some = {"m0": DESIGNS["m0"], "update": lambda known, setting: FixedK(1)}
    found = compare_designs(gains_known([0.01] * 5 + [-0.009]), Setting(1, "1"), some)
    assert not found.rows[1].fails
    assert (found.chosen, found.nested.choices) == ("m0", {"m0": 5, "update": 1})
    assert found.why.startswith("update passes every test, but")
    assert "(-0.0015)" in found.why
    none = compare_designs(gains_known([0.01] * 5 + [0.0]), Setting(1, "1"), some)  # the one that is left out decides
    assert not none.rows[1].fails
    assert (none.chosen, none.nested.gain) == ("m0", 0.0)


def test_as_many_hurt_patients_are_allowed_with_one_patient_fewer():
    """One of ten is hurt, as allowed. One of nine is not more; or the design would only be scored on the hurt one."""
    some = {"m0": DESIGNS["m0"], "update": lambda known, setting: FixedK(1)}
    found = compare_designs(gains_known([0.05] * 9 + [-0.02]), Setting(1, "1"), some)
    assert (found.chosen, found.nested.choices) == ("update", {"update": 10})
    assert found.nested.gain == pytest.approx(found.rows[1].gain)


def test_all_sign_patterns_agree_with_a_second_computation():
    """With few patients the p-value is a count over all 2^n patterns."""
    rng = np.random.default_rng(0)
    gains, clusters = rng.normal(0.3, 1, (8, 3)), list("aabbccdd")
    sums = gains.reshape(4, 2, 3).sum(axis=1)
    t = [
        (np.array(s) @ sums / np.sqrt((sums**2).sum(0))) for s in np.ndindex(2, 2, 2, 2) for s in [2 * np.array(s) - 1]
    ]
    own = sums.sum(0) / np.sqrt((sums**2).sum(0))
    assert chance_of_best(gains, clusters) == pytest.approx([np.mean([max(one) >= x - 1e-9 for one in t]) for x in own])


def test_hurt_patients_are_counted_once_and_bounded():
    change = [0.02, -0.03, 0.0, 0.0] + [0.01] * 16  # the first patient gains and loses, and is not hurt by a point
    found = hurt_share(change, [f"p{k // 2}" for k in range(20)])
    assert (found.patients, found.hurt, found.cases, found.cases_hurt) == (10, 0, 20, 1)
    assert found.upper == pytest.approx(1 - 0.1**0.1)
    assert found.needed == 22
    assert found.within
    assert "up to 21% may be" in found.sentence()
    assert "22 patients without harm are needed" in found.sentence()
    assert not hurt_share([-0.03, -0.03] + [0.01] * 18, [f"p{k // 2}" for k in range(20)], limit=0.05).within


def test_a_fixed_candidate_is_a_design_and_its_policy_travels(tmp_path, archive):
    made, options, found = fitted_choice(archive, "view-2", fixed=("view-2",))
    assert (made, options["candidate"]) == ("fixed-candidate", "2")
    assert "changes 24 of these 24 cases" in found["deploys"]
    with pytest.raises(BadInput, match="no candidate 'tuned/average'"):
        fitted_choice(archive, "default", fixed=("tuned/average",))
    with pytest.raises(BadInput, match="'fixed-candidate' cannot be calibrated"):
        fitted_choice(archive, "fixed-candidate")


def test_settled_is_compared_where_each_view_tells_how_far_the_consensus_has_settled(known, setting):
    assert "settled" not in designs_for(known, setting)
    running = [
        replace(one, seen=replace(one.seen, signals=[{}, *({**s, "settled": 1.0} for s in one.seen.signals[1:])]))
        for one in known
    ]
    found = designs_for(running, setting)["settled"](running, setting)
    assert found.name == "settled"
    assert found.cap == setting.steps


def test_a_policy_that_keeps_m0_says_so(tmp_path):
    wrong = views_archive(tmp_path / "wrong", misled=True, seed=1)
    made = calibrate(wrong, "merge")
    assert made.preflight["deploys"] == "this policy keeps M0 for every case"
    assert any("merge keeps M0 for every case" in line for line in made.preflight["concerns"])


def test_m0_that_is_cleaned_does_not_count_as_m0(tmp_path: Path) -> None:
    """One island in the mask of M0 and of its view: keeping the largest component is the whole gain."""
    setting = {"metric": "dice", "min_area": 4, "foreground": True, "objective": "views", "classes": [1]}
    archive = create_archive(tmp_path / "islands", binding=VIEWS, steps=2, configuration=setting)
    for number in range(12):
        label = np.zeros((24, 24), np.uint8)
        label[4:14, 4 : 12 + number % 3] = 1
        mask = label.copy()
        mask[18:22, 18 : 20 + number % 2] = number > 0  # the first patient has no island
        masks = (mask, mask, mask)
        signals = [fragmentation(mask, one, min_area=4).as_signals() for one in masks]
        case = Case(f"case-{number:02d}", np.empty((1, 0)), cluster=f"p{number:02d}", split="calibration")
        archive.add(case, Trajectory(case.id, masks, tuple(signals), made_by="views", rungs=("view-1", "vote")), label)
    made = calibrate(archive.seal(), "default")
    assert (made.controller, made.cleanup) == ("m0", "largest(1)")
    assert made.preflight["deploys"] == "this policy deploys m0+largest: it changes 11 of these 12 cases"
    assert not [line for line in made.preflight["concerns"] if "keeps M0" in line]
    changed = [one.case_id for one in replay(archive, made) if one.cleanup]
    assert len(changed) == 11


def test_allowed_hurt_limits_the_anchor_of_choose(archive, monkeypatch):
    strict, lax = (calibrate(archive, "choose", allowed_hurt=share) for share in (0.0, 1.0))
    assert strict.options["anchor"] == "0"  # every candidate hurts somebody by more than a point
    assert lax.options["anchor"] != "0"
    asked = []
    monkeypatch.setattr(designs, "fit_choose", lambda *a, allowed_hurt: asked.append(allowed_hurt) or DESIGNS["m0"](*a))
    calibrate(archive, "default", allowed_hurt=0.25)
    assert set(asked) == {0.25}  # in every fold


def test_the_mean_and_its_bounds_agree_with_a_second_computation():
    values, clusters = np.array([0.1, 0.2, -0.1, 0.4]), ["a", "b", "c", "d"]
    mean, low, high = mean_low(values, clusters, level=0.9)
    error = values.std(ddof=1) / 2 * 1.6377443  # t of three degrees of freedom
    assert (mean, low, high) == pytest.approx((0.15, 0.15 - error, 0.15 + error))
    assert mean_low(np.repeat(values, 2), np.repeat(clusters, 2).tolist())[1] == pytest.approx(low)  # equal scans


def test_a_flag_says_how_good_the_deployed_mask_is_at_least():
    seen, masks = one_row(A, B, C, B)
    quality = Quality(middle=0.5, ratio=2.0, level=0.9)
    inner = AgreementRule(steps=3, consensus="3", rule="consensus")
    for below, flagged in ((0.75, True), (0.7, False)):
        flag, shown = Flag(quality, below=below, steps=3, silent=("3",)), inner.compared(seen, masks)
        verdict = flag.applied(inner.decide(shown), shown)
        agreement = (4 / 5 + 1 + 6 / 7) / 3
        assert verdict.state == State(3)
        assert verdict.quality == pytest.approx(1 - 0.5 * (1 - agreement + 0.02))
        assert verdict.quality_low == pytest.approx(1 - 2 * (1 - agreement + 0.02))
        assert verdict.flagged is flagged
    decision = Decision.of(seen, verdict, "consensus")
    assert Decision.from_dict(decision.as_dict()) == decision
    assert "quality at least 0.731" in verdict.reason


def test_a_flag_follows_the_answer_of_any_controller():
    from casewise.judge.controllers.depth import Source

    seen, masks = one_row(A, B, C, B)
    flag = Flag(Quality(0.5, 1.0, 0.9), below=0.9, steps=3, silent=("3",))
    shown = flag.with_agreement(seen, masks)
    verdict = flag.applied(Source().decide(shown), shown)
    assert verdict.state == SOURCE
    assert verdict.flagged


def test_agreement_ranks_quality_here_and_not_where_views_are_misled(tmp_path, known, setting):
    def quality(known, setting, design):
        taken = Fits(known, setting, DESIGNS).cross_fitted(design)
        return quality_of([(one.signals, one.metric, one.cluster) for one in taken], level=0.8)

    found = quality(known, setting, "m0")
    assert found.quality.signal == "agreement"
    assert found.rho > 0.5
    wrong = views_archive(tmp_path / "wrong", misled=True)
    own = setting_of(wrong)
    other = quality(gather(wrong, own), own, "consensus")
    assert other.rho < found.rho


def test_calibrate_compares_the_designs_and_the_policy_travels(tmp_path, archive):
    made = calibrate(archive, "default", allowed_hurt=0.5, flag_below=0.7, confidence=0.8)
    rows = {row["design"]: row for row in made.preflight["comparison"]["rows"]}
    assert set(rows) == set(DESIGNS)
    assert made.controller == max((row for row in rows.values()), key=lambda row: row["low"])["design"]
    read = read_policy(write_policy(tmp_path / "policy.json", made))
    first, second = casewise.replay(archive, made), casewise.replay(archive, read)
    assert first == second
    assert all(decision.quality_low is not None for decision in first)
    assert 0 < sum(decision.flagged for decision in first) < len(first)
    said = "\n".join(in_words(made))
    assert "are equally likely" in said  # how p is printed
    assert f"taken: {made.controller}" in said
    assert "flags:" in said


@pytest.mark.parametrize("design", ["consensus", "choose", "merge", "consensus-where-low"])
def test_a_named_design_is_fitted_as_asked(design, archive):
    made = calibrate(archive, design)
    assert (made.name, made.controller) == (design, design)
    assert len(casewise.replay(archive, made)) == len(archive.ids)
    assert made.calibration_clusters


def test_misled_views_are_calibrated_to_m0(tmp_path):
    made = calibrate(views_archive(tmp_path / "wrong", misled=True), "default")
    assert made.controller == "m0"
    assert "M0 is deployed for every case" in made.preflight["concerns"][0]
    assert made.binding is not None


def test_a_named_design_that_hurts_more_than_it_helps_is_a_no_go_with_consequences(tmp_path):
    misled = views_archive(tmp_path / "wrong", misled=True)
    policy = calibrate(misled, "consensus")
    kept = policy.preflight["retained"]
    assert kept["hurt"] >= kept["helped"]
    assert kept["go"] is False
    assert any(sentence.startswith("NO-GO: ") for sentence in policy.preflight["concerns"])
    with pytest.raises(Refused, match=r"NO-GO: .* add --set force=true"):
        check_go(policy)
    assert "NO-GO" in check_go(policy, force=True)
    assert check_go(calibrate(misled, "default")) is None  # takes M0, which cannot harm


def test_the_command_line_passes_every_option_on(tmp_path, archive, monkeypatch):
    from typer.testing import CliRunner

    from casewise.cli import app
    from casewise.judge.calibration import calibrate as module

    seen = {}
    monkeypatch.setattr(module, "calibrate", lambda *a, **more: seen.update(more) or calibrate(archive, "consensus"))
    asked = ["--flag-below", "0.7", "--confidence", "0.8", "--set", "consensus=6", "--allowed-hurt", "0.2"]
    result = CliRunner().invoke(app, ["calibrate", str(archive.path), *asked, "-o", str(tmp_path / "p.json")])
    assert result.exit_code == 0, result.output
    assert {"flag_below": 0.7, "confidence": 0.8, "consensus": "6", "allowed_hurt": 0.2}.items() <= seen.items()


@pytest.fixture(scope="module")
def gradient(tmp_path_factory):
    from worlds.cohorts import synthetic_archive

    return synthetic_archive(tmp_path_factory.mktemp("gradient") / "a", cases=24)


@pytest.mark.parametrize("design", ["cardiac", "default", "frag-stop", "fixed-k", "tau-stop"])
def test_policies_of_the_paper_are_flagged_too_and_deploy_what_they_did(design, gradient, tmp_path):
    plain, flagged = calibrate(gradient, design), calibrate(gradient, design, flag_below=0.7, confidence=0.8)
    read = read_policy(write_policy(tmp_path / "policy.json", flagged))
    before, after = casewise.replay(gradient, plain), casewise.replay(gradient, read)
    assert [one.state for one in before] == [one.state for one in after]
    assert all(one.quality_low is not None for one in after)
    assert [one.flagged for one in after] == [one.quality_low < 0.7 for one in after]
    held = [one.quality_low <= deployed_metric(gradient, one) + 1e-9 for one in after]
    assert np.mean(held) >= 0.8
    assert "flags:" in "\n".join(in_words(flagged))


def deployed_metric(archive, decision):
    return dice(archive.mask(decision.case_id, decision.state), archive.label(decision.case_id))


def test_a_flag_is_asked_for_by_group_as_well(gradient):
    made = calibrate(gradient, "cardiac", mode="per-group", flag_below=0.7, confidence=0.8)
    assert made.groups
    assert all(one.quality_low is not None for one in casewise.replay(gradient, made))


def test_the_bound_of_a_flagged_router_holds_for_every_state_of_the_ladder(gradient):
    """So its cut-points may have been fitted on the same cases, and a certificate may move them."""
    made = calibrate(gradient, "cardiac", flag_below=0.7, confidence=0.8)
    for cut in (-np.inf, np.inf):
        moved = replace(made, options={**made.options, "cut_low": cut, "cut_high": cut})
        held = [one.quality_low <= deployed_metric(gradient, one) + 1e-9 for one in casewise.replay(gradient, moved)]
        assert np.mean(held) >= 0.8


def test_what_cannot_be_flagged_says_why(gradient):
    with pytest.raises(BadInput, match="'region-gate' makes masks that are not in the ladder"):
        calibrate(gradient, "region-gate", flag_below=0.7)
    with pytest.raises(BadInput, match="leave out hybrid or --flag-below"):
        calibrate(gradient, "cardiac", hybrid=True, flag_below=0.7)


def test_flags_of_a_router_through_the_command_line(gradient, tmp_path):
    from typer.testing import CliRunner

    from casewise.cli import app

    asked = ["--policy", "cardiac", "--flag-below", "0.7", "--confidence", "0.9", "-o", str(tmp_path / "policy.json")]
    result = CliRunner().invoke(app, ["calibrate", str(gradient.path), *asked])
    assert result.exit_code == 0, result.output
    assert "flags:" in result.output
    made = read_policy(tmp_path / "policy.json")
    assert made.flag["below"] == 0.7
    assert made.flag["quality"]["level"] == 0.9
    assert {one.flagged for one in casewise.replay(gradient, made)} <= {True, False}


def test_an_archive_without_a_consensus_says_what_is_missing(tmp_path):
    from worlds.cohorts import synthetic_archive

    plain = synthetic_archive(tmp_path / "a", cases=4)
    with pytest.raises(BadInput, match=r"no candidate of .* is called consensus or mean"):
        setting_of(plain)
    assert setting_of(plain, consensus="4").consensus == "4"


def test_signals_of_disagreement_leave_the_recorded_ones_alone(archive):
    case_id = archive.ids[0]
    seen = archive.observation(case_id, archive.steps)
    shown = with_agreement(seen, candidate_masks(archive, case_id), silent=("6",))
    for before, after in zip(seen.signals, shown.signals, strict=True):
        assert {name: after[name] for name in before} == dict(before)
    assert set(candidate_signals(shown)) == set(candidate_masks(archive, case_id))


def test_merge_and_choose_need_their_weights():
    with pytest.raises(BadInput, match="merge needs 6 weights, got 0; calibrate it"):
        Merge(steps=3, consensus="3")
    with pytest.raises(BadInput, match="choose needs 3 weights, got 0; run casewise calibrate"):
        Choose(steps=3, consensus="3")


NOTHING = [0, 0, 0, 0, 0]


def test_where_nobody_draws_anything_m0_stays_and_its_quality_is_unknown():
    seen, masks = one_row(NOTHING, NOTHING, NOTHING, NOTHING)
    for rule in ("agreement", "medoid", "low-agreement"):
        controller = AgreementRule(steps=3, consensus="3", rule=rule, threshold=0.9)
        assert controller.decide(controller.compared(seen, masks)).state == SOURCE
    inner = Choose(steps=3, consensus="3", weights=(1.0, 0.0, 0.0))
    flag = Flag(Quality(middle=0.5, ratio=1.0, level=0.9), below=0.5, steps=3, silent=("3",))
    shown = inner.compared(seen, masks)
    verdict = flag.applied(inner.decide(shown), shown)
    assert verdict.flagged
    assert verdict.quality is None
    assert "its quality cannot be estimated" in verdict.reason


def test_if_most_masks_are_empty_an_empty_one_is_chosen():
    seen, masks = one_row(NOTHING, NOTHING, A, NOTHING)
    for rule in ("agreement", "medoid"):
        controller = AgreementRule(steps=3, consensus="3", rule=rule)
        verdict = controller.decide(controller.compared(seen, masks))
        assert masks[verdict.state].tolist() == [NOTHING]


def test_a_signal_that_predicts_nothing_gives_a_bound_for_all_labelled_cases():
    """A case on which nobody draws anything has no agreement; without a signal it counts like any other."""
    from casewise.judge.calibration.quality import fit_quality

    rng = np.random.default_rng(0)
    agreement, metric = rng.random(20), np.linspace(0.5, 0.9, 20)
    agreement[:4], metric[:4] = np.nan, 0.0
    found = fit_quality({"agreement": agreement}, metric, range(20), level=0.8)
    assert found.quality.signal is None
    assert found.cases == 20
    assert found.quality.of(None)[1] == 0.0  # four of twenty are 0
    metric[4:] = agreement[4:]
    carried = fit_quality({"agreement": agreement}, metric, range(20), level=0.8)
    assert (carried.quality.signal, carried.cases) == ("agreement", 16)


def test_designs_are_scored_by_the_metric_of_the_archive(tmp_path, monkeypatch):
    from casewise.measure.metrics import METRICS, Metric

    def accuracy(mask, label, *, ignore, spacing_mm):
        return float(np.mean(mask == label))

    monkeypatch.setitem(METRICS, "accuracy", Metric("accuracy", accuracy))
    for metric in ("accuracy", "miou"):
        made = views_archive(tmp_path / metric, cases=6, metric=metric)
        own = setting_of(made)
        known = gather(made, own)
        controller = DESIGNS["merge"](known, own)
        for one in known:
            label, edit = made.label(one.case_id), one.edits[state_of(own.consensus)]
            masks = candidate_masks(made, one.case_id)
            everything = np.ones(len(edit.features), bool)
            score = METRICS[metric].of
            for accepted, mask in ((~everything, masks[SOURCE]), (everything, masks[state_of(own.consensus)])):
                wanted = score(mask, label, ignore=None, spacing_mm=None)
                assert edit.metric_of(accepted) == pytest.approx(wanted)
            assert answer(one, controller).source == pytest.approx(
                score(masks[SOURCE], label, ignore=None, spacing_mm=None)
            )


def test_ignored_voxels_are_left_out_by_default_in_driving_scenes(tmp_path):
    """The void of driving labels is 255 unless an archive says otherwise; pieces there are neither right nor wrong."""
    made = views_archive(tmp_path / "void", cases=4, metric="miou", void=6)
    own = setting_of(made)
    for one in gather(made, own):
        edit = one.edits[state_of(own.consensus)]
        assert edit.counts.shape[1] < 255
        assert edit.metric_of(np.ones(len(edit.features), bool)) == pytest.approx(one.metric[state_of(own.consensus)])


def test_the_best_of_many_settings_is_corrected_for_the_choice():
    """Gains of pure noise: often one of 21 columns looks sure by itself, seldom by the test that knows all of them."""
    clusters, alone, together = [str(k // 2) for k in range(40)], 0, 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        gains = np.repeat(rng.normal(0, 0.1, (20, 21)), 2, axis=0)  # two cases of each patient
        alone += max(mean_low(column, clusters, level=0.975)[1] for column in gains.T) > 0
        together += chance_of_best(gains, clusters, draws=199).min() <= 0.025
    assert alone >= 20
    assert together <= 9  # 2.5 expected, three standard errors
    steady = np.linspace(0.02, 0.06, 40)[:, None] * np.array([[1.0, 0.5, 0.0]])
    assert chance_of_best(steady, clusters, draws=999).round(3).tolist() == [0.001, 0.001, 1.0]


def test_a_merge_that_does_not_surely_gain_keeps_m0(tmp_path, known, setting):
    wrong = views_archive(tmp_path / "wrong", misled=True, seed=1)
    own = setting_of(wrong)
    controller = DESIGNS["merge"](gather(wrong, own), own)
    assert controller.threshold == float("inf")
    assert all(decision.rolled_back for decision in casewise.replay(wrong, controller))
    assert DESIGNS["merge"](known, setting).threshold < 1


def test_the_gate_of_the_paper_is_a_merge_whose_scores_are_entropy_drops(tmp_path):
    """Each piece has the drop of its region, and none where that is too small: the same voxels, at any threshold."""
    from worlds.cohorts import synthetic_archive

    from casewise.judge.controllers.region_gate import RegionGate, region_scores
    from casewise.measure.regions import regions_of

    made, parts = synthetic_archive(tmp_path / "drops", cases=8), set()
    area = int(made.configuration["min_area"])
    for case_id in made.ids:
        seen, masks = made.observation(case_id, 1), candidate_masks(made, case_id)
        source, edit = masks[SOURCE], masks[State(1)]
        drops, pieces, regions = (
            region_scores(seen),
            pieces_of(source, edit),
            regions_of(source, edit, min_area=area, foreground=False),
        )
        kept = dict(zip(np.flatnonzero(regions.kept).tolist(), drops, strict=True))
        region = dict(zip(regions.voxels.tolist(), regions.number.tolist(), strict=True))
        of = [region[int(pieces.voxels[pieces.number == k][0])] for k in range(len(pieces.sizes))]
        scores = {f"piece.{k}": kept.get(number) for k, number in enumerate(of)}
        shown = with_agreement(seen, {state: masks[state] for state in (SOURCE, State(1))})
        shown = added(shown, {State(1): {"pieces": float(len(scores)), **scores}})
        for threshold in (-np.inf, *drops, np.inf):
            merge = Merge(1, "1", weights=(0.0,) * 6, center=(0.0,) * 5, scale=(1.0,) * 5, threshold=threshold)
            outputs = []
            for controller, given in ((RegionGate(threshold, min_area=area), seen), (merge, shown)):
                decision = Decision.of(given, controller.decide(given), controller.name)
                outputs.append(controller.output(masks.__getitem__, decision))
            assert (outputs[0] == outputs[1]).all()
            parts.add((bool((outputs[0] == source).all()), bool((outputs[0] == edit).all())))
    assert {(True, False), (False, False)} <= parts or {(True, False), (False, True)} <= parts


def test_gains_without_any_residual_can_be_solved():
    """Three equal cases: one candidate never moves, and nothing is left to explain within a candidate."""
    from casewise.judge.calibration.designs import _fit_gain, _shrinkage
    from casewise.judge.controllers.choose import FEATURES

    features = np.zeros((2, len(FEATURES)))
    features[0, 1] = 1.0
    rows = [(features, np.array([0.1, 0.0]), ["moves", "stays"])] * 3
    shrink = _shrinkage(rows, ["moves", "stays"])
    _, own = _fit_gain(rows, ["moves", "stays"], shrink)
    assert dict(own) == pytest.approx({"moves": 0.1, "stays": 0.0}, abs=1e-4)


def test_a_comparison_reads_every_edit_once_and_fits_no_model_of_pieces_twice(archive, monkeypatch):
    """Street frames have thousands of pieces: what is read or fitted again is most of the time."""
    reads, counted = [], designs.merge.piece_features
    monkeypatch.setattr(designs.merge, "piece_features", lambda *of: reads.append(of[1]) or counted(*of))
    few = archive.select(ids=archive.ids[:12])
    setting = setting_of(few)
    known = gather(few, setting)
    assert len(reads) == len(known) * (1 + designs.RIVALS_READ)
    fits, asked = [], []
    fit_pieces, piece_model = designs._fit_pieces, designs._piece_model
    monkeypatch.setattr(designs, "_fit_pieces", lambda pieces: fits.append(1) or fit_pieces(pieces))
    monkeypatch.setattr(designs, "_piece_model", lambda *of: asked.append(1) or piece_model(*of))
    compare_designs(known, setting, {name: DESIGNS[name] for name in ("m0", "merge")})
    six_patients = 1 + 6 + 15 + 20  # all of them, and without one, two and three
    assert len(fits) <= six_patients * len(set(reads))
    assert len(asked) > len(fits)


def test_cases_are_not_held_after_their_comparison(archive, setting):
    """Edits of large volumes fill the memory of a process that fits several deployments."""
    known = gather(archive.select(ids=archive.ids[:12]), setting)
    compare_designs(known, setting, {name: DESIGNS[name] for name in ("m0", "merge", "choose")}, nested=False)
    held = [weakref.ref(one) for one in known]
    del known
    gc.collect()
    assert not any(one() for one in held)


def test_candidates_that_agree_far_less_than_those_of_calibration_are_flagged_and_stay(tmp_path):
    holdout = views_archive(tmp_path / "a", cases=20, looks=True)
    policy = calibrate(holdout, "consensus")
    assert "agreement" in policy.appearance["names"]
    apart = {**policy.appearance, "patients": [[0.5, 0.98 + 0.001 * n] for n in range(10)]}
    assert policy.appearance["names"] == ("intensity mean of channel 0", "agreement")
    plain = casewise.replay(holdout, replace(policy, appearance={}))
    bound = casewise.replay(holdout, replace(policy, appearance=apart))
    low = [one.case_id for one in plain if one.agreement < 0.8]
    assert low
    assert {one.case_id for one in bound if one.flagged} >= set(low)
    assert [one.state for one in bound] == [one.state for one in plain]


def test_too_few_patients_for_flags_are_reported_before_anything_is_computed(tmp_path, monkeypatch):
    views_archive(tmp_path / "a", cases=8)
    monkeypatch.setattr(
        "casewise.judge.calibration.calibrate.fitted_choice", lambda *_, **options: 1 / options["flag_below"]
    )
    words = ["calibrate", str(tmp_path / "a"), "--flag-below", "0.7", "-o", str(tmp_path / "p.json")]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, TypeError)  # 1 / None: no flag is asked of the comparison
    assert "needs at least 9 patients, got 4" in result.output


def test_a_design_that_hurts_too_many_names_the_count_that_is_too_large():
    """Three of 20 cases were too many, and the sentence said "0 of 10 patients were hurt"."""
    change = [0.05, -0.02] * 3 + [0.05, 0.05] * 7
    said = hurt_share(change, [f"p{number // 2}" for number in range(20)]).excess()
    assert said == "3 of 20 cases lost more than 0.01, and at most 10% may"
