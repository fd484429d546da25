"""``casewise record``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from casewise.cli.config import driving_cases
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
from casewise.core.brief import UNIT, counted

if TYPE_CHECKING:
    from casewise.adapt.adaptation import Adaptation

app = typer.Typer()

NOT_ALL_DONE = 3
NO_PATIENTS = (
    f"casewise: no {UNIT[0]} is named, so every case counts as one of its own. Where several cases belong together, "
    "say so in a table with the columns case and cluster: cases.csv beside the images, or --groups TABLE"
)


@app.command(cls=NnUNetStyle)
@grouped
def record(
    source: ModelOptions,
    which: CaseOptions,
    how: AdaptationOptions,
    where: EngineOptions,
    telling: PrintingOptions,
    archive: Path = typer.Option(..., "-o", help="Archive to make, or to go on with."),
    shrink: str = typer.Option("2:0.5", help="Interpolated states to keep, as step:alpha with commas; '' for none."),
    signals: str = typer.Option("", help="Further signals, with commas, such as augmentation_disagreement."),
    metric: str = typer.Option("dice", help="dice or miou."),
    propose: list[str] = typer.Option(
        [],
        help="What makes candidates, instead of --objective: tent, views:mri, NAME=views:gamma(1.4),random(8), ...; "
        "repeat for several ladders against one M0.",
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Adapt a model to every case and keep all candidates in an archive; a killed run goes on where it stopped.

    Exit codes: 0 every case is in the archive, 2 wrong arguments, 3 some cases failed and are not in it.
    """
    from casewise.adapt.adaptation import Adaptation
    from casewise.adapt.probes import probes_of
    from casewise.archive.store import check_archive_place
    from casewise.core.records import EVALUATION
    from casewise.deployment import Deployment
    from casewise.run.local import keep_freed_memory
    from casewise.run.record_folder import RecordCase, parsed_states, record_folder

    keep_freed_memory()
    check_archive_place(archive)
    model = source.chosen()
    probes = tuple(name for name in signals.split(",") if name)
    probes_of(probes)  # a wrong name is an error before anything is recorded
    cases = which.gathered(model, keep=archive.with_name(f"{archive.name}-images"))
    if which.labels is not None and len(cases) > 1 and not any(files.cluster for files in cases):
        typer.echo(NO_PATIENTS, err=True)
    given = how.asked(model)
    if how.preset is not None:
        cases, given = driving_cases(cases, given)
    adaptation = Adaptation(**given, shrink=parsed_states(shrink), signals=probes)
    ladders, proposers = proposals(adaptation, propose, None if how.preset else how.objective)
    deployment = Deployment(model, proposers, ladders=ladders)
    how.check_used(deployment)
    work = RecordCase(deployment, {files.id: files for files in cases})
    there = _there(archive)
    made, results = record_folder(
        work,
        where.chosen(),
        archive,
        metric=metric,
        dataset=_name(which.images),
        told=lambda note: typer.echo(f"casewise: {note}", err=True),
    )
    before, failed = len(made.entries), {}
    with telling.progress(len(cases), done=before) as progress:
        for result in results:
            if result.error is not None:
                failed[result.case_id] = result.error
            progress.step(f"{result.case_id}: {result.error or 'recorded'}", bad=result.error is not None)
    now, added = len(made.entries), [name for name in ladders if there and name not in there]
    words = [f"{archive}: {counted(now, 'case')}{_since(there, added, ladders, before)}; {len(failed)} failed"]
    if now:
        several = f" --ladder {ladders[0]}" if len({*there, *ladders}) > 1 else ""
        judged = all(files.split == EVALUATION for files in cases)  # calibrate refuses these
        words.append(f"next: casewise {f'study {archive} -c HOLDOUT' if judged else f'calibrate {archive}'}{several}")
    answer(
        "\n".join(words),
        {"archive": archive, "ladders": ladders, "added": added, "cases": now, "before": before, "failed": failed},
        as_json=as_json,
    )
    if failed:
        raise typer.Exit(NOT_ALL_DONE)


def _there(archive: Path) -> tuple[str, ...]:
    """The ladders that an archive holds already; none where there is no archive."""
    from casewise.archive.layout import MANIFEST
    from casewise.archive.store import open_archive

    return open_archive(archive).ladders if (archive / MANIFEST).exists() else ()


def _since(there: Sequence[str], added: Sequence[str], ladders: Sequence[str], before: int) -> str:
    """What is from before: cases of the first ladder, where it is not new, and the ladders beside those that are."""
    said = [] if ladders[0] in added or not before else [f", {before} of them from before"]
    if added:
        known = ", ".join(name or "the one without a name" for name in there)
        said += [f"; {'ladder' if len(added) == 1 else 'ladders'} {', '.join(added)} added to what was there ({known})"]
    return "".join(said)


def proposals(
    plain: Adaptation, texts: list[str], objective: str | None
) -> tuple[tuple[str, ...], tuple[Adaptation, ...]]:
    """(ladders, proposers): those that are named, or the objective on a ladder without a name."""
    from dataclasses import replace

    from casewise.adapt.proposers import named_proposal
    from casewise.core.errors import BadInput

    if not texts:
        return ("",), (plain,)
    if objective is not None:
        raise BadInput(f"--objective {objective} is what --propose {objective} says; give the one or the other")
    named = [named_proposal(text) for text in texts]
    return tuple(name for name, _ in named), tuple(replace(plain, objective=text) for _, text in named)


def _name(images: Path) -> str:
    """What reports call the data: the folder, or the one above it where it is only called images, imagesTs, ..."""
    folder = images.resolve()
    return folder.parent.name if folder.name.lower().startswith("images") else folder.name
