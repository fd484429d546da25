"""The input contract: a header is not a domain shift."""

from __future__ import annotations

import numpy as np
import pytest

from casewise.adapt.backbones import Expectation
from casewise.adapt.contract import HINT, check_contract, check_orientations
from casewise.core.records import Case

THICK = Expectation(channels=1, spacing_mm=(8.0, 1.2, 1.2))
CT = Expectation(intensity={0: {"percentile_00_5": -900.0, "percentile_99_5": 300.0}}, absolute=(True,))


def case(spacing: tuple[float, ...] | None = None, low: float = 0, high: float = 100) -> Case:
    return Case("a", np.linspace(low, high, 512).reshape(1, 8, 8, 8), spacing)


@pytest.mark.parametrize(
    ("spacing", "level", "what"),
    [
        ((8.0, 1.2, 1.2), None, None),
        ((8.0, 1.2, 2.0), None, None),
        ((8.0, 1.2, 4.0), "warning", "spacing"),
        ((1.2, 1.2, 8.0), "refusal", "axes"),
        ((8000.0, 1200.0, 1200.0), "refusal", "spacing"),
        ((0.0, 1.2, 1.2), "refusal", "spacing"),
        (None, None, None),
    ],
)
def test_spacing_is_held_against_the_plans(
    spacing: tuple[float, ...] | None, level: str | None, what: str | None
) -> None:
    found = [(finding.level, finding.what) for finding in check_contract(case(spacing), THICK)]
    assert found == ([] if level is None else [(level, what)])


def test_ct_numbers_without_their_offset_are_refused() -> None:
    assert check_contract(case(low=-1000, high=1000), CT) == ()
    (finding,) = check_contract(case(low=1024, high=3000), CT)
    assert finding.level == "refusal"
    assert HINT in finding.message


def test_intensities_do_not_matter_where_they_are_normalized_by_case() -> None:
    relative = Expectation(intensity=CT.intensity, absolute=(False,))
    assert check_contract(case(low=1024, high=3000), relative) == ()


def test_an_image_of_one_value_is_refused() -> None:
    assert [finding.level for finding in check_contract(case(low=5, high=5), Expectation())] == ["refusal"]


def test_the_one_that_lies_otherwise_is_named() -> None:
    assert check_orientations({"a": "RAS", "b": "RAS"}) == {}
    found = check_orientations({"a": "RAS", "b": "LPS", "c": "RAS"})
    assert list(found) == ["b"]
    assert "axes point LPS, those of most cases RAS" in found["b"].message
