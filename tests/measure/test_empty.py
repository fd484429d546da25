"""The table of empty masks is what the metrics do and what the reference page prints."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from casewise import assd, boundary_iou, dice, hd95, miou, surface_dice
from casewise.measure.metrics.overlap import EMPTY, value_if_empty

FULL, NOTHING = np.ones((3, 3), np.uint8), np.zeros((3, 3), np.uint8)

METRICS = {
    "dice": dice,
    "miou": miou,
    "hd95": hd95,
    "assd": assd,
    "surface_dice": lambda mask, label: surface_dice(mask, label, tolerance_mm=1.0),
    "boundary_iou": boundary_iou,
}


def same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


@pytest.mark.parametrize("name", EMPTY)
def test_every_metric_follows_the_table(name):
    for mask, label in ((NOTHING, NOTHING), (NOTHING, FULL), (FULL, NOTHING)):
        entry = value_if_empty(name, mask_empty=not mask.any(), label_empty=not label.any())
        value = METRICS[name](mask, label)
        assert not math.isnan(value) if entry is None else same(value, entry)


@pytest.mark.parametrize("name", EMPTY)
def test_a_perfect_mask_is_in_no_row_of_the_table(name):
    assert value_if_empty(name, mask_empty=False, label_empty=False) is None
    assert METRICS[name](FULL, FULL) == (0 if name in ("hd95", "assd") else 1)


def _cell(value: float | None) -> str:
    if value is None:
        return "as usual"
    return "NaN" if value != value else f"{value:g}"


def test_the_reference_page_prints_the_table():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    for name, rule in EMPTY.items():
        cells = " | ".join(_cell(value) for value in (rule.both, rule.mask_only, rule.label_only))
        assert any(f"`{name}`" in line and line.endswith(f"| {cells} |") for line in page.splitlines()), name
