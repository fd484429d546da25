"""``casewise inspect``: describe and verify folders, and convert checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from casewise.cli.options import NnUNetStyle, grouped, named_values, setting
from casewise.cli.printing import AS_JSON, answer
from casewise.core.text import pluralize

if TYPE_CHECKING:
    from casewise.data.inspection import Inspection
    from casewise.data.splits import Cohort

app = typer.Typer()

SHOWN = 6
RUNS = {
    "plan.json": ("fit.html", "fit"),
    ".compare.lock": ("summary.json", "compare"),
    ".lock": ("manifest.json", "record or import"),
    "certificate.json": ("certificate.html", "certify"),
}
"""The first file that a command writes into its folder, and the last one."""


@app.command(cls=NnUNetStyle)
@grouped
def inspect(
    path: Path = typer.Argument(
        ..., help="A dataset, images, an archive, a prediction folder, a model folder or a checkpoint."
    ),
    layout: str = typer.Option(
        None, "--dataset", help="Layout of the folder: {datasets}; default: recognized by its files."
    ),
    option: list[str] = typer.Option([], help="Option of the loader as name=value, such as group=centre; repeatable."),
    every: bool = typer.Option(False, "--all", help="Open every image and label, instead of 20 of them."),
    export: Path = typer.Option(
        None,
        help="Write into this new folder: the cases of a dataset as plain files with cases.csv, or the tuned model of "
        "a deployment as a model folder that works without casewise.",
    ),
    holdout: float = typer.Option(
        None, help="Share of the patients of each group to draw for calibration (paper: 0.2)."
    ),
    report: Path = setting(None, help="Report of casewise predict, to check the end of the audit log."),
    convert: bool = typer.Option(
        False,
        "--convert",
        help="Write each checkpoint as safetensors and JSON beside the old file; casewise then uses the new files.",
    ),
    trust: list[str] = setting([], help="--convert: checkpoint allows a pickle to run its code, once."),
    split: str = setting(None, help="Only cases of this split."),
    group: str = setting(None, help="Only cases of this group."),
    seed: int = setting(1000, help="Random seed of --holdout."),
    checkpoint: str = setting("checkpoint_final.pth", help="Checkpoint of the model folder."),
    as_json: bool = AS_JSON,
) -> None:
    """Describe a folder (dataset, images, archive, masks or model) and list its problems.

    Example:

        casewise inspect DATA

    Archives and prediction folders are verified against their hashes and their audit log; a model folder is described.

    Exit codes: 0 done, 1 the folder is damaged or incomplete, 2 wrong arguments.
    """
    from casewise.core.errors import BadInput
    from casewise.core.json_records import UNFINISHED

    if not path.exists():  # a mistyped path is no damage: exit code 2, not 1
        raise BadInput(f"{path} does not exist; name a folder of images, an archive, predictions or a model")
    if convert:
        _convert(path, checkpoint, trusted="checkpoint" in trust, as_json=as_json)
    elif export is not None and (path / "deployment.json").is_file():
        _export_model(path, export, as_json=as_json)
    elif _is_archive(path) or any((path / log).exists() for log in ("audit.jsonl", "applied.jsonl")):
        _verify(path, report, as_json=as_json)
    elif begun := [run for first, (last, run) in RUNS.items() if (path / first).is_file() > (path / last).is_file()]:
        said = UNFINISHED.replace("casewise fit", f"casewise {begun[0]}")
        answer(said, {"folder": path, "whole": False, "problems": [said]}, as_json=as_json)
        raise typer.Exit(1)
    elif layout is None and (known := _model_kind(path)) is not None:
        _describe_model(path, known, as_json=as_json)
    else:
        drawn = None if holdout is None else (holdout, seed)
        _inspect_images(path, layout, option, split, group, drawn, export, every=every, as_json=as_json)


def _inspect_images(
    folder: Path, dataset: str | None, option: list[str], split: str | None, group: str | None,
    drawn: tuple[float, int] | None, export: Path | None, *, every: bool, as_json: bool,
) -> None:  # fmt: skip
    """Layout, cases, groups, labels, geometry and problems of a folder of images."""
    from casewise.data.datasets import load_dataset, recognize
    from casewise.data.inspection import SAMPLE, inspect_cohort
    from casewise.data.splits import holdout, with_split

    cohort = load_dataset(folder, dataset, **named_values(option))
    if split is not None or group is not None:
        cohort = cohort.select(split=split, group=group)
    if drawn is not None:
        cohort = with_split(cohort, holdout(cohort, share=drawn[0], seed=drawn[1]))
    seen = inspect_cohort(cohort, layout=dataset or str(recognize(folder)), sample=None if every else SAMPLE)
    answer("\n".join(_lines(seen)), asdict(seen), as_json=as_json)
    if export is not None:
        _write(cohort, export)


def _lines(seen: Inspection) -> list[str]:
    clusters = f", {seen.clusters} patients (or sequences)" if seen.clusters is not None else ""
    lines = [f"{seen.name}: layout {seen.layout}", f"cases       {seen.cases}, {seen.labelled} labelled{clusters}"]
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
    typer.echo(f"{pluralize(sum(1 for _ in written), 'case')} written to {folder}", err=True)
    labels = f" -l {folder}/labels" if any(member.labelled for member in cohort.members.values()) else ""
    chain = f"casewise record -m MODEL -i {folder}/images{labels} --groups {folder}/cases.csv -o ARCHIVE"
    typer.echo(f"next: {chain}", err=True)


def _is_archive(path: Path) -> bool:
    """True if a folder holds recorded cases, with or without a manifest."""
    from casewise.archive.layout import CASES, ENTRY, MANIFEST

    return (path / MANIFEST).exists() or any(path.glob(f"{CASES}/*/{ENTRY}"))


def _verify(folder: Path, report: Path | None, *, as_json: bool) -> None:
    """Check an archive or a prediction folder against its hashes and its audit log."""
    from casewise.archive.verify import verify
    from casewise.judge.certificates.certificate import certificate_problems
    from casewise.judge.ledger import ledger_problems
    from casewise.run.prediction_folder import review_problems, verify_predictions

    if _is_archive(folder):
        kind, problems = "an archive", [*verify(folder), *ledger_problems(folder)]
    else:
        kind, problems = "a prediction folder", verify_predictions(folder, report)
    problems = [*problems, *review_problems(folder), *certificate_problems(folder)]
    words = "\n".join(problems) or f"{folder}: no problem found ({kind})"
    answer(words, {"folder": folder, "kind": kind, "whole": not problems, "problems": problems}, as_json=as_json)
    if problems:
        raise typer.Exit(1)


def _convert(path: Path, name: str, *, trusted: bool, as_json: bool) -> None:
    """Turn a checkpoint, or that of every fold, into safetensors and JSON without running its code."""
    from casewise.adapt.backbones.checkpoints import convert_checkpoint
    from casewise.core.errors import BadInput

    files = sorted(path.glob(f"fold_*/{name}")) if path.is_dir() else [path]
    if not files:
        raise BadInput(f"{path} has no fold with {name}; name another with --set checkpoint=FILE")
    made = [convert_checkpoint(file, trust=trusted) for file in files]
    answer("\n".join(map(str, made)), {"files": made}, as_json=as_json)


def _export_model(deployment: Path, out: Path, *, as_json: bool) -> None:
    """Write the model of a deployment with the mean of its tuned weights."""
    from casewise.adapt.tuned_weights import read_tuned_folder
    from casewise.core.errors import BadInput
    from casewise.deployment.saved import TUNED, load
    from casewise.learn.export import export

    if not (deployment / TUNED).is_dir():
        raise BadInput(f"{deployment} has no tuned weights, so its model is unchanged; use the original one")
    weights = read_tuned_folder(deployment / TUNED).mean
    folder = export(load(deployment).backbone, weights, out)
    words = f"wrote {folder}: the tuned model alone, without the policy that chooses between it and the old model"
    answer(words, {"folder": folder, "trained_on": list(weights.trained_on)}, as_json=as_json)


def _model_kind(path: Path) -> str | None:
    """Return the kind of a model by its files; None if it is not a model."""
    if path.is_file():
        return "checkpoint" if path.suffix in _WEIGHTS else None
    return next((kind for kind, files in _MODELS.items() if all(any(path.glob(name)) for name in files)), None)


def _describe_model(path: Path, kind: str, *, as_json: bool) -> None:
    """Describe a model folder without loading the model."""
    from casewise.core.json_records import read_json

    facts: dict[str, Any] = {"path": path, "kind": kind}
    if kind == "nnU-Net model":
        dataset = read_json(path / "dataset.json", "copy the model folder again")
        facts["channels"] = dict(dataset.get("channel_names", {}))
        facts["labels"] = {str(name): value for name, value in dataset.get("labels", {}).items()}
        facts["folds"] = sorted(fold.name.removeprefix("fold_") for fold in path.glob("fold_*") if fold.is_dir())
        facts["checkpoints"] = sorted({file.name for file in path.glob("fold_*/*.*") if file.suffix in _WEIGHTS})
    elif kind == "deployment":
        from casewise.deployment.saved import read_description

        plain = read_description(path)  # refuses a folder that was changed
        facts |= {"model": plain["model"]["name"], "model at": plain["model"].get("spec") or "in memory"}
        facts["files"] = sorted(plain["files"])
    elif path.is_dir():
        facts["files"] = sorted(file.name for file in path.rglob("*") if file.suffix in _WEIGHTS)
    else:
        facts["bytes"] = path.stat().st_size
    said = (f"{name:<11} {_plainly(value)}" for name, value in facts.items() if name not in ("path", "kind"))
    command = "predict -m {} -i IN -o OUT" if kind == "deployment" else "fit -m {} -i IMAGES -l LABELS -o DEPLOYMENT"
    use = [] if path.is_file() else [f"use it with: casewise {command.format(path)}"]
    answer("\n".join([f"{path}: {kind}", *said, *use]), facts, as_json=as_json)


_WEIGHTS = (".pth", ".pt", ".safetensors")
_MODELS = {
    "deployment": ("deployment.json",),
    "nnU-Net model": ("dataset.json", "plans.json"),
    "MONAI bundle": ("configs/metadata.json",),
    "network with its description": ("network.json",),
    "Hugging Face model": ("config.json", "*.safetensors"),
}
"""The files that each kind of model folder holds."""


def _plainly(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value)
