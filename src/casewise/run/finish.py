"""What a run leaves besides its masks: summary.json, nnU-Net's two files, and the machine-readable report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from casewise.core.chain import Chain
from casewise.core.durable import write_durably, write_json
from casewise.core.records import DONE
from casewise.core.strict_json import worded
from casewise.data.folders import CaseFiles
from casewise.judge.certificates.certificate import Certificate
from casewise.run.entry import as_json, versions
from casewise.run.predict import PredictCase
from casewise.run.summary import summarize


def write_summary(
    work: PredictCase, cases: Sequence[CaseFiles], entries: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """summary.json beside the masks; null where nnU-Net writes NaN, which strict readers refuse."""
    by_id = {str(entry["case"]): entry for entry in entries}
    summary = summarize(work.layout, cases, by_id, work.deployment.backbone, work.deployment.adaptation)
    write_json(work.layout.out / "summary.json", summary, indent=4, sort_keys=True)
    return summary


def copy_model_files(work: PredictCase) -> None:
    """dataset.json and plans.json, which nnU-Net's own tools look for beside predictions."""
    for name in ("dataset.json", "plans.json"):
        path = Path(work.deployment.model.spec) / name
        if path.is_file():
            write_durably(work.layout.out / name, path.read_bytes())


def run_report(
    work: PredictCase,
    images: Path,
    entries: Sequence[Mapping[str, Any]],
    seconds: float,
    scores: Mapping[str, Any],
) -> dict[str, Any]:
    """The run for a machine, in the manner of TotalSegmentator's ``--report``."""
    deployment = work.deployment
    backbone, model, policy = deployment.backbone, deployment.model, deployment.policy
    lines, last = Chain(work.layout.audit).tip
    return {
        "tool": "casewise predict",
        "versions": versions(),
        "model": {"name": backbone.name, "sha256": backbone.fingerprint, "trusted": model.trust},
        "policy": {"name": policy.name, "calibration_id": policy.calibration_id},
        "certificate": in_short(deployment.certificate),
        "alarms": {} if deployment.watch is None else deployment.watch.state.alarms,
        "device": model.device,
        "options": {**deployment.adaptation.as_plain(), "contract": deployment.contract, "timeout_s": work.timeout_s},
        "input": str(images),
        "output": str(work.layout.out),
        "classes": {str(value): name for value, name in backbone.labels.items()},
        "runtime_seconds": round(seconds, 3),
        "output_files": sorted(name for entry in entries for name in entry.get("outputs", {})),
        "statuses": dict(Counter(str(entry["status"]) for entry in entries)),
        "actions": dict(Counter(str((entry.get("decision") or {}).get("action")) for entry in entries)),
        "failures": [
            {"case": entry["case"], "status": entry["status"], "error": entry["error"], "kind": entry.get("error_kind")}
            for entry in entries
            if entry["status"] != DONE
        ],
        "warnings": {
            str(entry["case"]): [finding["message"] for finding in entry["contract"]]
            for entry in entries
            if entry.get("contract")
        },
        "scores": dict(scores),
        "audit": {"lines": lines, "last_hash": last},
    }


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """The report as JSON."""
    write_durably(path, as_json(report))


def in_short(certificate: Certificate | None) -> dict[str, Any] | None:
    """The promise for a machine-readable report."""
    if certificate is None:
        return None
    return {"statement": certificate.statement, "alpha": certificate.alpha, "cut": worded(certificate.cut)}
