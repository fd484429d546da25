"""Files of a run besides its masks: summary.json, nnU-Net's two files, and the machine-readable report.

summary.json is as ``nnUNetv2_evaluate_folder`` writes it, so that users' scripts keep working, plus an ``adapt`` block.

Dice and IoU are NaN where a class is neither predicted nor there; means are nanmeans. This is nnU-Net's convention; the
study's own differs (classes absent from the label are skipped, A10).

If every class is compared (``classes``, as for streets) class 0 is scored like the others, and a case became
better or worse by its mean IoU instead of its mean Dice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from casewise.adapt.backbones import Backbone
from casewise.core.chain import Chain
from casewise.core.durable import file_lock, file_sha256, write_durably, write_json
from casewise.core.errors import BadInput, CasewiseError, in_one_line, without_folders
from casewise.core.formats import worded
from casewise.core.prediction_record import CALIBRATED, OUTSIDE, PredictedCase
from casewise.core.records import Mask, Policy
from casewise.data.folders import CaseFiles
from casewise.data.nifti import check_same_place
from casewise.judge.certificates.certificate import DRIFTED
from casewise.judge.monitors.quota import quota_drift, quota_of
from casewise.judge.outcomes import edit_harm, judged_share
from casewise.judge.policy import no_go
from casewise.measure.measures import named_volumes
from casewise.run.predict_case import PredictCase
from casewise.run.prediction_folder import MEASURED, Layout, read_entry, versions, write_entry
from casewise.study.clinical import MeasuredCase

if TYPE_CHECKING:
    from casewise.deployment import Deployment

Region = int | tuple[int, ...]
METRICS = ("Dice", "FN", "FP", "IoU", "TN", "TP", "n_pred", "n_ref")
SCORES = {True: "Dice", False: "IoU"}  # True: label 0 is background


def write_summary(work: PredictCase, cases: Sequence[CaseFiles], found: Sequence[PredictedCase]) -> dict[str, Any]:
    """Score every output that has a label, and M0 beside it, and write summary.json beside the masks.

    A case whose label cannot be used is left out. The file has null where nnU-Net writes NaN, which strict readers
    refuse.
    """
    layout, backbone, adaptation = work.layout, work.deployment.backbone, work.deployment.adaptation
    entries = {entry.case: entry for entry in found}
    scored = [
        files for files in cases if files.label is not None and files.id in entries and entries[files.id].has_output
    ]
    rows: list[dict[str, Any]] = []
    effects: dict[str, dict[str, Any]] = {}
    problems: dict[str, str] = {}
    regions = _regions(backbone, scored, background=adaptation.foreground)
    for files in scored:
        assert files.label is not None
        try:
            label, mask, source = _masks(layout, files, files.label, backbone)
        except (CasewiseError, OSError, ValueError, RuntimeError) as error:
            problems[files.id] = without_folders(in_one_line(error), (files.label.parent, layout.out))
            continue
        metrics = _metrics(mask, label, regions, backbone.ignore)
        before = _metrics(source, label, regions, backbone.ignore)
        place = {"reference_file": str(files.label), "prediction_file": str(layout.mask(files.id))}
        rows.append({**place, "metrics": metrics})
        effects[files.id] = {
            **_effect(entries[files.id], before, metrics, foreground=adaptation.foreground),
            **edit_harm(
                source, mask, label, ignore=backbone.ignore, min_area=adaptation.min_area,
                foreground=adaptation.foreground,
            ),
        }  # fmt: skip
    mean = {
        str(region): {name: _nanmean([row["metrics"][str(region)][name] for row in rows]) for name in METRICS}
        for region in regions
        if rows
    }
    summary = {
        "foreground_mean": {name: float(np.mean([one[name] for one in mean.values()])) for name in METRICS if mean},
        "mean": mean,
        "metric_per_case": rows,
        "adapt": {
            "cases": effects,
            "unscored": sorted(set(entries) - set(effects)),
            "problems": problems,
            "score": SCORES[adaptation.foreground],
            **_cohort(effects),
        },
    }
    write_json(layout.out / "summary.json", summary, indent=4, sort_keys=True)
    return summary


def _masks(layout: Layout, files: CaseFiles, file: Path, backbone: Backbone) -> tuple[Mask, Mask, Mask]:
    """The label, the deployed mask and M0."""
    check_same_place(files.images[0], file, reorients=backbone.expects.reorients)
    label, mask = backbone.read_label(file), backbone.read_label(layout.mask(files.id))
    if label.shape != mask.shape:
        raise BadInput(f"label {file.name} has shape {label.shape}, its mask {mask.shape}; check its name")
    kept_source = layout.source(files.id)
    return label, mask, backbone.read_label(kept_source) if kept_source.is_file() else mask


def _regions(backbone: Backbone, scored: Sequence[CaseFiles], *, background: bool) -> tuple[Region, ...]:
    """Return the evaluated labels: nnU-Net's own regions, else every named label, else the values in the labels."""
    own = getattr(backbone, "regions", None)
    if own is not None:
        return tuple(own)
    if backbone.labels:
        return tuple(sorted(value for value in backbone.labels if value > 0 or not background))
    found: set[int] = set()
    for files in scored:
        with suppress(CasewiseError, OSError, ValueError, RuntimeError):  # reported when the case is scored
            found |= {int(value) for value in np.unique(backbone.read_label(files.label))} if files.label else set()
    return tuple(sorted(found - ({0, backbone.ignore} if background else {backbone.ignore})))


def _metrics(mask: Mask, label: Mask, regions: Sequence[Region], ignore: int | None) -> dict[str, dict[str, float]]:
    valid = np.ones(label.shape, bool) if ignore is None else label != ignore
    return {str(region): _counts(_in(mask, region), _in(label, region), valid) for region in regions}


def _in(mask: Mask, region: Region) -> NDArray[np.bool_]:
    return np.isin(mask, region) if isinstance(region, tuple) else np.asarray(mask == region)


def _counts(found: NDArray[np.bool_], truth: NDArray[np.bool_], valid: NDArray[np.bool_]) -> dict[str, float]:
    tp, fp = int((found & truth & valid).sum()), int((found & ~truth & valid).sum())
    fn, tn = int((~found & truth & valid).sum()), int((~found & ~truth & valid).sum())
    some = tp + fp + fn > 0
    return {
        "Dice": 2 * tp / (2 * tp + fp + fn) if some else float("nan"),
        "IoU": tp / (tp + fp + fn) if some else float("nan"),
        "FP": fp, "TP": tp, "FN": fn, "TN": tn, "n_pred": fp + tp, "n_ref": fn + tp,
    }  # fmt: skip


def _nanmean(values: Sequence[float]) -> float:
    known = [value for value in values if value == value]
    return fmean(known) if known else float("nan")


def _effect(
    entry: PredictedCase, before: dict[str, dict[str, float]], after: dict[str, dict[str, float]], *, foreground: bool
) -> dict[str, Any]:
    """Return the action for a case, and its scores before and after."""
    scores = {
        f"{when}{name}": _nanmean([values[name] for values in metrics.values()])
        for when, metrics in (("source_", before), ("", after))
        for name in SCORES.values()
    }
    change = scores[SCORES[foreground]] - scores[f"source_{SCORES[foreground]}"]
    depth = None if entry.decision is None else entry.decision.deployed
    return {"status": entry.status, "action": entry.action, "deployed": depth, **scores, "change": change}


def _cohort(effects: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    rows = list(effects.values())
    names = (*(f"{when}{name}" for name in SCORES.values() for when in ("source_", "")), "change", "ha", "ba")
    means = {name: _nanmean([float(row[name]) for row in rows]) for name in (*names, "worse_voxels")}
    return {
        "mean": {**means, "judged": judged_share(pd.DataFrame(rows)) if rows else None},
        "actions": dict(sorted(Counter(str(row["action"]) for row in rows).items())),
        "harmed": sum(row["change"] < 0 for row in rows),
        "helped": sum(row["change"] > 0 for row in rows),
    }


def copy_model_files(work: PredictCase) -> None:
    """dataset.json and plans.json, which nnU-Net's own tools look for beside predictions.

    If a model has no dataset.json, or its classes were merged, one is written that names the labels of the masks.
    """
    model, backbone = work.deployment.model, work.deployment.backbone
    own = {name: Path(getattr(model, "spec", "")) / name for name in ("dataset.json", "plans.json")}
    for name, path in own.items():
        if path.is_file():
            write_durably(work.layout.out / name, path.read_bytes())
    names = {0: "background", **backbone.labels}
    if (
        (getattr(model, "merge", ()) or not own["dataset.json"].is_file())
        and backbone.labels
        and len(set(names.values())) == len(names)
    ):
        labels = {name: number for number, name in sorted(names.items())}
        write_json(work.layout.out / "dataset.json", {"labels": labels, "file_ending": work.layout.ending}, indent=4)


def run_report(
    work: PredictCase, images: Path, entries: Sequence[PredictedCase], seconds: float, scores: Mapping[str, Any],
    all_parts: Sequence[PredictedCase] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The run for a machine, in the manner of TotalSegmentator's ``--set report=FILE``.

    ``all_parts`` are the cases of the other parts too: the promise depends on the bucket shares of all cases.
    """
    among = entries if all_parts is None else all_parts
    deployment = work.deployment
    backbone, policy = deployment.backbone, deployment.policy
    lines, last = Chain(work.layout.audit).tip
    return {
        "tool": "casewise predict",
        "versions": versions(),
        "model": {"name": backbone.name, "sha256": backbone.fingerprint, "trusted": deployment.trusted["checkpoint"]},
        "policy": {"name": policy.name, "calibration_id": policy.calibration_id, "no_go": no_go(policy)},
        "certificate": in_short(deployment, among),
        "quota": drift_of(policy, among),
        "alarms": {} if deployment.watch is None else deployment.watch.state.alarms,
        "device": deployment.device,
        "options": {**deployment.plain_adaptation, "contract": deployment.contract, "timeout_s": work.timeout_s},
        "input": str(images),
        "output": str(work.layout.out),
        "classes": {str(value): name for value, name in backbone.labels.items()},
        "runtime_seconds": round(seconds, 3),
        "output_files": sorted(name for entry in entries for name in entry.outputs),
        "statuses": dict(Counter(entry.status for entry in entries)),
        "actions": dict(Counter(str(entry.action) for entry in entries)),
        "failures": [
            {"case": entry.case, "status": entry.status, "error": entry.error, "kind": entry.error_kind}
            for entry in entries
            if not entry.is_done
        ],
        "warnings": {entry.case: list(entry.warnings) for entry in entries if entry.warnings},
        "scores": dict(scores),
        "audit": {"lines": lines, "last_hash": last},
    }


PAGES = ("report.html", "summary.json")
UNCOVERED = "the certificate does not hold here: it covers none of these cases"


@contextmanager
def everyone(work: PredictCase) -> Iterator[list[PredictedCase]]:
    """Yield the entries of all parts of the run; meanwhile no other part can write the page or the summary.

    Files that the block writes into the folder are listed in the audit log, so that later edits are noticed.
    """
    layout = work.layout
    with file_lock(layout.claims / "finish"):
        read = (read_entry(path) for path in layout.entries())
        yield [entry for entry in read if entry is not None and entry.key == work.key]
        made = {name: file_sha256(layout.out / name) for name in PAGES if (layout.out / name).is_file()}
        Chain(layout.audit).append("pages", {"files": made})


def with_patient_measures(work: PredictCase, entries: list[PredictedCase]) -> list[PredictedCase]:
    """Add measures over several scans of a patient, such as the ejection fraction, to the entries of these scans."""
    measures = work.deployment.measures
    if measures is None or not any(one.per_patient for one in measures.declared):
        return entries
    shown = [one for one in entries if one.has_output]
    names = work.deployment.label_names
    cases = []
    for one in shown:
        volumes = {int(label): volume for label, volume in one.volumes.items()}
        patient = None if one.decision is None else one.decision.cluster
        cases.append(MeasuredCase(one.case, patient, None, {"new": named_volumes(volumes, names)}))
    found = measures.of_cases(cases, {one.case: one.no_interval for one in shown})
    audit, made = Chain(work.layout.audit), []
    for one in entries:
        if one.case in found and found[one.case] != one.measures:
            one = replace(one, measures=found[one.case])
            write_entry(work.layout, one)
            audit.append(MEASURED, {"case": one.case, "entry": file_sha256(work.layout.entry(one.case))})
        made.append(one)
    return made


def drift_of(policy: Policy, entries: Sequence[PredictedCase]) -> str | None:
    """Say if the shares of the buckets of a router are not those of calibration; None where they are."""
    if "quota" not in policy.preflight:
        return None
    return quota_drift(policy, quota_of(entry.decision for entry in entries if entry.decision is not None))


def promised(deployment: Deployment, entries: Sequence[PredictedCase]) -> tuple[str | None, list[str]]:
    """Return the promise about these cases, None if it does not hold, and warnings about it."""
    drift, void = drift_of(deployment.policy, entries), why_void(deployment, entries)
    said = [*deployment.warnings, *([] if drift is None else [drift])]
    said += [void] if void is not None and void not in said else []
    statement = None if deployment.certificate is None or said else deployment.certificate.statement
    for sign, what in {CALIBRATED: "of labelled patients", OUTSIDE: OUTSIDE}.items():
        own = [entry.case for entry in entries if entry.noted(sign)]
        are, them = ("is", "it") if len(own) == 1 else ("are", "them")
        named = f" ({', '.join(own[:3])}{', ...' if len(own) > 3 else ''})"
        counted = f"{len(own)} of {len(entries)} cases{named} {are} {what}"
        said += [f"{counted}: no estimate or promise holds for {them}"] if own else []
    return statement, said


def why_void(deployment: Deployment, entries: Sequence[PredictedCase]) -> str | None:
    """Return why the certificate does not hold for these cases, as a sentence; None where it does, or where there is
    none."""
    if deployment.certificate is None or deployment.why_void is not None:
        return deployment.why_void
    if drift_of(deployment.policy, entries) is not None:
        return DRIFTED
    decided = [entry for entry in entries if entry.has_output]
    return UNCOVERED if decided and all(entry.uncovered for entry in decided) else None


def in_short(deployment: Deployment, entries: Sequence[PredictedCase]) -> dict[str, Any] | None:
    """The promise for a machine-readable report, and why it is void here, if it is."""
    if deployment.certificate is None:
        return None
    void = why_void(deployment, entries)
    cut = {"cut": worded(deployment.certificate.cut)}
    return {**(deployment.promise or {}), **cut, "void": void is not None, "why_void": void}
