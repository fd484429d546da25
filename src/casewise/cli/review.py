"""``casewise qc``: which masks should a person look at? ``casewise review``: the page on which she does."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from casewise.cli.printing import AS_JSON, answer
from casewise.core.brief import counted

app = typer.Typer()


@app.command()
def review(
    folder: Path = typer.Argument(..., help="What casewise predict wrote, or an archive."),
    images: Path = typer.Option(None, help="The images, in the naming that predict or record read."),
    reviewer: str = typer.Option("", help="Your name, as it goes into the log; the page asks when it is not given."),
    ladder: str = typer.Option(None, help="Which ladder, where the archive holds several."),
    port: int = typer.Option(0, min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one."),
    apply: bool = typer.Option(
        False, "--apply", help="No page: write the masks that were chosen, with a log, into the folder after --out."
    ),
    out: Path = typer.Option(None, "--out", "-o", help="--apply: an empty folder for the masks."),
    browser: bool = typer.Option(True, "--browser/--no-browser", help="Open the page in a browser."),
    as_json: bool = typer.Option(False, "--json", help="--apply: print the answer as JSON."),
) -> None:
    """A local page on which a person keeps M0, keeps the adaptation, or flags a case."""
    import webbrowser

    if apply:
        _apply(folder, out, as_json=as_json)
        return

    from casewise.serve.review import review_server

    server = review_server(folder, images=images, reviewer=reviewer, port=port, ladder=ladder)
    with server:
        for sentence in server.desk.said_at_start:
            typer.echo(f"! {sentence}", err=True)
        typer.echo(f"{counted(len(server.desk.folder.cases), 'case')}, worst first: {server.url}")
        typer.echo(f"decisions go to {server.desk.log.path}; stop with Ctrl-C", err=True)
        if browser:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo(f"{len(server.desk.log.latest())} cases are reviewed", err=True)


def _apply(folder: Path, out: Path | None, *, as_json: bool) -> None:
    from collections import Counter

    from casewise.core.errors import BadInput
    from casewise.serve.review_log import APPLIED, apply_reviews

    if out is None:
        raise BadInput("--apply writes masks; give an empty folder for them: --apply -o FOLDER")
    done = apply_reviews(folder, out)
    taken = Counter(one.taken for one in done)
    for one in (one for one in done if one.open):
        typer.echo(f"! {one.case} is open: {one.why}", err=True)
    for one in (one for one in done if one.overruled):
        typer.echo(
            f"! {one.case}: reviewers disagree, the last decision counts: {one.why}; before: {one.overruled}", err=True
        )
    counted = ", ".join(f"{name}: {count}" for name, count in sorted(taken.items()))
    answer(
        f"{counted}\nwrote {len(done) - taken['none']} masks and {out / APPLIED}",
        {"taken": taken, "open": {one.case: one.why for one in done if one.open}, "log": out / APPLIED},
        as_json=as_json,
    )
    if taken["none"]:
        raise typer.Exit(3)


@app.command()
def qc(
    opinions: list[Path] = typer.Argument(
        ..., help="An archive with several candidates, or folders of masks: the one in use first, then the others."
    ),
    out: Path = typer.Option(..., "--out", "-o", help="Folder for qc.csv (worst first), signals.csv and quality.json."),
    labels: Path = typer.Option(None, "--labels", "-l", help="Folder with labels of some of the cases."),
    cases: Path = typer.Option(None, help="CSV with case and cluster (patient, sequence)."),
    flag_below: float = typer.Option(0.7, help="Flag a case whose metric may lie below this."),
    at: float = typer.Option(0.9, help="Chance that the lower bound of the metric holds."),
    quality: Path = typer.Option(None, help="quality.json of an earlier run on labelled cases of the same model."),
    metric: str = typer.Option("dice", help="dice, miou or another metric of casewise; an archive has its own."),
    ignore: int = typer.Option(None, help="Label that is never wrong, such as 255."),
    ladder: str = typer.Option(None, help="Which ladder, where the archive holds several."),
    as_json: bool = AS_JSON,
) -> None:
    """Say how good each mask is at least, without a label, from how far several opinions agree.

    Opinions are folds, views, raters or models. Some labelled cases are needed once, for the lower bound; without any,
    cases are sorted by agreement and nothing is promised.
    """
    from casewise.core.durable import write_durably
    from casewise.core.errors import BadInput
    from casewise.core.formats import csv_cell, json_text
    from casewise.study.quality_control import archive_opinions, controlled, folder_opinions, quality_rows, read_quality

    if len(opinions) == 1:
        from casewise.archive.store import open_archive
        from casewise.judge.outcomes import scoring_options

        if labels is not None or cases is not None:
            raise BadInput("an archive holds its own labels and clusters; leave out --labels and --cases")
        archive = open_archive(opinions[0], ladder=ladder).one()
        scored = scoring_options(archive)
        metric, ignore = scored["metric"], scored["ignore"] if ignore is None else ignore
        found = archive_opinions(archive)
    else:
        found = folder_opinions(opinions, labels=labels, cases=cases)
    known = None if quality is None else read_quality(quality)
    result = controlled(quality_rows(found, metric=metric, ignore=ignore), below=flag_below, level=at, quality=known)
    out.mkdir(parents=True, exist_ok=True)
    for name, table in (("signals.csv", result.worth), ("qc.csv", result.cases)):
        write_durably(out / name, table.map(csv_cell).to_csv(index=False).encode())
    if result.fit is not None:
        write_durably(out / "quality.json", f"{json_text(result.fit.as_dict(), indent=1)}\n".encode())
    sentences = list(result.sentences())
    if result.fit is not None and len(opinions) > 1 and cases is None and known is None:
        sentences.append(
            "! no patient or sequence is named, so the lower bound counts every case as one of its own; "
            "where one has several scans, name them: --cases TABLE with the columns case and cluster"
        )
    found_cases = json.loads(result.cases.to_json(orient="records"))
    answer(
        "\n".join([*sentences, f"wrote {out / 'qc.csv'}"]),
        {"file": out / "qc.csv", "said": sentences, "cases": found_cases},
        as_json=as_json,
    )
    if (result.cases["problem"] != "").any():
        raise typer.Exit(3)
