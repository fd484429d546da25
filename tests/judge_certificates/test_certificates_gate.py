"""The region gate: surrogate, deployed HA, and the envelope that stands between them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casewise.core.errors import BadInput
from casewise.judge.certificates.certify_gate import Gated, envelope, gate_table, gated, thresholds
from casewise.judge.certificates.risk_control import conformal_setting

THREE = gated(np.array([0.9, 0.5, 0.1]), np.array([20.0, 60.0, 20.0]), np.array([1.0, 0.0, 1.0]), 200)


def test_the_surrogate_divides_by_the_whole_edit_and_deployed_ha_by_what_was_accepted():
    assert THREE.surrogate.tolist() == pytest.approx([0, 0.1, 0.1, 0.2])
    assert THREE.deployed.tolist() == pytest.approx([0, 1.0, 0.25, 0.4])
    assert THREE.kept.tolist() == pytest.approx([0, 0.2, 0.8, 1.0])


def test_deployed_ha_is_not_monotone_and_its_envelope_is():
    deployed, safe = gate_table([THREE], "deployed"), gate_table([THREE], "envelope")
    assert not deployed.is_monotone
    assert safe.is_monotone
    assert (safe.losses >= deployed.losses).all()
    with pytest.raises(BadInput, match="use the envelope"):
        conformal_setting(deployed, 0.9)


def test_a_region_at_the_threshold_is_rejected():
    table = gate_table([THREE], "surrogate", at=np.array([0.9, 0.5, 0.1, -np.inf]))
    assert table.losses[0].tolist() == pytest.approx([0, 0.1, 0.1, 0.2])  # s > threshold, so 0.9 accepts nothing


def test_tied_scores_enter_together():
    case = gated(np.array([0.5, 0.5]), np.array([30.0, 10.0]), np.array([1.0, 0.0]), 40)
    assert case.scores.tolist() == [0.5]
    assert case.deployed.tolist() == pytest.approx([0, 0.75])


def test_a_case_without_regions_costs_nothing_and_lowers_the_floor():
    empty = gated(np.empty(0), np.empty(0), np.empty(0), 0)
    assert thresholds([empty]).tolist() == [-np.inf]
    alone, together = gate_table([THREE], "surrogate"), gate_table([THREE, empty], "surrogate")
    assert together.units == alone.units + 1
    assert together.losses[1].tolist() == [0] * 4


def test_an_envelope_of_the_average_is_not_the_average_of_envelopes():
    # the peaks of two cases are at different thresholds; only the mean of the envelopes contains both
    curves = np.array([[0, 1.0, 0.0, 0.0], [0, 0.0, 0.0, 1.0]])
    assert envelope(curves.mean(axis=0))[-1] == 0.5
    assert np.mean([envelope(curve)[-1] for curve in curves]) == 1.0


def test_accepting_nothing_must_cost_nothing():
    with pytest.raises(BadInput, match="the loss must be 0"):
        Gated(np.array([0.5]), np.array([0.1, 0.2]), np.array([0.0, 0.2]), np.array([0.0, 1.0]))


regions = st.lists(st.tuples(st.floats(-1, 1), st.integers(16, 200), st.booleans()), max_size=6)


@given(st.lists(regions, min_size=1, max_size=6))
def test_the_envelope_always_dominates_and_the_surrogate_is_always_monotone(cases):
    built = []
    for rows in cases:
        scores, sizes, harmful = np.array(rows, dtype=float).reshape(-1, 3).T
        built.append(gated(scores, sizes, harmful, int(sizes.sum()) + 5))
    surrogate, deployed, safe = (gate_table(built, name) for name in ("surrogate", "deployed", "envelope"))
    assert surrogate.is_monotone
    assert safe.is_monotone
    assert (safe.losses >= deployed.losses - 1e-12).all()
    assert (deployed.losses >= surrogate.losses - 1e-12).all()  # what was accepted is at most the whole edit
