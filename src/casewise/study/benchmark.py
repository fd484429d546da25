"""Compare methods on labelled cases: split the patients, decide without evaluation labels, then score.

``split_cohort`` and ``split_archive`` choose calibration and evaluation patients. ``decide_all`` fits every policy on
the calibration archive and replays it on the evaluation archive, whose labels are locked. ``seal`` writes the hash of
all decisions to the exposure ledger; ``score`` then unlocks the labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from casewise.archive.store import Archive
from casewise.core.durable import json_sha256, write_json
from casewise.core.errors import BadInput, CasewiseError, Mismatch, Overlap, TooFewCases
from casewise.core.formats import json_text
from casewise.core.records import CALIBRATION, EVALUATION, Case, Decision, Policy
from casewise.core.text import UNIT, pluralize
from casewise.data.datasets import load_dataset, recognize
from casewise.data.datasets.plain import plain_files
from casewise.data.folders import CaseFiles
from casewise.data.splits import Cohort, Member, check_disjoint, clusters_of, holdout
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.certificates.certificate import Certificate
from casewise.judge.certificates.certify_designs import halves_of
from casewise.judge.certificates.certify_router import STREAM, Promise, certify_router
from casewise.judge.decide import CONSENSUS_NAMES, has_consensus
from casewise.judge.ledger import compared_as, expose, labels_of, read_ledger, unlock
from casewise.judge.outcomes import deployed_rows, judged_share, outcomes
from casewise.judge.policy import READY, among_candidates, check_held_out, controller_of, design_of, no_go
from casewise.render.tables import DASH, Cell, Column, Estimate, Table
from casewise.replay import replay
from casewise.study.statistics.resample import FEWEST, cluster_numbers, gain_fields

DECISIONS, RESULT = "decisions.json", "result.json"
SEALED, OPENED = "bench: decisions sealed", "bench: labels opened for the decisions"
READABLE_AS_THEY_ARE = ("plain", "nnunet_raw")  # layouts whose files need no mapping before a model reads them
CASE_COLUMNS = ("case", "metric", "change", "ha", "ba", "worse_voxels", "flagged", "rolled_back")
COLUMNS = (
    Column("method", "Method", text=True),
    Column("metric", "Metric"),
    Column("gain", "Gain over M0 [95 %]", 4, signed=True),
    Column("helped", "Helped"),
    Column("hurt", "Hurt"),
    Column("hurt_by_a_point", "Hurt by > .01"),
    Column("hurt_bound", "Hurt patients ≤, %", 0, percent=True),
    Column("ha", "HA"),
    Column("judged", "Judged, %", 0, percent=True),
    Column("worse_voxels", "Worse voxels"),
    Column("flagged", "Flagged"),
    Column("forwards", "Forwards", 1),
    Column("updates", "Updates", 1),
    Column("seconds", "Seconds", 1),
    Column("promise", "Promise", text=True),
)


# ---- calibration and evaluation patients ----


@dataclass(frozen=True)
class CohortSplit:
    """Calibration and evaluation cases of a benchmark; they share no patient."""

    calibration: Cohort
    evaluation: Cohort
    how: Mapping[str, Any]  # how the cases were split
    layouts: Mapping[str, str]  # layout of the folder of each split, as casewise.data.datasets names it

    def __post_init__(self) -> None:
        check_disjoint(*(clusters_of(self.of(split).members.values()) for split in (CALIBRATION, EVALUATION)))

    def of(self, split: str) -> Cohort:
        """Cases of one split."""
        return self.calibration if split == CALIBRATION else self.evaluation

    def files(self, split: str, copies: Path) -> tuple[CaseFiles, ...]:
        """Images and labels of one split; datasets of other layouts are copied to ``copies`` first."""
        as_it_lies = self.layouts[split] in READABLE_AS_THEY_ARE
        return plain_files(self.of(split), copies / split, as_it_lies=as_it_lies)


def split_cohort(data: Path, calibration: Path | None = None, *, share: float = 0.3, seed: int = 1000) -> CohortSplit:
    """Split the labelled cases of a dataset into calibration and evaluation.

    Args:
        data: Dataset folder. Its column ``split`` decides, if it has one.
        calibration: Folder of calibration cases; all cases of ``data`` are evaluation cases then.
        share: Share of the patients drawn for calibration, if neither a column nor a folder decides.
        seed: Seed of that draw.

    Returns:
        Both sides, without cases that have no label.

    Raises:
        BadInput: If a side has no labelled case, or the column names one side only.
    """
    whole = load_dataset(data)
    how: dict[str, Any] = {"by": "folders"}
    if calibration is not None:
        parts = [_marked(load_dataset(calibration), CALIBRATION), _marked(whole, EVALUATION)]
    else:
        marks = {member.split for member in whole.members.values()} & {CALIBRATION, EVALUATION}
        if len(marks) == 1:
            raise BadInput(
                f"{whole.name} marks {next(iter(marks))} cases only; mark calibration and evaluation cases in "
                f"the column split of cases.csv, or give --calibration FOLDER"
            )
        known = {name: one for name, one in whole.members.items() if marks or one.labelled}
        sides, how = sides_of(known, share, seed)
        parts = [
            _marked(replace(whole, members={name: one for name, one in known.items() if name in sides[side]}), side)
            for side in (CALIBRATION, EVALUATION)
        ]
    found = []
    for split, part in zip((CALIBRATION, EVALUATION), parts, strict=True):
        known = {name: member for name, member in part.members.items() if member.labelled}
        if not known:
            raise BadInput(f"no {split} case of {part.name} has a label; a benchmark needs labels on both sides")
        how[f"{split} without label"] = len(part) - len(known)
        found.append(replace(part, members=known))
    layouts = {CALIBRATION: recognize(calibration or data) or "", EVALUATION: recognize(data) or ""}
    return CohortSplit(found[0], found[1], how, layouts)


def split_archive(
    archive: Archive, calibration: Archive | None = None, *, share: float = 0.3
) -> tuple[Archive, Archive, dict[str, Any]]:
    """Split recorded cases: by a second archive, by the marks of the cases, or by drawing patients."""
    how: dict[str, Any] = {"by": "archives"}
    evaluation = archive
    if calibration is None:
        entries = archive.entries.values()
        sides, how = sides_of({one.id: Member(one.id, one.group, one.cluster, one.split) for one in entries}, share)
        calibration, evaluation = (archive.select(ids=sides[side]) for side in (CALIBRATION, EVALUATION))
    check_disjoint(*(clusters_of(part.entries.values()) for part in (calibration, evaluation)))
    for part in (calibration, evaluation):
        if not any(entry.labelled for entry in part.entries.values()):
            raise BadInput(f"{part.path} has no labelled case; a benchmark needs labels on both sides")
    return calibration, evaluation.locked(), how


def _marked(cohort: Cohort, split: str) -> Cohort:
    return replace(cohort, members={name: replace(one, split=split) for name, one in cohort.members.items()})


def sides_of(
    members: Mapping[str, Member], share: float, seed: int = 1000
) -> tuple[dict[str, set[str]], dict[str, Any]]:
    """Split cases by their marks; without marks of both sides draw calibration clusters.

    Clusters are drawn within each group, or from all groups together if a group has too few.
    """
    sides = {side: {name for name, one in members.items() if one.split == side} for side in (CALIBRATION, EVALUATION)}
    if all(sides.values()):
        return sides, {"by": "column split"}
    cohort = Cohort("cases", members, read_case=_unread)
    try:
        split = holdout(cohort, share=share, seed=seed)
    except TooFewCases:
        split = holdout(cohort, share=share, seed=seed, per_group=False)
    how = {"by": "draw of clusters", "share": share, "seed": seed, "per_group": split.per_group}
    return {CALIBRATION: {*split.calibration}, EVALUATION: {*split.evaluation}}, how


def _unread(member: Member) -> Case:
    raise BadInput(f"case {member.id} cannot be read while patients are drawn")


def check_cases(archive: Archive, ids: Iterable[str], ladders: Sequence[str]) -> Archive:
    """Return an archive with these ladders in view; it must hold these cases on each of them, and no other case."""
    wanted, views = set(ids), [archive.ladder(ladder) for ladder in ladders]
    for view in views:
        other = sorted(set(view.entries) ^ wanted)
        if other:
            raise Mismatch(
                f"{archive.path} holds other cases than this benchmark, such as {other[0]}; choose another folder with "
                f"-o, or repeat the data and options of the first run to resume it"
            )
    named = {name: facts for name, facts in archive.manifest.get("ladders", {}).items() if name in ladders}
    return replace(views[0], manifest={**archive.manifest, "ladders": named})


# ---- decisions, without evaluation labels ----


@dataclass(frozen=True)
class Method:
    """A policy and its decision on every evaluation case."""

    name: str
    policy: Policy
    decisions: tuple[Decision, ...] = field(repr=False)
    design: str = ""  # design that was calibrated; "" for methods without calibration
    certificate: Certificate | None = None
    notes: tuple[str, ...] = ()


def decide_all(
    calibration: Archive, evaluation: Archive, designs: Sequence[str], *, promise: Promise | None = None
) -> tuple[tuple[Method, ...], tuple[str, ...]]:
    """Fit every design on the calibration archive and decide every evaluation case.

    Designs are fitted for each ladder. Designs that choose among candidates are also fitted on all ladders together.

    Args:
        calibration: Archive of the calibration cases, with labels.
        evaluation: Archive of the evaluation cases; its labels are not read.
        designs: Names of policies, as ``casewise calibrate --policy`` takes them.
        promise: If given, each design that can be certified appears a second time with its certificate.

    Returns:
        Methods (M0, the last candidate for every case, each design), and one sentence for each refused method.
    """
    evaluation = evaluation.marked(EVALUATION)
    refused: dict[str, list[str]] = {}  # names of the methods by the reason
    made = [_method("M0", replace(READY["m0"], ladder=evaluation.ladders[0]), evaluation)]
    known = {ladder: calibration.ladder(ladder) for ladder in evaluation.ladders}
    if len(known) > 1:
        joint = " + ".join(known) if len(known) == 2 else f"all {len(known)} methods"
        known[joint] = calibration.join(evaluation.ladders)
    for ladder, holdout_cases in known.items():
        if not holdout_cases.joined:
            made.append(_everyone(evaluation.ladder(ladder), ladder))
        for design in designs:
            # only a design that chooses among all candidates of a case can read several ladders together
            default = design == "default" and has_consensus(holdout_cases, None)
            if holdout_cases.joined and not (default or among_candidates(design_of(design))):
                continue
            name = f"{ladder}: {design}" if ladder else design
            try:
                policy = _fitted(holdout_cases, design)
                check_held_out(policy, evaluation.entries.values())
                made.append(_method(name, policy, evaluation, design))
                if promise is not None:
                    name = f"{name}, certified"
                    made.append(_certified(holdout_cases, policy, design, promise, name, evaluation))
            except CasewiseError as error:
                refused.setdefault(str(error), []).append(name)
    return tuple(made), tuple(f"{'; '.join(names)} ({error})" for error, names in refused.items())


def _certified(known: Archive, policy: Policy, design: str, promise: Promise, name: str, evaluation: Archive) -> Method:
    """Certify a policy; a design that labels fit is fitted on half of the patients and certified on the other half."""
    note: tuple[str, ...] = ()
    try:
        certificate, certified = certify_router(known, policy, promise, force=True, together=None)
    except Overlap:
        fit, test = halves_of(known)
        certificate, certified = certify_router(test, _fitted(fit, design), promise, force=True, together=None)
        note = (f"{name}: fitted on half of the calibration {UNIT[1]} and certified on the other half",)
    if not certificate.feasible:
        raise BadInput(certificate.advice)
    note += tuple(f"{name}: {STREAM}" for said in certificate.warnings if said.startswith(STREAM))
    made = _method(name, certified, evaluation, design)
    return replace(made, certificate=certificate, notes=(*made.notes, *note))


def _fitted(calibration: Archive, design: str) -> Policy:
    """Calibrate a design; without shrunk states if none were recorded."""
    return calibrate(calibration, design, unshrunk=not any(state.shrink for state in calibration.states))


def _everyone(archive: Archive, ladder: str) -> Method:
    """Last candidate for every case: the consensus of views or members, or the last update."""
    rungs = next(iter(archive.entries.values())).rungs
    last = f"{rungs[-1] if rungs else f'step {archive.steps}'} for everyone"
    policy = Policy("fixed-k", "fixed-k", {"step": archive.steps}, archive.steps, ladder=ladder)
    return _method(f"{ladder}: {last}" if ladder else last, policy, archive)


def _method(name: str, policy: Policy, evaluation: Archive, design: str = "") -> Method:
    notes = () if (warning := no_go(policy)) is None else (f"{name}: {warning}",)
    return Method(name, policy, tuple(replay(_view(evaluation, policy), policy)), design, None, notes)


def _view(evaluation: Archive, policy: Policy) -> Archive:
    """Evaluation archive with the ladders in view that a policy reads."""
    if policy.ladders:
        return evaluation.join(policy.ladders)
    return evaluation.ladder(policy.ladder or evaluation.ladders[0])


def chosen_design(policy: Policy) -> str:
    """Name the design that ``default`` took, with its cleanup."""
    compared = policy.preflight.get("comparison") or {}
    name = str(compared.get("chosen") or policy.controller)
    return f"{name} with cleanup {policy.cleanup}" if policy.cleanup else name


def seal(folder: Path, methods: Iterable[Method], evaluation: Archive) -> str:
    """Write all decisions to decisions.json and their hash to the exposure ledger; return the hash."""
    plain = json.loads(
        json_text([{"name": one.name, "decisions": [made.as_dict() for made in one.decisions]} for one in methods])
    )
    sha256 = json_sha256(plain)
    write_json(folder / DECISIONS, {"sha256": sha256, "methods": plain})
    if not _ledger_has(evaluation, f"{SEALED} {sha256}"):
        expose(evaluation.path, choice=f"{SEALED} {sha256}", labels_visible=False)
    return sha256


def seen_before(evaluation: Archive, sha256: str) -> bool:
    """True if evaluation labels were read before the decisions of this hash were sealed."""
    evaluated = set(labels_of(evaluation))
    for line in read_ledger(evaluation.path):
        if line["choice"] == f"{SEALED} {sha256}":
            return False
        if line.get("labels_visible") and not evaluated.isdisjoint(line.get("labels", evaluated)):
            return True
    return True


def _ledger_has(evaluation: Archive, choice: str) -> bool:
    return any(line["choice"] == choice for line in read_ledger(evaluation.path))


# ---- scores, with evaluation labels ----


def score(methods: Sequence[Method], evaluation: Archive, sha256: str) -> dict[str, Any]:
    """Unlock the evaluation labels and score every method.

    Args:
        methods: Methods with their decisions.
        evaluation: Archive of the evaluation cases.
        sha256: Hash of the sealed decisions, for the exposure ledger.

    Returns:
        ``oracle`` (mean gain of the best recorded candidate of each case) and ``methods``, one record for each method.
    """
    opened = f"{OPENED} {sha256}"
    if _ledger_has(evaluation, opened):
        evaluation = replace(evaluation, unlocked_by=opened)
    evaluation = unlock(evaluation, purpose=opened, compared=[compared_as(one.policy) for one in methods if one.design])
    frames = pd.concat(outcomes(evaluation.ladder(ladder)) for ladder in evaluation.ladders)
    source = frames.loc[frames["step"] == 0].groupby("case")["metric"].first()
    gains = (frames.groupby("case")["metric"].max() - source).dropna()
    oracle = float(gains.mean()) if len(gains) else None
    made = []
    for method in methods:
        rows = deployed_rows(_view(evaluation, method.policy), method.decisions, controller_of(method.policy))
        rows = rows.assign(**_cost(evaluation, method))
        promise = None if method.certificate is None else _promise(method.certificate, rows)
        made.append(
            {
                "name": method.name,
                "design": method.design,
                "policy": method.policy.name,
                "took": chosen_design(method.policy),
                "ladders": list(method.policy.ladders) or [method.policy.ladder],
                "scores": summary(rows, oracle),
                "promise": promise,
                "notes": list(method.notes),
                "cases": rows[list(CASE_COLUMNS)].to_dict("records"),
            }
        )
    return dict(json.loads(json_text({"oracle": oracle, "methods": made})))


def _cost(evaluation: Archive, method: Method) -> dict[str, list[Any]]:
    """Forward passes (of views and members), updates (of gradients), seconds and flag of each decision."""
    policy = method.policy
    views = [evaluation.ladder(ladder) for ladder in policy.ladders or (policy.ladder or evaluation.ladders[0],)]
    found: dict[str, list[Any]] = {"forwards": [], "updates": [], "seconds": [], "flagged": []}
    for one in method.decisions:
        entries = [view.entry(one.case_id) for view in views]
        forwards, updates = 1, 0
        seconds = max((entry.seconds[0] for entry in entries if entry.seconds), default=float("nan"))
        for view, entry in zip(views, entries, strict=True):
            executed = one.executed if len(views) == 1 else view.steps  # several ladders are always read to the end
            forwards += sum(rung.split("(")[0] not in CONSENSUS_NAMES for rung in entry.rungs[:executed])
            updates += 0 if entry.rungs else executed
            seconds += sum(entry.seconds[1 : executed + 1]) if entry.seconds else float("nan")
        costs = float("nan") if updates else forwards, updates, seconds, one.flagged
        for name, value in zip(found, costs, strict=True):
            found[name].append(value)
    return found


def summary(rows: pd.DataFrame, oracle: float | None = None) -> dict[str, Any]:
    """Summarize one method over its cases.

    Args:
        rows: One row for each case, with the columns of :func:`casewise.judge.outcomes.deployed`.
        oracle: Mean gain of the best recorded candidate of each case.

    Returns:
        Gain with its interval by cluster, cases helped and hurt, harm and cost. Cases whose metric is undefined are
        only counted.
    """
    known = rows.loc[rows["change"].notna()]
    change, units = known["change"].to_numpy(float), cluster_numbers(known)
    judged, gains = judged_share(rows), gain_fields(change, units)
    if gains["clusters"] < FEWEST or pd.isna(gains["low"]):
        gains |= {"low": None, "high": None}
    return {
        "cases": len(rows),
        "undefined": len(rows) - len(known),
        "metric": _mean(known, "metric"),
        **gains,
        "captured": gains["gain"] / oracle if oracle and oracle > 0 else None,
        "judged": judged,
        **{name: None if judged is None else _mean(rows, name) for name in ("ha", "ba", "worse_voxels")},
        "flagged": int(rows["flagged"].sum()) if "flagged" in rows else None,
        **{name: _mean(rows, name) for name in ("forwards", "updates")},
        "seconds": float(rows["seconds"].median()) if "seconds" in rows and rows["seconds"].notna().all() else None,
    }


def _mean(rows: pd.DataFrame, name: str) -> float | None:
    return None if name not in rows or not len(rows) or rows[name].isna().any() else float(rows[name].mean())


def _promise(certificate: Certificate, rows: pd.DataFrame) -> dict[str, Any]:
    """Promised and realized risk on the evaluation cases."""
    change = rows["change"].dropna()
    losses: dict[str, Callable[[], float]] = {
        "ha": lambda: float(rows["ha"].mean()),
        "worse-voxels": lambda: float(rows["worse_voxels"].mean()),
        "harmed": lambda: float((change < -float(certificate.details.get("margin", 0.0))).mean()),
        "dice": lambda: float((-change).clip(lower=0).mean()),
    }
    named = {name: getattr(certificate, name) for name in ("statement", "loss", "alpha", "delta", "bound", "units")}
    realized = losses[certificate.loss]()
    return {**named, "realized": realized, "missed": bool(realized > certificate.alpha)}


def result_table(result: Mapping[str, Any]) -> Table:
    """Table of a result, methods in the order in which they were decided."""
    first = result["methods"][0]["scores"]
    caption = (
        f"{pluralize(first['cases'], 'evaluation case')} of {pluralize(first['clusters'], *UNIT)}; {result['metric']}; "
        f"gains against M0, with 95 % intervals by {UNIT[0]}."
    )
    return Table("bench", result["name"], COLUMNS, [_row(method) for method in result["methods"]], caption=caption)


def _row(method: Mapping[str, Any]) -> dict[str, Cell]:
    scores, promise = method["scores"], method["promise"]
    row: dict[str, Cell] = {one.key: DASH if scores.get(one.key) is None else scores[one.key] for one in COLUMNS}
    # M0 is the reference: no new patient can lose against it
    row |= {"hurt_bound": DASH} if method["name"] == "M0" else {}
    if scores["low"] is not None:
        row["gain"] = Estimate(scores["gain"], scores["low"], scores["high"])
    missed = ", MISSED" if promise is not None and promise["missed"] else ""
    words = ["NO-GO"] if any("NO-GO" in str(note) for note in method["notes"]) else []
    words += [f"{promise['loss']} ≤ {promise['alpha']:g}: {promise['realized']:.3f}{missed}"] if promise else []
    took = f" (took {method['took']})" if method["design"] == "default" else ""
    return {**row, "method": method["name"] + took, "promise": "; ".join(words) or DASH}
