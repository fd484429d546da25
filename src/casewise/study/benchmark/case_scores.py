"""The evaluation labels are opened, and every sealed decision is scored case by case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from casewise.archive.layout import Entry, compact_mask, mask_sha256
from casewise.archive.store import Archive, LabelSource
from casewise.core.errors import BadInput
from casewise.core.records import Action, Controller, Decision, Mask, Policy, State
from casewise.data.splits import Cohort
from casewise.judge.deciding import CONSENSUS_NAMES, candidate_masks
from casewise.judge.ledger import expose, read_ledger
from casewise.judge.outcomes import deployed, outcomes
from casewise.judge.policy import controller_of
from casewise.study.benchmark.decisions import Sealed, cluster_name
from casewise.study.quality_control import Opinions, consensus_steps, quality_rows

OPENED = "bench: labels opened to score the decisions"


def label_source(cohort: Cohort, archive: Archive, table: Sequence[int] | None = None) -> LabelSource:
    """Reads the label of a case in the numbers of the masks; ``table`` renumbers classes that a model merged."""

    def read(case_id: str) -> Mask:
        label = cohort.label(case_id)
        shape = archive.entry(case_id).shape
        if label.size != int(np.prod(shape)):
            raise BadInput(f"the label of case {case_id} has shape {label.shape}, its masks have {shape}")
        label = label.reshape(shape)
        return label if table is None else np.asarray(table)[label.astype(np.intp)]

    return read


def opened(sealed: Sealed, evaluation: Archive, labels: LabelSource) -> Archive:
    """The evaluation archive with its labels; that they are opened is written first, once for these decisions."""
    line = f"{OPENED} {sealed.sha256}"
    there = [one for one in read_ledger(sealed.ledger) if one["choice"] == line]
    said = there[0] if there else expose(sealed.ledger, choice=line)
    return with_labels(evaluation, labels, unlocked_by=str(said["hash"]))


def with_labels(archive: Archive, labels: LabelSource, *, unlocked_by: str) -> Archive:
    """An archive without labels as one whose labels are known by hash and read from elsewhere."""
    hashes = {case_id: mask_sha256(compact_mask(labels(case_id))) for case_id in archive.ids}

    def known(entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
        return MappingProxyType(
            {
                name: replace(entry, labelled=True, label_sha256=hashes[name])
                for name, entry in entries.items()
                if name in hashes
            }
        )

    return replace(
        archive,
        entries=known(archive.entries),
        cases=known(archive.cases or archive.entries),
        parts={ladder: known(entries) for ladder, entries in archive.parts.items()},
        labels=labels,
        unlocked_by=unlocked_by,
    )


@dataclass(frozen=True)
class Scored:
    """What every case and method came to."""

    cases: pd.DataFrame  # one row per case: case, cluster, group, metric of M0, best recorded metric, hashes
    methods: Mapping[str, pd.DataFrame] = field(repr=False)  # one row per case, columns of judge.outcomes and cost
    dealt: Mapping[str, dict[str, Any] | None] = field(repr=False)  # what a random deal is drawn from


def scored(evaluation: Archive, methods: Sequence[Mapping[str, Any]], policies: Mapping[str, Policy]) -> Scored:
    """Every sealed decision against the labels that are open now; ``policies`` say how a composed mask is made."""
    frames = {ladder: outcomes(evaluation.on(ladder)) for ladder in evaluation.ladders}
    best = pd.concat(frames.values()).groupby("case")["metric"].max()
    first = frames[evaluation.ladders[0]]
    source = first.loc[first["step"] == 0].set_index("case")["metric"]
    rows, dealt = {}, {}
    agreement = {ladders: _agreement(evaluation, ladders) for ladders in {tuple(one["ladders"]) for one in methods}}
    for method in methods:
        name, ladders = method["name"], tuple(method["ladders"])
        decisions = [Decision.from_dict(one) for one in method["decisions"]]
        frame = _deployed(frames, evaluation, decisions, ladders[0], controller_of(policies[name]))
        frame = frame.assign(**_paid(evaluation, ladders, decisions))
        rows[name] = frame.assign(agreement=frame["case"].map(agreement[ladders]))
        dealt[name] = deals(frames, decisions, ladders[0])
    entries = evaluation.cases or evaluation.entries
    cases = pd.DataFrame(
        [
            {
                "case": case_id,
                "cluster": cluster_name(entries[case_id]),
                "group": entries[case_id].group,
                "metric": float(source[case_id]),
                "best": float(best[case_id]),
                "m0_sha256": entries[case_id].mask_sha256["0"],
                "label_sha256": entries[case_id].label_sha256,
            }
            for case_id in evaluation.on(evaluation.ladders[0]).ids
        ]
    )
    return Scored(cases, rows, dealt)


def _deployed(
    frames: Mapping[str, pd.DataFrame],
    evaluation: Archive,
    decisions: Sequence[Decision],
    first: str,
    controller: Controller,
) -> pd.DataFrame:
    """One row for each decision, each scored on the ladder that its state names; M0 on the first."""
    found = []
    for ladder in dict.fromkeys(one.state.ladder or first for one in decisions):
        own = [replace(one, state=one.state.on("")) for one in decisions if (one.state.ladder or first) == ladder]
        found.append(deployed(frames[ladder], own, archive=evaluation.on(ladder), controller=controller))
    order = {one.case_id: place for place, one in enumerate(decisions)}
    return pd.concat(found, ignore_index=True).sort_values("case", key=lambda ids: ids.map(order), ignore_index=True)


def _agreement(evaluation: Archive, ladders: Sequence[str]) -> dict[str, float]:
    """Agreement of M0 with the other candidates of each case: a signal of quality that needs no label."""
    metric = str(evaluation.on(ladders[0]).configuration.get("metric", "dice"))
    views = [evaluation.on(ladder) for ladder in ladders]

    def opinions() -> Iterator[Opinions]:
        for case_id in views[0].ids:
            made = {State(step).on(ladder) for ladder, view in zip(ladders, views, strict=True)
                    for step in consensus_steps(view.entry(case_id).rungs)}  # fmt: skip
            masks = candidate_masks(evaluation, case_id, ladders)
            kept = tuple(mask for state, mask in masks.items() if state not in made)
            yield Opinions(case_id, case_id, kept, None)

    return dict(quality_rows(opinions(), metric=metric).set_index("case")["agreement"].astype(float))


def _paid(whole: Archive, ladders: Sequence[str], decisions: Sequence[Decision]) -> dict[str, list[Any]]:
    """Forwards (of readings), updates (of gradients), seconds and flags of each decision."""
    clocks = [{name: entry.seconds for name, entry in whole.on(ladder).entries.items()} for ladder in whole.ladders]
    views = [whole.on(ladder) for ladder in ladders]
    found: dict[str, list[Any]] = {"forwards": [], "updates": [], "seconds": [], "flagged": []}
    for one in decisions:
        source = max((clock[one.case_id][:1] for clock in clocks if clock.get(one.case_id)), default=())
        readings, updates, took = 1, 0, sum(source)
        for view in views:  # a policy over several ladders has seen them all
            entry = view.entry(one.case_id)
            executed = one.executed if len(views) == 1 else view.steps
            readings += sum(rung.split("(")[0] not in CONSENSUS_NAMES for rung in entry.rungs[:executed])
            updates += 0 if entry.rungs else executed
            took += sum(entry.seconds[1 : executed + 1]) if entry.seconds else float("nan")
        found["forwards"].append(float("nan") if updates else float(readings))
        found["updates"].append(float(updates))
        found["seconds"].append(took)
        found["flagged"].append(bool(one.flagged))
    return found


def deals(frames: Mapping[str, pd.DataFrame], decisions: Sequence[Decision], first: str = "") -> dict[str, Any] | None:
    """What every deployed state would come to on every case, and who got which; None where nothing was ranked.

    Nothing is ranked where one state is deployed for everyone, or a mask is composed of several.
    """
    states = sorted({one.state for one in decisions}, key=str)
    if len(states) < 2 or any(one.action is Action.GATE for one in decisions):
        return None
    ids = [one.case_id for one in decisions]
    table = {ladder: frame.set_index(["step", "shrink", "case"]).sort_index() for ladder, frame in frames.items()}
    parts = [table[state.ladder or first].loc[(state.step, state.shrink)].reindex(ids) for state in states]
    source = table[first].loc[(0, 0.0)].reindex(ids)["metric"].to_numpy(float)
    return {
        "states": [str(state) for state in states],
        "given": [states.index(one.state) for one in decisions],
        "change": np.column_stack([part["metric"].to_numpy(float) - source for part in parts]).tolist(),
        "ha": np.column_stack([part["ha"].to_numpy(float) for part in parts]).tolist(),
    }
