"""Risk-coverage curves: by hand, by an independent computation, and their limits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casewise.core.errors import BadInput
from casewise.measure.metrics.selective import auroc, risk_coverage


def test_three_cases_by_hand() -> None:
    found = risk_coverage([0.2, 0.9, 0.5], [0.6, 0.0, 0.3])
    assert found.risk.tolist() == pytest.approx([0.0, 0.15, 0.3])
    assert found.aurc == pytest.approx((0.075 + 0.225) / 2)
    assert found.normalized == pytest.approx(1.0)
    worst = risk_coverage([0.9, 0.2, 0.5], [0.6, 0.0, 0.3])
    assert worst.risk.tolist() == pytest.approx([0.6, 0.45, 0.3])
    assert worst.normalized == pytest.approx(-1.0)
    assert worst.excess == pytest.approx(0.45 - 0.15)


def test_a_confidence_that_says_nothing_has_the_mean_risk() -> None:
    risks = [0.6, 0.0, 0.3, 0.1]
    assert risk_coverage([1, 1, 1, 1], risks).aurc == pytest.approx(0.25)
    orders = [risk_coverage(order, risks).aurc for order in itertools.permutations(range(4))]
    assert np.mean(orders) == pytest.approx(0.25)


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), min_size=2, max_size=12))
def test_ties_are_the_mean_over_their_orders(cases: list[tuple[int, float]]) -> None:
    sure, risk = map(np.array, zip(*cases, strict=True))
    found = risk_coverage(sure, risk)
    rng, drawn = np.random.default_rng(0), []
    for _ in range(200):
        order = np.lexsort((rng.random(len(sure)), -sure))
        drawn.append(np.cumsum(risk[order]) / np.arange(1, len(risk) + 1))
    assert found.risk == pytest.approx(np.mean(drawn, axis=0), abs=0.25)
    assert found.optimum <= found.aurc + 1e-12
    assert found.risk[-1] == pytest.approx(risk.mean())


def test_auroc_counts_pairs() -> None:
    assert auroc([3, 1, 2, 2], [True, False, True, False]) == pytest.approx((2 + 1.5) / 4)
    assert np.isnan(auroc([1, 2], [True, True]))


def test_what_cannot_be_ordered_is_refused() -> None:
    with pytest.raises(BadInput, match="at least two cases, got 1"):
        risk_coverage([1], [1])
    with pytest.raises(BadInput, match="must be finite; leave out cases without a label"):
        risk_coverage([1, np.nan], [1, 0])
