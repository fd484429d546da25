"""Images like the calibration images are called outside as rarely as stated, with few patients of several scans."""

from __future__ import annotations

import numpy as np
import pytest

from casewise.judge.appearance import ALPHA, Appearance, folder_differs, known_appearance, outside

WORLDS = {"normal": lambda x: x, "skewed": np.exp, "heavy tails": lambda x: np.sign(x) * np.abs(x) ** 1.5}
NUMBERS = 12


def cohort(generator: np.random.Generator, patients: int, scans: int, icc: float, world: str, shift: float = 0.0):  # type: ignore[no-untyped-def]
    """Patients of several scans; numbers of one image are correlated."""
    mix = 0.6 * np.ones((NUMBERS, NUMBERS)) / NUMBERS + 0.7 * np.eye(NUMBERS)
    cases = []
    for patient in range(patients):
        own = generator.normal(size=NUMBERS)
        for scan in range(scans):
            raw = np.sqrt(icc) * own + np.sqrt(1 - icc) * generator.normal(size=NUMBERS)
            values = WORLDS[world](mix @ raw) + shift
            numbers = {f"intensity {k}": float(value) for k, value in enumerate(values)}
            cases.append(Appearance(f"{patient:03d}-{scan}", numbers, f"p{patient}"))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("patients", "scans", "icc"), [(5, 2, 0.5), (10, 2, 0.9), (10, 1, 0.0), (20, 4, 0.5)])
def test_few_images_of_the_same_kind_are_called_outside(world: str, patients: int, scans: int, icc: float) -> None:
    """At most one in n + 1 in every world; about ALPHA where numbers are normal."""
    generator = np.random.default_rng(1)
    alarms = []
    for _ in range(1500):
        known = known_appearance(cohort(generator, patients, scans, icc, world))
        alarms.append(bool(outside(cohort(generator, 1, 1, icc, world)[0], known)))
    stated = ALPHA if world == "normal" else 1 / (patients + 1)
    assert np.mean(alarms) <= stated + 3 * np.sqrt(stated / len(alarms))


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("here", "there", "scans"), [(3, 5, 2), (8, 10, 3), (30, 10, 1)])
def test_a_folder_of_the_same_kind_is_rarely_called_different(world: str, here: int, there: int, scans: int) -> None:
    generator = np.random.default_rng(2)
    found = []
    for _ in range(200):
        known = known_appearance(cohort(generator, there, scans, 0.5, world))
        found.append(folder_differs(cohort(generator, here, 1, 0.5, world), known)[0])
    for level in (0.05, 0.1):
        assert np.mean(np.array(found) <= level) <= level + 3 * np.sqrt(level * (1 - level) / len(found))


@pytest.mark.slow
def test_a_folder_of_another_kind_is_found_with_ten_patients_on_each_side() -> None:
    generator = np.random.default_rng(3)
    found = []
    for _ in range(50):
        known = known_appearance(cohort(generator, 10, 2, 0.5, "normal"))
        found.append(folder_differs(cohort(generator, 10, 2, 0.5, "normal", shift=1.5), known)[0])
    assert np.mean(np.array(found) <= 0.05) >= 0.9
