"""``casewise verify``."""

from __future__ import annotations

from pathlib import Path

import typer

from casewise.cli.printing import AS_JSON, answer

app = typer.Typer()


@app.command()
def verify(
    folder: Path = typer.Argument(..., help="An archive, or a folder of predictions."),
    report: Path = typer.Option(None, help="The report of casewise predict --report, which knows how the log ended."),
    as_json: bool = AS_JSON,
) -> None:
    """Check an archive or a prediction folder against its hashes and its audit log."""
    from casewise.archive.verify import verify as archive_problems
    from casewise.judge.ledger import ledger_problems
    from casewise.run.prediction_folder import review_problems, verify_predictions

    if (folder / "audit.jsonl").exists():
        problems = verify_predictions(folder, report)
    else:
        problems = [*archive_problems(folder), *ledger_problems(folder)]
    problems = [*problems, *review_problems(folder)]
    words = "\n".join(problems) or f"{folder} is whole"
    answer(words, {"folder": folder, "whole": not problems, "problems": problems}, as_json=as_json)
    if problems:
        raise typer.Exit(1)
