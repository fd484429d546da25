"""Class by class: what an edit gave and took, and what binarizing hides (a swap of classes changes no foreground)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from casewise.archive.store import Archive
from casewise.core.errors import BadInput
from casewise.core.records import SOURCE, State
from casewise.judge.outcomes import outcomes
from casewise.render.tables import Column, Table, rows_of, table
from casewise.study.finding import Finding, Section, plain_table, rows, sentences
from casewise.study.study import Study
from casewise.study.trajectories import mean_or_nan, unshrunk


def section(study: Study) -> Section:
    """The edits of every class; HA of the foreground beside HA of all classes, where labels hold more than one."""
    title, what = "What binarizing hides", "HA of every class beside HA of the foreground"
    if not _has_classes(study.evaluation):
        return Section("classes", title, missing={what: "the labels hold one foreground class"})
    each = edits_by_class(study.evaluation)
    tables, found = [_class_table(each)], [each]
    if not study.measure["foreground"]:
        missing = {what: "every class is compared already (foreground off)"}
        return Section("classes", title, sentences(each), tuple(tables), (), tuple(found), missing=missing)
    hidden = class_edits(study.outcomes, outcomes(study.evaluation, foreground=False))
    last = hidden.table.iloc[-1]
    lead = (
        f"After step {int(last['step'])}, {100 * float(last['hidden_share']):.1f} % of the changed voxels swap one "
        f"foreground class for another, which HA of the foreground cannot see; {int(last['hidden_cases'])} of "
        f"{int(last['n'])} cases change in no other way. {sentences(each)}"
    )
    made = plain_table("classes", "Foreground and classes", hidden, caption="raw: every class is compared.")
    return Section("classes", title, lead, (made, *tables), (), (hidden, *found), hidden.notes)


def _class_table(each: Finding) -> Table:
    columns = (
        Column("class", "Class"),
        Column("gained", "voxels gained"),
        Column("gained_right", "of these right (%)", 1, percent=True),
        Column("lost", "voxels lost"),
        Column("lost_right", "of these had been right (%)", 1, percent=True),
        Column("cases", "cases changed"),
        Column("n", "n"),
    )
    caption = f"M0 to step {each.made['step']}, over all labelled cases; voxels with the ignored label are left out."
    return table("class-edits", "Edits by class", columns, rows_of(each.table, columns), caption=caption)


def edits_by_class(archive: Archive, *, step: int | None = None) -> Finding:
    """For each class: voxels that became it and how many rightly; voxels that left it and how many had been right."""
    state = State(archive.steps if step is None else step)
    ignore = archive.configuration.get("ignore")
    counts: dict[int, NDArray[np.int64]] = {}
    labelled = [case for case, entry in archive.entries.items() if entry.labelled]
    for case in labelled:
        masks, label = archive.masks(case), archive.label(case)
        changed = (masks[SOURCE] != masks[state]) & (True if ignore is None else label != ignore)
        before, after, truth = masks[SOURCE][changed], masks[state][changed], label[changed]
        for name in np.union1d(before, after).tolist():
            gained, lost = after == name, before == name
            found = (gained, gained & (truth == name), lost, lost & (truth == name), np.array([True]))
            counts[name] = counts.get(name, np.zeros(5, np.int64)) + np.array([one.sum() for one in found], np.int64)
    records = [
        {
            "class": name,
            "gained": int(gained),
            "gained_right": right / gained if gained else np.nan,
            "lost": int(lost),
            "lost_right": wrong / lost if lost else np.nan,
            "cases": int(cases),
            "n": len(labelled),
        }
        for name, (gained, right, lost, wrong, cases) in sorted(counts.items())
    ]
    columns = ("class", "gained", "gained_right", "lost", "lost_right", "cases", "n")
    notes = tuple(_worst(records))
    return Finding("classes.edits", rows(records, columns), len(labelled), "S25", {"step": state.step}, notes)


def _worst(records: list[dict[str, Any]]) -> Iterator[str]:
    """The class that was robbed of most voxels that had been right."""
    taken = [(one["lost"] * one["lost_right"], one) for one in records if one["lost"]]
    if taken and max(taken, key=lambda pair: pair[0])[0] > 0:
        wrong, one = max(taken, key=lambda pair: pair[0])
        left = f"{wrong:.0f} of the {one['lost']} voxels that left it"
        yield f"class {one['class']} lost most that had been right: {left}"


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
