"""Decisions of reviewers: appended to reviews.jsonl, never edited; the last one of a case counts.

The file is a hash chain (:mod:`casewise.core.chain`).

:func:`apply_reviews` copies the mask that was chosen for each case, with a log of why. The prediction folder is not
changed. A review of an earlier output has no effect.
"""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from casewise.core.chain import Chain
from casewise.core.durable import TEMPORARY, file_lock, file_sha256, replacing
from casewise.core.errors import BadInput, CasewiseError, Refused
from casewise.core.formats import csv_cell
from casewise.core.prediction_record import REVIEW
from casewise.core.records import check_case_id
from casewise.core.text import pluralize
from casewise.run.prediction_folder import COPIES, review_problems
from casewise.serve.review_cases import DEPLOYED, Predictions

REVIEWS = "reviews.jsonl"
LOCK = ".reviews.lock"
DECISIONS = {"keep-m0": "keep original", "keep-adapted": "keep new", "both-wrong": "both are wrong", "flag": "flag"}
NEEDS_NO_MASK = ("both-wrong", "flag")
NAME_LENGTH, NOTE_LENGTH = 100, 500


@dataclass(frozen=True)
class Review:
    """One decision of one person about one output."""

    case: str
    decision: str  # one of DECISIONS
    reviewer: str
    about: str  # sha256 of what was looked at
    adapted: str | None = None  # the adapted state that was looked at; None where its mask was not there
    note: str = ""

    def __post_init__(self) -> None:
        check_case_id(self.case)
        if self.decision not in DECISIONS:
            raise BadInput(f"a decision must be one of {', '.join(DECISIONS)}, got {self.decision!r}")
        if not self.reviewer.strip() or len(self.reviewer) > NAME_LENGTH or not self.reviewer.isprintable():
            raise BadInput(f"a reviewer's name has 1 to {NAME_LENGTH} printable characters; enter yours first")
        if len(self.note) > NOTE_LENGTH:
            raise BadInput(f"a note has at most {NOTE_LENGTH} characters, got {len(self.note)}; shorten it")
        if any(character == "\0" or 0xD800 <= ord(character) < 0xE000 for character in self.note):
            raise BadInput("a note must be text without NUL or broken characters; write it again")


class Overtaken(Refused):
    """Another reviewer decided the case after this page had loaded it."""


@dataclass(frozen=True)
class ReviewLog:
    """reviews.jsonl of a folder."""

    path: Path

    @property
    def problems(self) -> list[str]:
        """Return the problems of the log; empty where every line follows from the one before."""
        strange = sum(not _is_review(line) for line in self._events())
        foreign = [f"{self.path.name} holds {pluralize(strange, 'line')} without a review"] if strange else []
        return [*Chain(self.path).problems, *foreign]

    def check(self) -> None:
        """Refuse to append to a file that is something else."""
        for problem in self.problems:
            if problem.endswith("is not a line of a hash-chained log"):
                raise BadInput(f"{problem}; move or restore the file before reviewing")

    def append(self, review: Review, *, seen: str | None = None) -> None:
        """Write one decision, durably.

        Args:
            review: The decision.
            seen: Hash of the decision that the reviewer saw, "" where there was none. If another one was written since,
                the new one is refused, unless both say the same. None checks nothing.

        Raises:
            Overtaken: If another reviewer decided the case meanwhile.
        """
        with file_lock(self.path.with_name(LOCK)):  # held from reading the last decision to writing the next one
            last = self.latest().get(review.case, {})
            if seen is None or last.get("hash", "") == seen:
                Chain(self.path).append(REVIEW, asdict(review))
            elif any(last.get(name) != value for name, value in asdict(review).items()):
                raise Overtaken(
                    f"{last.get('reviewer', 'somebody')} decided '{DECISIONS.get(last.get('decision', ''), 'open')}' "
                    f"for case {review.case} since you opened it; nothing was written. Decide again to overrule that"
                )

    def lines(self) -> list[dict[str, Any]]:
        """Every decision, oldest first; other lines are skipped."""
        return [line for line in self._events() if _is_review(line)]

    def _events(self) -> list[dict[str, Any]]:
        return [line for line in Chain(self.path).lines() if line.get("event") == REVIEW]

    def latest(self) -> dict[str, dict[str, Any]]:
        """The last decision of each case."""
        return {str(line["case"]): line for line in self.lines()}


def _is_review(line: Mapping[str, Any]) -> bool:
    """True if a line has the fields of a review; a correct hash alone does not show that."""
    try:
        said = Review(**{one.name: line[one.name] for one in fields(Review)})
    except (KeyError, TypeError, AttributeError, CasewiseError):
        return False
    return isinstance(said.about, str) and isinstance(said.adapted, str | None)


COLUMNS = (
    "case", "decision", "reviewer", "time", "current", "note", "adapted", "group", "status", "action", "quality_low",
    "about",
)  # fmt: skip


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table; a cell that a spreadsheet would take for a formula gets an apostrophe in front."""
    buffer = io.StringIO()
    table = csv.writer(buffer, lineterminator="\n")
    table.writerow(COLUMNS)
    table.writerows(["" if row.get(name) is None else csv_cell(row[name]) for name in COLUMNS] for row in rows)
    return buffer.getvalue()


APPLIED, STARTED, FINISHED = COPIES[1]
_LOCK = ".applying"


@dataclass(frozen=True)
class Applied:
    """Result of applying the reviews to one case."""

    case: str
    taken: str  # deployed, m0, adapted, or none where there was nothing to take
    why: str
    reviewer: str = ""
    mask: str = ""  # file name in the new folder
    sha256: str = ""
    open: bool = False  # a person still has to decide: flagged, or the review is about another output
    overruled: str = ""  # earlier decisions of other reviewers that differ; the last decision counts


def apply_reviews(folder: Path, out: Path) -> list[Applied]:
    """Write the chosen mask of every case into ``out`` and a hash-chained log beside them.

    Args:
        folder: Folder of ``casewise predict``, with its reviews.
        out: A new or empty folder, or one that an earlier run of this function did not finish: that run's files are
            replaced.

    Returns:
        Result for each case.

    Raises:
        Refused: If ``out`` holds anything else, another process writes into it, or the reviews cannot be trusted.
    """
    if (folder / "manifest.json").is_file():
        raise BadInput(f"{folder} is an archive without mask files; apply reviews to a folder of casewise predict")
    predicted = Predictions.of(folder)
    names = [predicted.file_of(one, "deployed").name for one, case in predicted.cases.items() if case.has_masks]
    _check_free(out, names)
    log = ReviewLog(folder / REVIEWS)
    if problems := [*log.problems, *review_problems(folder)]:
        raise Refused(f"the reviews cannot be trusted: {problems[0]}; run casewise inspect {folder}")
    with file_lock(out / _LOCK, wait=False) as own:
        if own is None:
            raise Refused(f"{out} is being written by another process; wait for it, or choose another folder")
        _check_free(out, names)
        for path in (path for path in out.iterdir() if path.name != _LOCK):
            path.unlink()  # of a run that was killed
        found = _apply_all(predicted, out, names, log)
        (out / _LOCK).unlink(missing_ok=True)
    return found


def _apply_all(predicted: Predictions, out: Path, names: list[str], reviews: ReviewLog) -> list[Applied]:
    latest, lines = reviews.latest(), reviews.lines()
    log = Chain(out / APPLIED)
    log.append(STARTED, {"files": names})
    found = [
        Applied(case_id, "none", "its JSON file is missing; predict it again", open=True) for case_id in predicted.lost
    ]
    for one in found:
        log.append("applied", asdict(one))
    for case_id in predicted.cases:
        try:
            one = _applied(predicted, case_id, latest.get(case_id), out)
            one = replace(one, overruled=_overruled(lines, latest.get(case_id)))
        except CasewiseError as error:  # only this case fails
            one = Applied(case_id, "none", str(error), open=True)
        log.append("applied", asdict(one))
        found.append(one)
    log.append(FINISHED, {"cases": len(found)})
    return found


def _check_free(out: Path, names: Iterable[str]) -> None:
    """Refuse a folder that is not empty, except for files of an earlier unfinished run."""
    there = [path.name for path in out.iterdir()] if out.is_dir() else []
    if out.exists() and not out.is_dir():
        raise Refused(f"{out} is not a folder; reviewed masks need an empty folder")
    begun, ended = Chain(out / APPLIED).since(STARTED, FINISHED)
    own = {APPLIED, _LOCK, *names} if begun and not ended else {_LOCK}
    if not Chain(out / APPLIED).lines():
        own.add(APPLIED)  # empty or half a line: it was killed while it began
    foreign = [name for name in there if name not in own and not name.startswith(TEMPORARY)]
    if foreign:
        raise Refused(f"{out} is not empty ({foreign[0]}); reviewed masks need an empty folder")


def _overruled(lines: Iterable[Mapping[str, Any]], last: Mapping[str, Any] | None) -> str:
    """Return earlier different decisions about this output, as a clause; empty where all agree."""
    if last is None:
        return ""
    same = [line for line in lines if (line["case"], line["about"]) == (last["case"], last["about"])]
    said = {str(line["reviewer"]): str(line["decision"]) for line in same}
    return ", ".join(f"{who}: {DECISIONS[what]}" for who, what in said.items() if what != last["decision"])


def _applied(predicted: Predictions, case_id: str, line: dict[str, object] | None, out: Path) -> Applied:
    case = predicted.cases[case_id]
    if not case.has_masks:
        return Applied(case_id, "none", f"there is no output: {case.error}", open=True)
    reviewer = str((line or {}).get("reviewer") or "")
    if line is None:
        taken, why, undecided = "deployed", "nobody reviewed it", case.flagged
    elif line.get("about") != case.about:
        taken, why, undecided = "deployed", "the review is of an earlier output; review this one", True
    elif line["decision"] == "both-wrong":
        return Applied(case_id, "none", f"{reviewer} marked both masks as wrong: contour it again", reviewer, open=True)
    elif line["decision"] == "flag":
        taken, why, undecided = "deployed", f"{reviewer} flagged it", True
    elif line["decision"] == "keep-m0":
        taken, why, undecided = "m0", f"{reviewer} keeps the original mask", False
    elif line.get("adapted") == DEPLOYED:
        taken, why, undecided = "deployed", f"{reviewer} keeps the written mask", False
    else:
        taken, why, undecided = "adapted", f"{reviewer} keeps the new mask, state {line.get('adapted')}", False
    state = line.get("adapted") if line is not None else None
    path = predicted.file_of(case_id, taken, None if state is None else str(state))
    target = out / predicted.file_of(case_id, "deployed").name
    with replacing(target) as temporary:
        shutil.copyfile(path, temporary)
    return Applied(case_id, taken, why, reviewer, target.name, file_sha256(target), undecided)
