"""Arms of a router whose buckets deploy fixed states."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from casewise.core.records import State
from casewise.study.trajectories import deployed_at


def arms_at(outcomes: pd.DataFrame, states: Mapping[str, State]) -> dict[str, pd.DataFrame]:
    """What every case gets in each bucket, such as {"low": State(3), "mid": State(2, 0.5), "hard": State(0)}."""
    return {
        bucket: deployed_at(outcomes, state).assign(bucket=bucket, executed=max(state.step, 1))
        for bucket, state in states.items()
    }
