"""``casewise record``."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from casewise.cli.options import AdaptationOptions, CaseOptions, EngineOptions, ModelOptions, NnUNetStyle, grouped

app = typer.Typer()

NOT_ALL_DONE = 3


@app.command(cls=NnUNetStyle)
@grouped
def record(
    source: ModelOptions,
    which: CaseOptions,
    how: AdaptationOptions,
    where: EngineOptions,
    archive: Path = typer.Option(..., "-o", help="Archive to make, or to go on with."),
    shrink: str = typer.Option("2:0.5", help="Interpolated states to keep, as step:alpha with commas; '' for none."),
    signals: str = typer.Option("", help="Further signals, with commas, such as augmentation_disagreement."),
    metric: str = typer.Option("dice", help="dice or miou."),
) -> None:
    """Adapt a model to every case and keep all candidates in an archive; a killed run goes on where it stopped.

    Exit codes: 0 every case is in the archive, 2 wrong arguments, 3 some cases failed and are not in it.
    """
    from tqdm import tqdm

    from casewise.adapt.adaptation import Adaptation
    from casewise.deployment import Deployment
    from casewise.run.allocator import keep_freed_memory
    from casewise.run.record import RecordCase, parsed_states, record_folder

    keep_freed_memory()
    model = source.chosen()
    probes = tuple(name for name in signals.split(",") if name)
    adaptation = Adaptation(**how.asked(model), shrink=parsed_states(shrink), signals=probes)
    deployment = Deployment(model, (adaptation,))
    cases = which.gathered(model, keep=archive.with_name(f"{archive.name}-images"))
    work = RecordCase(deployment, {files.id: files for files in cases})
    made, results = record_folder(work, where.chosen(), archive, metric=metric, dataset=_name(which.images))
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
