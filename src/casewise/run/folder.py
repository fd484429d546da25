"""A whole folder: what is there already, what is to do, and the stream of entries with an audit line for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from casewise.adapt.backbones import Backbone
from casewise.adapt.contract import Finding, check_orientations
from casewise.adapt.memory import shape_of
from casewise.core.chain import Chain
from casewise.core.durable import file_sha256, sweep, write_durably
from casewise.core.errors import BadInput
from casewise.core.records import DONE, FAILED
from casewise.data import nifti
from casewise.data.folders import CaseFiles
from casewise.deployment import Deployment
from casewise.run.entry import as_json, is_complete, read_entry, run_key
from casewise.run.local import Engine, Result
from casewise.run.outputs import Layout
from casewise.run.predict import Draw, PredictCase
from casewise.run.watched import decision_in, watched_results


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
    """The work of a prediction run. The cases go in without their labels: what decides cannot even find them."""
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
    if work.keep_header and not work.layout.ending.endswith((".nii", ".nii.gz")):
        raise BadInput(f"--keep-header is for NIfTI, the masks of this model are {work.layout.ending}; leave it out")
    settings = {
        "seed": deployment.adaptation.seed,
        "steps": deployment.policy.steps,
        "device": deployment.model.device,
        "candidates": work.save_candidates,
        "overlays": work.draw is not None,
        "contract": deployment.contract,
        "keep_header": work.keep_header,
    }
    return replace(work, key=run_key(deployment.binding, deployment.policy, settings))


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


def plan_folder(work: PredictCase, *, resume: bool) -> tuple[Planned, ...]:
    """What a run would do, from headers and hashes alone."""
    return tuple(_planned(work, files, resume=resume) for files in work.cases.values())


def _planned(work: PredictCase, files: CaseFiles, *, resume: bool) -> Planned:
    shape = shape_of(files)
    need = None if shape is None else work.deployment.estimated_bytes(shape)
    return Planned(files.id, shape, need, resume and is_complete(work.layout, files, work.key))


def predict_folder(work: PredictCase, engine: Engine, *, resume: bool = False) -> Iterator[dict[str, Any]]:
    """Predict every case and stream the entries: those kept from an earlier run first.

    Outputs of all cases that are to be done are removed before the first one starts, so that nothing old can be taken
    for the result of this run, whatever happens to it. The deployment's watch sees every decision and may suspend the
    policy.
    """
    watch = work.deployment.watch
    layout, audit = work.layout, Chain(work.layout.audit)
    layout.out.mkdir(parents=True, exist_ok=True)
    sweep(layout.out)
    kept = [files.id for files in work.cases.values() if resume and is_complete(layout, files, work.key)]
    waiting = [case_id for case_id in work.cases if case_id not in kept]
    audit.append("run-started", _facts(work, kept=len(kept), waiting=len(waiting)))
    for case_id in waiting:
        layout.forget(case_id)
    for case_id in kept:
        entry = read_entry(layout.entry(case_id)) or {}
        audit.append("case-kept", _line(layout, entry))
        if watch is not None:
            watch.show(decision_in(entry))
        yield entry
    failed = 0
    for result in engine.map(work, waiting) if watch is None else watched_results(work, engine, waiting, watch):
        entry = _entry_of(work, result)
        failed += entry["status"] != DONE
        audit.append("case", _line(layout, entry))
        yield entry
    audit.append("run-finished", {"cases": len(work.cases), "not_done": failed})


def _entry_of(work: PredictCase, result: Result) -> dict[str, Any]:
    """The entry that the work wrote, or one for a case whose process died."""
    if result.value is not None:
        entry: dict[str, Any] = result.value
        return entry
    work.layout.forget(result.case_id)
    entry = {
        **work.blank(work.cases[result.case_id]),
        "status": FAILED,
        "error": result.error,
        "error_kind": result.kind,
        "timing": {"total_s": round(result.seconds, 3)},
    }
    write_durably(work.layout.entry(result.case_id), as_json(entry))
    return entry


def _facts(work: PredictCase, **more: int) -> dict[str, Any]:
    model, policy = work.deployment.model, work.deployment.policy
    return {
        "key": work.key,
        "model": model.load().fingerprint,
        "trusted_checkpoint": model.trust,
        "trusted_bundle": model.trust_bundle,
        "trusted_architectures": list(model.trust_architectures),
        "policy": policy.name,
        "calibration_id": policy.calibration_id,
        "adaptation": work.deployment.adaptation.as_plain(),
        **more,
    }


def _line(layout: Layout, entry: Mapping[str, Any]) -> dict[str, Any]:
    decision = entry.get("decision") or {}
    return {
        "case": entry.get("case"),
        "status": entry.get("status"),
        "error": entry.get("error"),
        "action": decision.get("action"),
        "outputs": entry.get("outputs", {}),
        "entry": file_sha256(layout.entry(str(entry.get("case")))),
    }


def orientation_findings(cases: Sequence[CaseFiles], backbone: Backbone) -> dict[str, Finding]:
    """Cases that lie otherwise than the rest of their folder, for readers that do not reorient."""
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
