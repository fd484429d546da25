"""What a run leaves besides its masks: summary.json, nnU-Net's two files, and the machine-readable report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from casewise.core.chain import Chain
from casewise.core.durable import write_durably, write_json
from casewise.data.folders import CaseFiles
from casewise.judge.certificates.certificate import Certificate
from casewise.run.entry import DONE, as_json, versions
from casewise.run.predict import PredictCase
from casewise.run.promise import in_short
from casewise.run.summary import summarize


def write_summary(
    work: PredictCase, cases: Sequence[CaseFiles], entries: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """summary.json beside the masks; null where nnU-Net writes NaN, which strict readers refuse."""
    by_id = {str(entry["case"]): entry for entry in entries}
    summary = summarize(work.layout, cases, by_id, work.model.load(), work.adaptation)
    write_json(work.layout.out / "summary.json", summary, indent=4, sort_keys=True)
    return summary


def copy_model_files(work: PredictCase) -> None:
    """dataset.json and plans.json, which nnU-Net's own tools look for beside predictions."""
    for name in ("dataset.json", "plans.json"):
        path = Path(work.model.spec) / name
        if path.is_file():
            write_durably(work.layout.out / name, path.read_bytes())


def run_report(
    work: PredictCase,
    images: Path,
    entries: Sequence[Mapping[str, Any]],
    seconds: float,
    scores: Mapping[str, Any],
    certificate: Certificate | None = None,
    alarms: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The run for a machine, in the manner of TotalSegmentator's ``--report``."""
    backbone = work.model.load()
    lines, last = Chain(work.layout.audit).tip
    return {
        "tool": "casewise predict",
        "versions": versions(),
        "model": {"name": backbone.name, "sha256": backbone.fingerprint, "trusted": work.model.trust},
        "policy": {"name": work.policy.name, "calibration_id": work.policy.calibration_id},
        "certificate": in_short(certificate),
        "alarms": dict(alarms or {}),
        "device": work.model.device,
        "options": {**asdict(work.adaptation), "contract": work.contract, "timeout_s": work.timeout_s},
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
