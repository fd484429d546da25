"""``casewise verify``."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer()


@app.command()
def verify(folder: Path = typer.Argument(..., help="An archive.")) -> None:
    """Check an archive against its hashes: every file, every mask, the case list and the exposure ledger."""
    from casewise.archive.verify import verify as problems_of
    from casewise.judge.ledger import ledger_problems

    problems = [*problems_of(folder), *ledger_problems(folder)]
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    typer.echo(f"{folder} is whole")
