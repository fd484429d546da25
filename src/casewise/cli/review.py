"""``casewise review``."""

from __future__ import annotations

from pathlib import Path

import typer

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
) -> None:
    """A local page on which a person keeps M0, keeps the adaptation, or flags a case."""
    import webbrowser

    if apply:
        _apply(folder, out)
        return

    from casewise.serve.review import review_server

    server = review_server(folder, images=images, reviewer=reviewer, port=port, ladder=ladder)
    with server:
        typer.echo(f"{len(server.desk.folder.cases)} cases, worst first: {server.url}")
        typer.echo(f"decisions go to {server.desk.log.path}; stop with Ctrl-C", err=True)
        if browser:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo(f"{len(server.desk.log.latest())} cases are reviewed", err=True)


def _apply(folder: Path, out: Path | None) -> None:
    from collections import Counter

    from casewise.core.errors import BadInput
    from casewise.serve.review_log import APPLIED, apply_reviews

    if out is None:
        raise BadInput("--apply writes masks; give an empty folder for them: --apply -o FOLDER")
    done = apply_reviews(folder, out)
    taken = Counter(one.taken for one in done)
    typer.echo(", ".join(f"{name}: {count}" for name, count in sorted(taken.items())))
    for one in (one for one in done if one.open):
        typer.echo(f"! {one.case} is open: {one.why}", err=True)
    typer.echo(f"wrote {len(done) - taken['none']} masks and {out / APPLIED}")
    if taken["none"]:
        raise typer.Exit(3)
