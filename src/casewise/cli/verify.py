"""``casewise verify``."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer()


@app.command()
def verify(folder: Path = typer.Argument(..., help="An archive, or a folder of predictions.")) -> None:
    """Check an archive or a prediction folder against its hashes and its audit log."""
    from casewise.archive.verify import verify as archive_problems
    from casewise.judge.ledger import ledger_problems
    from casewise.run.verify import review_problems, verify_predictions

    if (folder / "audit.jsonl").exists():
        problems = verify_predictions(folder)
    else:
        problems = [*archive_problems(folder), *ledger_problems(folder)]
    problems = [*problems, *review_problems(folder)]
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    typer.echo(f"{folder} is whole")
