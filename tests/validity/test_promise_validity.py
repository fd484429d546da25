"""A promise from patients that took no part in learning holds, with clusters and with something learned before."""

from __future__ import annotations

import numpy as np
import pytest

from casewise.core.errors import TooFewCases
from casewise.judge.certificates.evidence import rollback_table
from casewise.judge.certificates.risk_control import conformal_setting
from casewise.judge.certificates.split import smallest_promise, split_for_promise


def realised(patients, alpha, repetitions, *, icc, within, scans=2):
    """Mean loss of new patients when a threshold is learned on A and a cut is certified on B."""
    rng = np.random.default_rng([patients, int(100 * alpha), int(10 * icc)])
    total = 0.0
    for _ in range(repetitions):
        split = split_for_promise([f"p{k:03d}" for k in range(patients)], alpha)
        drawn = rng.normal(size=(patients + 40, 1)), rng.normal(size=(patients + 40, scans))
        values = np.sqrt(icc) * drawn[0] + np.sqrt(1 - icc) * drawn[1]
        learning = np.array([f"p{k:03d}" in split.learning for k in range(patients)])
        bias = values[:patients][learning].mean()  # what was learned: all later values move with it
        harmed = (values + rng.normal(size=values.shape) > 1.0 + bias).astype(float)
        side = ~learning
        names = np.repeat(np.arange(int(side.sum())), scans).astype(str).tolist()
        table = rollback_table(
            values[:patients][side].ravel(), harmed[:patients][side].ravel(), clusters=names, within=within
        )
        at = conformal_setting(table, alpha)
        if at is not None:
            losses = harmed[patients:] * (values[patients:] < table.settings[at])
            total += float((losses.max(axis=1) if within == "max" else losses.mean(axis=1)).mean())
    return total / repetitions


@pytest.mark.parametrize("within", ["mean", "max"])
def test_the_promise_holds_for_new_patients(within):
    assert realised(20, 0.1, 300, icc=0.5, within=within) <= 0.1 + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("within", ["mean", "max"])
@pytest.mark.parametrize("icc", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("patients", "alpha"), [(14, 0.1), (20, 0.1), (20, 0.2), (40, 0.1)])
def test_the_promise_holds_everywhere(patients, alpha, icc, within):
    assert realised(patients, alpha, 4000, icc=icc, within=within) <= alpha + 3 * 0.15 / np.sqrt(4000)


def test_too_few_patients_are_refused_with_the_number_that_is_needed():
    # four patients would never adopt anything, so no promise would come of them
    with pytest.raises(TooFewCases, match=r"needs 14 labelled patients \(9 to certify it and 5 to learn and choose\)"):
        split_for_promise([f"p{k}" for k in range(13)], 0.1)
    split = split_for_promise([f"p{k}" for k in range(14)], 0.1)
    assert (len(split.learning), len(split.certifying)) == (5, 9)
    assert "9 only for the test of the promise (a risk of at most 0.1)" in split.sentence()
    assert "If their risks add up to more than 0, large changes will not be used" in split.sentence()
    assert not set(split.learning) & set(split.certifying)
    assert len(split_for_promise([f"p{k}" for k in range(40)], 0.1).certifying) == 19
    assert len(split_for_promise([f"p{k}" for k in range(10)], 0.2).certifying) == 4


@pytest.mark.parametrize("patients", range(6, 30))
def test_the_smallest_promise_that_is_named_is_not_refused(patients):
    names, least = [f"p{k}" for k in range(patients)], smallest_promise(patients)
    assert len(split_for_promise(names, least).learning) >= 5
    with pytest.raises(TooFewCases, match=f"promise {least:g}, the smallest with {patients}"):
        split_for_promise(names, least - 0.01)
