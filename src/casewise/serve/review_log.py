"""Decisions of reviewers: appended to reviews.jsonl and to the audit log, never edited; the last one of a case counts.

Both files are hash chains (:mod:`casewise.core.chain`). ``casewise calibrate --reviews`` reads reviews.jsonl.

:func:`apply_reviews` puts the decisions into effect: the mask that was chosen for each case, copied, with a log of why.
The prediction folder stays as it is. A review about another output than the one that lies there decides nothing.
"""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from casewise.core.brief import counted
from casewise.core.chain import Chain
from casewise.core.durable import file_sha256, held, replacing
from casewise.core.errors import BadInput, CasewiseError, Refused
from casewise.core.formats import csv_cell
from casewise.core.predicted import REVIEW, REVIEW_SET_ASIDE
from casewise.core.records import check_case_id
from casewise.run.prediction_folder import half_review, review_facts, review_problems
from casewise.serve.review_cases import DEPLOYED
from casewise.serve.review_sources import Predictions

REVIEWS = "reviews.jsonl"
LOCK = ".reviews.lock"
DECISIONS = ("keep-m0", "keep-adapted", "flag")
NAME_LENGTH, NOTE_LENGTH = 100, 500


@dataclass(frozen=True)
class Review:
    """One decision of one person about one output."""

    case: str
    decision: str  # keep-m0, keep-adapted or flag
    reviewer: str
    about: str  # sha256 of what was looked at
    adapted: str | None = None  # the adapted state that was looked at; None where its mask was not there
    note: str = ""

    def __post_init__(self) -> None:
        check_case_id(self.case)
        if self.decision not in DECISIONS:
            raise BadInput(f"a decision is one of {', '.join(DECISIONS)}, got {self.decision!r}")
        if not self.reviewer.strip() or len(self.reviewer) > NAME_LENGTH or not self.reviewer.isprintable():
            raise BadInput(f"a reviewer's name has 1 to {NAME_LENGTH} printable characters; enter yours first")
        if len(self.note) > NOTE_LENGTH:
            raise BadInput(f"a note has at most {NOTE_LENGTH} characters, got {len(self.note)}; shorten it")
        if any(character == "\0" or 0xD800 <= ord(character) < 0xE000 for character in self.note):
            raise BadInput("a note is text, this one holds halves of characters or NUL; write it again")


class Overtaken(Refused):
    """Somebody decided the case since the reviewer looked at it."""


@dataclass(frozen=True)
class ReviewLog:
    """reviews.jsonl of a folder, and the audit log that gets the same lines."""

    path: Path
    audit: Path | None = None

    @property
    def problems(self) -> list[str]:
        """What is wrong with the chains; empty where every line follows from the one before."""
        paths = [path for path in (self.path, self.audit) if path is not None]
        problems = [problem for path in paths for problem in Chain(path).problems]
        strange = sum(not _is_review(line) for line in self._events())
        return [*problems, *([f"{self.path.name} holds {counted(strange, 'line')} of no review"] if strange else [])]

    def check(self) -> None:
        """Refuse to append to a file that is something else."""
        for problem in self.problems:
            if problem.endswith("is not a line of a hash-chained log"):
                raise BadInput(f"{problem}; move the file away, or restore it, before reviewing")

    def append(self, review: Review, *, seen: str | None = None) -> None:
        """Write one decision, durably: the audit log first, then the reviews.

        ``seen`` is the hash of the decision that the reviewer saw, "" where she saw none: refused where another one
        was written since, unless it says the same, as one that was sent twice does.
        """
        with self._alone():
            last = self.latest().get(review.case, {})
            if seen is None or last.get("hash", "") == seen:
                self._write(REVIEW, asdict(review))
            elif any(last.get(name) != value for name, value in asdict(review).items()):
                raise Overtaken(
                    f"{last.get('reviewer', 'somebody')} decided {last.get('decision', 'that it is open')} for case "
                    f"{review.case} since you opened it; nothing was written. Decide again to overrule that"
                )

    def settle(self) -> list[str]:
        """Set aside a review that only the audit log holds, and say so; else say what is wrong with the logs.

        A process that is killed between the two logs leaves such a line, but anybody could have added it. So it decides
        nothing and is not lost: it stays where it is, both logs say what it said, and its case is open until a person
        decides it again.
        """
        if self.audit is None:
            return []
        folder = self.path.parent
        if half_review(folder) is None:
            return review_problems(folder)  # without the lock: a folder that may only be read can be looked at
        with self._alone():
            half = half_review(folder)
            if half is None:  # another process was writing it just then
                return review_problems(folder)
            facts = {"case": half.get("case"), "line": half["hash"], "review": review_facts(half)}
            self._write(REVIEW_SET_ASIDE, facts)
        said = f"{half.get('reviewer')} decided {half.get('decision')} for case {half.get('case')} ({half.get('time')})"
        return [
            f"{said}, but only {self.audit.name} holds it: the page was killed while it wrote, or the line was added. "
            "It is set aside; decide the case again"
        ]

    def _write(self, event: str, facts: Mapping[str, Any]) -> None:
        for path in (self.audit, self.path):
            if path is not None:
                Chain(path).append(event, facts)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The logs under one lock, from reading the last word to writing the next: no page overrules one unseen.

        A word on its way from one log to the other is not taken for half a one, either.
        """
        with held(self.path.with_name(LOCK), wait=True):
            yield

    def lines(self) -> list[dict[str, Any]]:
        """Every decision, oldest first; a line that is none decides nothing."""
        return [line for line in self._events() if _is_review(line)]

    def _events(self) -> list[dict[str, Any]]:
        return [line for line in Chain(self.path).lines() if line.get("event") == REVIEW]

    def latest(self) -> dict[str, dict[str, Any]]:
        """The last decision of each case; none of a case that is open again."""
        return {case: line for case, line in self._last().items() if line["event"] == REVIEW}

    def reopened(self) -> frozenset[str]:
        """Cases of which a review was set aside, and that nobody decided since."""
        return frozenset(case for case, line in self._last().items() if line["event"] == REVIEW_SET_ASIDE)

    def _last(self) -> dict[str, dict[str, Any]]:
        lines = Chain(self.path).lines()
        return {
            str(line.get("case")): line
            for line in lines
            if line.get("event") == REVIEW_SET_ASIDE or (line.get("event") == REVIEW and _is_review(line))
        }


def _is_review(line: Mapping[str, Any]) -> bool:
    """Whether a line says what a review says; anybody can write a line whose hash is right."""
    try:
        said = Review(**{one.name: line[one.name] for one in fields(Review)})
    except (KeyError, TypeError, AttributeError, CasewiseError):
        return False
    return isinstance(said.about, str) and isinstance(said.adapted, str | None)


COLUMNS = (
    "case", "decision", "reviewer", "time", "current", "note", "adapted", "group", "status", "action", "coordinate",
    "value", "risk", "about",
)  # fmt: skip


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table; a cell that a spreadsheet would take for a formula gets an apostrophe in front."""
    buffer = io.StringIO()
    table = csv.writer(buffer, lineterminator="\n")
    table.writerow(COLUMNS)
    table.writerows(["" if row.get(name) is None else csv_cell(row[name]) for name in COLUMNS] for row in rows)
    return buffer.getvalue()


APPLIED = "applied.jsonl"


@dataclass(frozen=True)
class Applied:
    """What became of one case."""

    case: str
    taken: str  # deployed, m0, adapted, or none where there was nothing to take
    why: str
    reviewer: str = ""
    mask: str = ""  # file name in the new folder
    sha256: str = ""
    open: bool = False  # a person still has to decide: flagged, or the review is about another output
    overruled: str = ""  # what other reviewers of this output had decided otherwise; the last decision counts


def apply_reviews(folder: Path, out: Path) -> list[Applied]:
    """Write the chosen mask of every case into ``out`` (a new folder) and a hash-chained log beside them."""
    if (folder / "manifest.json").is_file():
        raise BadInput(f"{folder} is an archive and holds no mask files; apply reviews to what casewise predict wrote")
    predicted = Predictions(folder)
    _check_empty(out)
    log = ReviewLog(folder / REVIEWS, predicted.audit)
    problems = [*log.problems, *review_problems(folder)]
    if problems:
        raise Refused(f"the reviews cannot be trusted: {problems[0]}; run casewise verify {folder}")
    latest, reopened, lines = log.latest(), log.reopened(), log.lines()
    _take(out)
    found = [Applied(case_id, "none", "its entry is gone; predict it again", open=True) for case_id in predicted.lost]
    for one in found:
        Chain(out / APPLIED).append("applied", asdict(one))
    for case_id in predicted.cases:
        try:
            one = _applied(predicted, case_id, latest.get(case_id), out, reopened=case_id in reopened)
            one = replace(one, overruled=_overruled(lines, latest.get(case_id)))
        except CasewiseError as error:  # one bad case costs no other its mask
            one = Applied(case_id, "none", str(error), open=True)
        Chain(out / APPLIED).append("applied", asdict(one))
        found.append(one)
    return found


def _check_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused(f"{out} is not empty; masks that a person chose go into a folder of their own")


def _take(out: Path) -> None:
    """The folder for this process alone: of several that found it empty, one begins the log and the others stop."""
    out.mkdir(parents=True, exist_ok=True)
    _check_empty(out)
    try:
        (out / APPLIED).open("x").close()
    except FileExistsError:
        raise Refused(f"{out} is being written by another process; wait for it, or choose another folder") from None


def _overruled(lines: Iterable[Mapping[str, Any]], last: Mapping[str, Any] | None) -> str:
    """Who decided otherwise about the same output before, and what, as a clause; empty where all agree."""
    if last is None:
        return ""
    same = [line for line in lines if (line["case"], line["about"]) == (last["case"], last["about"])]
    said = {str(line["reviewer"]): str(line["decision"]) for line in same}
    return ", ".join(f"{who} {what}" for who, what in said.items() if what != last["decision"])


def _applied(
    predicted: Predictions, case_id: str, line: dict[str, object] | None, out: Path, *, reopened: bool
) -> Applied:
    case = predicted.cases[case_id]
    if not case.has_masks:
        return Applied(case_id, "none", f"there is no output: {case.error}", open=True)
    reviewer = str((line or {}).get("reviewer") or "")
    if reopened:
        taken, why, undecided = "deployed", "a review that only one log held was set aside; decide again", True
    elif line is None:
        taken, why, undecided = "deployed", "nobody reviewed it", case.flagged
    elif line.get("about") != case.about:
        taken, why, undecided = "deployed", "the review is about another output; look at this one", True
    elif line["decision"] == "flag":
        taken, why, undecided = "deployed", f"{reviewer} flagged it", True
    elif line["decision"] == "keep-m0":
        taken, why, undecided = "m0", f"{reviewer} keeps M0", False
    elif line.get("adapted") == DEPLOYED:
        taken, why, undecided = "deployed", f"{reviewer} keeps what was deployed", False
    else:
        taken, why, undecided = "adapted", f"{reviewer} keeps the adaptation, state {line.get('adapted')}", False
    state = line.get("adapted") if line is not None else None
    path = predicted.file_of(case_id, taken, None if state is None else str(state))
    target = out / predicted.file_of(case_id, "deployed").name
    with replacing(target) as temporary:
        shutil.copyfile(path, temporary)
    return Applied(case_id, taken, why, reviewer, target.name, file_sha256(target), undecided)
