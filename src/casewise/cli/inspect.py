"""What files are: ``casewise inspect`` a folder, ``verify`` what was written, ``convert`` a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from casewise.data.inspection import Inspection
    from casewise.data.splits import Cohort


from casewise.cli.printing import AS_JSON, answer
from casewise.core.brief import counted

app = typer.Typer()

SHOWN = 6


@app.command()
def inspect(
    folder: Path = typer.Argument(..., help="A dataset as it was downloaded, an nnU-Net raw folder, or plain images."),
    dataset: str = typer.Option(None, help="Take the folder for this dataset; default: what it looks like."),
    option: list[str] = typer.Option([], help="Option of the loader as name=value, such as group=centre; repeatable."),
    every: bool = typer.Option(False, "--all", help="Open every image and label, not a sample of 20."),
    as_json: bool = AS_JSON,
    write: Path = typer.Option(None, help="Write the cases as plain files with cases.csv into this new folder."),
    split: str = typer.Option(None, help="Only cases of this split."),
    group: str = typer.Option(None, help="Only cases of this group."),
    holdout: float = typer.Option(None, help="Share of each group's clusters drawn to calibrate (the paper: 0.2)."),
    seed: int = typer.Option(1000, help="Seed of the draw."),
) -> None:
    """Say what is in a folder: layout, cases, groups, labels, geometry, and what would go wrong."""

    from casewise.data.datasets import load_dataset, recognize
    from casewise.data.inspection import SAMPLE, inspect_cohort
    from casewise.data.splits import holdout as drawn
    from casewise.data.splits import with_split

    cohort = load_dataset(folder, dataset, **_options(option))
    if split is not None or group is not None:
        cohort = cohort.select(split=split, group=group)
    if holdout is not None:
        cohort = with_split(cohort, drawn(cohort, share=holdout, seed=seed))
    seen = inspect_cohort(cohort, layout=dataset or str(recognize(folder)), sample=None if every else SAMPLE)
    answer("\n".join(_lines(seen)), seen.as_dict(), as_json=as_json)
    if write is not None:
        _write(cohort, write)


def _options(pairs: list[str]) -> dict[str, object]:
    from casewise.core.errors import BadInput

    options: dict[str, object] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise BadInput(f"--option is name=value, got {pair!r}")
        options[name] = {"true": True, "false": False}.get(value.lower(), int(value) if value.isdigit() else value)
    return options


def _lines(seen: Inspection) -> list[str]:
    clusters = f", {counted(seen.clusters, 'cluster')}" if seen.clusters is not None else ""
    lines = [
        f"{seen.name}: laid out like {seen.layout}",
        f"cases       {seen.cases}, {seen.labelled} labelled{clusters}",
    ]
    lines += [
        f"{name:<11} {_some(values)}" for name, values in (("groups", seen.groups), ("splits", seen.splits)) if values
    ]
    labels = {_label(seen, value): count for value, count in seen.labels_seen.items()}
    lines += [f"labels      {_some(labels, 24)} (in {seen.labels_read} labels that were read)"] if labels else []
    lines += [f"{name:<11} {_some(values)}" for name, values in seen.geometry.items()]
    lines += [f"{name}: {text}" for name, text in seen.facts.items()]
    lines += [f"note: {seen.notice}"] if seen.notice else []
    if not seen.problems:
        return [*lines, "no problem seen"]
    return [*lines, f"problems    {len(seen.problems)}", *(f"  - {problem}" for problem in seen.problems)]


def _label(seen: Inspection, value: int) -> str:
    if value == seen.ignore:
        return f"{value} (ignored)"
    return f"{value} {seen.classes[value]}" if 0 <= value < len(seen.classes) else str(value)


def _some(values: Mapping[str, int], shown: int = SHOWN) -> str:
    """Values with their counts, the first few of them."""
    listed = [f"{value} ({count})" for value, count in values.items()][:shown]
    more = [f"and {len(values) - shown} more"] if len(values) > shown else []
    return ", ".join([*listed, *more])


def _write(cohort: Cohort, folder: Path) -> None:
    from tqdm import tqdm

    from casewise.data.datasets.plain import write_plain

    written = tqdm(write_plain(cohort, folder), total=len(cohort), unit="case", disable=not sys.stderr.isatty())
    typer.echo(f"{counted(sum(1 for _ in written), 'case')} written to {folder}", err=True)
    labels = f" -l {folder}/labels" if any(member.labelled for member in cohort.members.values()) else ""
    chain = f"casewise record -m MODEL -i {folder}/images{labels} --groups {folder}/cases.csv -o ARCHIVE"
    typer.echo(f"next: {chain}", err=True)


@app.command()
def verify(
    folder: Path = typer.Argument(..., help="An archive, or a folder of predictions."),
    report: Path = typer.Option(None, help="The report of casewise predict --report, which knows how the log ended."),
    as_json: bool = AS_JSON,
) -> None:
    """Check an archive or a prediction folder against its hashes and its audit log."""
    from casewise.archive.verify import verify as archive_problems
    from casewise.core.errors import BadInput
    from casewise.judge.ledger import ledger_problems
    from casewise.run.prediction_folder import review_problems, verify_predictions

    if not folder.is_dir():  # a mistyped path is no damage: exit code 2, not 1
        raise BadInput(f"there is no folder {folder}; name an archive or a folder of predictions")
    if (folder / "audit.jsonl").exists():
        problems = verify_predictions(folder, report)
    else:
        problems = [*archive_problems(folder), *ledger_problems(folder)]
    problems = [*problems, *review_problems(folder)]
    words = "\n".join(problems) or f"{folder} is whole"
    answer(words, {"folder": folder, "whole": not problems, "problems": problems}, as_json=as_json)
    if problems:
        raise typer.Exit(1)


@app.command()
def convert(
    checkpoint: Path = typer.Argument(..., help="A .pth or .pt file, or an nnU-Net model folder."),
    name: str = typer.Option("checkpoint_final.pth", "-chk", help="Which checkpoint of a model folder."),
    trust_checkpoint: bool = typer.Option(False, "--trust-checkpoint", help="Let the pickle run its code, once."),
    as_json: bool = AS_JSON,
) -> None:
    """Turn a checkpoint into safetensors and JSON, once, without running its code.

    The new file lies beside the old one and is taken instead of it from then on; the old one may be deleted.
    """
    from casewise.adapt.backbones.checkpoints import convert_checkpoint
    from casewise.core.errors import BadInput

    files = sorted(checkpoint.glob(f"fold_*/{name}")) if checkpoint.is_dir() else [checkpoint]
    if not files:
        raise BadInput(f"{checkpoint} has no fold with {name}; name another with -chk")
    made = [convert_checkpoint(file, trust=trust_checkpoint) for file in files]
    answer("\n".join(map(str, made)), {"files": made}, as_json=as_json)
