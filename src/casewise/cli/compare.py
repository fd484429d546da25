"""``casewise compare``: may the new masks replace the old ones? ``casewise merge``: take them over case by case."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from casewise.cli.printing import AS_JSON, answer
from casewise.core.brief import counted

if TYPE_CHECKING:
    from casewise.data.pairs import Pair
    from casewise.run.compare import Outcome, Settings
    from casewise.run.local import Engine

app = typer.Typer()

_WRITTEN = ("summary.json", "summary.md", "junit.xml", "report.html", "cases.csv", "labels.csv", "regions.csv")


@app.command()
def compare(
    old: Path = typer.Argument(..., help="Folder with the masks that are in use (.nii.gz, .nii, .png, .npy)."),
    new: Path = typer.Argument(..., help="Folder with the masks that shall replace them, under the same names."),
    out: Path = typer.Option(..., "--out", "-o", help="Folder for the page, the tables and the verdict."),
    labels: Path = typer.Option(None, "--labels", "-l", help="Folder with labels of the same names."),
    images: Path = typer.Option(None, "--images", "-i", help="Folder with images, for the pictures."),
    accept: Path = typer.Option(None, help="Acceptance criteria (JSON or TOML): exit code 0 accepted, 4 rejected."),
    cases: Path = typer.Option(None, help="CSV with case, group (site, vendor) and cluster (patient, sequence)."),
    names: Path = typer.Option(None, help="CSV with case, old, new (label, image) where file names differ."),
    allow: list[str] = typer.Option(
        [], help="A kind of problem that is no failure: missing, unlabelled, empty, labels, ... Repeat for more."
    ),
    resample: str = typer.Option(None, help="nearest: bring masks of another grid onto the old one."),
    spacing: tuple[float, float, float] = typer.Option(
        (0, 0, 0), help="Spacing in mm (slices, rows, columns) where files do not say it.", show_default=False
    ),
    label_names: str = typer.Option(
        None, help="Names of labels: 1=LV,2=MYO, or a dataset.json; by default the one that nnU-Net left beside masks."
    ),
    zero_is_label: bool = typer.Option(
        None,
        "--zero-is-label/--zero-is-background",
        help="Whether label 0 is a class as any other (0 is the road); by default where it has another name.",
        show_default=False,
    ),
    classes: str = typer.Option(None, help="Compare these labels only, such as 1,2,3; others become background."),
    ignore: int = typer.Option(None, help="Label that is never wrong, such as 255."),
    metric: str = typer.Option("dice", help="dice or miou."),
    foreground: bool = typer.Option(False, help="Compare foreground with background only, not label with label."),
    min_area: int = typer.Option(16, help="Voxels below which a changed piece is no region (driving: 200)."),
    surfaces: str = typer.Option(
        "moved", help="Distances: none, moved (old to new where a label moved), all (also HD95 to the label; slower)."
    ),
    holes: str = typer.Option("volume", help="Holes enclosed within the volume, or within a slice."),
    good: float = typer.Option(0.7, help="A case at or above this metric is good; good before and not now is a flip."),
    pictures: int = typer.Option(12, help="How many cases the page shows, the most suspicious first."),
    jobs: int = typer.Option(0, "-j", "--jobs", help="Processes; default: one per core."),
    engine: str = typer.Option("local", help="local or ray."),
    address: str = typer.Option(None, help="Address of a Ray cluster."),
    fresh: bool = typer.Option(False, help="Compare every pair again, also those that an earlier run left in OUT."),
    as_json: bool = AS_JSON,
) -> None:
    """Compare two folders of masks, case by case and label by label, with or without labels.

    Exit code 0: accepted, or compared without criteria. 4: rejected by the criteria. 3: some pair has a problem (no
    partner, another shape, ...) that --allow does not name. 2: the command itself cannot be carried out.
    """
    from tqdm import tqdm

    from casewise.data.pairs import find_pairs
    from casewise.data.pairs import label_names as names_of_labels
    from casewise.run.compare import CaseLog, CompareCase, Settings, alone, compare_folders, outcome_of
    from casewise.study.acceptance import read_acceptance

    criteria = None if accept is None else read_acceptance(accept)
    pairs = {pair.id: pair for pair in find_pairs(old, new, labels=labels, images=images, names=names, cases=cases)}
    wanted = None if classes is None else _numbers(classes)
    called, at_odds = names_of_labels(label_names, [old, new, *(() if labels is None else (labels,))])
    settings = Settings(
        spacing_mm=tuple(spacing) if any(spacing) else None,
        min_area=min_area,
        foreground=foreground,
        ignore=ignore,
        classes=wanted,
        metric=metric,
        surfaces=surfaces,
        holes=holes,
        zero_is_label=_names_zero(called) if zero_is_label is None else zero_is_label,
        resample=resample,
        labels_given=labels is not None,
    )
    _check_place(out)
    work, workers = CompareCase(pairs, settings), _engine(engine, jobs, address, len(pairs))
    with alone(out):
        for name in _WRITTEN:  # nothing old may be taken for the outcome of this run
            (out / name).unlink(missing_ok=True)
        lines = compare_folders(work, workers, out, fresh=fresh)
        for _ in tqdm(lines, total=len(pairs), unit="pair", disable=None):
            pass  # they are in OUT/cases.jsonl, and read from there as they are needed
        outcome = outcome_of(
            CaseLog(out), acceptance=criteria, allow=allow, good=good, expected=wanted, names=called, at_odds=at_odds
        )
        _write(out, outcome, pairs, settings, {"old": str(old), "new": str(new)}, pictures)
    if as_json:
        answer("", outcome.as_dict(), as_json=True)
    else:
        _say(outcome, out)
    if criteria is not None and cases is None and not as_json:
        typer.echo(
            "! no patient or sequence is named, so the criteria count every case as one of its own; "
            "where one has several scans, name them: --cases TABLE with the columns case and cluster",
            err=True,
        )
    raise typer.Exit(outcome.exit_code)


def _check_place(out: Path) -> None:
    """Refuse to replace files that no earlier comparison wrote: a cases.csv is often a table of the user."""
    from casewise.core.errors import BadInput
    from casewise.run.compare import LOG

    there = [name for name in _WRITTEN if (out / name).exists()]
    if there and not (out / LOG).exists():
        raise BadInput(
            f"{out} holds {', '.join(there)}, which no casewise compare wrote and this run would replace; "
            "choose another folder with -o"
        )


def _names_zero(names: Mapping[int, str]) -> bool:
    """Whether 0 has a name that is not one of no class at all."""
    return names.get(0, "background").lower().strip("_") not in ("background", "bg", "unlabeled", "unlabelled", "void")


def _numbers(text: str) -> tuple[int, ...]:
    from casewise.core.errors import BadInput

    try:
        return tuple(sorted({int(part) for part in text.replace(",", " ").split()}))
    except ValueError:
        raise BadInput(f"--classes takes label numbers such as 1,2,3, got {text!r}") from None


def _engine(name: str, jobs: int, address: str | None, cases: int) -> Engine:
    """An engine; the local one needs no torch, so neither does this command."""
    from casewise.core.errors import BadInput
    from casewise.run.local import LocalEngine

    workers = jobs or max(1, min(os.cpu_count() or 1, cases // 64))  # starting a process takes as long as many pairs
    if name == "local" and address is None:
        return LocalEngine(workers)
    if name == "local":
        raise BadInput(f"--address {address} is a Ray cluster; add --engine ray")
    from casewise.run.assemble import chosen_engine

    made: Engine = chosen_engine(name, address=address, jobs=workers)
    return made


def _write(
    out: Path,
    outcome: Outcome,
    pairs: Mapping[str, Pair],
    settings: Settings,
    folders: Mapping[str, str],
    pictures: int,
) -> None:
    from casewise.core.durable import write_durably, write_json
    from casewise.measure.changes import NOTABLE
    from casewise.report.comparison_page import comparison_page, junit_xml, markdown_summary
    from casewise.study.comparison import MANY

    summary = outcome.as_dict()
    _write_tables(out, outcome)
    write_durably(out / "summary.md", markdown_summary(summary).encode())
    write_durably(out / "junit.xml", junit_xml(summary, list(pairs)).encode())
    shown = _pictured(outcome, pairs, settings, pictures)
    spaced = any(case.found.spacing_known for case in outcome.found.cases)
    facts: dict[str, Any] = {name: Path(folder).name for name, folder in folders.items()} | {
        "unit": "mm" if spaced else "voxels",
        "hd95": settings.surfaces == "all",
        "min_area": settings.min_area,
        "notable": NOTABLE,
        "zero_is_label": settings.zero_is_label,
        "many": MANY,
    }
    write_durably(out / "report.html", comparison_page(summary, shown, facts).encode())
    write_json(out / "summary.json", summary)  # last: it vouches for the rest


def _write_tables(out: Path, outcome: Outcome) -> None:
    """cases.csv, labels.csv and regions.csv, row by row; a table without rows is an empty file."""
    from casewise.core.durable import replacing
    from casewise.core.formats import csv_cell
    from casewise.run.compare import csv_rows

    with ExitStack() as opened:
        files = {}
        for name in ("cases.csv", "labels.csv", "regions.csv"):
            unfinished = opened.enter_context(replacing(out / name))
            files[name] = opened.enter_context(unfinished.open("w", encoding="utf-8", newline=""))
        tables: dict[str, Any] = {}
        for name, row in csv_rows(outcome):
            if name not in tables:
                tables[name] = csv.DictWriter(files[name], fieldnames=list(row), lineterminator="\n")
                tables[name].writeheader()
            known = {column: None if value != value else value for column, value in row.items()}  # NaN: an empty cell
            tables[name].writerow({column: csv_cell(value) for column, value in known.items()})


def _pictured(outcome: Outcome, pairs: Mapping[str, Pair], settings: Settings, most: int) -> list[dict[str, Any]]:
    """The first cases of the page with their pictures; unchanged ones are not shown."""
    from casewise.core.errors import BadPair, CasewiseError
    from casewise.data.pairs import read_image, read_pair
    from casewise.report.comparison_page import case_pictures

    shown = []
    for case in islice((case for case in outcome.found.worst_first if case.found.changed), most):
        pair = pairs[case.id]
        plain = {**case.found.as_dict(), "warnings": case.found.warned(outcome.names)}
        change = None if not case.found.labelled or case.found.change != case.found.change else case.found.change
        facts = {**plain, "id": case.id, "group": case.group, "change": change}
        try:
            old, new, label = read_pair(pair, resample=settings.resample)
        except BadPair:  # it could be read when it was compared
            shown.append({**facts, "pictures": []})
            continue
        try:
            image = None if pair.image is None else read_image(pair.image)
        except (CasewiseError, OSError, ValueError):
            image = None  # a picture without its image is still a picture of the masks
        truth = None if label is None else label.mask
        drawn = case_pictures(
            old.mask, new.mask, truth, image, names=outcome.names, zero_is_label=settings.zero_is_label
        )
        shown.append({**facts, "pictures": drawn})
    return shown


def _say(outcome: Outcome, out: Path) -> None:
    from casewise.measure.changes import label_name
    from casewise.report.comparison_page import change_sentence, headline

    summary = outcome.as_dict()
    typer.echo(headline(summary))
    if "metric_old" in summary["summary"]:
        typer.echo(change_sentence(summary["summary"]).replace("→", "->").replace("−", "-"))
    for row in summary["summary"]["labels"]:
        drift = row["drift"]
        words = [f"{label_name(row['label'], outcome.names)}: {row['changed']} of {row['cases']} changed"]
        if drift is not None and drift["estimate"] is not None:
            words.append(f"volume {drift['estimate']:+.1%}")
        words += [
            f"{said}: {row[name]}"
            for name, said in (
                ("holes_gained", "gained holes"),
                ("components_gained", "gained pieces"),
                ("components_lost", "lost pieces"),
            )
            if row[name]
        ]
        if row.get("metric_old") is not None:
            words.append(f"Dice {row['metric_old']:.3f} -> {row['metric_new']:.3f}")
        typer.echo(", ".join(words))
    for check in outcome.checks:
        typer.echo(f"{'ok  ' if check.holds else 'FAIL'} {check.name} on {check.scope}: {check.reason}")
    for kind, count in summary["problems_by_kind"].items():
        first = next(problem for problem in outcome.problems if problem.kind == kind)
        allowed = " (allowed)" if first.allowed else ""
        typer.echo(f"! {count} {kind}{allowed}: {first.message}", err=True)
    typer.echo(f"{outcome.verdict}; look at {out / 'report.html'}")


NOT_ALL_DECIDED = 3


@app.command()
def merge(
    old: Path = typer.Argument(..., help="Folder with the masks that are in use."),
    new: Path = typer.Argument(..., help="Folder with the masks that may replace them, under the same names."),
    policy: Path = typer.Option(..., help="policy.json of casewise calibrate --policy update, or its archive."),
    out: Path = typer.Option(..., "--out", "-o", help="Folder for the chosen masks and the decisions."),
    certificate: Path = typer.Option(None, help="Certificate that must hold for this policy; a mismatch is refused."),
    cases: Path = typer.Option(None, help="CSV with case and group, for policies that differ by group."),
    names: Path = typer.Option(None, help="CSV with case, old, new where file names differ."),
    method: str = typer.Option("imported", help="What produced the new masks, as named at casewise import."),
    model: str = typer.Option("imported", help="What produced the old masks, as named at casewise import."),
    force: bool = typer.Option(False, "--force", help="Follow a policy that calibration called NO-GO."),
    as_json: bool = AS_JSON,
) -> None:
    """Keep new, keep old, or ask: a calibrated policy decides for every case, without a label.

    Exit code 3 where a pair could not be decided; its old mask stays and is flagged.
    """
    from casewise.data.pairs import find_pairs
    from casewise.judge.policy import no_go, read_policy
    from casewise.run.merge import ASK, FAILED, merge_folders

    pairs, chosen = find_pairs(old, new, names=names, cases=cases), read_policy(policy)
    merged = list(merge_folders(pairs, chosen, out, model=model, method=method, certificate=certificate, force=force))
    taken = Counter(one.taken for one in merged)
    names_of = {"new": "new", "old": "old", "ask": "old until a person has looked", "failed": "without a mask"}
    kinds = ", ".join(f"{taken[name]} {said}" for name, said in names_of.items() if taken[name])
    words = [f"{counted(len(merged), 'case')}: {kinds}"]
    words += [f"{one.case_id}: {one.reason}" for one in merged if one.taken in (ASK, FAILED)]
    words.append(f"masks, decisions.jsonl and audit.jsonl are in {out}; M0 in a reason is the old mask")
    advised = no_go(chosen)
    if advised is not None:
        typer.echo(f"! {advised}. It was followed all the same (--force).", err=True)
    made = {"taken": dict(taken), "cases": {one.case_id: one.taken for one in merged}, "no_go": advised}
    answer("\n".join(words), {"out": out, **made}, as_json=as_json)
    if any(not one.compared for one in merged):
        raise typer.Exit(NOT_ALL_DECIDED)
