"""What binarizing hides: class-to-class edits are no edit of the foreground, so HA cannot see them (S25, B1)."""

from __future__ import annotations

import numpy as np
import pandas as pd

from casewise.core.errors import BadInput
from casewise.study.finding import Finding
from casewise.study.trajectories import mean_or_nan, unshrunk


def class_edits(binarized: pd.DataFrame, raw: pd.DataFrame) -> Finding:
    """HA of the foreground beside HA of all labels, step by step, and the cases whose edit the first cannot see.

    ``binarized`` and ``raw`` are the outcomes of one archive with ``foreground=True`` and ``foreground=False``.
    """
    both = unshrunk(binarized).merge(unshrunk(raw), on=["case", "step"], suffixes=("", "_raw"))
    if both.empty:
        raise BadInput("the two outcome frames share no (case, step); score one archive with foreground True and False")
    records = []
    for step, part in both[both["step"] >= 1].groupby("step"):
        hidden = (part["area"] == 0) & (part["area_raw"] > 0)
        share = 1 - part["area"].sum() / part["area_raw"].sum() if part["area_raw"].sum() else np.nan
        records.append(
            {
                "step": int(step),
                "n": len(part),
                "ha": mean_or_nan(part["ha"]),
                "ha_raw": mean_or_nan(part["ha_raw"]),
                "ba": mean_or_nan(part["ba"]),
                "ba_raw": mean_or_nan(part["ba_raw"]),
                "hidden_cases": int(hidden.sum()),
                "hidden_share": float(share),
            }
        )
    return Finding("classes", pd.DataFrame(records), int(both["case"].nunique()), "S25, B1")
