"""Numbers that labels fit for stop rules: HA by step, the fixed budget by four rules, and tau (G1, G2, G6, F6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from casewise.core.errors import BadInput, TooFewCases
from casewise.core.registry import Registry
from casewise.judge.calibration.cuts import FEWEST, Floats, mean_and_sigma

RULES: Registry[Callable[[Floats, Floats], Floats]] = Registry(
    "budget rule",
    {
        "ha": lambda ha, metric: ha,
        "metric": lambda ha, metric: -metric,
        "ha-half-metric": lambda ha, metric: ha - 0.5 * metric,
        "ha-metric": lambda ha, metric: ha - metric,
    },
)
"""What the selected step minimizes over k = 1..K; ties go to the smallest k (G2)."""


def ladder(frame: pd.DataFrame) -> pd.DataFrame:
    """Cohort means of HA and metric at k = 0..K, over labelled cases (G1); indexed by step."""
    labelled = labelled_steps(frame)
    return labelled.groupby("step")[["ha", "metric"]].mean()


def labelled_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """The unshrunk rows of cases that have a label."""
    plain = frame.loc[(frame["shrink"] == 0) & frame["ha"].notna()]
    cases = plain["case"].nunique()
    if cases < FEWEST:
        raise TooFewCases(f"a choice by labels needs at least {FEWEST} labelled calibration cases, got {cases}")
    return plain


def budget(frame: pd.DataFrame, rule: str = "ha") -> int:
    """The fixed step that a rule selects on the holdout (G2)."""
    steps = ladder(frame).loc[1:]
    return int(steps.index[int(cheapest(rule, steps["ha"].to_numpy(), steps["metric"].to_numpy()))])


def cheapest(rule: str, ha: Floats, metric: Floats) -> Any:
    """The place of the step that a rule selects, along the last axis, from cohort means of steps 1..K.

    The one rule for calibrate and study. Costs that agree to twelve digits are ties, and go to the smallest step: means
    of the same cases may differ in the last bit with the order of summation.
    """
    return np.argmin(np.round(RULES[rule](ha, metric), 12), axis=-1)


def budgets(frame: pd.DataFrame) -> dict[str, int]:
    """The step of every rule."""
    return {rule: budget(frame, rule) for rule in RULES}


def shape(frame: pd.DataFrame) -> dict[str, Any]:
    """The ladder and whether HA dips before it rises: argmin after step 1 and before K, and HA(K) > min (G6)."""
    steps = ladder(frame)
    ha = steps["ha"].loc[1:]
    best, last = int(ha.idxmin()), int(ha.index[-1])
    return {
        "ha": [float(value) for value in steps["ha"]],
        "metric": [float(value) for value in steps["metric"]],
        "argmin": best,
        "dips_before_it_rises": bool(1 < best < last and ha[last] > ha[best]),
        "non_monotone": bool(ha[last] > ha.min() and (ha.diff().dropna() < 0).any()),
    }


def tau(frame: pd.DataFrame, *, quantile: float = 0.5, signal: str = "regions") -> dict[str, float]:
    """mean, sigma and tau of the tau-stop: a quantile of z at each case's oracle early-stop step (F6).

    The oracle step is argmax over k >= 1 of the metric, ties to the smallest k, over the labelled cases. Mean and sigma
    need no label: they are those of step 1 over all cases, or of all steps where step 1 has no spread. Only a signal
    that never varies is refused.
    """
    if not 0 <= quantile <= 1:
        raise BadInput(f"the quantile of tau must be between 0 and 1, got {quantile}")
    steps = labelled_steps(frame)
    steps = steps.loc[(steps["step"] >= 1) & steps["metric"].notna()].sort_values(["case", "step"])
    everything = frame.loc[(frame["shrink"] == 0) & (frame["step"] >= 1) & frame[signal].notna()]
    first = everything.loc[everything["step"] == 1, signal].to_numpy(float)
    values = first if np.ptp(first) > 0 else everything[signal].to_numpy(float)
    mean, sigma = mean_and_sigma(values, signal)
    best = steps.loc[steps.groupby("case")["metric"].idxmax(), signal].to_numpy()
    return {"mean": mean, "sigma": sigma, "tau": float(np.quantile((best - mean) / sigma, quantile))}
