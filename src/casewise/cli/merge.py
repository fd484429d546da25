"""``casewise merge``: take over new masks case by case."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import typer

app = typer.Typer()

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
) -> None:
    """Keep new, keep old, or ask: a calibrated policy decides for every case, without a label.

    Exit code 3 where a pair could not be decided; its old mask stays and is flagged.
    """
    from casewise.data.pairs import find_pairs
    from casewise.judge.policy import read_policy
    from casewise.run.merge import ASK, FAILED, merge_folders

    pairs = find_pairs(old, new, names=names, cases=cases)
    merged = list(merge_folders(pairs, read_policy(policy), out, model=model, method=method, certificate=certificate))
    counted = Counter(one.taken for one in merged)
    words = {"new": "new", "old": "old", "ask": "old until a person has looked", "failed": "without a mask"}
    typer.echo(
        f"{len(merged)} cases: " + ", ".join(f"{counted[name]} {said}" for name, said in words.items() if counted[name])
    )
    for one in merged:
        if one.taken in (ASK, FAILED):
            typer.echo(f"{one.case_id}: {one.reason}", err=not one.compared)
    typer.echo(f"masks, decisions.jsonl and audit.jsonl are in {out}; M0 in a reason is the old mask")
    if any(not one.compared for one in merged):
        raise typer.Exit(NOT_ALL_DECIDED)
