"""``casewise predict``: nnUNetv2_predict with one word changed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from casewise.cli.nnunet_style import NnUNetStyle, folds_of

if TYPE_CHECKING:
    from casewise.run.folder import Planned
    from casewise.run.predict import PredictCase
    from casewise.run.trackers import Tracker
    from casewise.run.watched import Watching

app = typer.Typer()

NOT_ALL_DONE = 3


@app.command(cls=NnUNetStyle)
def predict(
    images: Path = typer.Option(..., "-i", help="Folder with images, named as nnU-Net wants them or one file a case."),
    out: Path = typer.Option(..., "-o", help="Folder for the masks; made if it is not there."),
    model: str = typer.Option(None, "-m", "--model", help="Model folder, hub id or package.module:factory."),
    policy: str = typer.Option(None, help="policy.json, the archive that holds it, or m0."),
    certificate: Path = typer.Option(None, help="Certificate that must hold for this policy; a mismatch is refused."),
    watch: Path = typer.Option(None, help="State of casewise monitor: M0 once it is suspended; decisions are added."),
    labels: Path = typer.Option(None, "-l", "--labels", help="Labels, for summary.json; no decision sees them."),
    groups: Path = typer.Option(None, help="CSV with case and group, for policies that differ by group."),
    folds: str = typer.Option(None, "-f", help="Folds of an nnU-Net; default: all that are there."),
    checkpoint: str = typer.Option("checkpoint_final.pth", "-chk", help="Checkpoint of an nnU-Net."),
    weights: Path = typer.Option(None, help="Weights for package.module:factory or network.json."),
    device: str = typer.Option(None, "-device", help="cuda, cpu or mps; default: cuda where there is one."),
    step_size: float = typer.Option(0.5, "-step_size", help="Step of nnU-Net's sliding window."),
    unmirrored: bool = typer.Option(
        False, "--disable_tta", "--disable_mirroring", help="Do not average mirrored images."
    ),
    dataset: str = typer.Option(None, "-d", help="nnU-Net dataset, instead of -m."),
    configuration: str = typer.Option("3d_fullres", "-c", help="nnU-Net configuration, with -d."),
    plans: str = typer.Option("nnUNetPlans", "-p", help="nnU-Net plans, with -d."),
    trainer: str = typer.Option("nnUNetTrainer", "-tr", help="nnU-Net trainer, with -d."),
    num_parts: int = typer.Option(None, "-num_parts", help="Number of parts; default: the SLURM array, else 1."),
    part_id: int = typer.Option(None, "-part_id", help="This part, from 0."),
    resume: bool = typer.Option(False, "--continue_prediction", "--c", help="Keep cases whose hashes all match."),
    quiet: bool = typer.Option(False, "--disable_progress_bar", help="No progress bar."),
    verbose: bool = typer.Option(False, "--verbose", help="A line for each case."),
    objective: str = typer.Option(
        None, help="tent, eata, ... or package.module:Name; default: the archive's, else eata."
    ),
    learning_rate: float = typer.Option(None, "--lr", help="Learning rate; default: the archive's."),
    steps: int = typer.Option(None, help="Horizon for policies that are not calibrated."),
    seed: int = typer.Option(None, help="Seed of the run; default: the archive's, else 0."),
    max_slices: int = typer.Option(None, help="Slices or patches at once: less memory, same result."),
    no_adapt: bool = typer.Option(False, "--no-adapt", help="The same as --policy m0."),
    save_candidates: bool = typer.Option(False, "--save-candidates", help="Keep the mask of every step."),
    keep_header: bool = typer.Option(
        False, "--keep-header", help="Copy affine, sform/qform codes and zooms from the image, with nnU-Net models too."
    ),
    timeout: float = typer.Option(None, help="Seconds for one case; then M0 is deployed."),
    max_ram: str = typer.Option(None, "--max-ram", help="Refuse cases that need more, such as 16G."),
    contract: str = typer.Option("refuse", help="Input contract: refuse, warn or off."),
    engine: str = typer.Option("local", help="local or ray."),
    address: str = typer.Option(None, help="Ray cluster to join, with --engine ray; default: one of our own here."),
    jobs: int = typer.Option(1, "-j", help="Processes; 1 runs everything in this one."),
    trust_checkpoint: bool = typer.Option(False, "--trust-checkpoint", help="Let a pickled checkpoint run its code."),
    trust_bundle: bool = typer.Option(False, "--trust-bundle", help="Let a MONAI bundle run its code."),
    trust_architecture: list[str] = typer.Option(
        [], "--trust-architecture", help="Class that a model folder may name, such as mypackage.nets.Net."
    ),
    report: Path = typer.Option(None, help="Write a machine-readable report of the run."),
    track: str = typer.Option(None, help="Tell a tracker, mlflow+URI or wandb+URI; no case name leaves."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Say what would be done; write nothing."),
    overlays: bool = typer.Option(True, help="Draw a PNG for each case."),
    npp: int = typer.Option(None, "-npp", hidden=True),
    nps: int = typer.Option(None, "-nps", hidden=True),
) -> None:
    """Segment a folder with adaptation under guard; nnUNetv2_predict with one word changed.

    Exit codes: 0 every case is done, 1 a bug, 2 wrong arguments or inputs, 3 finished, but some cases failed or fell
    back to M0 (which ones is in OUT/casewise and in the report).
    """
    from casewise.core.errors import BadInput
    from casewise.judge.policy import check_held_out
    from casewise.report.overlays import overlay_png
    from casewise.run import finish
    from casewise.run.allocator import keep_freed_memory
    from casewise.run.choice import chosen_engine, chosen_policy, model_folder
    from casewise.run.folder import plan_folder
    from casewise.run.memory import parse_size
    from casewise.run.model import Adaptation, Model, device_of
    from casewise.run.promise import promise_of
    from casewise.run.setup import gathered_cases, prediction_work
    from casewise.run.trackers import tracker_at
    from casewise.run.watched import watching

    keep_freed_memory()
    began = time.monotonic()
    if model is None and dataset is None:
        raise BadInput("name the model with -m FOLDER, or nnU-Net's -d DATASET -c CONFIGURATION")
    decided, recorded = chosen_policy("m0" if no_adapt else policy, steps=steps, objective=objective)
    asked: dict[str, Any] = {
        "objective": objective,
        "learning_rate": learning_rate,
        "seed": seed,
        "max_slices": max_slices,
    }
    how = replace(recorded or Adaptation(), steps=decided.steps, **{k: v for k, v in asked.items() if v is not None})
    source = Model(
        model or str(model_folder(dataset, configuration, plans, trainer, os.environ)),
        weights, folds_of(folds), checkpoint, device_of(device), step_size, not unmirrored, trust_checkpoint,
        trust_bundle, tuple(trust_architecture),
    )  # fmt: skip
    cases = gathered_cases(
        source, images, labels=labels, groups=groups, parts=(num_parts, part_id), environment=os.environ
    )
    if labels is not None:
        check_held_out(decided, cases)
    promised = promise_of(decided, policy, how.binding(source.load()), certificate)
    watched = watching(watch, decided)
    work = prediction_work(
        source, how, decided, cases, out, contract=contract, timeout_s=timeout, save_candidates=save_candidates,
        max_ram=parse_size(max_ram) if max_ram else None, draw=overlay_png if overlays else None,
        keep_header=keep_header,
    )  # fmt: skip
    tracker = tracker_at(track)
    planned = plan_folder(work, resume=resume)
    if dry_run:
        _say_plan(planned)
        return
    _warn_about_memory(planned, jobs)
    entries = _run(
        work,
        chosen_engine(engine, jobs=jobs, timeout_s=timeout, address=address),
        resume=resume,
        quiet=quiet,
        verbose=verbose,
        tracker=tracker,
        watch=watched,
    )
    alarms = {} if watched is None else watched.state.alarms
    finish.copy_model_files(work)
    scores: Mapping[str, Any] = {}
    if labels is not None:
        scores = finish.write_summary(work, cases, entries)["adapt"]["mean"]
    _write_page(work, entries, scores)
    if report is not None:
        seconds = time.monotonic() - began
        finish.write_report(report, finish.run_report(work, images, entries, seconds, scores, promised, alarms))
    _say_result(entries, out)
    if promised is not None:
        typer.echo(promised.statement)
    for name, cases_seen in alarms.items():
        typer.echo(
            f"casewise: the {name} monitor raised an alarm after {cases_seen} cases; see casewise monitor", err=True
        )
    if any(entry["status"] != "done" for entry in entries):
        raise typer.Exit(NOT_ALL_DONE)


def _run(
    work: PredictCase,
    engine: Any,
    *,
    resume: bool,
    quiet: bool,
    verbose: bool,
    tracker: Tracker | None,
    watch: Watching | None,
) -> list[Mapping[str, Any]]:
    from tqdm import tqdm

    from casewise.run.folder import predict_folder
    from casewise.run.trackers import tracked

    entries: list[Mapping[str, Any]] = []
    silent = quiet or verbose or not sys.stderr.isatty()
    with tqdm(total=len(work.cases), unit="case", disable=silent) as bar:
        for entry in tracked(predict_folder(work, engine, resume=resume, watch=watch), tracker):
            entries.append(entry)
            bar.update()
            if verbose or entry["status"] != "done":
                typer.echo(_in_words(entry), err=True)
    return entries


def _in_words(entry: Mapping[str, Any]) -> str:
    decision = entry.get("decision") or {}
    what = entry["error"] or decision.get("reason") or ""
    return f"{entry['case']}: {entry['status']}, {decision.get('action') or 'no output'}. {what}"


def _write_page(work: PredictCase, entries: Sequence[Mapping[str, Any]], scores: Mapping[str, Any]) -> None:
    from casewise.core.durable import write_durably
    from casewise.report.prediction_page import prediction_page
    from casewise.run.entry import versions

    facts = {
        "model": work.model.load().name, "policy": work.policy.name, "calibration_id": work.policy.calibration_id,
        "scores": scores, "versions": versions(),
    }  # fmt: skip
    write_durably(work.layout.out / "report.html", prediction_page(entries, facts).encode())


def _say_plan(planned: Sequence[Planned]) -> None:
    for row in planned:
        shape = "unreadable header" if row.shape is None else " x ".join(str(side) for side in row.shape)
        need = "" if row.bytes is None else f", about {row.bytes / 2**30:.2f} GiB"
        typer.echo(f"{row.case_id}: {shape}{need}{', already done' if row.complete else ''}")
    waiting = sum(not row.complete for row in planned)
    typer.echo(f"{len(planned)} cases, {waiting} to do, {len(planned) - waiting} already done; nothing was written")


def _warn_about_memory(planned: Sequence[Planned], jobs: int) -> None:
    from casewise.run.memory import available_bytes

    free = available_bytes()
    largest = max((row.bytes or 0 for row in planned if not row.complete), default=0) * jobs
    if free is not None and largest > free:
        typer.echo(
            f"casewise: the largest case needs about {largest / 2**30:.1f} GiB with -j {jobs}, "
            f"{free / 2**30:.1f} GiB are free; lower --max-slices or -j",
            err=True,
        )


def _say_result(entries: Sequence[Mapping[str, Any]], out: Path) -> None:
    from collections import Counter

    actions = Counter(str((entry.get("decision") or {}).get("action") or "no output") for entry in entries)
    failed = sum(entry["status"] != "done" for entry in entries)
    counted = ", ".join(f"{count} {action}" for action, count in sorted(actions.items()))
    typer.echo(f"{len(entries)} cases: {counted}; {failed} not done as asked. {out / 'report.html'}")
