"""Promises against worlds whose risk is known: never broken by more than three sigma of Monte Carlo error.

The fast half runs 200 repetitions in a few cells; the slow half is the whole grid with 2,000 (docs/explanation has it).
"""

from __future__ import annotations

import numpy as np
import pytest
from worlds.risks import (
    SEVERITIES,
    crc_cut,
    empirical_cut,
    gate_cases,
    gate_cuts,
    gate_jumps,
    gate_outcomes,
    ltt_cuts,
    router_cases,
    router_outcome,
    router_risk,
)

from casewise.judge.certificates.certify_gate import gate_table
from casewise.judge.certificates.evidence import rollback_table

FEW, MANY = 200, 2000
GRID = [(n, alpha) for n in (10, 20, 50) for alpha in (0.1, 0.15, 0.2, 0.3)]
TESTED = [(10, 0.25), (10, 0.3), (10, 0.4), (20, 0.15), (20, 0.2), (20, 0.3), (50, 0.1), (50, 0.2), (50, 0.3)]
GATES = [(10, 0.15), (10, 0.2), (10, 0.3), (20, 0.1), (20, 0.2), (20, 0.3), (50, 0.1), (50, 0.2), (50, 0.3)]


def certified_in_expectation(n, alpha, severity, repetitions):
    return router_outcome(
        lambda tables: [crc_cut(table, alpha) for table in tables],
        n=n,
        alpha=alpha,
        severity=severity,
        repetitions=repetitions,
    )


def certified_with_probability(n, alpha, severity, kind, repetitions, *, delta=0.1, orders=1):
    return router_outcome(
        lambda tables: ltt_cuts(tables, alpha, delta, kind, orders),
        n=n,
        alpha=alpha,
        severity=severity,
        repetitions=repetitions,
    )


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize(("n", "alpha"), [(10, 0.15), (20, 0.1), (50, 0.2)])
def test_crc_keeps_its_promise(n, alpha, severity):
    assert certified_in_expectation(n, alpha, severity, FEW).holds_in_expectation(alpha)


@pytest.mark.slow
@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize(("n", "alpha"), GRID)
def test_crc_keeps_its_promise_everywhere(n, alpha, severity):
    assert certified_in_expectation(n, alpha, severity, MANY).holds_in_expectation(alpha)


def test_the_empirical_cut_breaks_its_promise():
    found = router_outcome(
        lambda tables: [empirical_cut(table, 0.1) for table in tables],
        n=20,
        alpha=0.1,
        severity="binary",
        repetitions=FEW,
    )
    assert not found.holds_in_expectation(0.1)


@pytest.mark.parametrize(
    ("severity", "kind"), [("binary", "binomial"), ("discrete", "betting"), ("continuous", "hoeffding-bentkus")]
)
def test_learn_then_test_keeps_its_promise(severity, kind):
    assert certified_with_probability(20, 0.2, severity, kind, FEW).holds_with_probability(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["binomial", "betting", "hoeffding-bentkus"])
@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize(("n", "alpha"), TESTED)
def test_learn_then_test_keeps_its_promise_everywhere(n, alpha, severity, kind):
    if kind == "binomial" and severity != "binary":
        pytest.skip("the binomial test is for losses of 0 or 1")
    for orders in (1, 25) if kind == "betting" else (1,):
        found = certified_with_probability(n, alpha, severity, kind, MANY, orders=orders)
        assert found.holds_with_probability(0.1)


def gates(n, alpha, repetitions):
    return gate_outcomes(n=n, alpha=alpha, repetitions=repetitions, population=4000)


def test_the_envelope_bounds_the_deployed_harm_and_the_surrogate_does_not():
    found = gates(50, 0.2, FEW)
    assert found["envelope"].holds_in_expectation(0.2)
    assert not found["surrogate"].holds_in_expectation(0.2)  # the paper's gate, read as deployed HA


@pytest.mark.slow
@pytest.mark.parametrize(("n", "alpha"), GATES)
def test_the_surrogate_and_the_envelope_keep_their_own_promises_everywhere(n, alpha):
    found = gates(n, alpha, MANY)
    assert found["own"].holds_in_expectation(alpha)
    assert found["envelope"].holds_in_expectation(alpha)
    if n >= 20:
        assert not found["surrogate"].holds_in_expectation(alpha)


@pytest.mark.parametrize("alpha", [0.04, 0.1, 0.3])
def test_simulated_gates_are_those_of_the_certificate(alpha):
    rng = np.random.default_rng(8)
    for _ in range(10):
        cases = gate_cases(rng, 20)
        scores, jumps = gate_jumps(cases)
        for loss in ("surrogate", "envelope"):
            (cut,) = gate_cuts(scores[None], jumps[loss][None], alpha)
            assert (None if np.isnan(cut) else cut) == crc_cut(gate_table(cases, loss), alpha)


def test_the_surrogate_is_bounded_by_its_own_certificate():
    found = gates(20, 0.1, FEW)["own"]
    assert found.risk > 0.03
    assert found.holds_in_expectation(0.1)


def clustered_risk(alpha, repetitions, *, by_patient):
    """The three scans of a patient are harmed together: 20 patients are 20 units, not 60."""
    rng = np.random.default_rng(6)
    broken = []
    for _ in range(repetitions):
        values, losses = router_cases(rng, 20, "binary")
        patients = np.repeat(np.arange(20), 3) if by_patient else None
        table = rollback_table(np.repeat(values, 3), np.repeat(losses, 3), clusters=patients)
        (cut,) = ltt_cuts([table], alpha, 0.1, "binomial")
        broken.append(router_risk(cut, "binary") > alpha)
    return np.mean(broken)


def test_counting_scans_as_patients_breaks_the_promise():
    three_sigma = 3 * np.sqrt(0.1 * 0.9 / FEW)
    assert clustered_risk(0.2, FEW, by_patient=True) <= 0.1 + three_sigma
    assert clustered_risk(0.2, FEW, by_patient=False) > 0.1 + three_sigma
