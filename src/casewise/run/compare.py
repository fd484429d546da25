"""Compare two folders: every pair on all cores or on Ray, resumable, and the outcome with its exit code.

OUT/cases.jsonl holds a line for each pair as it was compared; a pair whose files and settings are as they were is not
compared again. The line is written by one process, so a killed run loses at most the pairs that it was busy with.
Statistics are imported where they are used: a worker process compares masks and starts without them.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from casewise import __version__
from casewise.core.durable import held, json_sha256, replacing, sweep
from casewise.core.errors import BadInput, BadPair, Refused
from casewise.core.formats import json_text
from casewise.core.registry import Registry
from casewise.data.pairs import KINDS, Pair, label_sets, read_pair
from casewise.measure.changes import label_name
from casewise.measure.comparison import comparison
from casewise.run.local import Engine, Result

if TYPE_CHECKING:
    from casewise.study.acceptance import Acceptance, Check
    from casewise.study.comparison import ComparedCase, Comparisons

ACCEPTED, FAILED, REJECTED = 0, 3, 4
"""Exit codes: accepted (or nothing was asked), cases with problems, rejected."""

LOG = "cases.jsonl"
LOCK = ".compare.lock"


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """The folder for this process: a second one would take the first one's lines away, or count them twice."""
    with held(out / LOCK, wait=False) as own:
        if own is None:
            raise Refused(f"another casewise compare writes into {out}; wait until it ends, or choose another -o")
        yield


@dataclass(frozen=True)
class Settings:
    """How every pair is compared; the same settings and files give the same line."""

    spacing_mm: tuple[float, ...] | None = None  # for files that do not say it; None: from the header, or voxels
    min_area: int = 16
    foreground: bool = False
    ignore: int | None = None
    classes: tuple[int, ...] | None = None
    metric: str = "dice"
    surfaces: str = "moved"
    holes: str = "volume"
    zero_is_label: bool = False
    resample: str | None = None
    labels_given: bool = False

    @property
    def measure(self) -> dict[str, Any]:
        """The options of a comparison of two masks, but for the spacing."""
        left = ("spacing_mm", "resample", "labels_given")
        return {name: value for name, value in asdict(self).items() if name not in left}


@dataclass(frozen=True)
class CompareCase:
    """The work for an engine: one case id in, one line out."""

    pairs: Mapping[str, Pair]
    settings: Settings

    def __call__(self, case_id: str) -> dict[str, Any]:
        """Compare one pair; what cannot be compared is a line with its problems."""
        pair = self.pairs[case_id]
        key = self.key(pair)  # before they are read: files that change meanwhile are compared again by the next run
        try:
            old, new, label = read_pair(pair, resample=self.settings.resample)
        except BadPair as error:
            return self.line(pair, key, problems=[(error.kind, str(error))])
        found = comparison(
            old.mask,
            new.mask,
            None if label is None else label.mask,
            spacing_mm=self.settings.spacing_mm or old.spacing_mm,
            **self.settings.measure,
        )
        problems = []
        if label is None and self.settings.labels_given:
            problems.append(("unlabelled", f"{pair.id} has no label; it was compared without"))
        empty = [name for name in ("old", "new") if not any(getattr(row, f"voxels_{name}") for row in found.labels)]
        if empty and (label is None or label.mask.any()):
            problems += [("empty", f"{pair.id}: the {name} mask has no foreground") for name in empty]
        return self.line(pair, key, problems=problems, found=found.as_dict())

    def line(
        self, pair: Pair, key: str, *, problems: Sequence[tuple[str, str]] = (), found: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What cases.jsonl keeps of a pair; without a key it is compared again."""
        return {
            "case": pair.id,
            "group": pair.group,
            "cluster": pair.cluster,
            "status": "failed" if found is None else "compared",
            "problems": [{"kind": kind, "message": message} for kind, message in problems],
            "comparison": found,
            "key": key,
        }

    def key(self, pair: Pair) -> str:
        """Changes with the settings, the version, and the size or time of any of the pair's files."""
        files = [_stamp(path) for path in (pair.old, pair.new, pair.label)]
        return json_sha256([self._how, files, pair.group, pair.cluster])[:16]

    @cached_property
    def _how(self) -> str:
        return json_sha256([__version__, asdict(self.settings)])


def _stamp(path: Path | None) -> tuple[str, int, int] | None:
    if path is None:
        return None
    try:
        about = path.stat()
    except OSError:  # it was there when the folder was listed
        return path.name, -1, -1
    return path.name, about.st_size, about.st_mtime_ns


def compare_folders(work: CompareCase, engine: Engine, out: Path, *, fresh: bool = False) -> Iterator[dict[str, Any]]:
    """Compare every pair and stream the lines: those that an earlier run left first, unless ``fresh``."""
    out.mkdir(parents=True, exist_ok=True)
    sweep(out)
    log = out / LOG
    if fresh:
        log.unlink(missing_ok=True)
    kept = set()
    with replacing(log) as tidied, tidied.open("w", encoding="utf-8") as file:
        for line in _left(log):
            pair = work.pairs.get(line["case"])
            if pair is not None and pair.id not in kept and line.get("key") == work.key(pair):
                kept.add(pair.id)
                file.write(f"{json_text(line)}\n")
    yield from _left(log)
    with log.open("a", encoding="utf-8") as file:
        for result in engine.map(work, [case_id for case_id in work.pairs if case_id not in kept]):
            line = _line_of(work, result)
            file.write(f"{json_text(line)}\n")
            file.flush()
            yield line


def _left(log: Path) -> Iterator[dict[str, Any]]:
    """The finished lines of an earlier run; a torn line is no line."""
    if not log.is_file():
        return
    with log.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
                if line["case"]:
                    yield line
            except (ValueError, TypeError, KeyError):
                continue


def _line_of(work: CompareCase, result: Result) -> dict[str, Any]:
    if result.value is not None:
        line: dict[str, Any] = result.value
        return line
    return work.line(work.pairs[result.case_id], "", problems=[("broke", f"{result.case_id}: {result.error}")])


class CaseLog(Sequence[Mapping[str, Any]]):
    """The lines of a finished run, read from OUT/cases.jsonl each time they are asked for; only places are kept."""

    def __init__(self, out: Path) -> None:
        self._log = out / LOG
        self._begins = array("q", [0])
        with self._log.open("rb") as file:
            for text in file:
                self._begins.append(self._begins[-1] + len(text))

    def __len__(self) -> int:
        return len(self._begins) - 1

    @overload
    def __getitem__(self, at: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Mapping[str, Any]]: ...

    def __getitem__(self, at: int | slice) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        with self._log.open("rb") as file:
            file.seek(self._begins[at])
            line: Mapping[str, Any] = json.loads(file.readline())
            return line


@dataclass(frozen=True)
class Problem:
    """Something that was named and counted instead of passed over; allowed ones do not change the exit code."""

    kind: str
    case: str
    message: str
    allowed: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of comparing two folders."""

    found: Comparisons
    checks: tuple[Check, ...]
    problems: tuple[Problem, ...]
    pairs: int
    judged: bool  # whether there were criteria
    names: Mapping[int, str] = field(default_factory=dict)  # what labels are called

    @property
    def accepted(self) -> bool:
        """Whether every criterion holds; without criteria there is nothing to reject."""
        return all(check.holds for check in self.checks)

    @property
    def exit_code(self) -> int:
        """4 rejected; else 3 where a case has a problem that was not allowed; else 0."""
        if not self.accepted:
            return REJECTED
        return FAILED if any(not problem.allowed for problem in self.problems) else ACCEPTED

    @property
    def verdict(self) -> str:
        """One word."""
        if self.judged:
            return "accepted" if self.accepted else "rejected"
        return "compared"

    def as_dict(self) -> dict[str, Any]:
        """summary.json."""
        return {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "pairs": self.pairs,
            "compared": len(self.found.cases),
            "problems": [asdict(problem) for problem in self.problems],
            "problems_by_kind": dict(sorted(Counter(problem.kind for problem in self.problems).items())),
            "checks": [check.as_dict() for check in self.checks],
            "names": {str(label): name for label, name in self.names.items()},
            "summary": self.found.summary,
            "worst_first": self.found.worst_first_ids,
            "casewise": __version__,
        }


def outcome_of(
    lines: Sequence[Mapping[str, Any]],
    *,
    acceptance: Acceptance | None = None,
    allow: Sequence[str] = (),
    good: float = 0.7,
    expected: Sequence[int] | None = None,
    names: Mapping[int, str] | None = None,
    at_odds: Sequence[str] = (),
) -> Outcome:
    """The cohort, its verdict and its problems from the lines of all pairs, in any order.

    ``lines`` (a :class:`CaseLog`) are gone through a few times and not kept, whatever their number. ``names`` are those
    of labels, ``at_odds`` sentences on labels that the two folders call differently.
    """
    from casewise.study.acceptance import checks_of
    from casewise.study.comparison import CasesInOrder, ComparedCase, Comparisons, comparison_of

    known = Registry("kind of problem", KINDS)
    allowed = {kind for kind in allow if known[kind]}

    def case_at(at: int) -> ComparedCase:
        line = lines[at]
        return ComparedCase(line["case"], comparison_of(line["comparison"]), line["group"], line["cluster"])

    compared, problems = [], []
    for at, line in enumerate(lines):  # one after the other: a line is much larger than what is kept of it
        problems += [(line["case"], one["kind"], one["message"]) for one in line["problems"]]
        if line["comparison"] is not None:
            compared.append((line["case"], at))
    problems.sort(key=lambda problem: problem[0])
    if not compared:
        first = problems[0][2] if problems else "there is none"
        raise BadInput(f"none of {len(lines)} pairs could be compared; the first one: {first}")
    cases = CasesInOrder(case_at, np.array([at for _, at in sorted(compared)], np.int64))
    if expected is None:
        only = label_sets(map(_held, cases), lambda label: label_name(label, names or {}))
        problems += [(case_id, "labels", message) for case_id, message in only]
    problems += [("dataset.json", "labels", message) for message in at_odds]
    return Outcome(
        Comparisons(cases, good),
        () if acceptance is None else checks_of(acceptance, cases, names),
        tuple(Problem(kind, case_id, message, kind in allowed) for case_id, kind, message in problems),
        len(lines),
        acceptance is not None,
        names or {},
    )


def _held(case: ComparedCase) -> tuple[str, list[int], list[int]]:
    rows = case.found.labels
    return case.id, [row.label for row in rows if row.voxels_old], [row.label for row in rows if row.voxels_new]


def csv_rows(outcome: Outcome) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file name, row) of three tables: one row per case, per case and label, per region that became worse."""
    for case in outcome.found.worst_first:
        who = {"case": case.id, "group": case.group, "cluster": case.cluster}
        plain = case.found.as_dict()
        parts = ("labels", "regressions", "warnings")
        yield (
            "cases.csv",
            {
                **who,
                **{k: v for k, v in plain.items() if k not in parts},
                "suspicion": case.found.suspicion,
                "warnings": "; ".join(case.found.warned(outcome.names)),
            },
        )
        for row in plain["labels"]:
            yield "labels.csv", {**who, "name": outcome.names.get(row["label"]), **row}
        for region in case.found.regressions:
            box = {
                f"{side}_{axis}": int(getattr(region, side)[axis])
                for axis in range(len(region.low))
                for side in ("low", "high")
            }
            yield "regions.csv", {**who, "voxels": region.voxels, "worse": region.worse, "ml": region.ml, **box}
