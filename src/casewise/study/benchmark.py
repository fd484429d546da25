"""A benchmark of decisions: fitted on calibration cases, taken without evaluation labels, sealed, then scored once.

The order is the point. :func:`decide_all` sees calibration labels and an evaluation archive that holds none.
:func:`seal` writes every decision and its hash into the ledger of the evaluation archive. Only then does :func:`scored`
open the evaluation labels, which is the next line of the same ledger. The result is one value of plain JSON types that
``study/leaderboard.py`` checks and compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from casewise.archive.layout import Entry, compact_mask, image_sha256, mask_sha256
from casewise.archive.store import Archive, LabelSource
from casewise.core.chain import Chain
from casewise.core.durable import json_sha256, text_sha256, write_json
from casewise.core.errors import BadInput, CasewiseError, Locked, Mismatch, Overlap, TooFewCases
from casewise.core.formats import json_text
from casewise.core.records import CALIBRATION, EVALUATION, Decision, Mask, Policy
from casewise.data.datasets import load_dataset, recognize
from casewise.data.datasets.plain import plain_files
from casewise.data.folders import CaseFiles
from casewise.data.splits import Cohort, check_disjoint, clusters_of, holdout, with_split
from casewise.judge.calibration.designs import CONSENSUS_NAMES
from casewise.judge.calibration.fit import calibrate
from casewise.judge.certificates.certificate import Certificate, policy_digest
from casewise.judge.certificates.certify_router import Promise, certify_router
from casewise.judge.ledger import LEDGER, expose, read_ledger
from casewise.judge.outcomes import deployed, judged_share, outcomes
from casewise.judge.policy import READY, check_held_out, controller_of, no_go
from casewise.replay import replay
from casewise.study.statistics.resample import clusters_of as units_of
from casewise.study.statistics.resample import mean_interval

SCHEMA = "casewise-bench/1"
DECISIONS, RESULT, PLAN = "decisions.json", "result.json", "plan.json"
SEALED, OPENED = "bench: decisions sealed", "bench: labels opened to score the decisions"
POINT = 0.01  # a case is clearly hurt where the metric falls by more than this
FEWEST = 5  # clusters from which an interval is given
CHOSEN_BY_LABELS = "the labels of the calibration cases chose this design, so they cannot also certify it"
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
            "ladder": self.policy.ladder,
            "controller": self.policy.controller,
            "policy_sha256": policy_digest(self.policy),
            "certificate": _promised(self.certificate),
            "notes": list(self.notes),
            "decisions": [{**one.as_dict(), "cluster": cluster_name(one)} for one in self.decisions],
        }
        return dict(json.loads(json_text(made)))


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

    Designs are fitted on the calibration archive, ladder by ladder. The evaluation archive must hold no label: then
    nothing here can have seen one. With ``promise`` a design that can be certified is there twice, the second time
    under its certificate.
    """
    if any(entry.labelled for entry in evaluation.entries.values()):
        raise Locked(f"{evaluation.path} holds labels; decisions of a benchmark are taken where there are none")
    refused: list[str] = []
    first = evaluation.ladders[0]
    made = [_decided("M0", replace(READY["m0"], ladder=first), evaluation)]
    for ladder in evaluation.ladders:
        made.append(_everyone(evaluation.on(ladder), ladder))
        known = calibration.on(ladder)
        for design in designs:
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
                    certificate, certified = certify_router(known, policy, promise, force=True)
                except Overlap:
                    refused.append(f"{name}, certificate: {CHOSEN_BY_LABELS}")
                    continue
                except CasewiseError as error:
                    refused.append(f"{name}, certificate: {error}")
                    continue
                if certificate.feasible:
                    made.append(_decided(f"{name}, certified", certified, evaluation, design, certificate))
                else:
                    refused.append(f"{name}, certificate: {certificate.advice}")
    return tuple(made), tuple(refused)


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
    view = evaluation.on(policy.ladder or evaluation.ladders[0])
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


def scored(evaluation: Archive, methods: Iterable[Mapping[str, Any]], policies: Mapping[str, Policy]) -> Scored:
    """Every sealed decision against the labels that are open now; ``policies`` say how a composed mask is made."""
    frames = {ladder: outcomes(evaluation.on(ladder)) for ladder in evaluation.ladders}
    best = pd.concat(frames.values()).groupby("case")["metric"].max()
    first = frames[evaluation.ladders[0]]
    source = first.loc[first["step"] == 0].set_index("case")["metric"]
    rows = {}
    for method in methods:
        ladder = method["ladder"]
        archive = evaluation.on(ladder)
        decisions = [Decision.from_dict(one) for one in method["decisions"]]
        plain = [replace(one, state=one.state.on("")) for one in decisions]
        controller = controller_of(policies[method["name"]])
        frame = deployed(frames[ladder], plain, archive=archive, controller=controller)
        rows[method["name"]] = frame.assign(**_paid(archive, evaluation, decisions))
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
    return Scored(cases, rows)


def _paid(archive: Archive, whole: Archive, decisions: Sequence[Decision]) -> dict[str, list[Any]]:
    """Forwards (of readings), updates (of gradients), seconds and flags of each decision."""
    clocks = [{name: entry.seconds for name, entry in whole.on(ladder).entries.items()} for ladder in whole.ladders]
    found: dict[str, list[Any]] = {"forwards": [], "updates": [], "seconds": [], "flagged": []}
    for one in decisions:
        entry = archive.entry(one.case_id)
        made = entry.rungs[: one.executed]
        readings = 1 + sum(rung.split("(")[0] not in CONSENSUS_NAMES for rung in made)
        is_read = bool(entry.rungs) or not one.executed
        source = max((clock[one.case_id][:1] for clock in clocks if clock.get(one.case_id)), default=())
        took = sum(entry.seconds[1 : one.executed + 1]) + sum(source)
        found["forwards"].append(float(readings) if is_read else float("nan"))
        found["updates"].append(float(0 if entry.rungs else one.executed))
        found["seconds"].append(took if entry.seconds else float("nan"))
        found["flagged"].append(bool(one.flagged))
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
    }


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
            {**method, "rows": _kept(found.methods[method["name"]]), **_summarized(method, found, oracle)}
            for method in sealed.methods
        ],
        "refused": list(refused),
    }  # fmt: skip
    plain = json.loads(json_text(plain))
    return {**plain, "sha256": json_sha256(plain)}


def _summarized(method: Mapping[str, Any], found: Scored, oracle: float | None) -> dict[str, Any]:
    rows = kept_frame(_kept(found.methods[method["name"]]), found.cases.to_dict("records"))
    return {"scores": summary(rows, oracle), "realised": realised(method["certificate"], rows)}


def _kept(rows: pd.DataFrame) -> list[dict[str, Any]]:
    names = ["case", *NUMBERS, "forwards", "updates", "seconds", "flagged"]
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
