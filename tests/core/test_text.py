"""Results print in one line."""

from __future__ import annotations

import numpy as np

import casewise
from casewise.core.records import Case, Policy, Trajectory
from casewise.core.text import UNIT, pluralize
from casewise.measure.regions import regions_of

SOURCE = np.zeros((64, 64), int)
ADAPTED = SOURCE.copy()
ADAPTED[10:30, 10:30] = 1


def test_harm_prints_its_numbers_and_no_arrays() -> None:
    assert repr(casewise.harm(SOURCE, ADAPTED, ADAPTED)) == (
        "Harm(ha=0, ba=1, neutral_scored=0, unscored=0, regions=1, delta=0.09766, area=400, voxel_harm=0)"
    )


def test_a_case_shows_the_shape_of_its_image() -> None:
    assert (
        repr(Case("a", np.zeros((1, 8, 8), np.float32), group="B"))
        == "Case(id='a', image=<1 x 8 x 8 float32>, group='B')"
    )


def test_results_stay_short() -> None:
    trajectory = Trajectory(
        "a", (SOURCE, ADAPTED), ({}, {"regions": 1.0}), diagnostics=tuple({"loss": 1.0} for _ in range(9))
    )
    policy = Policy("p", "router", {"cut_low": 0.1}, 4, calibration_cases=tuple(f"case-{i}" for i in range(99)))
    found = regions_of(SOURCE, ADAPTED)
    for result in (trajectory, policy, found):
        assert len(repr(result)) < 400, repr(result)
        assert "\n" not in repr(result)
    assert "case-3" in repr(policy)
    assert "case-4" not in repr(policy)


def test_pluralize_knows_one_and_many() -> None:
    assert pluralize(1, "case") == "1 case"
    assert pluralize(0, "case") == "0 cases"
    assert pluralize(2, "class", "classes") == "2 classes"
    assert pluralize(1, *UNIT) == "1 patient"
    assert pluralize(3, *UNIT) == "3 patients"


KNOWN_TO_BE_PATIENTS = ("data/datasets/fundus.py", "data/dicom")  # eyes and DICOM series are those of patients
