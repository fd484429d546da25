"""The case table: every case, worst first, with small pictures of the worst ones and the facts of its decision.

A case opens with its candidates side by side: its name, its agreement with the others, its gain, and whether it was
deployed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from casewise.core.errors import CasewiseError
from casewise.core.records import Decision
from casewise.judge.decide import candidate_masks
from casewise.measure.signals.agreement import candidates_of
from casewise.render.mask_pictures import data_uri, edits, painted, view_of
from casewise.render.tables import Cell, Column, Table, number
from casewise.study.quality_control import consensus_steps
from casewise.study.study import Study, case_masks

PICTURES = 150  # cases with pictures; four panels are about 5 kB per case


def panel_names(study: Study) -> list[str]:
    """label | M0 | without control | deployed."""
    return ["label", "M0", study.everywhere, f"deployed by the {study.title(study.ours)}"]


def columns(study: Study) -> list[Column]:
    """Columns of the table beside the pictures."""
    bucket, flagged = Column("bucket", "Bucket", text=True), Column("flagged", "Flagged", text=True)
    third, last = (flagged, ()) if flags(study) and not study.is_router else (bucket, (flagged,) * flags(study))
    return [
        Column("case", "Case", text=True),
        Column("group", "Group", text=True),
        third,
        *(Column(f"change_{name}", f"Δ {study.metric}, {name}", signed=True) for name in study.extras.others),
        Column("change_reference", f"Δ {study.metric}, {study.everywhere}", signed=True),
        Column("ha_reference", f"HA, {study.everywhere}"),
        Column("change", f"Δ {study.metric}, deployed", signed=True),
        Column("ha", "HA, deployed"),
        Column("value", study.coordinate if study.is_router else "Value that decides", 5),
        Column("state", "Deployed", text=True),
        *last,
    ]


def flags(study: Study) -> bool:
    """True if the policy flagged a case or estimated the quality of one."""
    return any(one.flagged or one.quality is not None for one in study.decisions[study.ours])


def case_frame(study: Study) -> pd.DataFrame:
    """One row per case, worst under the uncontrolled budget first, ties by more HA."""
    reference = study.uncontrolled.set_index("case")
    frame = study.policy_rows.copy()
    frame["change_reference"] = frame["case"].map(reference["change"])
    frame["ha_reference"] = frame["case"].map(reference["ha"])
    for name in study.extras.others:
        frame[f"change_{name}"] = frame["case"].map(study.methods[name].set_index("case")["change"])
    frame["state"] = [_state(study, row) for row in frame.to_dict("records")]
    if flags(study):
        asked = {one.case_id for one in study.decisions[study.ours] if one.flagged}
        frame["flagged"] = ["yes" if case in asked else "no" for case in frame["case"]]
    return frame.sort_values(
        ["change_reference", "ha_reference"], ascending=[True, False], kind="stable", na_position="last"
    )


def _state(study: Study, row: Mapping[Any, Any]) -> str:
    if row["rolled_back"]:
        return "M0"
    shrunk = f", {row['shrink']:.0%} back" if row.get("shrink") else ""
    return f"{_candidate_name(study, str(row['case']), int(row['deployed']))}{shrunk}"


def _candidate_name(study: Study, case_id: str, step: int) -> str:
    """M0, the name of a rung such as gamma(1.4), or the number of the update."""
    rungs = study.evaluation.entry(case_id).rungs
    if step in consensus_steps(rungs):
        return f"consensus ({rungs[step - 1]})" if rungs[step - 1] != "consensus" else "consensus"
    return "M0" if step == 0 else rungs[step - 1] if step <= len(rungs) else f"step {step}"


def candidate_map(study: Study, decision: Decision) -> list[dict[str, str]]:
    """The candidates of a case side by side: name, agreement with the others, change of the metric, which is deployed.

    Nothing where they cannot be compared.
    """
    case_id = decision.case_id
    made = consensus_steps(study.evaluation.entry(case_id).rungs)
    masks = candidate_masks(study.evaluation, case_id)
    steps = [state.step for state in masks]
    voters = [at for at, step in enumerate(steps) if step not in made]
    try:
        found = candidates_of(
            list(masks.values()), voters=voters, background=study.configuration.get("metric") == "miou"
        )
    except CasewiseError:
        return []
    own = study.outcomes.loc[(study.outcomes["case"] == case_id) & (study.outcomes["shrink"] == 0)]
    metric = own.set_index("step")["metric"]
    return [
        {
            "name": _candidate_name(study, case_id, step),
            "agreement": "none" if signals["agreement"] is None else number(signals["agreement"]),
            "change": number(metric.get(step, np.nan) - metric.get(0, np.nan), signed=True) if step else "",
            "chosen": _chosen(study, decision, step),
        }
        for step, signals in zip(steps, found.signals(), strict=True)
    ]


def _chosen(study: Study, decision: Decision, step: int) -> str:
    """Describe the deployed part of a candidate: "" for none."""
    here = decision.state.ladder in ("", study.policy.ladder, study.evaluation.ladder_name)
    if not here or step != (0 if decision.rolled_back else decision.state.step):
        return ""
    if decision.accepted is not None and step:
        return "deployed in parts"
    return f"deployed, {decision.state.shrink:.0%} back" if decision.state.shrink else "deployed"


def case_table(study: Study, frame: pd.DataFrame) -> Table:
    """The rows of the page, and of tables/cases.csv at full precision."""
    made = columns(study)
    rows: list[dict[str, Cell]] = [
        {column.key: _word(row[column.key]) if column.text else float(row[column.key]) for column in made}
        for row in frame.astype({column.key: float for column in made if not column.text}).to_dict("records")
    ]
    return Table("cases", "Cases", made, rows)


def shown_cases(study: Study, frame: pd.DataFrame, *, pictures: int = PICTURES) -> Iterator[dict[str, Any]]:
    """Every case for the page; the first ``pictures`` with panels."""
    decisions = {name: {one.case_id: one for one in study.decisions[name]} for name in (study.reference, study.ours)}
    for at, row in enumerate(frame.to_dict("records")):
        case = str(row["case"])
        pair = decisions[study.reference][case], decisions[study.ours][case]
        painted_panels, captions, where = _pictures(study, pair) if at < pictures else ((), panel_names(study), "")
        facts = {
            "panels": captions,
            "where": where,
            "facts": _facts(study, row, pair[1]),
            "candidates": candidate_map(study, pair[1]) if at < pictures else [],
            "flagged": pair[1].flagged,
        }
        words = {name: _word(row[name]) for name in ("group", "bucket")}
        worse = bool(row["change_reference"] < 0)
        yield {"id": case, **words, "worse": worse, "pictures": painted_panels, "facts": facts}


def _word(value: Any) -> str:
    return "none" if value is None or value != value else str(value)


def _pictures(study: Study, pair: tuple[Decision, Decision]) -> tuple[tuple[str, ...], list[str], str]:
    """Return four small panels of the slice with most harm, their captions, and their place."""
    found = case_masks(study, pair[0].case_id, reference=pair[0], deployed=pair[1])
    if found is None:
        return (), panel_names(study), "no label was recorded, so no outline can be drawn"
    view = view_of(found.reference_edits, found.label, found.source, found.reference, found.deployed)
    output = edits(found.source, found.deployed, found.label, measure=study.measure)
    panels = (
        painted(found.label, view, classes=study.classes),
        painted(found.source, view, classes=study.classes),
        painted(found.reference, view, change=found.reference_edits, classes=study.classes),
        painted(found.deployed, view, change=output, classes=study.classes),
    )
    harms = ("", "", f", HA {found.reference_edits.found.ha:.2f}", f", HA {output.found.ha:.2f}")
    captions = [f"{name}{harm}" for name, harm in zip(panel_names(study), harms, strict=True)]
    return tuple(data_uri(panel) for panel in panels), captions, f"Shown: {view.words(found.label.shape)}."


def _facts(study: Study, row: Mapping[Any, Any], decision: Decision) -> list[tuple[str, str]]:
    measured = [
        ("group", _word(row["group"])),
        ("cluster", _word(row["cluster"])),
        (f"{study.metric} of M0", number(row["metric_source"], 4)),
        (f"Δ {study.metric}, {study.everywhere}", number(row["change_reference"], 4, signed=True)),
        (f"HA, {study.everywhere}", number(row["ha_reference"], 4)),
        (f"Δ {study.metric}, deployed", number(row["change"], 4, signed=True)),
        ("HA, deployed", number(row["ha"], 4)),
        ("share of the deployed edit that HA judged", number(1 - row["unscored"] if row["area"] else None, 2)),
        ("BA, deployed", number(row["ba"], 4)),
        ("number of regions of the deployed edit", f"{int(row['regions'])}"),
        ("changed voxels deployed", f"{int(row['area'])}"),
    ]
    decided = [
        ("decision", decision.reason or decision.action.value),
        ("bucket", decision.bucket or "none"),
        ("candidates made" if study.rungs else "updates executed", f"{decision.executed}"),
        ("state deployed", str(decision.state)),
        ("sha256 of the deployed mask", decision.state_hash[:16] or "none"),
    ]
    asked = [
        ("flagged for a person", "yes" if decision.flagged else "no"),
        ("estimated quality", number(decision.quality)),
        ("its lower bound", "none" if decision.quality_low is None else number(decision.quality_low)),
    ]
    return measured + decided + (asked if decision.quality is not None else [])
