"""Outcome frames with known contents: a ladder per case, with harm that a signal does or does not foretell."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest


def cohort(
    cases: int = 60, steps: int = 4, *, effect: float = 1.0, seed: int = 0, groups: int = 2, shrink: float = 0.5
) -> pd.DataFrame:
    """Cases whose step-1 delta foretells their harm by ``effect`` (0 = not at all), shrunk step 2 included."""
    rng = np.random.default_rng(seed)
    risk = rng.random(cases)
    rows = []
    for number in range(cases):
        group = f"site-{number % groups}"
        source = 0.8 + 0.1 * rng.standard_normal()
        for step, back in [(k, 0.0) for k in range(steps + 1)] + [(2, shrink)]:
            depth = step * (1 - back)
            toll = risk[number] if effect else rng.random()
            ha = float(
                np.clip((0.05 * depth + effect * 0.6 * toll * (depth > 0) + 0.05 * rng.random()) * (depth > 0), 0, 1)
            )
            ba = (1 - ha) * 0.6 * (depth > 0)
            delta = (0.002 + 0.01 * risk[number]) * depth
            rows.append(
                {
                    "case": f"c{number:03d}",
                    "group": group,
                    "cluster": None,
                    "split": "evaluation",
                    "step": step,
                    "shrink": back,
                    "metric": source
                    + (0.02 - 0.04 * ha) * (depth > 0) * effect
                    + 0.001 * rng.standard_normal() * (depth > 0),
                    "ha": ha,
                    "ba": ba,
                    "neutral_scored": 0.0,
                    "unscored": (1 - ha - ba) * (depth > 0),
                    "regions": round(10 * risk[number] * depth / 2) if depth else 0,
                    "delta": delta,
                    "area": int(delta * 1e5),
                    "entropy": 0.1 - 0.01 * depth + 0.01 * rng.standard_normal(),
                    "msp": 0.9 + 0.01 * rng.standard_normal(),
                    "entropy_on_d": 0.3 + 0.1 * rng.random(),
                    "largest_share": float(rng.random()),
                }
            )
    return pd.DataFrame(rows)


@pytest.fixture
def make_cohort() -> Callable[..., pd.DataFrame]:
    """The builder itself, for tests that choose the effect."""
    return cohort


@pytest.fixture
def outcomes() -> pd.DataFrame:
    """Sixty cases in two groups with a strong planted effect."""
    return cohort()
