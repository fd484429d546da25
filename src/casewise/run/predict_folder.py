"""Predict a folder: masks, one record per case, an audit log, scores where labels are given, and a page.

``predict_all`` is the whole run. Under it, ``predict_folder`` resumes, claims the cases for this process, and writes an
audit line for each.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from casewise.adapt.backbones import Backbone
from casewise.adapt.contract import check_orientations
from casewise.archive.layout import image_sha256
from casewise.core.chain import Chain
from casewise.core.durable import file_lock, file_sha256, sweep, write_durably
from casewise.core.errors import BadInput, CasewiseError, Refused
from casewise.core.formats import json_text
from casewise.core.prediction_record import OUTSIDE, ContractFinding, PredictedCase
from casewise.core.text import pluralize
from casewise.data import nifti
from casewise.data.dicom_objects import check_kind, read_codes
from casewise.data.dicom_series import is_dicom_folder
from casewise.data.folders import CaseFiles
from casewise.judge.appearance import Appearance, KnownAppearance, folder_differs, outside
from casewise.judge.calibration.adoption import unpromised
from casewise.judge.monitors.exchangeability import suspended_policy
from casewise.judge.monitors.watch import Watching
from casewise.judge.policy import adapts, check_held_out, is_hybrid
from casewise.render.mask_pictures import overlay_png
from casewise.report.prediction_page import prediction_page
from casewise.run import summary
from casewise.run.dicom import write_objects
from casewise.run.gather import gathered_cases
from casewise.run.local import Engine, LocalEngine, Result
from casewise.run.predict_case import PredictCase
from casewise.run.prediction_folder import (
    Layout,
    check_replaceable,
    is_complete,
    read_entry,
    run_key,
    unfinished,
    versions,
    write_entry,
)

if TYPE_CHECKING:
    from casewise.deployment import Deployment

PAGE = "report.html"


@dataclass(frozen=True)
class PredictedFolder:
    """Result of a prediction run.

    Attributes:
        entries: One record per case, in the order of the cases, failed ones included.
        page: The page for a person.
        report: The run for a machine.
        scores: Mean scores of the deployed masks and of M0, where labels were given.
        promise: Promise about these cases; None where nothing is.
        warnings: Warnings for the reader.
        unpromised: Where nothing is promised: how many labelled patients were hurt, and how many new ones may be.
        refusal: Why no new mask is used, where most images are unlike the labelled ones; else empty.
    """

    entries: tuple[PredictedCase, ...]
    page: Path
    report: Mapping[str, Any]
    scores: Mapping[str, Any]
    scored_cases: int
    promise: str | None
    warnings: tuple[str, ...]
    unpromised: str = ""
    refusal: str = ""

    @property
    def is_done(self) -> bool:
        """True if every case has its mask and, if requested, its score and DICOM objects."""
        return not self.failures and all(entry.is_done for entry in self.entries)

    @property
    def failures(self) -> tuple[str, ...]:
        """Sentences about DICOM series and labels that could not be read, and DICOM objects that were not written."""
        return (*self.report["refused"].values(), *self.report["unscored"], *self.report["unwritten"])

    @property
    def flagged(self) -> tuple[PredictedCase, ...]:
        """Cases that a person should check, the poorest estimate first."""
        flagged = (one for one in self.entries if one.decision is not None and one.decision.flagged)
        return tuple(sorted(flagged, key=lambda one: one.lowest_quality))


def predict_all(
    deployment: Deployment,
    images: Path,
    out: Path,
    *,
    cases: Sequence[CaseFiles] | None = None,
    refused: dict[str, str] | None = None,
    labels: Path | None = None,
    groups: Path | None = None,
    whole: Callable[[], Sequence[CaseFiles]] | None = None,
    engine: Engine | None = None,
    jobs: int = 1,
    timeout_s: float | None = None,
    resume: bool = False,
    overwrite: bool = False,
    save_candidates: bool = False,
    keep_header: bool = False,
    overlays: bool = True,
    codes: Path | None = None,
    segmentation: str = "binary",
    channels: Sequence[str] = (),
    each: Callable[[Iterable[PredictedCase], int], Iterator[PredictedCase]] | None = None,
) -> PredictedFolder:
    """Predict every case of a folder.

    Args:
        deployment: Decides; it is checked first.
        images: Folder of images or of DICOM series.
        out: Folder for the masks.
        cases: The cases, where they were gathered already.
        refused: DICOM series that cannot be read, and why, where the cases were gathered already.
        labels: Folder of labels; they are opened after the last decision, to score the masks.
        groups: Table with group, patient and split of the cases; default: ``cases.csv`` beside the images.
        whole: Gives the cases of all parts, where this process has a part of them.
        engine: Runs the cases; default: ``jobs`` processes on this machine.
        jobs: Number of processes.
        timeout_s: Seconds for one case; M0 is deployed then.
        resume: Keep cases of an earlier run whose hashes match.
        overwrite: Replace masks in ``out`` that casewise did not write.
        save_candidates: Keep the mask of every candidate.
        keep_header: Copy the geometry of the NIfTI header from the image.
        overlays: Draw a picture of each case.
        codes: JSON file with codes of the classes, for DICOM SEG.
        segmentation: Kind of DICOM SEG: binary or labelmap.
        channels: DICOM series by description, in the order of the model's channels.
        each: Wraps the stream of records, to show progress.

    Returns:
        The records, the page, the scores and the warnings.
    """
    began = time.monotonic()
    refused = {} if refused is None else refused
    check_kind(segmentation)  # before the first case, not after the last
    read_codes(codes)
    if cases is None:
        cases = gathered_cases(
            deployment.backbone, images, labels=labels, groups=groups, keep=out / "casewise" / "images",
            refused=refused, channels=channels,
        )  # fmt: skip
    if labels is not None:
        check_scorable(deployment, cases)
    work = prediction_work(
        deployment, cases, out, timeout_s=timeout_s, save_candidates=save_candidates, keep_header=keep_header,
        draw=overlay_png if overlays else None,
    )  # fmt: skip
    stream: Iterator[PredictedCase] = predict_folder(
        work, engine or LocalEngine(jobs=jobs, timeout_s=timeout_s), resume=resume, overwrite=overwrite, page=True
    )
    entries = tuple(stream if each is None else each(stream, len(work.cases)))
    summary.copy_model_files(work)
    scored: Mapping[str, Any] = {}
    with summary.everyone(work) as all_parts:
        refusal, unlike = _unlike(deployment, all_parts)
        if refusal:
            of_parts = () if whole is None or len(all_parts) <= len(work.cases) else whole()
            all_parts = _with_source(
                replace(work, cases={**{one.id: one for one in of_parts}, **work.cases}), all_parts
            )
        if labels is not None:
            labelled = cases if len(all_parts) == len(cases) or whole is None else whole()
            scored = summary.write_summary(work, labelled, all_parts)["adapt"]
        scores = scored["mean"] if scored.get("cases") else {}
        unscored = [f"{case_id} is not scored: {why}" for case_id, why in scored.get("problems", {}).items()]
        promise, warnings = summary.promised(deployment, all_parts)
        warnings = [*unlike, *warnings]
        promise = None if unlike else promise
        harm = "" if unlike or promise else unpromised(deployment.policy.preflight)
        all_parts = summary.with_patient_measures(work, all_parts)
        by_case = {one.case: one for one in all_parts}
        entries = tuple(by_case.get(one.case, one) for one in entries)
        said = [*([refusal] if refusal else ()), *refused.values(), *warnings, *unscored]
        _write_page(work, all_parts, scores, promise or harm, said)
        certificate = _in_words(summary.in_short(deployment, all_parts))
        unwritten = _write_dicom(
            work, images, entries, codes=codes, kind=segmentation, certificate=certificate, channels=tuple(channels)
        )
    report = summary.run_report(work, images, entries, time.monotonic() - began, scores, all_parts)
    found = {**report, "unscored": unscored, "unwritten": unwritten, "refused": refused, "refusal": refusal}
    counted = len(scored.get("cases", ()))
    return PredictedFolder(entries, out / PAGE, found, scores, counted, promise, tuple(warnings), harm, refusal)


UNLIKE = "This folder is unlike the labelled cases"
EVIDENT = 0.01
FEWEST_UNLIKE = 3
"""Images before a whole folder is refused; fewer are single cases, one in n + 1 of which is outside by chance."""


def _unlike(deployment: Deployment, entries: Sequence[PredictedCase]) -> tuple[str, list[str]]:
    """Say why no new mask is used, where most images look unlike the labelled ones, and how the folder differs."""
    plain, seen = deployment.policy.appearance, [one for one in entries if one.appearance]
    if not plain or not seen:
        return "", []
    known = KnownAppearance.from_plain(plain)
    looks = [Appearance(one.case, one.appearance, one.decision.cluster if one.decision else None) for one in seen]
    beyond = sum(bool(outside(look, known, image_only=True)) for look in looks)
    p, sentence = folder_differs(looks, known)
    said = [f"{UNLIKE}, so no estimate and no promise covers it: {sentence}"]
    if beyond < FEWEST_UNLIKE or 2 * beyond <= len(seen):
        return "", said if p <= EVIDENT else []
    return (
        f"Refused: {beyond} of {len(seen)} images are unlike the labelled "
        "ones. No new mask is used: every case has the model's original mask and is flagged. If these are the right "
        "images, label some of them and run casewise fit again."
    ), said


def _with_source(work: PredictCase, entries: Sequence[PredictedCase]) -> list[PredictedCase]:
    """Give every case M0, a flag and no estimate, because most images are unlike the labelled ones."""
    reason = "most images of this folder are unlike the labelled ones"
    policy = suspended_policy(work.deployment.policy, reason)
    again = replace(work, deployment=replace(work.deployment, policy=policy, watch=None))
    made = []
    for one in entries:
        decided = one.decision
        if one.is_done and decided and not (decided.rolled_back and decided.flagged and decided.quality is None):
            new = again(one.case)
            if new.decision is not None:
                new = replace(new, decision=replace(new.decision, flagged=True), appearance=one.appearance)
            one = replace(new, notes=(*new.notes, f"{OUTSIDE}: {reason}"))
            write_entry(work.layout, one)
            Chain(work.layout.audit).append("case", _line(work.layout, one))
        made.append(one)
    return made


def _write_page(
    work: PredictCase,
    entries: Sequence[PredictedCase],
    scores: Mapping[str, Any],
    promise: str | None,
    warnings: Sequence[str],
) -> None:
    policy, warnings = work.deployment.policy, list(warnings)
    if left := unfinished(work.layout.out):
        warnings.append(
            f"{pluralize(len(left), 'more case')} of this folder had no result when this page was written (such "
            f"as {left[0]}): another part was still running, or was killed"
        )
    facts = {
        "model": work.deployment.backbone.name, "policy": policy.name, "calibration_id": policy.calibration_id,
        "scores": scores, "versions": versions(), "warnings": warnings, "promise": promise,
        "classes": work.deployment.backbone.labels, "background": work.deployment.adaptation.foreground,
    }  # fmt: skip
    write_durably(work.layout.out / PAGE, prediction_page(entries, facts).encode())


def _write_dicom(work: PredictCase, images: Path, entries: Sequence[PredictedCase], **options: Any) -> list[str]:
    """Write SEG and structured report of every case whose image came as DICOM; return the problems.

    ``options`` are those of :func:`casewise.run.dicom.write_objects`.
    """
    if not is_dicom_folder(images):
        return []
    masks, classes = {case_id: work.layout.mask(case_id) for case_id in work.cases}, work.deployment.backbone.labels
    failed = write_objects(images, work.layout.out, masks, entries, classes=classes, **options)
    return [f"{case_id}: no DICOM output, {reason}" for case_id, reason in failed.items()]


def _in_words(promise: Mapping[str, Any] | None) -> str:
    """Return the promise, or why there is none; empty without a certificate."""
    if promise is None:
        return ""
    lead, why = "the certificate does not hold here: ", promise["why_void"]
    return str(promise["statement"]) if why is None else f"{lead}{str(why).removeprefix(lead)}"


# ---- the run, case by case ----


def prediction_work(deployment: Deployment, cases: Sequence[CaseFiles], out: Path, **options: Any) -> PredictCase:
    """Return the work of a prediction run; ``options`` are fields of :class:`PredictCase`.

    Labels are removed from the cases, so no decision can read them.
    """
    deployment.check()
    backbone = deployment.backbone
    layout = Layout(out, backbone.ending or _ending_for(cases))
    unlabelled = {files.id: replace(files, label=None) for files in cases}
    known = orientation_findings(cases, backbone)
    work = PredictCase(deployment, layout, unlabelled, key="", known=known, **options)
    if cases and work.keep_header and not work.layout.ending.endswith((".nii", ".nii.gz")):
        raise BadInput(f"--set keep-header needs NIfTI, and this model writes {work.layout.ending}; leave it out")
    _check_apart_from_inputs(work.layout, cases)
    written = {
        "candidates": work.save_candidates, "overlays": work.draw is not None, "keep_header": work.keep_header
    }  # fmt: skip
    return replace(work, key=run_key(deployment, written))


def _check_apart_from_inputs(layout: Layout, cases: Sequence[CaseFiles]) -> None:
    """Refuse a folder in which masks would take the place of images or labels: old outputs are removed at the start."""
    outputs = {os.path.realpath(layout.mask(files.id)) for files in cases}
    for files in cases:
        for path in (*files.images, *(() if files.label is None else (files.label,))):
            if os.path.realpath(path) in outputs:
                raise BadInput(
                    f"{layout.out} holds {path.name}, an image or label of this run, where a mask would be written; "
                    "choose another folder with -o"
                )


def check_scorable(deployment: Deployment, cases: Sequence[CaseFiles]) -> None:
    """Refuse to score a policy on its calibration cases; the images are read, so that renamed cases are found."""
    known = any(deployment.policy.calibration_inputs)
    check_held_out(deployment.policy, [_seen(files, deployment.backbone, known=known) for files in cases])


def _seen(files: CaseFiles, backbone: Backbone, *, known: bool) -> SimpleNamespace:
    """Id, patient and image hash of a case, to compare it with calibration cases."""
    try:
        digest = image_sha256(backbone.read(files.checked()).case.image) if known else None
    except (CasewiseError, OSError, ValueError, RuntimeError):  # the run itself says what is wrong with the file
        digest = None
    return SimpleNamespace(id=files.id, cluster=files.cluster, input_sha256=digest)


def _ending_for(cases: Sequence[CaseFiles]) -> str:
    return ".nii.gz" if cases and nifti.is_volume(cases[0].images[0]) else ".png"


def predict_folder(
    work: PredictCase, engine: Engine, *, resume: bool = False, overwrite: bool = False, page: bool = False
) -> Iterator[PredictedCase]:
    """Predict every case and stream the entries: those kept from an earlier run first.

    Outputs of all cases that are to be done are removed before the first one starts, so that nothing old can be taken
    for the result of this run, whatever happens to it. Masks that no run wrote are refused, unless ``overwrite`` gives
    them up. Every decision is added to the watch of the deployment, which may suspend the policy. With ``page`` the log
    says that the run is incomplete until the caller has written the page.
    """
    work.layout.out.mkdir(parents=True, exist_ok=True)
    with claimed(work.layout.claims, work.cases):
        yield from _predicted(work, engine, resume=resume, overwrite=overwrite, page=page)


@contextmanager
def claimed(folder: Path, cases: Collection[str]) -> Iterator[None]:
    """Reserve cases for this process; refuse if another process works on one of them in the same folder.

    Parts of one folder (``-num_parts``) share no case, so they may run side by side. The claim of a process that was
    killed holds no longer.
    """
    own = folder / f"{uuid.uuid4().hex}.json"
    with ExitStack() as stack:
        with file_lock(folder / "lock"):
            for path in folder.glob("*.json"):
                _check_apart(path, cases)
            file = stack.enter_context(file_lock(own))
            assert file is not None
            file.write(json_text({"process": os.getpid(), "host": platform.node(), "cases": list(cases)}).encode())
            file.flush()
        try:
            yield
        finally:
            own.unlink(missing_ok=True)


def _check_apart(path: Path, cases: Collection[str]) -> None:
    with file_lock(path, wait=False) as free:
        if free is not None:
            path.unlink(missing_ok=True)  # the claim of a process that was killed
            return
    try:
        other = json.loads(path.read_text())
    except (OSError, ValueError):
        return
    shared = sorted(set(other["cases"]) & set(cases))
    if shared:
        raise Refused(
            f"process {other['process']} on {other['host']} is predicting {len(shared)} of these cases (such as "
            f"{shared[0]}) into the same folder; wait until it ends, or choose another -o"
        )


def _predicted(
    work: PredictCase, engine: Engine, *, resume: bool, overwrite: bool, page: bool
) -> Iterator[PredictedCase]:
    watch = work.deployment.watch
    layout, audit = work.layout, Chain(work.layout.audit)
    kept = [files.id for files in work.cases.values() if resume and is_complete(layout, files, work.key)]
    waiting = [case_id for case_id in work.cases if case_id not in kept]
    if not overwrite:
        check_replaceable(layout, waiting)
    sweep(layout.out)
    audit.append("run-started", _facts(work, kept=len(kept), waiting=len(waiting), to_do=waiting, page=page))
    for case_id in waiting:
        layout.forget(case_id)
    for case_id in kept:
        entry = read_entry(layout.entry(case_id))
        assert entry is not None  # the case is complete
        audit.append("case-kept", _line(layout, entry))
        if watch is not None:
            watch.show(entry.decision)
        yield entry
    failed = 0
    for result in engine.map(work, waiting) if watch is None else watched_results(work, engine, waiting, watch):
        entry = _entry_of(work, result)
        failed += not entry.is_done
        audit.append("case", _line(layout, entry))
        yield entry
    audit.append("run-finished", {"cases": len(work.cases), "not_done": failed})


def _entry_of(work: PredictCase, result: Result) -> PredictedCase:
    """Return the entry that the work wrote, or a failed entry if its process died."""
    if result.value is not None:
        written: PredictedCase = result.value
        return written
    entry = work.failed(work.cases[result.case_id], result.error, result.kind)
    entry = replace(entry, timing={"total_s": round(result.seconds, 3)})
    write_entry(work.layout, entry)
    return entry


def _facts(work: PredictCase, **more: Any) -> dict[str, Any]:
    policy = work.deployment.policy
    return {
        "key": work.key,
        "model": work.deployment.backbone.fingerprint,
        "trusted": work.deployment.trusted,
        "policy": policy.name,
        "calibration_id": policy.calibration_id,
        "adaptation": work.deployment.plain_adaptation,
        "classes": {str(value): name for value, name in sorted(work.deployment.backbone.labels.items())},
        **more,
    }


def _line(layout: Layout, entry: PredictedCase) -> dict[str, Any]:
    return {
        "case": entry.case,
        "status": entry.status,
        "error": entry.error,
        "action": entry.action,
        "outputs": entry.outputs,
        "entry": file_sha256(layout.entry(entry.case)),
    }


def watched_results(work: PredictCase, engine: Engine, waiting: Sequence[str], watch: Watching) -> Iterator[Result]:
    """Yield results in the order of the cases; after an alarm all later cases get M0.

    Cut-points of a hybrid policy move with every case, so its cases run one after the other.
    """
    left = list(waiting)
    while left:
        policy = watch.policy(work.deployment.policy)
        adapting = adapts(policy)
        together = left[:1] if is_hybrid(work.deployment.policy) and adapting else left
        now = replace(work, deployment=replace(work.deployment, policy=policy, watch=None, void=watch.void or ""))
        with closing(_in_order(engine, now, list(together))) as results:
            for result in results:
                watch.show(None if result.value is None else result.value.decision)
                left.remove(result.case_id)
                yield result
                if adapting and watch.state.suspended:
                    break
        if adapting and watch.state.suspended:
            for case_id in left:
                work.layout.forget(case_id)


def _in_order(engine: Engine, work: PredictCase, case_ids: Sequence[str]) -> Generator[Result]:
    """Yield results in the order of ``case_ids``, because a monitor must not depend on which case ends first."""
    early: dict[str, Result] = {}
    waiting = iter(case_ids)
    due = next(waiting, None)
    with closing(engine.map(work, case_ids)) as results:  # type: ignore[type-var]
        for result in results:
            early[result.case_id] = result
            while due in early:
                yield early.pop(due)
                due = next(waiting, None)


def orientation_findings(cases: Sequence[CaseFiles], backbone: Backbone) -> dict[str, ContractFinding]:
    """Find cases with another orientation than the rest, for readers that do not reorient."""
    if backbone.expects.reorients:
        return {}
    import nibabel

    found: dict[str, str] = {}
    for files in cases:
        path = files.images[0]
        if not nifti.is_volume(path):
            continue
        try:
            nifti.check_header(path)
            found[files.id] = "".join(str(code) for code in nibabel.aff2axcodes(nibabel.load(path).affine))
        except Exception:  # a header can be bad in more ways than nibabel has errors; the case itself says which
            continue
    return check_orientations(found)
