"""Compare the pairs of two folders, on any engine: one line of results for each pair.

With a folder for the results, the lines are in its cases.jsonl, and a pair whose files and settings did not change is
not compared again. One process writes the file, so a killed run loses only the pairs that it was comparing. Statistics
are not imported here, so that worker processes start fast.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from casewise import __version__
from casewise.core.durable import file_lock, file_sha256, file_stamp, json_sha256, replacing, sweep
from casewise.core.errors import BadPair, Refused, in_one_line
from casewise.core.formats import json_text, parsed_json
from casewise.data.pairs import Pair, read_pair
from casewise.measure.comparison import comparison

if TYPE_CHECKING:
    from casewise.run.local import Engine

LOG = "cases.jsonl"
LOCK = ".compare.lock"


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Lock the folder for this process; a second process would remove its lines or count them twice."""
    with file_lock(out / LOCK, wait=False) as own:
        if own is None:
            raise Refused(f"another casewise compare writes into {out}; wait until it ends, or choose another -o")
        yield


@dataclass(frozen=True)
class Settings:
    """Options of the comparison of a pair; the same settings and files give the same line."""

    spacing_mm: tuple[float, ...] | None = None  # for files without a spacing; None: from the header, else voxels
    min_area: int = 16
    foreground: bool = False
    ignore: int | None = None
    classes: tuple[int, ...] | None = None
    metric: str = "dice"
    surfaces: str = "moved"
    zero_is_label: bool = False
    resample: str | None = None
    labels_given: bool = False
    hashed: bool = False  # True: each line holds the sha256 of its files

    @property
    def measure(self) -> dict[str, Any]:
        """Options of the comparison of two masks, without the spacing."""
        left = ("spacing_mm", "resample", "labels_given", "hashed")
        return {name: value for name, value in asdict(self).items() if name not in left}


@dataclass(frozen=True)
class CompareCase:
    """Work for an engine: takes a case id and returns its line."""

    pairs: Mapping[str, Pair]
    settings: Settings

    def __call__(self, case_id: str) -> dict[str, Any]:
        """Compare one pair; if that is not possible, the line holds the problems."""
        pair = self.pairs[case_id]
        key = self.key(pair)  # computed before the files are read, so that the next run notices a change
        try:
            old, new, label = read_pair(pair, resample=self.settings.resample)
        except BadPair as error:
            return self.line(pair, key, problems=[(error.kind, str(error))])
        found = comparison(
            old.mask, new.mask, None if label is None else label.mask,
            spacing_mm=self.settings.spacing_mm or old.spacing_mm, **self.settings.measure,
        )  # fmt: skip
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
        """Return the line of a pair in cases.jsonl; without a key the next run compares the pair again."""
        return {
            "case": pair.id,
            "group": pair.group,
            "cluster": pair.cluster,
            "scan": pair.scan,
            "status": "failed" if found is None else "compared",
            "problems": [{"kind": kind, "message": message} for kind, message in problems],
            "comparison": found,
            "sha256": self.hashes(pair),
            "key": key,
        }

    def hashes(self, pair: Pair) -> dict[str, str] | None:
        """Return the sha256 of the files of a pair, if the settings ask for it."""
        if not self.settings.hashed:
            return None
        files = {name: getattr(pair, name) for name in ("old", "new", "label")}
        return {name: file_sha256(path) for name, path in files.items() if path is not None and path.is_file()}

    def key(self, pair: Pair) -> str:
        """Return a key that changes with the settings, the version, and the size or time of any file of the pair."""
        files = [path and (path.name, file_stamp(path)) for path in (pair.old, pair.new, pair.label)]
        return json_sha256([self._how, files, pair.group, pair.cluster, pair.scan])[:16]

    @cached_property
    def _how(self) -> str:
        return json_sha256([__version__, asdict(self.settings)])


def compare_pairs(
    work: CompareCase, engine: Engine | None, out: Path | None, *, fresh: bool = False
) -> Iterator[dict[str, Any]]:
    """Compare every pair and yield the lines, first those of an earlier run that still hold (unless ``fresh``)."""
    if out is None:
        yield from compared_lines(work, engine, list(work.pairs))
        return
    out.mkdir(parents=True, exist_ok=True)
    sweep(out)
    log = out / LOG
    if fresh:
        log.unlink(missing_ok=True)
    kept = set()
    with replacing(log) as tidied, tidied.open("w", encoding="utf-8") as file:
        for line in _finished_lines(log):
            pair = work.pairs.get(line["case"])
            if pair is not None and pair.id not in kept and line.get("key") == work.key(pair):
                kept.add(pair.id)
                file.write(f"{json_text(line)}\n")
    yield from _finished_lines(log)
    with log.open("a", encoding="utf-8") as file:
        for line in compared_lines(work, engine, [case_id for case_id in work.pairs if case_id not in kept]):
            file.write(f"{json_text(line)}\n")
            file.flush()
            yield line


def compared_lines(work: CompareCase, engine: Engine | None, case_ids: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines of some pairs; without an engine this process compares them one by one."""
    if engine is None:
        for case_id in case_ids:
            try:
                yield work(case_id)
            except Exception as error:  # only this case fails, as with an engine
                yield _broken_line(work, case_id, in_one_line(error))
        return
    for result in engine.map(work, case_ids):
        if result.value is None:
            yield _broken_line(work, result.case_id, str(result.error))
        else:
            yield result.value


def _broken_line(work: CompareCase, case_id: str, why: str) -> dict[str, Any]:
    """Return a line without a key, so that the next run compares the pair again."""
    return work.line(work.pairs[case_id], "", problems=[("broke", f"{case_id}: {why}")])


def _finished_lines(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of an earlier run; a line that was cut off is left out."""
    if not log.is_file():
        return
    with log.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = parsed_json(text)
                if line["case"]:
                    yield line
            except (ValueError, TypeError, KeyError):
                continue


Item = TypeVar("Item")


class MadeOnDemand(Sequence[Item]):
    """Items in some order; each is made when it is needed and not stored."""

    def __init__(self, make: Callable[[int], Item], order: Any) -> None:
        self._make, self._order = make, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return MadeOnDemand(self._make, self._order[which])
        return self._make(int(self._order[which]))


def case_log(out: Path) -> Sequence[Mapping[str, Any]]:
    """The lines of a finished run; each is read from OUT/cases.jsonl when it is needed."""
    begins = array("q", [0])
    with (out / LOG).open("rb") as file:
        for text in file:
            begins.append(begins[-1] + len(text))

    def line(at: int) -> Mapping[str, Any]:
        with (out / LOG).open("rb") as file:
            file.seek(begins[at])
            found: Mapping[str, Any] = json.loads(file.readline())
            return found

    return MadeOnDemand(line, range(len(begins) - 1))
