"""Output of commands: answers in words or as JSON, and progress with the remaining time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import typer

from casewise.core.formats import json_text
from casewise.core.text import pluralize

AS_JSON = typer.Option(False, "--json", help="Print the answer as JSON.")
NO_PATIENT = (
    "! no patient is named, so every case counts as one patient; if patients have several scans, name "
    "them: --cases TABLE with the columns case and cluster"
)
UNITS = {"learn": "update", "propose": "case", "read": "case", "compare": "design", "check": "fold"}
RECENT = 5  # lines of progress that the remaining time is estimated from
EVERY_S = 15.0  # between two lines of progress if the output is no terminal


def colored(text: str, color: str) -> str:
    """Return the text in color; plain if NO_COLOR is set (typer.echo strips colors off a terminal)."""
    return text if "NO_COLOR" in os.environ else typer.style(text, fg=color, bold=True)


def answer(words: str, content: Mapping[str, Any], *, as_json: bool) -> None:
    """Print an answer: words for a person, or JSON for a program; never both."""
    if as_json:
        typer.echo(json_text(content, indent=2, default=str))
        return
    marked = ("! ", "Please check: ")
    lines = (colored(line, "yellow") if line.startswith(marked) else line for line in words.splitlines())
    typer.echo("\n".join(lines))


def warn(sentence: str) -> None:
    """Print a warning to standard error."""
    typer.echo(colored(f"! {sentence}", "yellow"), err=True)


class Progress(AbstractContextManager["Progress"]):
    """Progress of a run: a bar on a terminal; elsewhere a line every 15 seconds with the remaining time.

    ``quiet`` prints problems only; ``verbose`` prints a line for each case.
    """

    def __init__(
        self, total: int, *, done: int = 0, unit: str = "case", title: str = "", quiet: bool = False,
        verbose: bool = False, every_s: float = EVERY_S,
    ) -> None:  # fmt: skip
        self.total, self.done, self.unit, self.title = total, done, unit, title
        self.quiet, self.verbose, self.every_s = quiet, verbose, every_s
        self._first = done
        self._began = self._said = self._first_at = time.monotonic()
        self._marks = [(self._began, done)]  # (time, done) of each line of progress
        self._bar: Any = None
        if sys.stderr.isatty() and not quiet and not verbose:
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, unit=unit, desc=title or None)

    def step(self, line: str, *, bad: bool = False) -> None:
        """Count one more; ``line`` is its result and is always printed if something went wrong."""
        self.done += 1
        if self._bar is not None:
            self._bar.update()
        if bad or (self.verbose and not self.quiet):
            self._echo(line)
        now = time.monotonic()
        self._first_at = now if self.done == self._first + 1 else self._first_at
        waited = max(self.every_s, (now - self._began) / 20)  # a long run prints fewer lines
        due = self.done == self._first + 1 or self.done == self.total or now - self._said >= waited
        if due and self._bar is None and not self.quiet and not self.verbose:
            self._said = now
            self._echo(self.line(now))
            self._marks.append((now, self.done))

    def line(self, now: float) -> str:
        """Return the progress: ``propose: 12 of 60 cases, about 4 min left``."""
        said = f"{self.title}: " * bool(self.title) + f"{self.done} of {pluralize(self.total, self.unit)}"
        if self.done >= self.total:
            return f"{said}, {in_words(now - self._began)} in all"
        later = self.done - self._first - 1  # the first one also loads the model, so it is not timed
        each = (now - self._first_at) / max(later, 1)
        before, counted = self._marks[-RECENT:][0]
        if len(self._marks) > RECENT and self.done > counted:  # the machine may have become slower or faster
            each = (now - before) / (self.done - counted)
        return f"{said}, about {in_words(each * (self.total - self.done))} left" if later > 0 else said

    def _echo(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            typer.echo(line, err=True)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


class StepProgress(AbstractContextManager["StepProgress"]):
    """One progress bar for each step of a command that has several; call it with (step, done, total)."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self._options: dict[str, Any] = {"quiet": quiet, "verbose": verbose}
        self._step = ""
        self._shown: Progress | None = None

    def __call__(self, step: str, done: int, total: int) -> None:
        """Show how many parts of a step are done."""
        if step != self._step or self._shown is None:
            self.__exit__()
            self._step = step
            unit = UNITS.get(step.partition(" ")[0], "part")
            self._shown = Progress(total, done=max(done - 1, 0), unit=unit, title=step, **self._options)
        self._shown.total = total
        for _ in range(done - self._shown.done):
            self._shown.step(f"{step}: {done} of {total}")

    def __exit__(self, *error: object) -> None:
        if self._shown is not None:
            self._shown.__exit__()
            self._shown = None


def in_words(seconds: float) -> str:
    """Return a duration in words.

    >>> in_words(42), in_words(250), in_words(7300)
    ('42 s', '4 min', '2 h 2 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
