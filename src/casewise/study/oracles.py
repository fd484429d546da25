"""Reference rows that NEED LABELS: they bound what a controller could do, and can never be deployed (E12).

An oracle bounds only the quantity that it optimizes; the HA oracle is no bound on Dice.
"""

from __future__ import annotations

import pandas as pd

from casewise.core.errors import BadInput
from casewise.core.records import SOURCE, Action, Decision, State

NEEDS_LABELS = True
_NO_LABEL = "an oracle needs labels and no case has one; oracles are reference rows, never controllers"


def replay_oracle(frame: pd.DataFrame, *, include_source: bool = True) -> list[Decision]:
    """For each case the step with the highest metric along its trajectory, ties to the smallest k (E12a)."""
    steps = _labelled(frame)
    steps = steps.loc[(steps["shrink"] == 0) & (steps["step"] >= (0 if include_source else 1))]
    best = steps.sort_values(["case", "step"]).groupby("case")["metric"].idxmax()
    return [_decision(row, "replay-oracle") for row in steps.loc[best].to_dict("records")]


def ha_oracle_scores(frame: pd.DataFrame) -> pd.Series:
    """HA of step 1 by case: rank it descending and roll back the top (E12b)."""
    first = frame.loc[(frame["step"] == 1) & (frame["shrink"] == 0) & frame["ha"].notna()]
    if first.empty:
        raise BadInput(_NO_LABEL)
    return first.set_index("case")["ha"].rename("oracle-ha")


def change_oracle_scores(frame: pd.DataFrame, *, step: int | None = None) -> pd.Series:
    """Minus the metric change of a step (default: the last) by case: rank it descending, roll back the top (E12c)."""
    plain = _labelled(frame).loc[frame["shrink"] == 0]
    at = int(plain["step"].max()) if step is None else step
    adapted = plain.loc[plain["step"] == at].set_index("case")["metric"]
    source = plain.loc[plain["step"] == 0].set_index("case")["metric"]
    return (source - adapted).rename("oracle-change")


def _labelled(frame: pd.DataFrame) -> pd.DataFrame:
    if frame["metric"].isna().all():
        raise BadInput(_NO_LABEL)
    return frame.loc[frame["metric"].notna()]


def _decision(row: dict[str, object], name: str) -> Decision:
    step = int(str(row["step"]))
    return Decision(
        case_id=str(row["case"]),
        action=Action.KEEP if step else Action.ROLLBACK,
        state=State(step) if step else SOURCE,
        executed=step,
        controller=name,
        group=None if row["group"] is None else str(row["group"]),
        reason="needs labels: the step with the highest metric",
    )
