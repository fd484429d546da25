"""``casewise choose-views``."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer()


@app.command()
def choose_views(
    archive: Path = typer.Argument(..., help="Archive of labelled calibration cases, recorded with --keep-ballots."),
    ladder: str = typer.Option(None, help="Which ladder of views, where the archive holds several."),
    most: int = typer.Option(12, min=1, help="Views at most."),
    least: float = typer.Option(0.0005, min=0.0, help="A view must raise the mean gain by this much."),
) -> None:
    """Choose on calibration labels which views enter the consensus; say what such a choice gains on clusters left out.

    Prints a proposal for casewise record --propose and casewise predict --objective. The estimate leaves one patient or
    sequence out at a time; the gain on the cases that chose is shown beside it and is no promise.
    """
    from casewise.archive.store import open_archive
    from casewise.core.records import CALIBRATION
    from casewise.judge.calibration.view_selection import chosen_views, read_case

    opened = open_archive(archive, ladder=ladder).one().marked(CALIBRATION)
    cases = [read_case(opened, case_id) for case_id in opened.ids]
    found = chosen_views(cases, least=least, most=most)
    clusters = len({case.cluster for case in cases})
    typer.echo(f"{len(cases)} cases of {clusters} clusters, {len(cases[0].names)} views")
    typer.echo(f"mean gain of all views together: {found.everything:+.4f}")
    typer.echo(
        f"mean gain of chosen views on clusters left out: {found.left_out:+.4f} (in sample {found.in_sample:+.4f})"
    )
    if not found.names or found.left_out <= 0:
        typer.echo("no choice gains on clusters left out: keep M0, or record other views")
        raise typer.Exit(1)
    if found.left_out < found.everything:
        typer.echo("all views together gain more than a choice among them: deploy them all")
    typer.echo(f"--propose '{found.proposal}'")
