"""``casewise predict``: segment a folder with a deployment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from casewise.cli.options import (
    CaseOptions,
    DeploymentOptions,
    EngineOptions,
    NnUNetModelOptions,
    NnUNetStyle,
    PrintingOptions,
    grouped,
    setting,
)
from casewise.cli.printing import AS_JSON, answer, warn
from casewise.core.text import pluralize

if TYPE_CHECKING:
    from casewise.core.prediction_record import PredictedCase
    from casewise.deployment import Deployment
    from casewise.run.predict_folder import PredictedFolder

app = typer.Typer()

NOT_ALL_DONE, UNLIKE = 3, 4


@app.command(cls=NnUNetStyle)
@grouped
def predict(
    source: NnUNetModelOptions,
    decides: DeploymentOptions,
    which: CaseOptions,
    where: EngineOptions,
    telling: PrintingOptions,
    out: Path = typer.Option(..., "-o", "--out", help="Folder for the masks; created if needed."),
    resume: bool = typer.Option(
        False, "--continue_prediction", "--c", help="Skip cases that are finished (checked by hash)."
    ),
    overwrite: bool = setting(False, help="Replace masks in -o that casewise did not write."),
    save_candidates: bool = setting(False, help="Keep the mask of every candidate."),
    keep_header: bool = setting(False, help="Copy the geometry of the image's NIfTI header to the mask."),
    max_slices: int = setting(None, help="Slices or patches per batch; fewer need less memory."),
    codes: Path = setting(None, help="JSON with codes of the classes, for DICOM SEG."),
    segmentation: str = setting("binary", help="Kind of DICOM SEG: binary (every viewer) or labelmap (smaller)."),
    report: Path = setting(None, help="Write a machine-readable report of the run."),
    overlays: bool = setting(True, help="Draw a picture of each case."),
    npp: int = typer.Option(None, "-npp", hidden=True),
    nps: int = typer.Option(None, "-nps", hidden=True),
    as_json: bool = AS_JSON,
) -> None:
    """Segment a folder of images; write masks, flags and a page.

    Example:

        casewise predict -m deployment -i images -o masks

    -m is a deployment (from casewise fit) or a model. The options are those of nnUNetv2_predict_from_modelfolder.

    Exit codes: 0 every case is done, 1 a bug, 2 wrong arguments or inputs, 3 finished, but some cases failed or got the
    model's original mask after an error (listed on the page and in OUT/casewise), 4 refused: most images are unlike the
    labelled ones, so every case has the original mask.
    """
    from casewise.core.durable import write_durably
    from casewise.core.formats import json_bytes
    from casewise.run.local import keep_freed_memory
    from casewise.run.predict_folder import predict_all

    keep_freed_memory()
    deployment = decides.open_deployment(source.as_model(), max_slices=max_slices)
    refused: dict[str, str] = {}
    cases = which.list_cases(deployment.backbone, out / "casewise" / "images", refused)

    def each(entries: Iterable[PredictedCase], total: int) -> Iterator[PredictedCase]:
        with telling.progress(total) as progress:
            for entry in entries:
                progress.step(_case_line(entry), bad=not entry.is_done)
                yield entry

    found = predict_all(
        deployment, which.images, out, cases=cases, refused=refused, labels=which.labels, groups=which.groups,
        whole=lambda: which.all_cases(deployment.backbone), engine=where.as_engine(), timeout_s=where.timeout,
        resume=resume, overwrite=overwrite, save_candidates=save_candidates, keep_header=keep_header, overlays=overlays,
        codes=codes, segmentation=segmentation, channels=which.channel_patterns, each=each,
    )  # fmt: skip
    if report is not None:
        write_durably(report, json_bytes(found.report))
    answer(
        "\n".join(_summary(found, deployment, which.images, out)), {**found.report, "page": found.page}, as_json=as_json
    )
    for line in (*found.failures, *found.warnings, *_alarms(deployment)):
        warn(line)
    if found.refusal or not found.is_done:
        raise typer.Exit(UNLIKE if found.refusal else NOT_ALL_DONE)


def _case_line(entry: PredictedCase) -> str:
    why = entry.error or (entry.decision.reason if entry.decision is not None else "")
    return f"{entry.case}: {entry.status}, {entry.action or 'no output'}. {why}"


SHOWN = 5


def _summary(found: PredictedFolder, deployment: Deployment, images: Path, out: Path) -> list[str]:
    """Print counts, the cases to check, and the path of the page."""
    entries = found.entries
    name, key = ("Dice", "Dice") if deployment.adaptation.foreground else ("mIoU", "IoU")
    replaced = sum(one.is_done and one.decision is not None and not _is_source(one) for one in entries)
    own = sum(one.has_output and (one.decision is None or _is_source(one)) for one in entries)
    failed = [one for one in entries if not one.has_output]
    fallen = [one for one in entries if one.has_output and not one.is_done]
    counts = f"{replaced} replaced, {own} original" if deployment.adapts else "all are the model's own (M0)"
    lines = [*([found.refusal] if found.refusal else ()), f"{pluralize(len(entries) - len(failed), 'mask')}: {counts}."]
    if found.flagged:
        named = ", ".join(_flag_line(one, name) for one in found.flagged[:SHOWN])
        more = f", and {len(found.flagged) - SHOWN} more" if len(found.flagged) > SHOWN else ""
        lines.append(f"Please check: {named}{more}. To review them: casewise review {out} --images {images}")
    elif deployment.policy.flag:
        lines.append("No case was flagged.")
    lost = [*(one.case for one in failed), *found.report["refused"]]
    for title, cases in (("Failed, no mask", lost), ("Original mask after an error", [one.case for one in fallen])):
        if cases:
            named = ", ".join(cases[:SHOWN])
            lines.append(f"{title}: {named}{f', and {len(cases) - SHOWN} more' if len(cases) > SHOWN else ''}.")
    if found.scores and found.scores[key] == found.scores[key]:
        over = "" if found.scored_cases == len(entries) else f" (over {pluralize(found.scored_cases, 'case')})"
        before = f"{found.scores[f'source_{key}']:.3f}"
        lines.append(f"Mean {name}: {found.scores[key]:.3f}, original masks {before}{over}.")
    said = f"Promised: {found.promise}" if found.promise else found.unpromised
    return [*lines, *filter(None, [said]), f"Page: {found.page}"]


def _is_source(entry: PredictedCase) -> bool:
    return entry.decision is not None and entry.decision.rolled_back


def _flag_line(entry: PredictedCase, metric: str) -> str:
    low = None if entry.decision is None or entry.uncovered else entry.decision.quality_low
    return entry.case if low is None else f"{entry.case} (estimated {metric} at least {low:.2f})"


def _alarms(deployment: Deployment) -> list[str]:
    raised: dict[str, Any] = {} if deployment.watch is None else dict(deployment.watch.state.alarms)
    return [
        f"the {name} monitor raised an alarm after {pluralize(seen, 'case')}; see casewise monitor"
        for name, seen in raised.items()
    ]
