"""Type-I error of "accept" at the boundary of each kind of criterion, with several cases per patient.

At the boundary the quantity equals its limit, so a criterion must be met in at most 1 - confidence of all samples. Rare
disasters, which a mean does not see, are in tests/study/test_acceptance.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from casewise.study.acceptance import Criterion, check_values

CONFIDENCE = 0.9
WORLDS = 400
Draw = Callable[[np.random.Generator, int, float], np.ndarray]


def normal(draw: np.random.Generator, patients: int, icc: float) -> np.ndarray:
    """Falls with mean 0.02, two cases per patient."""
    shared = draw.normal(0, 0.03 * np.sqrt(icc), (patients, 1))
    return 0.02 + shared + draw.normal(0, 0.03 * np.sqrt(1 - icc), (patients, 2))


def harmed(draw: np.random.Generator, patients: int, icc: float) -> np.ndarray:
    """0 or 1 with mean 0.15; with icc the cases of a patient are mostly harmed together."""
    shared = draw.random((patients, 1)) < 0.15
    own = draw.random((patients, 2)) < 0.15
    return np.where(draw.random((patients, 1)) < icc, shared, own).astype(float)


def area(draw: np.random.Generator, patients: int, icc: float) -> np.ndarray:
    """Shares in [0, 1] with mean 0.15: HA of a case."""
    level = np.where(
        draw.random((patients, 1)) < icc, draw.beta(0.3, 1.7, (patients, 1)), draw.beta(0.3, 1.7, (patients, 2))
    )
    return np.broadcast_to(level, (patients, 2)).astype(float)


KINDS: dict[str, tuple[Draw, float]] = {
    "max_mean_drop": (normal, 0.02),  # means by Student's t: also min_mean_gain and max_error_rise
    "max_harmed_share": (harmed, 0.15),  # shares of cases: also flipped, changed, drifted, holed, lost, crossed
    "max_ha": (area, 0.15),  # means of shares
}


def accepted(name: str, made: Draw, limit: float, patients: int, icc: float, worlds: int = WORLDS) -> float:
    draw = np.random.default_rng([patients, round(100 * icc), sum(map(ord, name))])
    criterion = Criterion(name, limit, 0.0)
    who = np.repeat(np.arange(patients), 2).tolist()
    ids = [str(at) for at in range(2 * patients)]
    met = 0
    for _ in range(worlds):
        values = made(draw, patients, icc).ravel().tolist()
        met += check_values(criterion, values, who, ids, CONFIDENCE).verdict == "met"
    return met / worlds


def most(worlds: int = WORLDS) -> float:
    """What is stated, and three standard errors of the simulation."""
    return 1 - CONFIDENCE + 3 * float(np.sqrt(CONFIDENCE * (1 - CONFIDENCE) / worlds))


@pytest.mark.parametrize("name", ["max_mean_drop", "max_harmed_share"])
def test_no_more_versions_at_the_limit_are_accepted_than_stated(name: str) -> None:
    made, limit = KINDS[name]
    assert accepted(name, made, limit, 20, 0.5, worlds=100) <= most(100)


@pytest.mark.slow
@pytest.mark.parametrize("icc", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("patients", [10, 20, 40])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_criterion_at_its_limit(name: str, patients: int, icc: float) -> None:
    made, limit = KINDS[name]
    assert accepted(name, made, limit, patients, icc) <= most()


def test_several_criteria_at_their_limits_are_accepted_together_less_often_than_one() -> None:
    """All must be met (an intersection-union test), so the number of criteria needs no correction."""
    draw, both = np.random.default_rng(0), 0
    who = np.repeat(np.arange(20), 2).tolist()
    ids = [str(at) for at in range(40)]
    for _ in range(100):
        falls = normal(draw, 20, 0.5).ravel().tolist()
        shares = harmed(draw, 20, 0.5).ravel().tolist()
        checks = [
            check_values(Criterion("max_mean_drop", 0.02, 0.0), falls, who, ids, CONFIDENCE),
            check_values(Criterion("max_harmed_share", 0.15, 0.0), shares, who, ids, CONFIDENCE),
        ]
        both += all(check.verdict == "met" for check in checks)
    assert both / 100 <= most(100)
