"""``casewise predict``: nnUNetv2_predict with one word changed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import typer

from casewise.cli.options import (
    AdaptationOptions,
    CaseOptions,
    EngineOptions,
    ModelOptions,
    NnUNetStyle,
    PrintingOptions,
    grouped,
)
from casewise.cli.printing import AS_JSON, answer
from casewise.core.brief import counted

if TYPE_CHECKING:
    from casewise.core.predicted import PredictedCase
    from casewise.deployment import Deployment
    from casewise.run.predict_case import PredictCase
    from casewise.run.predict_folder import Planned
    from casewise.run.trackers import Tracker

app = typer.Typer()

NOT_ALL_DONE = 3


@app.command(cls=NnUNetStyle)
@grouped
def predict(
    source: ModelOptions,
    which: CaseOptions,
    how: AdaptationOptions,
    where: EngineOptions,
    telling: PrintingOptions,
    out: Path = typer.Option(..., "-o", help="Folder for the masks; made if it is not there."),
    policy: str = typer.Option(None, help="policy.json, the archive that holds it, m0, or package.module:Name."),
    controller: str = typer.Option(None, help="package.module:Name that the policy was calibrated with."),
    certificate: Path = typer.Option(None, help="Certificate that must hold for this policy; a mismatch is refused."),
    watch: Path = typer.Option(None, help="State of casewise monitor: M0 once it is suspended; decisions are added."),
    force: bool = typer.Option(False, "--force", help="Deploy a policy that calibration called NO-GO."),
    resume: bool = typer.Option(False, "--continue_prediction", "--c", help="Keep cases whose hashes all match."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace masks in -o that casewise did not write."),
    no_adapt: bool = typer.Option(False, "--no-adapt", help="The same as --policy m0."),
    save_candidates: bool = typer.Option(False, "--save-candidates", help="Keep the mask of every step."),
    keep_header: bool = typer.Option(
        False, "--keep-header", help="Copy affine, sform/qform codes and zooms from the image, with nnU-Net models too."
    ),
    max_ram: str = typer.Option(None, "--max-ram", help="Refuse cases that need more, such as 16G."),
    contract: str = typer.Option("refuse", help="Input contract: refuse, warn or off."),
    codes: Path = typer.Option(None, help="JSON with codes of classes, for DICOM SEG; see docs/how-to/dicom.md."),
    report: Path = typer.Option(None, help="Write a machine-readable report of the run."),
    track: str = typer.Option(None, help="Tell a tracker, mlflow+URI or wandb+URI; no case name leaves."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Say what would be done; write nothing."),
    overlays: bool = typer.Option(True, help="Draw a PNG for each case."),
    npp: int = typer.Option(None, "-npp", hidden=True),
    nps: int = typer.Option(None, "-nps", hidden=True),
    as_json: bool = AS_JSON,
) -> None:
    """Segment a folder with adaptation under guard; nnUNetv2_predict with one word changed.

    Exit codes: 0 every case is done, 1 a bug, 2 wrong arguments or inputs, 3 finished, but some cases failed or fell
    back to M0 (which ones is in OUT/casewise and in the report).
    """
    from casewise.adapt.contract import parse_size
    from casewise.judge.policy import adapts
    from casewise.render.masks import overlay_png
    from casewise.run import summary
    from casewise.run.assemble import assembled
    from casewise.run.local import keep_freed_memory
    from casewise.run.predict_folder import check_scorable, plan_folder, prediction_work
    from casewise.run.trackers import tracker_at

    keep_freed_memory()
    began = time.monotonic()
    model = source.chosen()
    deployment = assembled(
        model, "m0" if no_adapt else policy, asked=how.asked(model), controller=controller,
        certificate=certificate, watch=watch,
        contract=contract, max_ram=parse_size(max_ram) if max_ram else None, force=force,
    )  # fmt: skip
    how.check_used(deployment)
    if dry_run:
        with TemporaryDirectory(prefix="casewise-") as folder:  # DICOM series are read here, and gone afterwards
            cases = which.gathered(model, keep=Path(folder))
            planned = plan_folder(prediction_work(deployment, cases, out), resume=resume, overwrite=overwrite)
            _say_plan(planned, as_json=as_json)
        return
    cases = which.gathered(model, keep=out / "casewise" / "images")
    if which.labels is not None:
        check_scorable(deployment, cases)
    work = prediction_work(
        deployment, cases, out, timeout_s=where.timeout, save_candidates=save_candidates, keep_header=keep_header,
        draw=overlay_png if overlays else None,
    )  # fmt: skip
    tracker = tracker_at(track)
    planned = plan_folder(work, resume=resume, overwrite=overwrite)
    _warn_about_memory(planned, where.jobs)
    entries = _run(work, where.chosen(), resume=resume, overwrite=overwrite, telling=telling, tracker=tracker)
    summary.copy_model_files(work)
    scored: Mapping[str, Any] = {}
    with summary.everyone(work) as all_parts:
        if which.labels is not None:
            labelled = cases if len(all_parts) == len(cases) else which.whole(model)
            scored = summary.write_summary(work, labelled, all_parts)["adapt"]
        scores = scored["mean"] if scored.get("cases") else {}
        unscored = [f"{case_id} is not scored: {why}" for case_id, why in scored.get("problems", {}).items()]
        _write_page(work, all_parts, scores, unscored)
    found = summary.run_report(work, which.images, entries, time.monotonic() - began, scores, all_parts)
    if report is not None:
        summary.write_report(report, found)
    promise, warnings = summary.promised(deployment, all_parts)
    means = _scored(scores, work, len(scored.get("cases", ())), len(entries))
    lines = [_result(entries, out, adapting=adapts(deployment.policy)), *means, promise]
    answer(
        "\n".join(line for line in lines if line),
        {**found, "page": out / "report.html"},
        as_json=as_json,
    )
    for line in (*(f"! {sentence}" for sentence in (*unscored, *warnings)), *_alarms(deployment)):
        typer.echo(line, err=True)
    unwritten = _write_dicom(work, which, entries, codes, _certified(summary.in_short(deployment, all_parts)))
    if unwritten or unscored or not all(entry.is_done for entry in entries):
        raise typer.Exit(NOT_ALL_DONE)


def _write_dicom(
    work: PredictCase, which: CaseOptions, entries: Sequence[PredictedCase], codes: Path | None, certificate: str
) -> bool:
    """SEG and structured report of every case whose image came as DICOM; whether any could not be written."""
    from casewise.data.dicom import is_dicom_folder
    from casewise.run.dicom import FOLDER, write_objects

    if not is_dicom_folder(which.images):
        return False
    deployment = work.deployment
    failed = write_objects(
        which.images, work.layout.out, {case_id: work.layout.mask(case_id) for case_id in work.cases}, entries,
        classes=deployment.backbone.labels, codes=codes,
        certificate=certificate, channels=which.channel_patterns,
    )  # fmt: skip
    for case_id, reason in failed.items():
        typer.echo(f"{case_id}: no DICOM output, {reason}", err=True)
    typer.echo(f"DICOM SEG and structured reports: {work.layout.out / FOLDER}", err=True)
    return bool(failed)


def _certified(promise: Mapping[str, Any] | None) -> str:
    """What a report says of the certificate: its sentence, or why it does not hold here; empty without one."""
    if promise is None:
        return ""
    lead, why = "the certificate does not hold here: ", promise["why_void"]
    return str(promise["statement"]) if why is None else f"{lead}{str(why).removeprefix(lead)}"


def _alarms(deployment: Deployment) -> list[str]:
    """Alarms of the monitors, each as a line."""
    raised = {} if deployment.watch is None else deployment.watch.state.alarms
    return [
        f"casewise: the {name} monitor raised an alarm after {counted(seen, 'case')}; see casewise monitor"
        for name, seen in raised.items()
    ]


def _run(
    work: PredictCase, engine: Any, *, resume: bool, overwrite: bool, telling: PrintingOptions, tracker: Tracker | None
) -> list[PredictedCase]:
    from casewise.run.predict_folder import predict_folder
    from casewise.run.trackers import tracked

    entries: list[PredictedCase] = []
    with telling.progress(len(work.cases)) as progress:
        for entry in tracked(predict_folder(work, engine, resume=resume, overwrite=overwrite), tracker):
            entries.append(entry)
            progress.step(_in_words(entry), bad=not entry.is_done)
    return entries


def _in_words(entry: PredictedCase) -> str:
    why = entry.error or (entry.decision.reason if entry.decision is not None else "")
    return f"{entry.case}: {entry.status}, {entry.action or 'no output'}. {why}"


def _scored(scores: Mapping[str, Any], work: PredictCase, cases: int, own: int) -> list[str]:
    """The mean metric of what is deployed and of M0, where there are labels; over whom, where that is not this run."""
    name, key = ("Dice", "Dice") if work.deployment.adaptation.foreground else ("mIoU", "IoU")
    if not scores or scores[key] != scores[key]:  # no case has a label
        return []
    over = "" if cases == own else f" (over the {counted(cases, 'scored case')} of the folder)"
    return [f"mean {name} of the deployed masks {scores[key]:.3f}, of M0 {scores[f'source_{key}']:.3f}{over}"]


def _write_page(
    work: PredictCase, entries: Sequence[PredictedCase], scores: Mapping[str, Any], unscored: Sequence[str]
) -> None:
    from casewise.core.durable import write_durably
    from casewise.report.prediction_page import prediction_page
    from casewise.run.prediction_folder import unfinished, versions
    from casewise.run.summary import promised

    policy = work.deployment.policy
    promise, warnings = promised(work.deployment, entries)
    warnings += unscored
    if left := unfinished(work.layout.out):
        warnings.append(
            f"{counted(len(left), 'more case')} of this folder had no result when this page was written (such as "
            f"{left[0]}): another part was at work, or was killed"
        )
    facts = {
        "model": work.deployment.backbone.name, "policy": policy.name, "calibration_id": policy.calibration_id,
        "scores": scores, "versions": versions(), "warnings": warnings,
        "classes": work.deployment.backbone.labels, "background": work.deployment.adaptation.foreground,
        "promise": promise,
    }  # fmt: skip
    write_durably(work.layout.out / "report.html", prediction_page(entries, facts).encode())


def _say_plan(planned: Sequence[Planned], *, as_json: bool) -> None:
    lines = []
    for row in planned:
        shape = "unreadable header" if row.shape is None else " x ".join(str(side) for side in row.shape)
        need = "" if row.bytes is None else f", about {row.bytes / 2**30:.2f} GiB"
        lines.append(f"{row.case_id}: {shape}{need}{', already done' if row.complete else ''}")
    waiting = sum(not row.complete for row in planned)
    lines.append(
        f"{counted(len(planned), 'case')}, {waiting} to do, {len(planned) - waiting} already done; nothing was written"
    )
    answer("\n".join(lines), {"cases": [asdict(row) for row in planned], "to_do": waiting}, as_json=as_json)


def _warn_about_memory(planned: Sequence[Planned], jobs: int) -> None:
    from casewise.adapt.contract import available_bytes

    free = available_bytes()
    largest = max((row.bytes or 0 for row in planned if not row.complete), default=0) * jobs
    if free is not None and largest > free:
        typer.echo(
            f"casewise: the largest case needs about {largest / 2**30:.1f} GiB with -j {jobs}, "
            f"{free / 2**30:.1f} GiB are free; lower --max-slices or -j",
            err=True,
        )


def _result(entries: Sequence[PredictedCase], out: Path, *, adapting: bool) -> str:
    from collections import Counter

    failed = sum(not entry.is_done for entry in entries)
    cases, page = counted(len(entries), "case"), out / "report.html"
    if not adapting:
        return f"{cases}, nothing adapted: the masks are the model's own (M0); {failed} not done. {page}"
    actions = Counter(entry.action or "no output" for entry in entries)
    each = ", ".join(f"{count} {action}" for action, count in sorted(actions.items()))
    flagged = sum(entry.decision is not None and entry.decision.flagged for entry in entries)
    look = f"; {flagged} flagged: a person should look, see casewise review {out}" if flagged else ""
    return f"{cases}: {each}{look}; {failed} not done as asked. {page}"
