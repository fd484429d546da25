"""CRC by its cut: exact jump points, ties, equality, and the difference between everything and nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casewise.core.errors import BadInput
from casewise.judge.certificates.evidence import Evidence, LossTable, cluster_rows, rollback_table
from casewise.judge.certificates.risk_control import (
    conformal_bounds,
    conformal_cases,
    conformal_floor,
    conformal_setting,
    left_out_risk,
)


def cut(values, losses, alpha, **more):
    table = rollback_table(values, losses, **more)
    at = conformal_setting(table, alpha)
    return None if at is None else table.settings[at]


def test_everything_safe_and_nothing_safe_are_told_apart():
    assert cut(np.arange(20.0), np.zeros(20), 0.1) == np.inf
    assert cut(np.arange(8.0), np.zeros(8), 0.1) is None


def test_a_harmful_everywhere_router_is_certified_only_by_keeping_nothing():
    values = np.arange(20.0)
    assert cut(values, np.ones(20), 0.05) == 0.0  # rolls back every calibration case
    assert cut(values, np.ones(20), 0.10) == 1.0  # (1 + 1) / 21 <= 0.1: one case of twenty may be kept


def test_a_bound_equal_to_alpha_is_accepted():
    table = rollback_table(np.arange(9.0), np.zeros(9))
    assert conformal_bounds(table)[0] == pytest.approx(0.1)
    assert conformal_setting(table, 0.1) is not None
    assert conformal_setting(table, 0.0999) is None
    for n in range(1, 60):  # 1/(n+1) is rarely exact in binary
        assert conformal_setting(rollback_table(np.arange(float(n)), np.zeros(n)), 1 / (n + 1)) is not None


def test_tied_coordinates_are_kept_or_rolled_back_together():
    table = rollback_table([1, 1, 1, 2, 2, 3], [0, 0, 1, 0, 0, 0])
    assert table.settings.tolist() == [1, 2, 3, np.inf]
    assert table.kept.tolist() == [0, 0.5, 5 / 6, 1]
    assert table.risks.tolist() == pytest.approx([0, 1 / 6, 1 / 6, 1 / 6])


def test_a_case_at_the_cut_is_rolled_back():
    table = rollback_table([1.0, 2.0], [1.0, 1.0])
    assert table.losses[:, table.settings.tolist().index(2.0)].tolist() == [1.0, 0.0]


def test_the_certified_cut_is_a_jump_point_and_the_next_one_is_not_safe():
    rng = np.random.default_rng(3)
    values, losses = rng.random(50), rng.random(50) * (rng.random(50) < 0.4)
    table = rollback_table(values, losses)
    at = conformal_setting(table, 0.1)
    bounds = conformal_bounds(table)
    assert bounds[at] <= 0.1 < bounds[at + 1]
    fine = np.linspace(values.min(), values.max(), 37)  # a grid can only lose power
    safe = [c for c in fine if (losses[values < c].sum() + 1) / 51 <= 0.1]
    assert max(safe) <= table.settings[at + 1]
    assert (values < max(safe)).sum() <= (values < table.settings[at]).sum()


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1)), min_size=1, max_size=30), st.floats(0.01, 0.9))
def test_the_cut_is_none_iff_n_is_below_the_floor(cases, alpha):
    values, losses = zip(*cases, strict=True)
    found = cut(values, losses, alpha)
    assert (found is None) == (conformal_floor(len(cases)) > alpha + 1e-12)


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1)), min_size=3, max_size=30))
def test_a_larger_alpha_never_keeps_less(cases):
    values, losses = zip(*cases, strict=True)
    cuts = [cut(values, losses, alpha) for alpha in (0.3, 0.5, 0.7)]
    known = [c for c in cuts if c is not None]
    assert known == sorted(known)


def test_more_cases_are_asked_for_as_the_table_says():
    assert [conformal_cases(a) for a in (0.05, 0.1, 0.15, 0.2, 0.3)] == [19, 9, 6, 4, 3]
    for alpha in (0.05, 0.1, 0.15, 0.2, 0.3):
        n = conformal_cases(alpha)
        assert conformal_floor(n) <= alpha + 1e-12 < conformal_floor(n - 1)


def test_losses_that_fall_are_refused_with_advice():
    table = LossTable(np.array([[0.5, 0.1]]), np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    with pytest.raises(BadInput, match=r"use the envelope or method 'ltt'"):
        conformal_setting(table, 0.9)


@pytest.mark.parametrize("losses", [[1.5, 0], [-0.1, 0], [np.nan, 0]])
def test_losses_outside_the_unit_interval_are_refused(losses):
    with pytest.raises(BadInput, match=r"finite and in \[0, 1\]"):
        rollback_table([0, 1], losses)


def test_two_scans_of_a_patient_count_as_one():
    values, losses = [1, 2, 3, 4], [0.0, 1.0, 0.5, 0.5]
    mean = rollback_table(values, losses, clusters=["a", "a", "b", "b"])
    worst = rollback_table(values, losses, clusters=["a", "a", "b", "b"], within="max")
    assert mean.units == worst.units == 2
    assert mean.losses[:, -1].tolist() == [0.5, 0.5]
    assert worst.losses[:, -1].tolist() == [1.0, 0.5]
    assert mean.is_monotone
    assert worst.is_monotone


def test_an_unknown_cluster_join_is_refused():
    with pytest.raises(BadInput, match="'mean' or 'max'"):
        cluster_rows(np.zeros((2, 1)), ["a", "b"], "median")


def test_the_envelope_is_the_worse_action():
    low, mid = {"ha": np.array([0.1, 0.5])}, {"ha": np.array([0.3, 0.2])}
    assert Evidence(("a", "b"), ("a", "b"), np.zeros(2), low, mid, low).loss("ha").tolist() == [0.3, 0.5]


def test_the_left_out_risk_uses_the_setting_of_the_others():
    assert left_out_risk(rollback_table(np.arange(9.0), np.zeros(9)), 0.1) is None  # 8 cases cannot promise 0.1
    table = rollback_table(np.arange(20.0), np.r_[np.zeros(19), 1.0])
    by_hand = []
    for i in range(20):
        rest = np.delete(table.losses, i, axis=0)
        safe = np.flatnonzero((rest.sum(axis=0) + 1) / 20 <= 0.1 + 1e-12)
        by_hand.append(table.losses[i, safe[-1]])
    assert left_out_risk(table, 0.1) == pytest.approx(np.mean(by_hand))
