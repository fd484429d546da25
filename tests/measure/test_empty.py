"""What every metric gives for empty masks, as the reference page prints it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from casewise import assd, dice, hd95, miou

FULL, NOTHING = np.ones((3, 3), np.uint8), np.zeros((3, 3), np.uint8)
METRICS = {"dice": dice, "miou": miou, "hd95": hd95, "assd": assd}
PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_does_what_the_reference_page_says(name: str) -> None:
    row = next(line for line in PAGE.partition("| metric | both empty")[2].splitlines() if f"`{name}`" in line)
    cells = [cell.strip() for cell in row.split("|")[2:5]]
    for cell, (mask, label) in zip(cells, ((NOTHING, NOTHING), (NOTHING, FULL), (FULL, NOTHING)), strict=True):
        value = METRICS[name](mask, label)
        assert math.isnan(value) == (cell == "NaN")
        assert cell in ("NaN", "as usual") or value == float(cell)


@pytest.mark.parametrize("name", METRICS)
def test_a_perfect_mask_has_the_best_value(name: str) -> None:
    assert METRICS[name](FULL, FULL) == (0 if name in ("hd95", "assd") else 1)
