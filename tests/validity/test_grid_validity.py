"""Choosing among many settings (T6, T7, T8) in worlds whose risk is known: the price of the choice is really paid.

Grids run ``searched``, the search of ``certify_grid``, with its own choice; only the archive is replaced by draws.
"""

from __future__ import annotations

import pytest
from worlds.risks import grid_outcome, inflated_outcomes

from casewise.judge.certificates.certify_router import Promise
from casewise.judge.certificates.risk_control import inflation

FEW, MANY, DELTA, THRESHOLDS = 60, 2000, 0.1, 4
ALPHAS = {10: (0.35, 0.4, 0.5), 20: (0.2, 0.25, 0.3), 50: (0.15, 0.2, 0.3)}  # what half of n supports, about
CELLS = [(n, alpha, severity) for n in ALPHAS for alpha in ALPHAS[n] for severity in ("binary", "continuous")]
ONE, BOTH = ("ha",), ("ha", "harmed")


def searched(family, n, alpha, severity, repetitions, *, losses=ONE, p_value="hoeffding-bentkus"):
    asked = Promise(losses, (alpha,) * len(losses), DELTA, p_value)
    return grid_outcome(family, asked, n=n, severity=severity, repetitions=repetitions)


@pytest.mark.parametrize(("family", "losses"), [("chains", ONE), ("holm", ONE), ("pareto", ONE), ("pareto", BOTH)])
def test_a_grid_keeps_its_promise(family, losses):
    found = searched(family, 50, 0.3, "binary", FEW, losses=losses)
    assert found.holds_with_probability(DELTA)
    assert found.refused < 0.5  # it does certify: silence would keep any promise


def test_the_best_empirical_configuration_breaks_the_promise():
    assert not searched("naive", 50, 0.3, "binary", FEW).holds_with_probability(DELTA)


@pytest.mark.parametrize(("family", "n", "alpha"), [("chains", 10, 0.3), ("holm", 20, 0.25), ("pareto", 10, 0.3)])
def test_a_grid_refuses_where_even_no_loss_would_not_do(family, n, alpha):
    found = searched(family, n, alpha, "discrete", 10)
    assert found.refused == 1.0
    assert found.risk == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["chains", "holm", "pareto"])
@pytest.mark.parametrize(("n", "alpha", "severity"), CELLS)
def test_a_grid_keeps_its_promise_everywhere(family, n, alpha, severity):
    assert searched(family, n, alpha, severity, MANY).holds_with_probability(DELTA)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["chains", "pareto"])
@pytest.mark.parametrize(("n", "alpha", "severity"), CELLS)
def test_a_grid_of_two_risks_keeps_its_promise_everywhere(family, n, alpha, severity):
    assert searched(family, n, alpha, severity, MANY, losses=BOTH).holds_with_probability(DELTA)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "alpha", "severity", "p_value"),
    [
        (10, 0.4, "discrete", "betting"),
        (20, 0.2, "discrete", "betting"),
        (20, 0.25, "discrete", "betting"),
        (20, 0.3, "discrete", "hoeffding-bentkus"),
        (50, 0.15, "discrete", "hoeffding-bentkus"),
    ],
)
def test_chains_keep_their_promise_for_other_losses_and_p_values(n, alpha, severity, p_value):
    assert searched("chains", n, alpha, severity, MANY, p_value=p_value).holds_with_probability(DELTA)


def check_inflated(n, alpha, loss, repetitions):
    """The promise, and a refusal every time where the price alone exceeds alpha."""
    found = inflated_outcomes(n=n, alpha=alpha, loss=loss, repetitions=repetitions)["inflated"]
    assert found.holds_in_expectation(alpha)
    if inflation(n, THRESHOLDS) > alpha:
        assert found.refused == 1.0
        assert found.risk == 0.0


@pytest.mark.parametrize(("n", "alpha"), [(10, 0.1), (20, 0.1), (50, 0.1), (200, 0.2)])
def test_inflated_crc_keeps_its_promise_or_refuses(n, alpha):
    check_inflated(n, alpha, "continuous", FEW)


def test_inflated_crc_certifies_with_enough_cases_and_the_naive_choice_is_over_alpha_with_few():
    assert inflated_outcomes(n=500, alpha=0.2, loss="continuous", repetitions=FEW)["inflated"].refused == 0.0
    assert not inflated_outcomes(n=10, alpha=0.1, loss="discrete", repetitions=200)["naive"].holds_in_expectation(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["continuous", "discrete"])
@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.3])
@pytest.mark.parametrize("n", [10, 20, 50, 200, 500])
def test_inflated_crc_keeps_its_promise_or_refuses_everywhere(n, alpha, loss):
    check_inflated(n, alpha, loss, MANY)
