"""Predict the cases of a folder: resume, claim the cases, and write an audit line for each."""

from __future__ import annotations

import json
import os
import platform
import uuid
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from casewise.adapt.backbones import Backbone
from casewise.adapt.contract import check_orientations, shape_of
from casewise.archive.layout import image_sha256
from casewise.core.chain import Chain
from casewise.core.durable import file_lock, file_sha256, sweep
from casewise.core.errors import BadInput, CasewiseError, Refused
from casewise.core.formats import json_text
from casewise.core.prediction_record import ContractFinding, PredictedCase
from casewise.data import nifti
from casewise.data.folders import CaseFiles
from casewise.judge.monitors.watch import Watching
from casewise.judge.policy import adapts, check_held_out, is_hybrid
from casewise.run.local import Engine, Result
from casewise.run.predict_case import Draw, PredictCase
from casewise.run.prediction_folder import Layout, check_replaceable, is_complete, read_entry, run_key, write_entry

if TYPE_CHECKING:
    from casewise.deployment import Deployment


def prediction_work(
    deployment: Deployment,
    cases: Sequence[CaseFiles],
    out: Path,
    *,
    timeout_s: float | None = None,
    save_candidates: bool = False,
    keep_header: bool = False,
    draw: Draw | None = None,
) -> PredictCase:
    """Return the work of a prediction run. Labels are removed from the cases, so no decision can read them."""
    deployment.check()
    backbone = deployment.backbone
    work = PredictCase(
        deployment=deployment,
        layout=Layout(out, backbone.ending or _ending_for(cases)),
        cases={files.id: replace(files, label=None) for files in cases},
        key="",
        timeout_s=timeout_s,
        save_candidates=save_candidates,
        keep_header=keep_header,
        draw=draw,
        known=orientation_findings(cases, backbone),
    )
    if cases and work.keep_header and not work.layout.ending.endswith((".nii", ".nii.gz")):
        raise BadInput(f"keep-header is for NIfTI, the masks of this model are {work.layout.ending}; leave it out")
    _check_apart_from_inputs(work.layout, cases)
    written = {"candidates": save_candidates, "overlays": draw is not None, "keep_header": keep_header}
    return replace(work, key=run_key(deployment, written))


def _check_apart_from_inputs(layout: Layout, cases: Sequence[CaseFiles]) -> None:
    """Refuse a folder in which masks would take the place of images or labels: old outputs are removed at the start."""
    outputs = {layout.mask(files.id).resolve() for files in cases}
    for files in cases:
        for path in (*files.images, *(() if files.label is None else (files.label,))):
            if path.resolve() in outputs:
                raise BadInput(
                    f"{layout.out} holds {path.name}, an image or label of this run, where a mask would be written; "
                    "choose another folder with -o"
                )


@dataclass(frozen=True)
class _Seen:
    """Id, patient and image hash of a case, to compare it with calibration cases."""

    id: str
    cluster: str | None
    input_sha256: str | None


def check_scorable(deployment: Deployment, cases: Sequence[CaseFiles]) -> None:
    """Refuse to score a policy on its calibration cases; the images are read, so that no other name hides them."""
    known = any(deployment.policy.calibration_inputs)
    check_held_out(deployment.policy, [_seen(files, deployment.backbone, known=known) for files in cases])


def _seen(files: CaseFiles, backbone: Backbone, *, known: bool) -> _Seen:
    try:
        digest = image_sha256(backbone.read(files.checked()).case.image) if known else None
    except (CasewiseError, OSError, ValueError, RuntimeError):  # the run itself says what is wrong with the file
        digest = None
    return _Seen(files.id, files.cluster, digest)


def _ending_for(cases: Sequence[CaseFiles]) -> str:
    volumes = cases and cases[0].images[0].name.lower().endswith((".nii", ".nii.gz"))
    return ".nii.gz" if volumes else ".png"


@dataclass(frozen=True)
class Planned:
    """One row of a dry run."""

    case_id: str
    shape: tuple[int, ...] | None  # (channel, *space), None where the header cannot be read
    bytes: int | None
    complete: bool


def plan_folder(work: PredictCase, *, resume: bool, overwrite: bool = False) -> tuple[Planned, ...]:
    """Say what a run would do, from headers and hashes; refuse to replace masks of somebody else."""
    planned = tuple(_planned(work, files, resume=resume) for files in work.cases.values())
    if not overwrite:
        check_replaceable(work.layout, [row.case_id for row in planned if not row.complete])
    return planned


def _planned(work: PredictCase, files: CaseFiles, *, resume: bool) -> Planned:
    shape = None if files.leaving else shape_of(files)
    need = None if shape is None else work.deployment.estimated_bytes(shape)
    complete = resume and is_complete(work.layout, files, work.key)
    return Planned(files.id, shape, need, complete)


def predict_folder(
    work: PredictCase, engine: Engine, *, resume: bool = False, overwrite: bool = False
) -> Iterator[PredictedCase]:
    """Predict every case and stream the entries: those kept from an earlier run first.

    Outputs of all cases that are to be done are removed before the first one starts, so that nothing old can be taken
    for the result of this run, whatever happens to it. Masks that no run wrote are refused, unless ``overwrite`` gives
    them up. The deployment's watch sees every decision and may suspend the policy.
    """
    work.layout.out.mkdir(parents=True, exist_ok=True)
    with claimed(work.layout.claims, work.cases):
        yield from _predicted(work, engine, resume=resume, overwrite=overwrite)


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
            path.unlink(missing_ok=True)  # of a process that ended without a word
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


def _predicted(work: PredictCase, engine: Engine, *, resume: bool, overwrite: bool) -> Iterator[PredictedCase]:
    watch = work.deployment.watch
    layout, audit = work.layout, Chain(work.layout.audit)
    kept = [files.id for files in work.cases.values() if resume and is_complete(layout, files, work.key)]
    waiting = [case_id for case_id in work.cases if case_id not in kept]
    if not overwrite:
        check_replaceable(layout, waiting)
    sweep(layout.out)
    audit.append("run-started", _facts(work, kept=len(kept), waiting=len(waiting), to_do=waiting))
    for case_id in waiting:
        layout.forget(case_id)
    for case_id in kept:
        entry = read_entry(layout.entry(case_id))
        assert entry is not None  # it was just found to be complete
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
        if not path.name.lower().endswith((".nii", ".nii.gz")):
            continue
        try:
            nifti.check_header(path)
            found[files.id] = "".join(str(code) for code in nibabel.aff2axcodes(nibabel.load(path).affine))
        except Exception:  # a header can be bad in more ways than nibabel has errors; the case itself says which
            continue
    return check_orientations(found)
