"""``casewise plan``."""

from __future__ import annotations

import typer

app = typer.Typer()


@app.command()
def plan(alpha: float = typer.Option(0.1, help="Promised risk.")) -> None:
    """How many labelled cases a certificate needs."""
    typer.echo(f"{alpha}")
