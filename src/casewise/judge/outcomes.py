"""The table of outcomes: metric and harm of every candidate, with its signals. Controllers may not import this file.

One row for each (case, step, shrink): metric (Dice or mIoU), harmful and beneficial area, and every stored signal. It
is derived from the masks once for each choice of min_area, foreground and ignore, and kept beside the archive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from casewise.archive.layout import cached_table
from casewise.archive.store import Archive
from casewise.core.durable import text_sha256
from casewise.core.errors import BadInput
from casewise.core.formats import json_text
from casewise.core.records import SOURCE, Action, Controller, Decision, Mask
from casewise.judge.decide import mask_of
from casewise.measure.metrics import METRICS
from casewise.measure.metrics.harm import harm
from casewise.measure.metrics.overlap import VOID
from casewise.measure.signals.fragmentation import fragmentation
from casewise.measure.signals.risk import DROP

POINT = 0.01
"""A case whose metric fell by more than this was hurt by more than a point."""

KEYS = ["case", "step", "shrink"]
COLUMNS = [
    "metric", "ha", "ba", "neutral_scored", "unscored", "regions", "delta", "area",
    "worse_voxels", "better_voxels", "swapped",
]  # fmt: skip
WHO = ["case", "group", "cluster", "split"]
DECIDED = ["action", "bucket", "value", "deployed", "executed", "rolled_back"]
_VERSION = 3  # version of the table; raise it when a column changes its meaning


Rows = list[dict[str, Any]]
Measured = Callable[[Archive, dict[str, Any]], Iterable[Rows]]
"""Gives the rows of every case of an archive, in the order of its ids."""


def patients_of(rows: pd.DataFrame) -> list[str]:
    """Return the patient of each row, as :func:`cluster_of` does for a case: a case without one is its own."""
    named = rows["cluster"] if "cluster" in rows.columns else [None] * len(rows)
    return [str(case if pd.isna(name) or name == "" else name) for case, name in zip(rows["case"], named, strict=True)]


def outcomes(archive: Archive, *, measured: Measured | None = None) -> pd.DataFrame:
    """One row for each (case, step, shrink); NaN metrics where a case has no label.

    Regions, delta and area are those of the masks under the archive's configuration. ``measured`` may spread the cases
    over processes or machines (``run/record_folder.py``).
    """
    archive.check_unlocked(archive.ids)  # a cached table also contains results of labels
    options = scoring_options(archive)
    key = json_text([_VERSION, archive.digest, options], sort_keys=True)
    name = f"outcomes-{text_sha256(key)}"
    return cached_table(archive.path, name, lambda: _table(archive, options, measured))


def deployed(
    frame: pd.DataFrame,
    decisions: Iterable[Decision],
    *,
    archive: Archive | None = None,
    controller: Controller | None = None,
) -> pd.DataFrame:
    """Return one row for each decision: the deployed state, its metric and its harm against M0.

    A mask that is composed of several masks was not recorded; to measure it, pass ``archive`` and the ``controller``
    that composed it.
    """
    chosen = pd.DataFrame([_chosen(decision) for decision in decisions])
    if chosen.empty:
        raise BadInput("there is no decision to score; the archive may be empty")
    states = frame[[*WHO, "step", "shrink", *COLUMNS]]
    rows = chosen.merge(states.drop(columns="group"), on=KEYS, how="left", indicator=True)
    lost = rows.loc[rows["_merge"] != "both", "case"].tolist()
    if lost:
        raise BadInput(f"the deployed state of case {lost[0]} is not among the outcomes ({len(lost)} such cases)")
    for decision in (one for one in chosen["decision"] if one.action is Action.GATE or one.cleanup):
        rows.loc[rows["case"] == decision.case_id, COLUMNS] = _composed_row(archive, decision, controller)
    source = frame.loc[frame["step"] == 0].set_index("case")["metric"]
    rows["metric_source"] = rows["case"].map(source)
    rows["change"] = rows["metric"] - rows["metric_source"]
    return rows[[*WHO, *DECIDED, "metric", "metric_source", "change", *COLUMNS[1:], "shrink"]]


def deployed_rows(archive: Archive, decisions: Sequence[Decision], controller: Controller) -> pd.DataFrame:
    """:func:`deployed` on an archive, in the order of the decisions; each is scored on the ladder that its state names.

    M0 and what composes M0 with a candidate belong to one ladder too, so ladders that are read together need no table
    of their own.
    """
    own = archive.joined[0] if archive.joined else archive.ladder_name or ""
    by_ladder: dict[str, list[Decision]] = {}
    for decision in decisions:
        by_ladder.setdefault(decision.state.ladder or own, []).append(decision)
    if not archive.joined and set(by_ladder) <= {own}:
        return deployed(outcomes(archive), decisions, archive=archive, controller=controller)
    views = {name: archive.ladder(name) for name in by_ladder}
    rows = pd.concat(
        deployed(outcomes(views[name]), found, archive=views[name], controller=controller)
        for name, found in by_ladder.items()
    )
    return rows.set_index("case", drop=False).loc[[one.case_id for one in decisions]].reset_index(drop=True)


def scoring_options(archive: Archive) -> dict[str, Any]:
    """Return how the cases of an archive are scored: its configuration, with defaults filled in."""
    configuration = archive.configuration
    return {
        "min_area": int(configuration.get("min_area", 16)),
        "foreground": bool(configuration.get("foreground", True)),
        "ignore": configuration.get("ignore", VOID if configuration.get("metric") == "miou" else None),
        "metric": str(configuration.get("metric", "dice")),
        "classes": configuration.get("classes"),
    }


def _table(archive: Archive, options: dict[str, Any], measured: Measured | None) -> pd.DataFrame:
    one_by_one = (case_outcomes(archive, options, case_id) for case_id in archive.ids)
    rows = [row for found in (measured(archive, options) if measured else one_by_one) for row in found]
    derived = pd.DataFrame(rows, columns=[*WHO, "step", "shrink", *COLUMNS])
    stored = archive.signals()
    names = [name for name in stored.columns if name not in {*COLUMNS, *KEYS} and not name.startswith(DROP)]
    return derived.merge(stored[[*KEYS, *names]], on=KEYS, how="left")


def case_outcomes(archive: Archive, options: dict[str, Any], case_id: str) -> Rows:
    """Return the rows of one case."""
    entry, masks = archive.entry(case_id), archive.masks(case_id)
    label = archive.label(case_id) if entry.labelled else None
    who = {"case": case_id, "group": entry.group, "cluster": entry.cluster, "split": entry.split}
    return [
        {
            **who,
            "step": state.step,
            "shrink": state.shrink,
            **_measured(masks[SOURCE], mask, label, options, entry.spacing_mm),
        }
        for state, mask in masks.items()
    ]


def _measured(
    source: Mask, mask: Mask, label: Mask | None, options: dict[str, Any], spacing_mm: tuple[float, ...] | None
) -> dict[str, float]:
    """Measure one candidate against M0 and the label."""
    area = {"min_area": options["min_area"], "foreground": options["foreground"]}
    if label is None:
        found = fragmentation(source, mask, **area)
        sizes = {"regions": found.regions, "delta": found.delta, "area": found.area}
        return {**sizes, **edit_shares(source, mask, None, None)}
    score = METRICS[options["metric"]].of(mask, label, ignore=options["ignore"], spacing_mm=spacing_mm)
    return {"metric": float(score), **edit_harm(source, mask, label, ignore=options["ignore"], **area)}


def edit_harm(
    source: Mask, mask: Mask, label: Mask, *, ignore: int | None, min_area: int, foreground: bool
) -> dict[str, float]:
    """Measure an edit against the label: HA and BA with their counts, and the shares of voxels."""
    judged = harm(source, mask, label, ignore=ignore, min_area=min_area, foreground=foreground)
    return {name: getattr(judged, name) for name in COLUMNS[1:8]} | edit_shares(source, mask, label, ignore)


def edit_shares(source: Mask, mask: Mask, label: Mask | None, ignore: int | None) -> dict[str, float]:
    """Shares of the changed voxels, classes as they are: made wrong, made right, moved between foreground classes.

    Small components count, and so do swaps of one foreground class for another, both of which HA may not see.
    """
    at = np.flatnonzero(source != mask)
    whole = max(at.size, 1)
    before, after = source.ravel()[at], mask.ravel()[at]
    found: dict[str, float] = {"swapped": np.count_nonzero((before > 0) & (after > 0)) / whole}
    if label is None:
        return found
    truth = label.ravel()[at]
    valid = np.ones(at.size, bool) if ignore is None else truth != ignore
    found["worse_voxels"] = np.count_nonzero(valid & (before == truth)) / whole
    found["better_voxels"] = np.count_nonzero(valid & (after == truth)) / whole
    return found


def judged_share(rows: pd.DataFrame) -> float | None:
    """Return the share of the changed area that HA judged: sum_i (1 - unscored_i) |D_i| / sum_i |D_i|.

    None where nothing was changed. If it is small, HA covers little of the edit: most of the edit is in smaller
    components.
    """
    known = rows.loc[rows["unscored"].notna() & (rows["area"] > 0)]
    area = float(known["area"].sum())
    return float(((1 - known["unscored"]) * known["area"]).sum() / area) if area else None


LITTLE = 0.5


def judged_sentence(share: float | None) -> str:
    """Say how much of the edit HA judged; below one half, name the measure to read instead."""
    if share is None:
        return "no voxel changed, so HA judged nothing"
    if share >= LITTLE:
        return f"HA judged {share:.0%} of the edit"
    return f"HA judged only {share:.0%} of the edit, so use worse-voxels, which counts every voxel"


def _chosen(decision: Decision) -> dict[str, Any]:
    state = {"case": decision.case_id, "step": decision.state.step, "shrink": decision.state.shrink}
    facts = {name: getattr(decision, name) for name in ("group", *DECIDED)}
    return {**state, **facts, "action": decision.action.value, "decision": decision}


def _composed_row(archive: Archive | None, decision: Decision, controller: Controller | None) -> Sequence[float]:
    if archive is None or controller is None:
        raise BadInput(
            f"{decision.controller} makes masks that were not recorded; call deployed(..., archive=, "
            f"controller=) to measure them"
        )
    options, masks = scoring_options(archive), archive.masks(decision.case_id)
    output = mask_of(controller, lambda state: masks[state.on("")], decision)
    entry = archive.entry(decision.case_id)
    label = archive.label(decision.case_id) if entry.labelled else None
    measured = _measured(masks[SOURCE], output, label, options, entry.spacing_mm)
    return [measured.get(name, float("nan")) for name in COLUMNS]
