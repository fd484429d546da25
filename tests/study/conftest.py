"""Outcome frames with known contents: a ladder per case, with harm that a signal does or does not predict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from worlds.arms import arms_at, deployed_at
from worlds.studies import sources, study

from casewise.core.records import State

__all__ = ["sources", "study"]

STATES = {"low": State(3), "mid": State(2, 0.5), "hard": State(0)}


def cohort(cases: int = 60, steps: int = 4, *, effect: float = 1.0, seed: int = 0, prefix: str = "c") -> pd.DataFrame:
    """Cases in two groups whose step-1 delta predicts their harm by ``effect`` (0: not at all)."""
    rng = np.random.default_rng(seed)
    rungs = [(step, 0.0) for step in range(steps + 1)] + [(2, 0.5)]
    records = []
    for number in range(cases):
        risk, toll, source = rng.random(), rng.random(), 0.8 + 0.1 * rng.standard_normal()
        fate = effect * risk + (1 - effect) * toll
        who = {"case": f"{prefix}{number:03d}", "group": f"site-{number % 2}", "cluster": None, "split": "evaluation"}
        records += [{**who, **_rung(rng, step, back, risk, fate, source)} for step, back in rungs]
    return pd.DataFrame(records)


def _rung(
    rng: np.random.Generator, step: int, back: float, risk: float, fate: float, source: float
) -> dict[str, float]:
    depth = step * (1 - back)
    on = float(depth > 0)
    ha = float(np.clip((0.04 * depth + 0.5 * fate + 0.05 * rng.random()) * on, 0, 1))
    ba = 0.6 * (1 - ha) * on
    delta = (0.002 + 0.01 * risk) * depth
    return {
        "step": step,
        "shrink": back,
        "metric": source + on * (0.012 - 0.04 * fate + 0.004 * rng.standard_normal()),
        "ha": ha,
        "ba": ba,
        "neutral_scored": 0.0,
        "unscored": (1 - ha - ba) * on,
        "regions": round(5 * risk * depth),
        "delta": delta,
        "area": round(delta * 1e5),
        "worse_voxels": ha,
        "entropy": 0.1 + 0.01 * rng.standard_normal(),
        "msp": 0.9 + 0.01 * rng.standard_normal(),
        "entropy_on_d": 0.3 + 0.1 * rng.random(),
        "largest_share": float(rng.random()),
        "gradient_norm": 1 + rng.random() if step else np.nan,
    }


def routed(outcomes: pd.DataFrame, coordinate: str = "delta") -> pd.DataFrame:
    """The deployed frame of a tertile router on a step-1 coordinate."""
    arms = arms_at(outcomes, STATES)
    first = outcomes[outcomes["step"] == 1].set_index("case")[coordinate].sort_index()
    low, high = np.percentile(first, [33.33, 66.67])
    bucket = np.where(first >= high, "hard", np.where(first > low, "mid", "low"))
    parts = [arms[name].set_index("case").loc[first.index[bucket == name]] for name in STATES]
    return pd.concat(parts).reset_index().sort_values("case").reset_index(drop=True)


@pytest.fixture
def make_cohort() -> Callable[..., pd.DataFrame]:
    """The builder itself, for tests that choose the effect."""
    return cohort


@pytest.fixture
def make_router() -> Callable[..., pd.DataFrame]:
    """Route a cohort by tertiles."""
    return routed


@pytest.fixture
def outcomes() -> pd.DataFrame:
    """Sixty cases in two groups with a strong planted effect."""
    return cohort()


@pytest.fixture
def router(outcomes: pd.DataFrame) -> pd.DataFrame:
    """The tertile router on those cases."""
    return routed(outcomes)


@pytest.fixture
def arms(outcomes: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """What every case would have got in each bucket."""
    return arms_at(outcomes, STATES)


@pytest.fixture
def methods(outcomes: pd.DataFrame, router: pd.DataFrame) -> dict[str, Any]:
    """M0, four budgets and the router."""
    fixed = {f"fixed-{step}": deployed_at(outcomes, State(step)) for step in range(1, 5)}
    return {"m0": deployed_at(outcomes, State(0)), **fixed, "router": router}
