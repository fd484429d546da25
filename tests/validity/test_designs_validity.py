"""Several designs certified together (T6, T8) in worlds whose risk is known: the bound is corrected for the choice.

``best_certified``, the search of ``certify_designs``, makes its own choice; only the archive is replaced by draws.
"""

from __future__ import annotations

import pytest
from worlds.risks import grid_outcome

from casewise.judge.certificates.certify_router import Promise

FEW, MANY, DELTA = 60, 2000, 0.1
ALPHAS = {10: (0.35, 0.4, 0.5), 20: (0.2, 0.25, 0.3), 50: (0.15, 0.2, 0.3)}
CELLS = [(n, alpha, severity) for n in ALPHAS for alpha in ALPHAS[n] for severity in ("binary", "continuous")]
ONE, BOTH = ("ha",), ("ha", "harmed")


def chosen(n, alpha, severity, repetitions, *, family="chains", losses=ONE, p_value="hoeffding-bentkus"):
    asked = Promise(losses, (alpha,) * len(losses), DELTA)
    return grid_outcome(family, asked, n=n, severity=severity, repetitions=repetitions, kind=p_value)


@pytest.mark.parametrize("losses", [ONE, BOTH])
def test_several_designs_keep_their_promise_together(losses):
    found = chosen(50, 0.3, "binary", FEW, losses=losses)
    assert found.holds_with_probability(DELTA)
    assert found.refused < 0.5  # something is certified; with no certificate every promise would hold


def test_the_best_empirical_configuration_breaks_the_promise():
    assert not chosen(50, 0.3, "binary", FEW, family="naive").holds_with_probability(DELTA)


def test_nothing_is_certified_where_even_no_loss_would_not_do():
    found = chosen(10, 0.3, "discrete", 10)
    assert found.refused == 1.0
    assert found.risk == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("losses", [ONE, BOTH])
@pytest.mark.parametrize(("n", "alpha", "severity"), CELLS)
def test_several_designs_keep_their_promise_everywhere(n, alpha, severity, losses):
    assert chosen(n, alpha, severity, MANY, losses=losses).holds_with_probability(DELTA)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "alpha"), [(10, 0.4), (20, 0.2), (20, 0.25)])
def test_betting_keeps_the_promise_too(n, alpha):
    assert chosen(n, alpha, "discrete", MANY, p_value="betting").holds_with_probability(DELTA)
