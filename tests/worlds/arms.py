"""What fixed states deploy, and the arms of a router whose buckets are fixed states."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from casewise.core.records import State


def deployed_at(outcomes: pd.DataFrame, state: State) -> pd.DataFrame:
    """What a method would have deployed that gives this state to every case: one row per case, sorted by case."""
    chosen = outcomes[(outcomes["step"] == state.step) & np.isclose(outcomes["shrink"], state.shrink)]
    source = outcomes[(outcomes["step"] == 0) & (outcomes["shrink"] == 0)]
    frame = chosen.sort_values("case", kind="stable").reset_index(drop=True)
    first = source.set_index("case")["metric"]
    frame = frame.assign(metric_source=frame["case"].map(first).astype(float))
    rolled_back = state.step == 0
    action = "rollback" if rolled_back else "shrink" if state.shrink else "keep"
    return frame.assign(
        change=frame["metric"] - frame["metric_source"],
        deployed=state.step,
        executed=state.step,
        rolled_back=rolled_back,
        action=action,
        bucket=None,
        value=np.nan,
    )


def arms_at(outcomes: pd.DataFrame, states: Mapping[str, State]) -> dict[str, pd.DataFrame]:
    """What every case gets in each bucket, such as {"low": State(3), "mid": State(2, 0.5), "hard": State(0)}."""
    return {
        bucket: deployed_at(outcomes, state).assign(bucket=bucket, executed=max(state.step, 1))
        for bucket, state in states.items()
    }
