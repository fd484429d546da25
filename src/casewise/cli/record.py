"""``casewise record``: candidates into an archive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from casewise.cli.options import (
    AdaptationOptions,
    CaseOptions,
    EngineOptions,
    ModelOptions,
    NnUNetStyle,
    PrintingOptions,
    grouped,
    setting,
)
from casewise.cli.printing import AS_JSON, answer
from casewise.core.text import UNIT, pluralize

if TYPE_CHECKING:
    from casewise.adapt.adaptation import Adaptation

app = typer.Typer()

NOT_ALL_DONE = 3
NO_PATIENTS = (
    f"casewise: no {UNIT[0]} is named, so every case counts as one. Where several cases belong together, "
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
    archive: Path = typer.Option(..., "-o", "--out", help="Archive to create or continue."),
    propose: list[str] = typer.Option(
        [],
        help="Method that makes candidates: {objectives}, views:SET (SET is {views}), NAME=views:gamma(1.4),random(8), "
        "members:FOLDER, or package.module:Name; repeat to record several methods. Default: eata.",
    ),
    reset: str = typer.Option(
        "case",
        help="case: every case starts from the original weights. stream: each case continues from the last (CoTTA).",
    ),
    metric: str = typer.Option("dice", help="Metric that labels are scored with: {metrics}."),
    shrink: str = setting("2:0.5", help="Interpolated states to store, as step:alpha with commas; empty for none."),
    signals: str = setting("", help="Further signals, with commas, such as augmentation_disagreement."),
    ignore_geometry: bool = setting(False, help="Pair labels with images whose affines differ; default: refuse them."),
    as_json: bool = AS_JSON,
) -> None:
    """Make candidate masks for every case and store them in an archive.

    Example:

        casewise record -m MODEL -i images -l labels -o archive --propose views:mri

    Repeat the command to resume.

    Exit codes: 0 every case is recorded, 2 wrong arguments, 3 some cases failed and are not recorded.
    """
    from casewise.adapt.adaptation import Adaptation
    from casewise.adapt.probes import probes_of
    from casewise.archive.store import check_archive_place
    from casewise.core.records import EVALUATION
    from casewise.run.local import keep_freed_memory
    from casewise.run.record_folder import RecordCase, parsed_states, record_folder

    keep_freed_memory()
    check_archive_place(archive)
    model = source.as_model()
    probes = tuple(name for name in signals.split(",") if name)
    probes_of(probes)  # a wrong name is an error before anything is recorded
    failed: dict[str, str] = {}
    cases = which.list_cases(model.load(), archive.with_name(f"{archive.name}-images"), failed)
    for sentence in failed.values():
        typer.echo(f"casewise: {sentence}", err=True)
    if which.labels is not None and len(cases) > 1 and not any(files.cluster for files in cases):
        typer.echo(NO_PATIENTS, err=True)
    adaptation = Adaptation(**how.as_fields(model), reset=reset, shrink=parsed_states(shrink), signals=probes)
    proposers = proposals(adaptation, propose, how.objective)
    how.check_used(proposers)
    ladders = tuple(proposers)
    work = RecordCase(model, proposers, {files.id: files for files in cases}, ignore_geometry=ignore_geometry)
    there = _there(archive)
    made, results = record_folder(
        work, where.as_engine(), archive, metric=metric, dataset=_name(which.images),
        on_warning=lambda note: typer.echo(f"casewise: {note}", err=True),
    )  # fmt: skip
    before = len(made.entries)
    with telling.progress(len(cases), done=sum(files.id in made.entries for files in cases)) as progress:
        for result in results:
            if result.error is not None:
                failed[result.case_id] = result.error
            progress.step(f"{result.case_id}: {result.error or 'recorded'}", bad=result.error is not None)
    now, added = len(made.entries), [name for name in ladders if there and name not in there]
    words = [f"{archive}: {pluralize(now, 'case')}{_since(there, added, ladders, before)}; {len(failed)} failed"]
    if now:
        several = f" --ladder {ladders[0]}" if len({*there, *ladders}) > 1 else ""
        judged = all(files.split == EVALUATION for files in cases)  # calibrate refuses evaluation cases
        words.append(f"next: casewise {f'study {archive} -c HOLDOUT' if judged else f'calibrate {archive}'}{several}")
    answer(
        "\n".join(words),
        {"archive": archive, "ladders": ladders, "added": added, "cases": now, "before": before, "failed": failed},
        as_json=as_json,
    )
    if failed:
        raise typer.Exit(NOT_ALL_DONE)


def _there(archive: Path) -> tuple[str, ...]:
    """Return the ladders of an archive; none if there is no archive."""
    from casewise.archive.layout import MANIFEST
    from casewise.archive.store import open_archive

    return open_archive(archive).ladders if (archive / MANIFEST).exists() else ()


def _since(there: Sequence[str], added: Sequence[str], ladders: Sequence[str], before: int) -> str:
    """Say which cases and ladders were recorded before."""
    said = [] if ladders[0] in added or not before else [f", {before} of them recorded before"]
    if added:
        known = ", ".join(name or "the unnamed one" for name in there)
        said += [f"; {'ladder' if len(added) == 1 else 'ladders'} {', '.join(added)} added (there before: {known})"]
    return "".join(said)


def proposals(plain: Adaptation, texts: list[str], objective: str | None) -> dict[str, Adaptation]:
    """Return the given proposers by ladder; without any, the objective on a ladder called ""."""
    from casewise.adapt.proposers import named_proposal
    from casewise.core.errors import BadInput

    if not texts:
        return {"": plain}
    if objective is not None:
        raise BadInput(f"objective={objective} and --propose {objective} are the same method; give only one of them")
    named = [named_proposal(text) for text in texts]
    if len({name for name, _ in named}) < len(named):
        raise BadInput(f"two proposers have one name: {', '.join(name for name, _ in named)}; write NAME=PROPOSER")
    return {name: replace(plain, objective=text) for name, text in named}


def _name(images: Path) -> str:
    """Return the name of the data in reports: that of the folder, or of its parent if it is only called images,
    imagesTs, ..."""
    folder = images.resolve()
    return folder.parent.name if folder.name.lower().startswith("images") else folder.name
