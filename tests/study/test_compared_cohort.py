"""``casewise.compare`` on one case and on many: the same numbers as a plain statement, and patients counted once."""

from __future__ import annotations

import json

import numpy as np
import pytest
from worlds.updates import heart, planted

import casewise
from casewise.core.errors import BadInput
from casewise.core.formats import json_text
from casewise.measure.metrics.overlap import dice
from casewise.report.comparison_text import plain_interval
from casewise.study.compared_cohort import Comparisons, comparison_of
from casewise.study.statistics.resample import mean_interval

KINDS = ("hole", "lost", "", "shifted", "vanished", "")
OLD = [heart(8.0 + number % 2) for number in range(6)]
NEW = [planted(kind, mask) for kind, mask in zip(KINDS, OLD, strict=True)]


def test_two_arrays_give_a_comparison_and_two_sequences_a_cohort():
    one = casewise.compare(OLD[0], NEW[0], OLD[0])
    many = casewise.compare(OLD, NEW, OLD)
    assert isinstance(many, Comparisons)
    assert many.cases[0].found == one
    assert casewise.compare(OLD, NEW).summary.keys() < many.summary.keys()  # no label, no judgement


def test_helped_and_hurt_come_with_intervals_by_cluster():
    patients = ["a", "a", "b", "b", "c", "d"]
    found = casewise.compare(OLD, NEW, OLD, clusters=patients).summary
    change = np.array([dice(new, old) - 1 for old, new in zip(OLD, NEW, strict=True)])
    wanted = mean_interval(np.round(change, 12), clusters=np.array([0, 0, 1, 1, 2, 3]))
    assert found["change"]["estimate"] == pytest.approx(change.mean())
    assert (found["change"]["low"], found["change"]["high"]) == pytest.approx((wanted.low, wanted.high))
    assert (found["helped"], found["hurt"], found["unchanged"], found["clusters"]) == (0, 4, 2, 4)
    assert found["hurt_share"]["estimate"] == pytest.approx(4 / 6)
    assert found["flipped"] == ["4"]


def test_a_share_is_not_below_zero_and_equal_values_have_no_interval():
    """Ten patients that all keep their mask do not show that no other patient's mask changes."""
    old, new = [OLD[0]] * 10, [NEW[1], *[OLD[0]] * 9]
    found = casewise.compare(old, new, old).summary
    assert found["ha"]["low"] == 0 < found["ha"]["high"]
    assert found["change"]["low"] < found["change"]["estimate"] < 0
    same = casewise.compare(old, old, old).summary
    assert (same["change"]["estimate"], same["change"]["low"]) == (0, None)
    assert plain_interval(same["change"]) == "0.000 (all values are equal: no interval)"


def test_the_drift_of_a_label_is_that_of_all_its_voxels():
    rows = {row["label"]: row for row in casewise.compare(OLD, NEW).summary["labels"]}
    before, after = (sum(int((mask == 3).sum()) for mask in masks) for masks in (OLD, NEW))
    assert rows[3]["drift"]["estimate"] == pytest.approx(after / before - 1)
    assert (rows[1]["holes_gained"], rows[3]["components_lost"], rows[3]["cases_with_lost_components"]) == (1, 3, 2)


def test_the_worst_come_first_with_and_without_labels():
    for labels in (OLD, None):
        order = [case.id for case in casewise.compare(OLD, NEW, labels).worst_first]
        assert set(order[:4]) == {"0", "1", "3", "4"}
        assert set(order[4:]) == {"2", "5"}
    assert casewise.compare(OLD, NEW, OLD).worst_first[0].id == "4"


def test_generators_are_taken_case_by_case():
    alive, most = 0, 0

    def masks(which):
        nonlocal alive, most
        for mask in which:
            alive += 1
            most = max(most, alive)
            yield mask
            alive -= 1

    found = casewise.compare(masks(OLD), masks(NEW), masks(OLD))
    assert len(found.cases) == 6
    assert most <= 3


def test_a_comparison_survives_json():
    for label in (OLD[4], None):
        found = casewise.compare(OLD[4], NEW[4], label, surfaces="all")
        back = comparison_of(json.loads(json_text(found.as_dict())))
        assert json_text(back.as_dict()) == json_text(found.as_dict())


def test_what_cannot_be_compared_is_reported():
    with pytest.raises(BadInput, match="two masks, two sequences of masks or two folders, got one of each"):
        casewise.compare(OLD[0], NEW)
    with pytest.raises(BadInput, match="one of them ended after 6"):
        casewise.compare(OLD, [*NEW, NEW[0]])
    with pytest.raises(BadInput, match="need sequences of masks"):
        casewise.compare(OLD[0], NEW[0], clusters=["a"])


def test_intervals_of_large_cohorts_are_those_of_the_bootstrap_without_its_memory():
    from casewise.study.compared_cohort import MANY, _mean, _ratio

    draw = np.random.default_rng(0)
    of = np.repeat(np.arange(MANY), 2)
    values = draw.normal(0.02, 0.1, MANY)[of] + draw.normal(0, 0.05, of.size)
    slow, fast = mean_interval(values, clusters=of), _mean(values, of)
    assert (fast.method, fast.n, fast.clusters) == ("t", 2 * MANY, MANY)
    assert fast.estimate == pytest.approx(slow.estimate)
    width = slow.high - slow.low
    assert (fast.low, fast.high) == pytest.approx((slow.low, slow.high), abs=0.08 * width)
    assert fast.shown == slow.shown
    still = _ratio(np.zeros(MANY), np.ones(MANY), n=MANY)
    assert (still.low, still.high, still.shown) == (0.0, 0.0, False)


def test_arrays_take_their_labels_by_the_name_that_folders_use():
    old, new = np.zeros((4, 6), np.uint8), np.eye(4, 6, dtype=np.uint8)
    assert casewise.compare([old], [new], labels=[new]).summary["helped"] == 1
