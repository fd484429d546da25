"""nnU-Net's way of writing a command: ``-f 0 1 2`` takes as many values as follow, and old flags stay flags."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

MANY = ("-f",)


class NnUNetStyle(TyperCommand):
    """A command whose ``-f`` takes all the values that follow it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Join the values of ``-f`` into one before the options are parsed."""
        return super().parse_args(ctx, joined(args))


def joined(args: list[str]) -> list[str]:
    """``-f 0 1 2 -o OUT`` as ``-f "0 1 2" -o OUT``.

    >>> joined(["-f", "0", "1", "-o", "OUT"])
    ['-f', '0 1', '-o', 'OUT']
    """
    result: list[str] = []
    values: list[str] | None = None
    for arg in args:
        if values is not None and not arg.startswith("-"):
            values.append(arg)
            continue
        if values is not None:
            result.append(" ".join(values))
            values = None
        result.append(arg)
        if arg in MANY:
            values = []
    return result if values is None else [*result, " ".join(values)]


def folds_of(text: str | None) -> tuple[int | str, ...] | None:
    """Folds from "0 1 2" or "all"; None for every fold that is there."""
    if text is None:
        return None
    return tuple(int(word) if word.isdigit() else word for word in text.split())
