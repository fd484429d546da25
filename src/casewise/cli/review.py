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
    browser: bool = typer.Option(True, "--browser/--no-browser", help="Open the page in a browser."),
) -> None:
    """A local page on which a person keeps M0, keeps the adaptation, or flags a case."""
    import webbrowser

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
