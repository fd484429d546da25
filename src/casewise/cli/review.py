"""``casewise qc``: which masks a person should check. ``casewise review``: the page to check them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from casewise.cli.options import NnUNetStyle
from casewise.cli.printing import AS_JSON, NO_PATIENT, answer, warn
from casewise.core.text import pluralize

app = typer.Typer()


@app.command(cls=NnUNetStyle)
def review(
    folder: Path = typer.Argument(..., help="Folder that casewise predict wrote."),
    images: Path = typer.Option(None, help="Folder with the images that predict used."),
    reviewer: str = typer.Option("", help="Your name for the log; if not given, the page asks."),
    port: int = typer.Option(0, min=0, max=65535, help="Port on 127.0.0.1; 0: any free port."),
    apply: bool = typer.Option(False, "--apply", help="Write the chosen masks and a log to --out; open no page."),
    out: Path = typer.Option(None, "--out", "-o", help="--apply: an empty folder for the masks."),
    browser: bool = typer.Option(True, "--browser/--no-browser", help="Open the page in a browser."),
    as_json: bool = typer.Option(False, "--json", help="--apply: print the answer as JSON."),
) -> None:
    """Open a local page to compare masks and to choose which one to keep.

    Example:

        casewise review masks --images images

        casewise review masks --apply -o reviewed

    The choices: keep the original mask, keep the new mask, both are wrong (contour again), or ask somebody else.
    """
    import webbrowser

    if apply:
        _apply(folder, out, as_json=as_json)
        return

    from casewise.serve.review_server import review_server

    server = review_server(folder, images=images, reviewer=reviewer, port=port)
    with server:
        for sentence in server.desk.log.problems:
            warn(sentence)
        typer.echo(f"{pluralize(len(server.desk.folder.cases), 'case')}, worst first: {server.url}")
        typer.echo(f"decisions go to {server.desk.log.path}; stop with Ctrl-C", err=True)
        if browser:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo(f"{pluralize(len(server.desk.log.latest()), 'case')} reviewed", err=True)


def _apply(folder: Path, out: Path | None, *, as_json: bool) -> None:
    from collections import Counter

    from casewise.core.errors import BadInput
    from casewise.core.text import pluralize
    from casewise.serve.review_log import APPLIED, apply_reviews

    if out is None:
        raise BadInput("--apply needs an empty folder for the masks: --apply -o FOLDER")
    done = apply_reviews(folder, out)
    taken = Counter(one.taken for one in done)
    for one in (one for one in done if one.open):
        warn(f"{one.case} is open: {one.why}")
    for one in (one for one in done if one.overruled):
        warn(f"{one.case}: reviewers disagree, the last counts: {one.why}; before: {one.overruled}")
    names = {"deployed": "as written by predict", "m0": "original", "adapted": "new", "none": "without a mask"}
    people = sum(bool(one.reviewer) for one in done)
    counted = ", ".join(f"{taken[name]} {said}" for name, said in names.items() if taken[name])
    answer(
        f"{pluralize(len(done), 'case')}, {people} reviewed: {counted}.\nMasks: {out}\nDecisions: {out / APPLIED}",
        {"taken": taken, "open": {one.case: one.why for one in done if one.open}, "log": out / APPLIED},
        as_json=as_json,
    )
    if taken["none"]:
        raise typer.Exit(3)


@app.command(cls=NnUNetStyle)
def qc(
    folders: list[Path] = typer.Argument(
        ..., help="Folders of masks of the same cases (the masks in use first), or one archive with several candidates."
    ),
    out: Path = typer.Option(..., "--out", "-o", help="Folder for qc.csv (worst first), signals.csv and quality.json."),
    labels: Path = typer.Option(None, "--labels", "-l", help="Folder with labels of some of the cases."),
    images: Path = typer.Option(None, "--images", "-i", help="DICOM series, which contours alone need."),
    cases: Path = typer.Option(None, help="CSV with case and cluster (patient)."),
    flag_below: float = typer.Option(0.7, help="Flag cases whose metric may be below this."),
    confidence: float = typer.Option(0.9, help="Probability that the lower bound of the metric holds."),
    quality: Path = typer.Option(None, help="quality.json of an earlier run on labelled cases of the same model."),
    metric: str = typer.Option("dice", help="Metric that labels are scored with: {metrics}; an archive has its own."),
    ignore: int = typer.Option(None, help="Label of voxels that are left out, such as 255."),
    ladder: list[str] = typer.Option([], help="Method to use, if the archive has several; repeat for several."),
    as_json: bool = AS_JSON,
) -> None:
    """Estimate the quality of each mask without its label, from the agreement of several masks of the case.

    Example:

        casewise qc fold_0 fold_1 fold_2 -l labels -o qc

    The masks may come from folds, views, raters or models. Labels of some cases are needed once, for the lower bound.
    Without labels, cases are sorted by agreement and there is no bound.
    """
    from casewise.core.durable import write_durably
    from casewise.core.errors import BadInput
    from casewise.core.formats import csv_cell, json_text
    from casewise.study.quality_control import archive_opinions, controlled, folder_opinions, quality_rows, read_quality

    if len(folders) == 1:
        from casewise.archive.store import as_archive
        from casewise.judge.outcomes import scoring_options

        if labels is not None or cases is not None:
            raise BadInput("an archive has its own labels and clusters; leave out --labels and --cases")
        archive = as_archive(folders[0], ladder)
        scored = scoring_options(archive)
        metric, ignore = scored["metric"], scored["ignore"] if ignore is None else ignore
        found = archive_opinions(archive)
    else:
        from casewise.data.dicom_masks import nifti_folders

        (*read, labels_read), patients, refused = nifti_folders([*folders, labels], out / "dicom", images=images)
        cases = cases or patients  # type: ignore[assignment]
        masks = [one for one in read if one is not None]
        found = folder_opinions(masks, labels=labels_read, cases=cases, refused=refused)
    known = None if quality is None else read_quality(quality)
    result = controlled(
        quality_rows(found, metric=metric, ignore=ignore), below=flag_below, level=confidence, quality=known
    )
    out.mkdir(parents=True, exist_ok=True)
    for name, table in (("signals.csv", result.worth), ("qc.csv", result.cases)):
        write_durably(out / name, table.map(csv_cell).to_csv(index=False).encode())
    if result.fit is not None:
        write_durably(out / "quality.json", f"{json_text(asdict(result.fit), indent=1)}\n".encode())
    sentences = list(result.sentences())
    if result.fit is not None and len(folders) > 1 and cases is None and known is None:
        sentences.append(NO_PATIENT)
    found_cases = json.loads(result.cases.to_json(orient="records"))
    answer(
        "\n".join([*sentences, f"wrote {out / 'qc.csv'}"]),
        {"file": out / "qc.csv", "said": sentences, "cases": found_cases},
        as_json=as_json,
    )
    if (result.cases["problem"] != "").any():
        raise typer.Exit(3)
