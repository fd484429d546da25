"""CRC, Hoeffding-Bentkus and families against MAPIE 1.6.0 where it is right, and where it is not, pinned."""

from __future__ import annotations

import numpy as np
import pytest
from mapie.risk_control.fwer_control import control_fwer
from mapie.risk_control.methods import (
    compute_hoeffding_bentkus_p_value,
    find_best_predict_param,
    get_r_hat_plus,
)
from scipy import stats

from casewise.judge.certificates.evidence import rollback_table
from casewise.judge.certificates.risk_control import (
    betting_process,
    conformal_bounds,
    conformal_setting,
    exact_binomial,
    fixed_sequence,
    hoeffding_bentkus,
)


def crc_of_mapie(table, alpha):
    risk, bound = get_r_hat_plus(table.losses, table.settings, "crc", None, None, None)
    return risk, bound, find_best_predict_param(np.arange(len(table.settings)), bound, np.array([alpha]))[0]


@pytest.mark.parametrize("seed", range(5))
def test_bounds_and_cuts_agree_with_mapie(seed):
    rng = np.random.default_rng(seed)
    table = rollback_table(rng.random(40), rng.random(40) * (rng.random(40) < 0.4))
    for alpha in (0.05, 0.1, 0.1731):
        risk, bound, at = crc_of_mapie(table, alpha)
        np.testing.assert_allclose(table.risks, risk)
        np.testing.assert_allclose(conformal_bounds(table), bound)
        assert conformal_setting(table, alpha) == at


def test_mapie_rejects_a_bound_equal_to_alpha_and_we_do_not():
    # 3 units, bounds 1/4, 1/4, 1/4, 1/2 (exact in binary): at alpha = 1/2 everything may be kept
    table = rollback_table([1.0, 2.0, 3.0], [0.0, 0.0, 1.0])
    assert conformal_bounds(table).tolist() == [0.25, 0.25, 0.25, 0.5]
    assert conformal_setting(table, 0.5) == 3
    assert crc_of_mapie(table, 0.5)[2] == 2


def test_mapie_answers_infeasible_with_an_end_point_and_we_with_none():
    table = rollback_table(np.arange(8.0), np.r_[np.zeros(7), 1.0])
    with pytest.warns(UserWarning, match="cannot be controlled"):
        at = crc_of_mapie(table, 0.1)[2]
    assert table.settings[at] == 0.0  # a number like any other
    assert conformal_setting(table, 0.1) is None


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2, 0.5])
def test_hoeffding_bentkus_agrees_with_mapie(alpha):
    for n in (10, 20, 50):
        risks = np.linspace(0.0031, 0.97, 23)
        theirs = compute_hoeffding_bentkus_p_value(risks, n, alpha)[:, 0]
        np.testing.assert_allclose(hoeffding_bentkus(risks, n, alpha), np.minimum(theirs, 1.0), rtol=1e-9)


def test_the_exact_binomial_test_agrees_with_scipy():
    for hits in (0, 1, 4, 9):
        expected = stats.binomtest(hits, 20, 0.3, alternative="less").pvalue
        assert float(exact_binomial(hits / 20, 20, 0.3)) == pytest.approx(expected)


def test_mapie_lets_rounding_lift_a_count():
    # 30 losses of 0.1 average to 0.10000000000000003, thirty times that is a hair above 3, and ceil says 4
    risk, n, alpha = float(np.mean([0.1] * 30)), 30, 0.4
    guarded, unguarded = np.e * stats.binom.cdf([3, 4], n, alpha)
    assert unguarded > guarded
    theirs = float(compute_hoeffding_bentkus_p_value(np.array([risk]), n, alpha)[0, 0])
    assert float(hoeffding_bentkus(risk, n, alpha)) == pytest.approx(guarded)
    assert theirs > float(hoeffding_bentkus(risk, n, alpha))


@pytest.mark.parametrize("seed", range(10))
def test_families_agree_with_mapie(seed):
    p = np.random.default_rng(seed).random(12) ** 4
    assert fixed_sequence(p, np.arange(12), 0.1).tolist() == control_fwer(p, 0.1, "fixed_sequence").tolist()


def test_a_two_sided_martingale_certifies_an_always_harmful_setting_and_ours_does_not():
    # the trap of a published wsr_p_value: wealth that also bets on losses ABOVE alpha gets rich on pure harm
    harmful = np.ones(20)
    ours = betting_process(harmful, 0.1, 0.1)
    above = np.prod(1 + 0.5 * (harmful - 0.1))
    assert ours.max() < 1
    assert 1 / (0.5 * ours[-1] + 0.5 * above) < 0.01  # read as a p-value, "certified"


@pytest.mark.slow
def test_the_wsr_bound_of_mapie_is_below_the_mean_too_often():
    # it adds the maxima of two halves, of which the second restarts: not a martingale any more
    rng = np.random.default_rng(0)
    grid, mean, delta, repetitions = np.linspace(0, 1, 41), 0.31, 0.1, 1000
    below = 0
    for _ in range(repetitions):
        losses = np.repeat((rng.random(20) < mean).astype(float)[:, None], len(grid), axis=1)
        below += get_r_hat_plus(losses, grid, "rcps", "wsr", delta, 0.25)[1][0] < mean
    assert below / repetitions > delta + 3 * np.sqrt(delta * (1 - delta) / repetitions)
