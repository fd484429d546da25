"""What binarizing hides: class-to-class edits are no edit of the foreground, so HA cannot see them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from casewise.archive.store import Archive
from casewise.core.errors import BadInput
from casewise.judge.outcomes import outcomes
from casewise.study.finding import Finding, Section, plain_table
from casewise.study.study import Study
from casewise.study.trajectories import mean_or_nan, unshrunk


def section(study: Study) -> Section:
    """HA of the foreground beside HA of all classes, where labels hold more than one."""
    title, what = "What binarizing hides", "HA of every class beside HA of the foreground"
    if not study.measure["foreground"]:
        return Section("classes", title, missing={what: "every class is compared already (foreground off)"})
    if not _has_classes(study.evaluation):
        return Section("classes", title, missing={what: "the labels hold one foreground class"})
    found = class_edits(study.outcomes, outcomes(study.evaluation, foreground=False))
    last = found.table.iloc[-1]
    lead = (
        f"After step {int(last['step'])}, {100 * float(last['hidden_share']):.1f} % of the changed voxels swap one "
        f"foreground class for another, which HA of the foreground cannot see; {int(last['hidden_cases'])} of "
        f"{int(last['n'])} cases change in no other way."
    )
    made = plain_table("classes", "Foreground and classes", found, caption="raw: every class is compared.")
    return Section("classes", title, lead, (made,), (), (found,), found.notes)


def _has_classes(archive: Archive) -> bool:
    """Whether any label holds two foreground classes."""
    ignore = archive.configuration.get("ignore")
    labelled = (case for case, entry in archive.entries.items() if entry.labelled)
    return any(np.setdiff1d(archive.label(case), (0, ignore or 0)).size > 1 for case in labelled)


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
