"""Parts of an outcomes frame: rows of steps and groups, a column by case and step, the signals it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from casewise.core.errors import BadInput
from casewise.judge.calibration.fixed_budget import cheapest
from casewise.judge.outcomes import COLUMNS, KEYS, WHO
from casewise.measure.signals import REGION_SCORES, SIGNALS
from casewise.study.finding import need_columns

Floats = NDArray[np.float64]
_KEYS = ("case", "step", "shrink")
_NO_SIGNAL = frozenset(
    {*WHO, *KEYS, *COLUMNS, "risk", REGION_SCORES}
)  # columns of an outcomes frame that no probe made


def unshrunk(outcomes: pd.DataFrame) -> pd.DataFrame:
    """Rows of recorded steps without shrunk states, sorted by case and step."""
    need_columns(outcomes, _KEYS, "an outcomes frame")
    return outcomes[outcomes["shrink"] == 0].sort_values(["case", "step"], kind="stable").reset_index(drop=True)


def adapted_rows(outcomes: pd.DataFrame) -> pd.DataFrame:
    """Rows of the ladder after M0."""
    frame = unshrunk(outcomes)
    return frame[frame["step"] >= 1]


def scopes_of(frame: pd.DataFrame, by_group: bool) -> Iterator[tuple[str, pd.DataFrame]]:
    """All rows, and those of each group."""
    yield "all", frame
    if by_group and "group" in frame.columns:
        yield from ((str(name), part) for name, part in frame.groupby("group", sort=True))


def labelled(outcomes: pd.DataFrame) -> pd.DataFrame:
    """Rows of the cases that were scored against a label (A10)."""
    need_columns(outcomes, ("case", "ha"), "an outcomes frame")
    unscored = outcomes["ha"].isna().groupby(outcomes["case"]).transform("any")
    return outcomes[~unscored].reset_index(drop=True)


def by_step(outcomes: pd.DataFrame, column: str) -> pd.DataFrame:
    """One column as cases (rows, sorted) by steps (columns)."""
    need_columns(outcomes, (*_KEYS, column), "an outcomes frame")
    wide = unshrunk(outcomes).pivot(index="case", columns="step", values=column)
    steps = unshrunk(outcomes).groupby("case")["step"].nunique()
    if len(steps) and steps.nunique() > 1:
        short = steps[steps < steps.max()].index.tolist()
        raise BadInput(f"every case needs the same steps, cases {short[:5]} have fewer; record them again")
    return wide.astype(float)


def horizon(outcomes: pd.DataFrame) -> int:
    """The last recorded step K."""
    need_columns(outcomes, ("step",), "an outcomes frame")
    if outcomes.empty:
        raise BadInput("there are no outcomes; score an archive with labels first")
    return int(outcomes["step"].max())


def harm_and_metric(outcomes: pd.DataFrame) -> tuple[Floats, Floats]:
    """HA and metric of the labelled cases as (case, step 1..K)."""
    if horizon(outcomes) < 1:
        raise BadInput("a budget needs at least one update; the archive has step 0 only")
    outcomes = labelled(outcomes)
    ha, metric = (by_step(outcomes, name).drop(columns=0).to_numpy(float) for name in ("ha", "metric"))
    return ha, metric


def least_harm(outcomes: pd.DataFrame) -> int:
    """The step k >= 1 of lowest cohort HA; ties go to the smallest."""
    ha, _ = harm_and_metric(outcomes)
    return int(cheapest("ha", ha.mean(axis=0), np.zeros(ha.shape[1]))) + 1


def step_one(outcomes: pd.DataFrame, column: str) -> pd.Series:
    """One column after the first update, by case."""
    first = outcomes[(outcomes["step"] == 1) & (outcomes["shrink"] == 0)].sort_values("case")
    return first.set_index("case")[column].astype(float)


def signals_in(outcomes: pd.DataFrame, signals: Sequence[str] | None = None) -> list[str]:
    """Signals that were asked for, or every one with a defined value: registered ones first, then the user's.

    Coordinates that are made of signals (risk, -msp) are left out.
    """
    if signals is not None:
        need_columns(outcomes, signals, "the outcomes frame")
        return list(signals)
    adapted = outcomes[outcomes["step"] > 0]
    own = [name for name in outcomes.columns if name not in _NO_SIGNAL and name not in SIGNALS and name[0] != "-"]
    return [name for name in (*SIGNALS, *own) if name in outcomes.columns and adapted[name].notna().any()]


def mean_or_nan(values: pd.Series | Floats) -> float:
    """Mean of the defined values; NaN if there is none."""
    numbers = np.asarray(values, dtype=np.float64)
    kept = numbers[np.isfinite(numbers)]
    return float(kept.mean()) if len(kept) else float("nan")


def same_cases(first: pd.DataFrame, second: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Sort two deployed frames alike; refuse frames of different cases."""
    left, right = (frame.sort_values("case", kind="stable").reset_index(drop=True) for frame in (first, second))
    if left["case"].tolist() != right["case"].tolist():
        only = sorted(set(left["case"]) ^ set(right["case"]))
        raise BadInput(f"paired methods need the same cases, {len(only)} are in one only, such as {only[:3]}")
    return left, right
