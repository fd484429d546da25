"""A benchmark of decisions: fitted on calibration cases, taken without evaluation labels, sealed, then scored once.

The order is the point. :func:`decide_all` sees calibration labels and an evaluation archive that holds none.
:func:`seal` writes every decision and its hash into the ledger of the evaluation archive. Only then does :func:`scored`
open the evaluation labels, which is the next line of the same ledger. The result is one value of plain JSON types that
``study/leaderboard.py`` checks and compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from casewise.archive.layout import Entry, compact_mask, image_sha256, mask_sha256
from casewise.archive.store import Archive, LabelSource
from casewise.core.brief import UNIT
from casewise.core.chain import Chain
from casewise.core.durable import json_sha256, text_sha256, write_json
from casewise.core.errors import BadInput, CasewiseError, Locked, Mismatch, Overlap, TooFewCases
from casewise.core.formats import json_text
from casewise.core.records import CALIBRATION, EVALUATION, Action, Controller, Decision, Mask, Policy, State
from casewise.data.datasets import load_dataset, recognize
from casewise.data.datasets.plain import plain_files
from casewise.data.folders import CaseFiles
from casewise.data.splits import Cohort, check_disjoint, clusters_of, holdout, with_split
from casewise.judge.calibration.fit import calibrate
from casewise.judge.certificates.certificate import Certificate, policy_digest
from casewise.judge.certificates.certify_router import Promise, certify_router
from casewise.judge.certificates.grid import halves_of
from casewise.judge.deciding import CONSENSUS_NAMES, candidate_masks, has_consensus
from casewise.judge.ledger import LEDGER, expose, read_ledger
from casewise.judge.outcomes import POINT, deployed, judged_share, outcomes
from casewise.judge.policy import READY, among_candidates, check_held_out, controller_of, design_of, no_go
from casewise.measure.metrics.selective import auroc, risk_coverage
from casewise.replay import replay
from casewise.study.quality_control import Opinions, consensus_steps, quality_rows
from casewise.study.statistics.chance import chance_draws
from casewise.study.statistics.resample import clusters_of as units_of
from casewise.study.statistics.resample import mean_interval

SCHEMA = "casewise-bench/2"
DECISIONS, RESULT, PLAN = "decisions.json", "result.json", "plan.json"
SEALED, OPENED = "bench: decisions sealed", "bench: labels opened to score the decisions"
FEWEST = 5  # clusters from which an interval is given
POOR = 0.7  # cases whose metric is below this should be found by a signal of quality
DEALS, DEAL_SEED = 1000, 1000
HALVED = f"labels fit this design, so half of the calibration {UNIT[1]} fitted it and the others certify it"
AS_THEY_LIE = ("plain", "nnunet_raw")  # layouts whose files need no mapping before a model reads them
NUMBERS = ("metric", "change", "ha", "ba", "unscored", "area", "worse_voxels")
"""What the result keeps of each case and method."""


# ---- the two sides ----


@dataclass(frozen=True)
class Sides:
    """Which cases calibrate and which evaluate, and how they were told apart; no label has been opened."""

    calibration: Cohort
    evaluation: Cohort
    how: Mapping[str, Any]
    layouts: tuple[str, str]  # of the two folders, as casewise.data.datasets calls them

    def __post_init__(self) -> None:
        check_disjoint(*(clusters_of(side.members.values()) for side in (self.calibration, self.evaluation)))

    def files(self, split: str, copies: Path) -> tuple[CaseFiles, ...]:
        """What a model reads of one side; of evaluation cases not even the path of a label."""
        calibrates = split == CALIBRATION
        return plain_files(
            self.calibration if calibrates else self.evaluation,
            copies / split,
            as_it_lies=self.layouts[0 if calibrates else 1] in AS_THEY_LIE,
            labels=calibrates,
        )

    def images(self) -> dict[str, dict[str, str | None]]:
        """sha256 of every image by split and case, the same for every model."""
        return {
            split: {case.id: image_sha256(case.image) for case in side}
            for split, side in ((CALIBRATION, self.calibration), (EVALUATION, self.evaluation))
        }


def sides_of(data: Path, calibration: Path | None = None, *, share: float = 0.3, seed: int = 1000) -> Sides:
    """The cases of a dataset folder: by its column split, by a folder of calibration cases, or drawn by cluster.

    Cases without a label can neither calibrate nor be scored here, so they are left out and counted.
    """
    whole = load_dataset(data)
    how: dict[str, Any] = {"by": "folders" if calibration else "column split"}
    if calibration is not None:
        parts = [_marked(load_dataset(calibration), CALIBRATION), _marked(whole, EVALUATION)]
    else:
        marks = {member.split for member in whole.members.values()} & {CALIBRATION, EVALUATION}
        if not marks:
            whole, drawn = _drawn(whole, share, seed)
            how = {"by": "draw of clusters", **drawn}
        elif len(marks) == 1:
            raise BadInput(
                f"{whole.name} marks {next(iter(marks))} cases only; mark calibration and evaluation in the column "
                f"split of cases.csv, or give --calibration FOLDER"
            )
        parts = [whole.select(split=CALIBRATION), whole.select(split=EVALUATION)]
    found = []
    for split, part in zip((CALIBRATION, EVALUATION), parts, strict=True):
        kept = {name: member for name, member in part.members.items() if member.labelled}
        if not kept:
            raise BadInput(f"no {split} case of {part.name} has a label; a benchmark needs labels on both sides")
        how[f"{split} without label"] = len(part) - len(kept)
        found.append(replace(part, members=kept))
    layouts = [recognize(folder) or "" for folder in (calibration or data, data)]
    return Sides(found[0], found[1], how, (layouts[0], layouts[1]))


def _marked(cohort: Cohort, split: str) -> Cohort:
    return replace(cohort, members={name: replace(one, split=split) for name, one in cohort.members.items()})


def _drawn(cohort: Cohort, share: float, seed: int) -> tuple[Cohort, dict[str, Any]]:
    """Calibration clusters drawn within each group, or from all together where a group has too few."""
    labelled = {name: one for name, one in cohort.members.items() if one.labelled}
    if not labelled:
        raise BadInput(f"{cohort.name} has no labels; a benchmark needs them on both sides")
    cohort = replace(cohort, members=labelled)
    try:
        split = holdout(cohort, share=share, seed=seed)
    except TooFewCases:
        split = holdout(cohort, share=share, seed=seed, per_group=False)
    return with_split(cohort, split), {"share": share, "seed": seed, "per_group": split.per_group}


def check_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Write what is benchmarked, or refuse a folder that holds another benchmark: then nothing could be resumed."""
    file, said = folder / PLAN, json.loads(json_text(plan))
    if not file.exists():
        write_json(file, said)
        return
    there = json.loads(file.read_text(encoding="utf-8"))
    differing = [name for name in said if there.get(name) != said[name]]
    if differing:
        raise Mismatch(
            f"{folder} holds a benchmark with other {', '.join(differing)}; choose another folder, or repeat the first "
            f"run's data and options to go on with it"
        )


def part_of(archive: Archive, ids: Iterable[str], ladders: Sequence[str]) -> Archive:
    """An archive as if it held these cases and ladders only; one that it lacks is an error."""
    ids, views = list(ids), [archive.on(ladder) for ladder in ladders]
    lacking = [case_id for view in views for case_id in ids if case_id not in view.entries]
    if lacking:
        raise BadInput(f"{archive.path} lacks {len(lacking)} recordings, such as that of case {lacking[0]}")
    named = {name: facts for name, facts in archive.manifest.get("ladders", {}).items() if name in ladders}
    return replace(views[0], manifest={**archive.manifest, "ladders": named}).select(ids=ids)


# ---- decisions, without evaluation labels ----


@dataclass(frozen=True)
class Method:
    """A policy and what it decided on every evaluation case."""

    name: str
    policy: Policy
    decisions: tuple[Decision, ...]
    design: str = ""  # what was calibrated; "" for methods that need no calibration
    certificate: Certificate | None = None  # that the policy stands under
    notes: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """What is sealed: plain JSON types, clusters by hash."""
        made = {
            "name": self.name,
            "design": self.design,
            "ladders": ladders_of(self.policy),
            "controller": self.policy.controller,
            "policy_sha256": policy_digest(self.policy),
            "certificate": _promised(self.certificate),
            "notes": list(self.notes),
            "decisions": [{**one.as_dict(), "cluster": cluster_name(one)} for one in self.decisions],
        }
        return dict(json.loads(json_text(made)))


def ladders_of(policy: Policy) -> list[str]:
    """The ladders that a policy reads."""
    return list(policy.ladders) or [policy.ladder]


def _promised(certificate: Certificate | None) -> dict[str, Any] | None:
    if certificate is None:
        return None
    names = ("statement", "loss", "alpha", "delta", "bound", "units", "kept")
    margin = certificate.details.get("margin", 0.0)
    return {**{name: getattr(certificate, name) for name in names}, "margin": margin}


def cluster_name(decision: Decision | Entry) -> str:
    """The patient or sequence of a case, by hash: a result may be published."""
    case = decision.case_id if isinstance(decision, Decision) else decision.id
    return text_sha256(decision.cluster or case)[:16]


def decide_all(
    calibration: Archive, evaluation: Archive, designs: Sequence[str], *, promise: Promise | None = None
) -> tuple[tuple[Method, ...], tuple[str, ...]]:
    """(methods with their decisions, what was refused and why): M0, the last candidate for everyone, each design.

    Designs are fitted on the calibration archive, ladder by ladder; those that choose among candidates also over all
    ladders together. The evaluation archive must hold no label: then nothing here can have seen one. With ``promise`` a
    design that can be certified is there twice, the second time under its certificate.
    """
    if any(entry.labelled for entry in evaluation.entries.values()):
        raise Locked(f"{evaluation.path} holds labels; decisions of a benchmark are taken where there are none")
    refused: list[str] = []
    first = evaluation.ladders[0]
    made = [_decided("M0", replace(READY["m0"], ladder=first), evaluation)]
    sides = {ladder: calibration.on(ladder) for ladder in evaluation.ladders}
    if len(sides) > 1:
        sides[" + ".join(sides)] = calibration.together(tuple(sides))
    for ladder, known in sides.items():
        if not known.joined:
            made.append(_everyone(evaluation.on(ladder), ladder))
        for design in designs:
            if known.joined and not chooses(design, known):
                continue
            name = method_name(ladder, design)
            try:
                policy = fitted(known, design)
                check_held_out(policy, evaluation.entries.values())
                made.append(_decided(name, policy, evaluation, design))
            except CasewiseError as error:
                refused.append(f"{name}: {error}")
                continue
            if promise is not None:
                try:
                    certificate, certified, note = _certified(known, policy, design, promise, name)
                except CasewiseError as error:
                    refused.append(f"{name}, certificate: {error}")
                    continue
                if certificate.feasible:
                    under = _decided(f"{name}, certified", certified, evaluation, design, certificate)
                    made.append(replace(under, notes=(*under.notes, *note)))
                else:
                    refused.append(f"{name}, certificate: {certificate.advice}")
    return tuple(made), tuple(refused)


def _certified(
    known: Archive, policy: Policy, design: str, promise: Promise, name: str
) -> tuple[Certificate, Policy, tuple[str, ...]]:
    """A certificate with its policy; one that labels fitted is fitted again on half of the patients first."""
    try:
        return *certify_router(known, policy, promise, force=True), ()
    except Overlap:
        fit, test = halves_of(known)
        certificate, certified = certify_router(test, fitted(fit, design), promise, force=True)
        return certificate, certified, (f"{name}, certified: {HALVED}",)


def chooses(design: str, known: Archive) -> bool:
    """Whether a design chooses among all candidates of a case, and so can read several ladders together."""
    return among_candidates(design_of(design)) or (design == "default" and has_consensus(known, None))


def method_name(ladder: str, what: str) -> str:
    """How a table calls a method of a ladder."""
    return f"{ladder}: {what}" if ladder else what


def fitted(calibration: Archive, design: str) -> Policy:
    """A design calibrated on one ladder; where no shrunk states were recorded, without them."""
    return calibrate(calibration, design, unshrunk=not any(state.shrink for state in calibration.states))


def _everyone(archive: Archive, ladder: str) -> Method:
    """The last candidate for every case: the consensus of a ladder of readings, or the last update."""
    rungs = next(iter(archive.entries.values())).rungs
    last = rungs[-1] if rungs else f"step {archive.steps}"
    policy = Policy("fixed-k", "fixed-k", {"step": archive.steps}, archive.steps, ladder=ladder)
    return _decided(method_name(ladder, f"{last} for everyone"), policy, archive)


def _decided(
    name: str, policy: Policy, evaluation: Archive, design: str = "", certificate: Certificate | None = None
) -> Method:
    said = no_go(policy)
    view = evaluation if policy.ladders else evaluation.on(policy.ladder or evaluation.ladders[0])
    return Method(name, policy, tuple(replay(view, policy)), design, certificate, () if said is None else (said,))


@dataclass(frozen=True)
class Sealed:
    """Decisions that are written and hashed, and where the ledger says so."""

    methods: tuple[dict[str, Any], ...]
    sha256: str
    ledger: Path
    labels_seen_before: bool  # whether evaluation labels had been opened when these decisions were sealed


def seal(folder: Path, methods: Iterable[Method], evaluation: Archive) -> Sealed:
    """Write all decisions, and their hash into the ledger of the evaluation archive; the same decisions once."""
    plain = [method.plain() for method in methods]
    sha256 = json_sha256(plain)
    write_json(folder / DECISIONS, {"schema": SCHEMA, "sha256": sha256, "methods": plain})
    line = f"{SEALED} {sha256}"
    if not any(one["choice"] == line for one in read_ledger(evaluation.path)):
        expose(evaluation.path, choice=line, labels_visible=False)
    return Sealed(tuple(plain), sha256, evaluation.path, seen_before(read_ledger(evaluation.path), sha256))


def seen_before(ledger: Sequence[Mapping[str, Any]], sha256: str) -> bool:
    """Whether labels were visible on any line of a ledger before the one that seals these decisions."""
    for line in ledger:
        if line.get("choice") == f"{SEALED} {sha256}":
            return False
        if line.get("labels_visible"):
            return True
    return True  # never sealed


# ---- scores, once the labels are open ----


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
    dealt: Mapping[str, dict[str, Any] | None] = field(
        repr=False, default_factory=dict
    )  # what a random deal is drawn from


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


# ---- matched quotas ----


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


def quota_p(dealt: Mapping[str, Any] | None, units: Any) -> dict[str, float | None]:
    """How often dealing the same states to the patients at random gains as much, and harms as little.

    ``units`` numbers the patient of each case. One-sided, with the observed deal among the draws.
    """
    found: dict[str, float | None] = {"p_gain": None, "p_ha": None}
    if dealt is None:
        return found
    given = np.array(dealt["given"], int)
    for name, column, sign in (("p_gain", "change", 1), ("p_ha", "ha", -1)):
        values = np.array(dealt[column], float)
        drawn = sign * chance_draws(values, given, DEALS, DEAL_SEED, np.asarray(units))
        observed = sign * float(np.nanmean(values[np.arange(len(values)), given]))
        found[name] = (1 + int((drawn >= observed - 1e-12).sum())) / (1 + DEALS)
    return found


def summary(rows: pd.DataFrame, oracle: float | None = None) -> dict[str, Any]:
    """The numbers of one method: gain with its interval by cluster, whom it helped and hurt, harm, cost.

    ``rows``: one per case, with the columns of ``judge.outcomes.deployed`` or those that a result keeps. ``oracle`` is
    the mean gain of the best recorded candidate of each case. Cases whose metric is undefined are counted, no more.
    """
    known = rows.loc[rows["change"].notna()]
    change = known["change"].to_numpy(float)
    units = units_of(known)
    several = len(change) and units.max() + 1 >= FEWEST
    gain = float(change.mean()) if len(change) else None
    interval = mean_interval(change, clusters=units) if several else None
    judged = judged_share(rows)
    return {
        "cases": len(rows),
        "clusters": int(units.max() + 1) if len(change) else 0,
        "undefined": len(rows) - len(known),
        "metric": _mean(known, "metric"),
        "gain": gain,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "captured": None if gain is None or not oracle or oracle <= 0 else gain / oracle,
        "helped": int((change > 0).sum()),
        "hurt": int((change < 0).sum()),
        "hurt_by_a_point": int((change < -POINT).sum()),
        "worst": float(change.min()) if len(change) else None,
        "ha": None if judged is None else _mean(rows, "ha"),
        "ba": None if judged is None else _mean(rows, "ba"),
        "judged": judged,
        "worse_voxels": None if judged is None else _mean(rows, "worse_voxels"),
        "flagged": int(rows["flagged"].sum()) if "flagged" in rows else None,
        "forwards": _mean(rows, "forwards"),
        "updates": _mean(rows, "updates"),
        "seconds": float(rows["seconds"].median()) if "seconds" in rows and rows["seconds"].notna().all() else None,
        **_told_apart(known),
    }


def _told_apart(rows: pd.DataFrame) -> dict[str, float | None]:
    """AURC where cases are trusted in the order of agreement, and AUROC of agreement for poor ones."""
    found: dict[str, float | None] = {"aurc": None, "aurc_best": None, "auroc": None}
    seen = rows.loc[rows["agreement"].notna()] if "agreement" in rows else rows.iloc[:0]
    if len(seen) >= 3 and seen["agreement"].nunique() > 1:
        signal, metric = seen["agreement"].to_numpy(float), seen["metric"].to_numpy(float)
        curve = risk_coverage(signal, 1 - metric)
        poor = metric < POOR
        found |= {"aurc": curve.aurc, "aurc_best": curve.optimum}
        found["auroc"] = auroc(-signal, poor) if 0 < poor.sum() < len(poor) else None
    return found


def _mean(rows: pd.DataFrame, name: str) -> float | None:
    if name not in rows or not len(rows) or rows[name].isna().any():
        return None
    return float(rows[name].mean())


def realised(promise: Mapping[str, Any] | None, rows: pd.DataFrame) -> float | None:
    """What a promised loss came to on the evaluation cases."""
    if promise is None:
        return None
    change = rows["change"].to_numpy(float)
    losses: dict[str, Callable[[], float]] = {
        "ha": lambda: float(rows["ha"].mean()),
        "worse-voxels": lambda: float(rows["worse_voxels"].mean()),
        "harmed": lambda: float((change[np.isfinite(change)] < -float(promise["margin"])).mean()),
        "dice": lambda: float(np.maximum(0.0, -change[np.isfinite(change)]).mean()),
    }
    return losses[promise["loss"]]()


def oracle_gain(cases: pd.DataFrame) -> float | None:
    """Mean gain of the best recorded candidate of each case, which only the label can choose."""
    gains = (cases["best"] - cases["metric"]).dropna()
    return float(gains.mean()) if len(gains) else None


# ---- the result ----


def result_of(
    found: Scored,
    sealed: Sealed,
    *,
    name: str,
    sides: Sides,
    images: Mapping[str, Mapping[str, str | None]],
    calibration: Archive,
    evaluation: Archive,
    promise: Promise | None = None,
    refused: Sequence[str] = (),
    label_table: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The one file: data, model, policies, decisions, masks and scores, each with its hash, and a hash over all."""
    first = evaluation.on(evaluation.ladders[0])
    oracle = oracle_gain(found.cases)
    cases = [{**row, "image_sha256": images[EVALUATION][row["case"]]} for row in found.cases.to_dict("records")]
    known = calibration.on(calibration.ladders[0]).entries
    fitted_on = [
        {"case": case_id, "cluster": cluster_name(entry), "image_sha256": images[CALIBRATION][case_id],
         "label_sha256": entry.label_sha256}
        for case_id, entry in known.items()
    ]  # fmt: skip
    plain: dict[str, Any] = {
        "schema": SCHEMA,
        "name": name,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "software": dict(evaluation.manifest.get("software", {})),
        "model": {
            "name": first.configuration.get("model"), "sha256": first.binding.model, "loader": first.binding.loader,
        },
        "metric": first.configuration.get("metric", "dice"),
        "measure": first.binding.measure,
        "label_table": None if label_table is None else [int(value) for value in label_table],
        "split": dict(sides.how),
        "data": {"calibration": fitted_on, "evaluation": cases, "sha256": data_sha256(cases)},
        "archives": {
            ladder: {
                "objective": evaluation.on(ladder).binding.objective,
                "steps": evaluation.on(ladder).steps,
                CALIBRATION: calibration.on(ladder).digest,
                EVALUATION: evaluation.on(ladder).digest,
            }
            for ladder in evaluation.ladders
        },
        "decisions_sha256": sealed.sha256,
        "labels_seen_before_decisions": sealed.labels_seen_before,
        "ledger": _ledger_lines(sealed.ledger),
        "oracle": oracle,
        "promise": None if promise is None else asdict(promise),
        "methods": [
            {**method, "rows": _kept(found.methods[method["name"]]), "dealt": found.dealt[method["name"]],
             **_summarized(method, found, oracle)}
            for method in sealed.methods
        ],
        "refused": list(refused),
    }  # fmt: skip
    plain = json.loads(json_text(plain))
    return {**plain, "sha256": json_sha256(plain)}


def _summarized(method: Mapping[str, Any], found: Scored, oracle: float | None) -> dict[str, Any]:
    rows = kept_frame(_kept(found.methods[method["name"]]), found.cases.to_dict("records"))
    chance = quota_p(found.dealt[method["name"]], units_of(rows))
    return {"scores": {**summary(rows, oracle), **chance}, "realised": realised(method["certificate"], rows)}


def _kept(rows: pd.DataFrame) -> list[dict[str, Any]]:
    names = ["case", *NUMBERS, "agreement", "forwards", "updates", "seconds", "flagged"]
    return list(json.loads(json_text([dict(row) for row in rows[names].to_dict("records")])))


def kept_frame(rows: Sequence[Mapping[str, Any]], cases: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The rows that a result keeps, with the clusters of their cases; null is NaN."""
    frame = pd.DataFrame(rows)
    clusters = {case["case"]: case["cluster"] for case in cases}
    numbers = [name for name in frame.columns if name not in ("case", "flagged")]
    frame[numbers] = frame[numbers].astype(float)
    return frame.assign(cluster=frame["case"].map(clusters))


def data_sha256(cases: Sequence[Mapping[str, Any]]) -> str:
    """What makes two benchmarks comparable: the same evaluation images with the same labels, under any name."""
    return json_sha256(sorted([str(case["image_sha256"]), str(case["label_sha256"])] for case in cases))


def _ledger_lines(folder: Path) -> list[dict[str, Any]]:
    """The ledger as it is on disk, every line with its hash."""
    read_ledger(folder)  # refuses one that was edited
    return Chain(folder / LEDGER).lines()
