"""Measure every candidate of an archive against its labels, spread over an engine; the table is the same as without."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from casewise.archive.store import Archive, open_archive
from casewise.core.errors import CasewiseError
from casewise.judge.outcomes import Rows, case_outcomes, outcomes
from casewise.run.local import Engine


@dataclass(frozen=True)
class ScoreCase:
    """Measures one case; opens the archive where it runs."""

    path: Path
    options: tuple[tuple[str, Any], ...]
    unlocked_by: str = ""  # the ledger's line, where these are evaluation cases (F12)
    ladder: str = ""

    def __call__(self, case_id: str) -> Rows:
        """The rows of the case."""
        return case_outcomes(_opened(self.path, self.unlocked_by, self.ladder), dict(self.options), case_id)


@functools.lru_cache(maxsize=2)
def _opened(path: Path, unlocked_by: str, ladder: str) -> Archive:
    return replace(open_archive(path, ladder=ladder), unlocked_by=unlocked_by)


def scored(archive: Archive, engine: Engine) -> pd.DataFrame:
    """The outcomes of an archive, kept beside it, so that a study finds them."""

    def measured(archive: Archive, options: dict[str, Any]) -> Iterable[Rows]:
        settings = tuple((k, _hashable(v)) for k, v in options.items())
        work = ScoreCase(archive.path.resolve(), settings, archive.unlocked_by, archive.ladder_name or "")
        found = {result.case_id: result for result in engine.map(work, archive.ids)}
        for result in found.values():
            if result.error is not None:
                raise CasewiseError(f"case {result.case_id} cannot be scored: {result.error}")
        return [found[case_id].value for case_id in archive.ids]

    return outcomes(archive, measured=measured)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
