"""Acceptance criteria: what the file may say, and when a criterion holds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from casewise.core.errors import BadInput, UnknownName
from casewise.judge.certificates.risk_control import share_bound
from casewise.measure.changes import Comparison, LabelChange
from casewise.study import acceptance as acceptance_module
from casewise.study.acceptance import (
    COMPANION,
    FEWEST,
    acceptance_of,
    mean_bound,
    verdict_of,
)
from casewise.study.compared_cohort import ComparedCase, Comparisons


def case(number, old, new, *, group=None, cluster=None, ha=0.0, labelled=True, **row):
    """A case with one label."""
    lost, holes, after = (row.pop(name, default) for name, default in (("lost", 0), ("holes", 0), ("voxels_new", 100)))
    label = LabelChange(
        1, 100, after, 0, 1, 1, 0, lost, 0, 0, holes, 0, 0, 5 * lost, 2 * holes, dice_old=old, dice_new=new, ha=ha
    )  # fmt: skip
    scores = {"metric_old": old, "metric_new": new, "ha": ha, "ba": 0.0} if labelled else {}
    found = Comparison(1000, 10, row.pop("share", 0.1), 1, 10, (label,), labelled=labelled, **scores)
    return ComparedCase(f"c{number:03d}", found, group, cluster)


def checks_of(acceptance, cases, names=None):
    return acceptance_module.checks_of(acceptance, Comparisons(tuple(cases)).cohort, names)


def only(criteria, cases):
    """The check of the criterion that was asked for; a companion may follow it."""
    return checks_of(acceptance_of(criteria), cases)[0]


def test_a_mean_drop_is_bounded_by_t_over_patients():
    drops = np.linspace(-0.02, 0.03, 20)
    cases = [case(i, 0.9, 0.9 - drop) for i, drop in enumerate(drops)]
    check = only({"max_mean_drop": 0.02}, cases)
    spread = drops.std(ddof=1) / np.sqrt(20)
    assert check.bound == pytest.approx(drops.mean() + stats.t.ppf(0.95, 19) * spread)
    assert check.holds == (check.bound <= 0.02)
    assert only({"max_mean_drop": 0.02, "confidence": 0.99}, cases).bound > check.bound


def test_a_patient_counts_once():
    cases = [case(i, 0.9, 0.9 - 0.01 * (i % 3), cluster=f"p{i // 4}") for i in range(40)]
    check = only({"max_mean_drop": 0.1}, cases)
    assert (check.cases, check.patients) == (40, 10)
    assert only({"max_mean_drop": 0.1}, [case(i, 0.9, 0.9, cluster="p0") for i in range(40)]).patients == 1


def test_too_few_patients_show_nothing_unless_observed_values_are_enough():
    cases = [case(i, 0.9, 0.9) for i in range(FEWEST - 1)]
    check = only({"max_mean_drop": 0.5}, cases)
    assert (check.holds, check.bound) == (False, None)
    assert f"at least {FEWEST} patients: cannot be decided with {FEWEST - 1} patients" in check.reason
    assert only({"max_mean_drop": 0.5, "confidence": None}, cases).holds


def test_a_share_is_bounded_exactly():
    cases = [case(i, 0.9, 0.8 if i < 2 else 0.9) for i in range(50)]
    check = only({"max_harmed_share": {"limit": 0.2, "margin": 0.05}}, cases)
    assert check.value == pytest.approx(0.04)
    assert check.bound == pytest.approx(stats.beta.ppf(0.95, 3, 48))
    assert check.holds
    assert not only({"max_harmed_share": {"limit": 0.1, "margin": 0.05}}, cases).holds
    assert only({"max_harmed_share": {"limit": 0.1, "margin": 0.15}}, cases).value == 0


def test_margins_flips_holes_losses_and_drift_read_what_they_say():
    cases = [case(i, 0.8, 0.65, holes=i % 2, lost=1, voxels_new=80, share=0.3) for i in range(20)]
    assert only({"max_flipped_share": 0.99}, cases).value == 1
    assert only({"max_flipped_share": {"limit": 0.99, "margin": 0.6}}, cases).value == 0
    assert only({"max_holed_share": 0.99}, cases).value == 0.5
    assert only({"max_lost_share": 0.99}, cases).value == 1
    assert only({"max_lost_share": {"limit": 0.99, "margin": 0.06}}, cases).value == 0  # 5 of 100 voxels
    assert only({"max_holed_share": {"limit": 0.99, "margin": 0.015}}, cases).value == 0.5  # 2 of 100
    assert only({"max_drifted_share": {"limit": 0.99, "margin": 0.1}}, cases).value == 1
    assert only({"max_drifted_share": {"limit": 0.99, "margin": 0.25}}, cases).value == 0
    assert only({"max_changed_share": {"limit": 0.99, "margin": 0.25}}, cases).value == 1


def test_labels_and_groups_have_their_own_checks():
    cases = [case(i, 0.9, 0.9 if i < 20 else 0.8, group="A" if i < 20 else "B") for i in range(40)]
    plain = {"each_group": {"max_mean_drop": 0.05}, "each_label": {"max_mean_drop": 0.2}}
    found = {check.scope: check.holds for check in checks_of(acceptance_of(plain), cases)[:3]}
    assert found == {"group A": True, "group B": False, "label 1": True}
    assert only({"groups": {"A": {"max_mean_drop": 0.05}}}, cases).holds
    nobody = only({"groups": {"C": {"max_mean_drop": 0.05}}}, cases)
    assert not nobody.holds
    assert "no case with a label" in nobody.reason
    assert not only({"labels": {"7": {"max_mean_drop": 0.05}}}, cases).holds


def test_without_labels_only_what_needs_none_can_hold():
    cases = [case(i, None, None, labelled=False) for i in range(60)]
    assert not only({"max_mean_drop": 0.5}, cases).holds
    assert only({"max_holed_share": 0.1}, cases).holds


def test_undefined_values_are_left_out_and_counted():
    cases = [case(i, 0.9, 0.9) for i in range(20)] + [case(99, float("nan"), float("nan"))]
    check = only({"max_mean_drop": 0.05}, cases)
    assert (check.cases, check.undefined) == (20, 1)


@pytest.mark.parametrize(
    ("plain", "sentence"),
    [
        ([], "criteria must be a table"),
        ({}, "there is no criterion"),
        ({"confidence": 2, "max_ha": 0.1}, "confidence must be a number from 0.5 to below 1"),
        ({"max_ha": "low"}, r"max_ha must be a number or \{limit"),
        ({"max_ha": True}, r"max_ha must be a number or"),
        ({"max_ha": {"limit": 0.1, "marge": 1}}, r"max_ha must be a number or"),
        ({"max_ha": 3}, "max_ha bounds a share, so its limit must be from 0 to below 1"),
        ({"groups": {"A": 0.1}}, "groups 'A' must have criteria by name"),
        ({"each_label": 0.1}, "each_label must have criteria by name"),
    ],
)
def test_criteria_that_make_no_sense_are_refused(plain, sentence):
    with pytest.raises(BadInput, match=sentence):
        acceptance_of(plain)


def test_a_misspelt_criterion_is_recognized():
    with pytest.raises(UnknownName, match="Did you mean 'max_mean_drop'"):
        acceptance_of({"max_mean_drp": 0.1})


def test_bounds_hold_as_often_as_they_say():
    draw = np.random.default_rng(5)
    missed = {"share": 0, "mean": 0}
    for _ in range(400):
        harmed = (draw.random((30, 2)) < 0.15).mean(axis=1)
        missed["share"] += share_bound(harmed, 0.9, binary=False) < 0.15
        missed["mean"] += mean_bound(draw.normal(0.01, 0.02, 30), 0.9) < 0.01
    assert missed["share"] <= 40
    assert missed["mean"] <= 60  # 40 expected; three standard errors more


def test_labels_may_be_called_by_name():
    cases = [case(i, 0.9, 0.8) for i in range(20)]
    wanted = acceptance_of({"labels": {"LV": {"max_mean_drop": 0.05}, "1": {"max_mean_drop": 0.2}}})
    first, second, *_ = checks_of(wanted, cases, {1: "LV"})
    assert (first.scope, first.holds, second.scope, second.holds) == ("LV (1)", False, "LV (1)", True)


def test_a_mean_is_never_accepted_without_a_limit_on_the_harmed_share():
    few, many = ([case(i, 0.9, 0.9) for i in range(amount)] for amount in (20, 29))
    mean, harmed = checks_of(acceptance_of({"max_mean_drop": 0.005}), few)
    assert (mean.verdict, harmed.name, harmed.limit, harmed.margin) == ("met", "max_harmed_share", *COMPANION)
    assert (harmed.verdict, harmed.needed) == ("undecided", 29)
    assert verdict_of([mean, harmed]) == "undecided"
    assert verdict_of(checks_of(acceptance_of({"max_mean_drop": 0.005}), many)) == "accepted"
    assert len(acceptance_of({"max_mean_drop": 0.005, "max_harmed_share": 0.2}).criteria) == 2
    assert len(acceptance_of({"max_mean_drop": 0.005, "confidence": None}).criteria) == 1


def test_broken_and_undecided_are_two_verdicts_and_the_cases_are_named():
    worse = [case(i, 0.9, 0.7 if i % 2 else 0.9) for i in range(40)]
    mean, harmed = checks_of(acceptance_of({"max_mean_drop": 0.01}), worse)
    assert (mean.verdict, harmed.verdict) == ("broken", "broken")
    assert harmed.worst[0] == "c001"
    assert len(harmed.worst) == 20
    assert verdict_of([mean, harmed]) == "rejected"
    one = only({"max_harmed_share": 0.1}, [case(i, 0.9, 0.7 if i == 3 else 0.9) for i in range(5)])
    assert (one.verdict, one.worst, one.needed) == ("undecided", ("c003",), 29)
    all_five = only({"max_harmed_share": 0.1}, [case(i, 0.9, 0.7) for i in range(5)])
    assert all_five.verdict == "broken"  # that few show it already: its lower bound is above the limit
    alone = only({"max_mean_drop": 0.01}, [case(i, 0.9, 0.7, cluster="one") for i in range(9)])
    assert (alone.verdict, alone.bound) == ("undecided", None)


@pytest.mark.parametrize("place", ["label 2", "group B", "size small"])
def test_a_regression_in_one_label_one_site_or_one_size_class_is_found_and_named(place):
    """A quarter of the cases, or one label of four, loses 0.06; the mean over all cases hides it."""
    rng = np.random.default_rng(0)
    cases = []
    for number in range(80):
        site, small = "ABCD"[number % 4], number % 3 == 0
        rows = []
        for label in range(1, 5):
            hit = {"label 2": label == 2, "group B": site == "B", "size small": small}[place]
            old = 0.9 + rng.normal(0, 0.005)
            new = old + rng.normal(0, 0.005) + (-0.06 if hit else 0.02)
            rows.append(LabelChange(label, 100, 100, 5, 1, 1, 0, 0, 0, 0, 0, 0, dice_old=old, dice_new=new,
                                    voxels_label=100 + 10 * label + (0 if small else 1000 + number)))  # fmt: skip
        scores = {side: float(np.mean([getattr(row, f"dice_{side}") for row in rows])) for side in ("old", "new")}
        found = Comparison(10_000, 10, 0.1, 1, 10, tuple(rows), labelled=True, metric_old=scores["old"],
                           metric_new=scores["new"])  # fmt: skip
        cases.append(ComparedCase(f"c{number:03d}", found, site, f"p{number // 2}"))
    each = {"max_mean_drop": 0.02}
    wanted = {"max_mean_drop": 0.02, "each_label": each, "each_group": each, "each_size": each}
    checks = [one for one in checks_of(acceptance_of(wanted), cases) if one.name == "max_mean_drop"]
    broken = {one.scope for one in checks if one.verdict == "broken"}
    assert broken == {place}
    assert checks[0].holds  # on all cases together
    assert next(one for one in checks if one.scope == place).worst  # the cases are named
