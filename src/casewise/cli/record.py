"""``casewise record``."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import typer

from casewise.cli.nnunet_style import NnUNetStyle, folds_of

app = typer.Typer()

NOT_ALL_DONE = 3


@app.command(cls=NnUNetStyle)
def record(
    model: str = typer.Option(..., "-m", "--model", help="Model folder, hub id or package.module:factory."),
    images: Path = typer.Option(..., "-i", help="Folder with images."),
    archive: Path = typer.Option(..., "-o", help="Archive to make, or to go on with."),
    labels: Path = typer.Option(None, "-l", "--labels", help="Folder with labels, where there are any."),
    groups: Path = typer.Option(None, help="CSV with case and any of group, cluster, split."),
    objective: str = typer.Option("eata", help="tent, eata, memo, ... or package.module:Name."),
    steps: int = typer.Option(4, help="Updates for each case."),
    learning_rate: float = typer.Option(None, "--lr", help="Learning rate; default: the objective's."),
    parameters: str = typer.Option("all-norm", help="all-norm, decoder-norm, encoder-norm, all, or patterns."),
    modulation: str = typer.Option(
        None, help="Careful updates after risky edits: param-subset (FragSubset), entropy-weight, anchor-weight, ..."
    ),
    statistics: Path = typer.Option(
        None, help="Archive of calibration cases without modulation, to measure that risk with; needs no labels."
    ),
    shrink: str = typer.Option("2:0.5", help="Interpolated states to keep, as step:alpha with commas; '' for none."),
    signals: str = typer.Option("", help="Further signals, with commas, such as augmentation_disagreement."),
    min_area: int = typer.Option(16, help="Voxels of the smallest region that counts."),
    foreground: bool = typer.Option(True, "--foreground/--classes", help="Compare foreground, or every class."),
    metric: str = typer.Option("dice", help="dice or miou."),
    seed: int = typer.Option(0, help="Seed of the run."),
    max_slices: int = typer.Option(None, help="Slices or patches at once: less memory, same result."),
    folds: str = typer.Option(None, "-f", help="Folds of an nnU-Net; default: all that are there."),
    checkpoint: str = typer.Option("checkpoint_final.pth", "-chk", help="Checkpoint of an nnU-Net."),
    weights: Path = typer.Option(None, help="Weights for package.module:factory or network.json."),
    device: str = typer.Option(None, "-device", help="cuda, cpu or mps; default: cuda where there is one."),
    step_size: float = typer.Option(0.5, "-step_size", help="Step of nnU-Net's sliding window."),
    unmirrored: bool = typer.Option(
        False, "--disable_tta", "--disable_mirroring", help="Do not average mirrored images."
    ),
    num_parts: int = typer.Option(None, "-num_parts", help="Number of parts; default: the SLURM array, else 1."),
    part_id: int = typer.Option(None, "-part_id", help="This part, from 0."),
    engine: str = typer.Option("local", help="local or ray."),
    address: str = typer.Option(None, help="Ray cluster to join, with --engine ray; default: one of our own here."),
    jobs: int = typer.Option(1, "-j", help="Processes; 1 runs everything in this one."),
    timeout: float = typer.Option(None, help="Seconds for one case."),
    trust_checkpoint: bool = typer.Option(False, "--trust-checkpoint", help="Let a pickled checkpoint run its code."),
    trust_bundle: bool = typer.Option(False, "--trust-bundle", help="Let a MONAI bundle run its code."),
    trust_architecture: list[str] = typer.Option(
        [], "--trust-architecture", help="Class that a model folder may name, such as mypackage.nets.Net."
    ),
) -> None:
    """Adapt a model to every case and keep all candidates in an archive; a killed run goes on where it stopped.

    Exit codes: 0 every case is in the archive, 2 wrong arguments, 3 some cases failed and are not in it.
    """
    from tqdm import tqdm

    from casewise.core.errors import BadInput
    from casewise.run.allocator import keep_freed_memory
    from casewise.run.choice import chosen_engine
    from casewise.run.model import Adaptation, Model, device_of
    from casewise.run.record import RecordCase, parsed_states, record_folder, risk_statistics
    from casewise.run.setup import gathered_cases

    keep_freed_memory()
    source = Model(
        model, weights, folds_of(folds), checkpoint, device_of(device), step_size, not unmirrored, trust_checkpoint,
        trust_bundle, tuple(trust_architecture),
    )  # fmt: skip
    how = Adaptation(objective, learning_rate, parameters, steps, seed, min_area, foreground, max_slices)
    if statistics is not None and modulation is None:
        raise BadInput("--statistics belongs to a modulation; add --modulation param-subset, or leave it out")
    if modulation is not None:
        measured = None if statistics is None else risk_statistics(statistics, source, how)
        how = replace(how, modulation=modulation, statistics=measured)
    cases = gathered_cases(
        source, images, labels=labels, groups=groups, parts=(num_parts, part_id), environment=os.environ
    )
    asked = tuple(name for name in signals.split(",") if name)
    work = RecordCase(source, how, {files.id: files for files in cases}, parsed_states(shrink), asked)
    made, results = record_folder(
        work,
        chosen_engine(engine, jobs=jobs, timeout_s=timeout, address=address),
        archive,
        metric=metric,
        dataset=_name(images),
    )
    before, failed = len(made.entries), 0
    with tqdm(total=len(cases), initial=before, unit="case", disable=not sys.stderr.isatty()) as bar:
        for result in results:
            bar.update()
            if result.error is not None:
                failed += 1
                typer.echo(f"{result.case_id}: {result.error}", err=True)
    typer.echo(f"{archive}: {len(made.entries)} cases, {before} of them from before; {failed} failed")
    if failed:
        raise typer.Exit(NOT_ALL_DONE)


def _name(images: Path) -> str:
    """What reports call the data: the folder, or the one above it where it is only called images, imagesTs, ..."""
    folder = images.resolve()
    return folder.parent.name if folder.name.lower().startswith("images") else folder.name
