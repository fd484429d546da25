"""p-values and families: the printed examples, the traps of other people's code, and plans."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from casewise.core.errors import BadInput
from casewise.judge.certificates.risk_control import (
    betting,
    betting_alpha,
    betting_cases,
    clopper_pearson_upper,
    crc_budget,
    exact_binomial,
    fixed_sequence,
    hoeffding_bentkus,
    ltt_alpha,
    ltt_budget,
    ltt_cases,
    p_values,
    plan,
)

FEW_LOSSES = np.r_[np.zeros(17), 0.1, 0.2, 0.1]


@pytest.mark.parametrize(("alpha", "hb", "wsr"), [(0.20, 0.047, 0.019), (0.15, 0.138, 0.063)])
def test_betting_beats_hoeffding_bentkus_on_the_printed_example(alpha, hb, wsr):
    assert float(hoeffding_bentkus(FEW_LOSSES.mean(), 20, alpha)) == pytest.approx(hb, abs=5e-4)
    assert float(betting(FEW_LOSSES, alpha)) == pytest.approx(wsr, abs=5e-4)


@pytest.mark.parametrize("kind", ["betting", "hoeffding-bentkus", "binomial"])
def test_an_always_harmful_setting_is_never_certified(kind):
    for alpha in (0.05, 0.1, 0.5, 0.9):
        for orders in (1, 25):
            assert p_values(np.ones((40, 1)), alpha, kind=kind, orders=orders)[0] == pytest.approx(1.0)


def test_without_losses_p_is_a_power_of_one_minus_alpha():
    for n, alpha in ((10, 0.2), (20, 0.1), (50, 0.05)):
        assert float(hoeffding_bentkus(0.0, n, alpha)) == pytest.approx((1 - alpha) ** n)
        assert float(exact_binomial(0.0, n, alpha)) == pytest.approx((1 - alpha) ** n)
        assert (1 - alpha) ** n <= float(betting(np.zeros(n), alpha)) < 1


def test_rounding_does_not_lift_a_count_over_the_next_integer():
    n, hits = 30, 3
    risk = np.mean([0.1] * n)  # 0.10000000000000002: n * risk is a hair above 3
    expected = np.e * stats.binom.cdf(hits, n, 0.5)
    assert float(hoeffding_bentkus(risk, n, 0.5)) <= expected + 1e-15


def test_a_risk_above_alpha_is_not_significant():
    assert float(hoeffding_bentkus(0.5, 20, 0.2)) == 1.0
    assert float(betting(np.full(20, 0.5), 0.2)) == 1.0


def test_averaging_over_many_orders_makes_p_stable():
    lucky, unlucky = np.sort(FEW_LOSSES), np.sort(FEW_LOSSES)[::-1]
    alone = abs(float(betting(lucky, 0.2)) - float(betting(unlucky, 0.2)))
    shuffled = [float(betting(row, 0.2, orders=200)) for row in (lucky, unlucky)]
    assert abs(shuffled[0] - shuffled[1]) < max(alone, 1e-3)


def test_the_binomial_test_wants_zeros_and_ones():
    with pytest.raises(BadInput, match="losses of 0 or 1"):
        p_values(np.array([[0.5]]), 0.1, kind="binomial")
    with pytest.raises(BadInput, match="got 'normal'"):
        p_values(np.array([[0.5]]), 0.1, kind="normal")


def test_a_fixed_sequence_stops_at_the_first_failure():
    p = [0.01, 0.04, 0.2, 0.01]
    assert fixed_sequence(p, [0, 1, 2, 3], 0.1).tolist() == [0, 1]
    assert fixed_sequence(p, [3, 0, 1, 2], 0.1).tolist() == [3, 0, 1]
    assert fixed_sequence([0.5], [0], 0.1).tolist() == []
    assert fixed_sequence([0.1], [0], 0.1).tolist() == [0]  # equal to delta is rejected as a null


def test_the_plan_prints_the_table_of_the_note():
    alphas = (0.05, 0.10, 0.15, 0.20, 0.30)
    assert [ltt_cases(a, 0.10) for a in alphas] == [45, 22, 15, 11, 7]
    assert [ltt_cases(a, 0.05) for a in alphas] == [59, 29, 19, 14, 9]
    assert ltt_cases(1e-300, 0.10) == pytest.approx(2.302585e300)
    printed = (0.251, 0.206, 0.109, 0.096, 0.070)  # rounded up in the note: a floor must not be rounded down
    assert [np.ceil(ltt_alpha(n, 0.10) * 1000) / 1000 for n in (8, 10, 20, 23, 32)] == pytest.approx(printed)
    assert clopper_pearson_upper(4, 20) == pytest.approx(0.361, abs=5e-4)
    assert clopper_pearson_upper(20, 20) == 1.0


def test_what_twenty_cases_can_promise():
    found = plan(0.2, 0.1, 20)
    assert found.crc_alpha == pytest.approx(1 / 21)
    assert found.crc_budget == pytest.approx(0.2 * 21 - 1)
    assert found.ltt_budget == 1
    assert stats.binom.cdf(1, 20, 0.2) <= 0.1 < stats.binom.cdf(2, 20, 0.2)
    assert plan(0.1, 0.1, 20).ltt_budget is None
    assert crc_budget(8, 0.1) is None
    assert crc_budget(9, 0.1) == pytest.approx(0.0)
    assert ltt_budget(22, 0.1, 0.1) == 0


@pytest.mark.parametrize(("alpha", "delta"), [(0.05, 0.1), (0.2, 0.05), (0.5, 0.3), (1e-6, 0.1), (0.999, 0.1)])
def test_the_budget_is_the_last_count_that_the_binomial_test_accepts(alpha, delta):
    for cases in (1, 2, 7, 22, 45, 200):
        passes = np.flatnonzero(stats.binom.cdf(np.arange(cases + 1), cases, alpha) <= delta)
        assert ltt_budget(cases, alpha, delta) == (passes[-1] if passes.size else None)


def test_a_billion_cases_are_planned_without_counting_them():
    budget = plan(0.1, 0.1, 10**9).ltt_budget
    assert stats.binom.cdf(budget, 10**9, 0.1) <= 0.1 < stats.binom.cdf(budget + 1, 10**9, 0.1)


def test_betting_needs_a_few_cases_more_and_says_so():
    n = betting_cases(0.2, 0.1)
    assert n >= ltt_cases(0.2, 0.1)
    assert float(betting(np.zeros(n), 0.2)) <= 0.1 < float(betting(np.zeros(n - 1), 0.2))
    assert betting_alpha(n, 0.1) <= 0.2 + 1e-4


@pytest.mark.parametrize(("alpha", "delta"), [(0, 0.1), (1, 0.1), (0.1, 0), (0.1, 1)])
def test_levels_outside_the_open_interval_are_refused(alpha, delta):
    with pytest.raises(BadInput, match="strictly between 0 and 1"):
        plan(alpha, delta)
