"""``casewise.compare``: compare two masks, two sequences of masks, or two folders with a verdict."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from sys import intern
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from casewise import __version__
from casewise.core.durable import json_sha256
from casewise.core.errors import BadInput
from casewise.core.records import check_shares
from casewise.core.registry import Registry
from casewise.core.text import UNIT
from casewise.data.dicom_masks import IMAGES, is_mask_folder, nifti_folders
from casewise.data.pairs import ENDINGS, KINDS, Pair, find_pairs, label_sets
from casewise.data.pairs import label_names as names_of_labels
from casewise.measure.changes import Comparison, label_name
from casewise.measure.comparison import comparison
from casewise.measure.masks import is_tensor
from casewise.measure.measures import Measure, check_names
from casewise.study.acceptance import MET, UNDECIDED, Check, checks_of, verdict_of
from casewise.study.clinical import MeasureResult, measure_checks, measure_results, volume_results
from casewise.study.compared_cohort import GOOD, ComparedCase, Comparisons, comparison_of
from casewise.study.compared_pairs import LOG, CompareCase, MadeOnDemand, Settings, case_log, compare_pairs
from casewise.study.plan import (
    ChangePlan,
    Seal,
    check_fits,
    log_opened,
    log_verdict,
    read_measures,
    read_plan,
    seal_plan,
)  # fmt: skip

if TYPE_CHECKING:
    from torch import Tensor

    from casewise.run.local import Engine

    Folder = str | os.PathLike[str]
    Array = NDArray[Any] | Tensor

ACCEPTED, FAILED, REJECTED, NOT_DECIDED = 0, 3, 4, 5
"""Exit codes: accepted (or no criteria), cases with problems, rejected, cannot be decided with so few patients."""

WRITTEN = ("summary.json", "summary.md", "junit.xml", "report.html", "cases.csv", "labels.csv", "regions.csv")
"""Files that a comparison writes to its folder beside cases.jsonl."""

BACKGROUND = ("background", "bg", "unlabeled", "unlabelled", "void")
"""Names of a label 0 that is not a class."""
Lines = Iterator[Mapping[str, Any]]


@dataclass(frozen=True)
class Problem:
    """A problem of one pair; an allowed problem does not change the exit code."""

    kind: str
    case: str
    message: str
    allowed: bool = False


@dataclass(frozen=True)
class Outcome:
    """The comparison of two folders: ``cases``, ``summary``, ``verdict`` and their sources."""

    found: Comparisons
    checks: tuple[Check, ...] = ()
    problems: tuple[Problem, ...] = ()
    pairs: int = 0
    names: Mapping[int, str] = field(default_factory=dict)  # names of the labels
    measures: tuple[MeasureResult, ...] = ()
    plan: ChangePlan | None = None
    seal: Seal | None = None
    hashes: Mapping[str, str] = field(default_factory=dict)  # sha256 of the folders, if there is a plan
    notes: tuple[str, ...] = ()  # sentences that belong before the verdict
    files: Mapping[str, Pair] = field(default_factory=dict, repr=False)
    settings: Settings = field(default_factory=Settings, repr=False)

    @property
    def cases(self) -> Sequence[ComparedCase]:
        """The compared cases by id."""
        return self.found.cases

    @property
    def summary(self) -> dict[str, Any]:
        """The cohort, its labels and groups in plain JSON types, with intervals by patient."""
        return self.found.summary

    @property
    def verdict(self) -> str:
        """``accepted``, ``rejected``, ``undecided`` (too few patients), or ``compared`` where there are no criteria."""
        return verdict_of(self.checks) if self.checks else "compared"

    @property
    def exit_code(self) -> int:
        """4 rejected, 5 undecided; else 3 where a case has a problem that was not allowed; else 0."""
        failed = FAILED if any(not problem.allowed for problem in self.problems) else ACCEPTED
        return {"rejected": REJECTED, "undecided": NOT_DECIDED}.get(self.verdict, failed)

    def as_dict(self) -> dict[str, Any]:
        """summary.json."""
        return {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "notes": list(self.notes),
            "plan": None if self.plan is None else self.plan.as_dict(),
            "seal": None if self.seal is None else asdict(self.seal),
            "hashes": dict(self.hashes),
            "pairs": self.pairs,
            "compared": len(self.found.cases),
            "problems": [asdict(problem) for problem in self.problems],
            "problems_by_kind": dict(sorted(Counter(problem.kind for problem in self.problems).items())),
            "checks": [check.as_dict() for check in self.checks],
            "measures": [asdict(one) for one in self.measures],
            "unit_spacing": self.settings.spacing_mm is None and self.found.cohort.unit_spacing,
            "names": {str(label): name for label, name in self.names.items()},
            "summary": self.found.summary,
            "worst_first": self.first_shown,
            "casewise": __version__,
        }

    @property
    def first_shown(self) -> list[str]:
        """The ids of all cases in the order to look at: decisions that changed first, then the most suspicious."""
        crossed = [case for one in self.measures for crossing in one.crossings for case in crossing.cases]
        return list(dict.fromkeys([*crossed, *self.found.worst_first_ids]))


@overload
def compare(old: Folder, new: Folder, label: None = None, **options: Any) -> Outcome: ...


@overload
def compare(old: Array, new: Array, label: Array | None = None, **options: Any) -> Comparison: ...


@overload
def compare(
    old: Iterable[Array], new: Iterable[Array], label: Iterable[Array] | None = None, **options: Any
) -> Comparisons: ...


def compare(old: Any, new: Any, label: Any = None, **options: Any) -> Comparison | Comparisons | Outcome:
    """Compare new masks with old ones; with labels, count the cases that became better and worse.

    Args:
        old: A mask, a sequence (or generator) of masks, or a folder with one mask per case.
        new: The new masks, in the same form.
        label: The true masks in the same form; ``labels=`` says the same, and folders take them so.
        **options: For masks, those of :func:`casewise.measure.comparison.comparison`. For sequences also ``ids``,
            ``clusters`` (patients), ``groups`` and ``good``. For folders those of :func:`compare_folders`.

    Returns:
        A :class:`Comparison` of two masks, :class:`Comparisons` of two sequences, or the :class:`Outcome` of two
        folders. The last has ``.cases``, ``.summary`` and ``.verdict``.

    Raises:
        BadInput: One side is a mask and the other is not, or the masks differ in shape.

    Example:
        >>> old = np.zeros((4, 6), np.uint8)
        >>> old[1:3, 1:5] = 1
        >>> new = old.copy()
        >>> new[1:3, 4] = 0
        >>> found = compare(old, new, old, min_area=1)
        >>> found.labels[0].drift, found.ha, round(found.change, 3)
        (-0.25, 1.0, -0.143)
        >>> compare([old, old], [new, old], [old, old], min_area=1).summary["hurt"]
        1
    """
    if isinstance(old, str | os.PathLike) and isinstance(new, str | os.PathLike):
        if label is not None:
            raise BadInput("for two folders give the labels as a folder: compare(old, new, labels=folder)")
        return compare_folders(old, new, **options)
    label = options.pop("labels", None) if label is None else label
    if _is_mask(old) and _is_mask(new):
        if options.keys() & {"ids", "clusters", "groups"}:
            raise BadInput("ids, clusters and groups need sequences of masks, not two single masks")
        return comparison(old, new, label, **options)
    if any(_is_mask(one) or isinstance(one, str | os.PathLike) for one in (old, new)):
        raise BadInput("compare takes two masks, two sequences of masks or two folders, got one of each")
    check_shares(good=(good := options.pop("good", GOOD)))
    who = {name: options.pop(name, None) for name in ("ids", "groups", "clusters")}
    given = (old, new) if label is None else (old, new, label)
    return Comparisons(tuple(_each(given, who, options)), good)


def _is_mask(given: Any) -> bool:
    return is_tensor(given) or (isinstance(given, np.ndarray) and given.dtype != object)


def _each(
    given: Sequence[Iterable[Any]], who: Mapping[str, Sequence[Any] | None], options: Mapping[str, Any]
) -> Iterable[ComparedCase]:
    """Compare case by case, so that generators are not held in memory."""
    ended = object()
    for at, masks in enumerate(zip_longest(*given, fillvalue=ended)):
        if any(mask is ended for mask in masks):
            raise BadInput(f"old, new and label must have equal numbers of masks; one of them ended after {at}")
        case_id, group, cluster = (None if of is None else of[at] for of in who.values())
        yield ComparedCase(str(at) if case_id is None else case_id, comparison(*masks, **options), group, cluster)


def compare_folders(
    old: Folder,
    new: Folder,
    *,
    labels: Folder | None = None,
    images: Folder | None = None,
    cases: Folder | None = None,
    names: Folder | None = None,
    plan: Folder | None = None,
    measures: Folder | None = None,
    label_names: str | None = None,
    zero_is_label: bool | None = None,
    allow: Sequence[str] = (),
    good: float = GOOD,
    out: Folder | None = None,
    engine: Engine | None = None,
    fresh: bool = False,
    progress: Callable[[Lines, int], Iterable[Any]] | None = None,
    **options: Any,
) -> Outcome:
    """Compare two folders of masks, case by case and label by label, and judge them by a plan where there is one.

    Args:
        old: Folder with the masks in use.
        new: Folder with the masks that may replace them, under the same names.
        labels: Folder with labels of the same names.
        images: Folder with images, for pictures.
        cases: CSV with case, group (site), cluster (patient) and scan (ED, ES).
        names: CSV with case, old, new (label, image) where file names differ.
        plan: ``plan.toml`` with criteria and measures; it is sealed before the new masks are opened.
        measures: ``measures.toml``, where there is no plan.
        label_names: Names of labels: ``1=LV,2=MYO`` or a dataset.json; by default the one beside the masks.
        zero_is_label: True if label 0 is a class; by default where it has a name other than background.
        allow: Kinds of problems that do not count as failures.
        good: A case at or above this metric is good; good before and not now is a flip.
        out: Folder for cases.jsonl, so that a repeated run compares only changed pairs; without it nothing is written.
        engine: Runs many pairs at a time; by default this process runs one after the other.
        fresh: Compare every pair again.
        progress: Called with the stream of results and their number; returns the stream to read.
        **options: Further fields of :class:`Settings`, such as ``metric`` or ``min_area``.

    Returns:
        The outcome; its ``verdict`` is ``compared`` without a plan.

    Raises:
        BadInput: The folders, the plan or an option cannot be used, or no pair can be compared.
    """
    check_shares(good=good)
    if out is not None:
        check_place(Path(out), [None if one is None else Path(one) for one in (old, new, labels, images)])
    judged_by = None if plan is None else read_plan(Path(plan))
    declared = () if judged_by is None else judged_by.measures
    if measures is not None:
        declared = (*declared, *read_measures(Path(measures)))
    given = {"labels": labels, "images": images, "cases": cases, "names": names}
    with ExitStack() as stack:
        keep = Path(stack.enter_context(TemporaryDirectory())) if out is None else Path(out) / "dicom"
        seal = None
        if judged_by is not None:
            log = None if out is None else Path(out) / LOG
            masks = _listed(Path(new))
            seal = seal_plan(judged_by, masks, compared_before=_is_younger(log, masks))
            if converts := is_mask_folder(Path(new)):  # reading DICOM masks opens them
                seal = log_opened(judged_by, seal)
        folders, places, refused = _readable(Path(old), Path(new), given, keep)
        found = find_pairs(folders[0], folders[1], **places)
        pairs = {pair.id: pair for pair in found}
        called, at_odds = names_of_labels(label_names, folders)
        check_names(declared, called)
        if judged_by is not None:
            check_fits(judged_by, found, called, labelled=labels is not None)
        zero = called.get(0, "background").lower().strip("_")
        settings = Settings(
            **options,
            zero_is_label=zero not in BACKGROUND if zero_is_label is None else zero_is_label,
            labels_given=labels is not None,
            hashed=judged_by is not None,
        )
        work = CompareCase(pairs, settings)
        if judged_by is not None and seal is not None and not converts:
            seal = log_opened(judged_by, seal)
        stream: Lines = compare_pairs(work, engine, None if out is None else Path(out), fresh=fresh)
        kept = []
        for line in stream if progress is None else progress(stream, len(pairs)):
            if out is None:
                kept.append(line)
    known = [("dataset.json", "labels", message) for message in at_odds]
    known += [(case_id, "unreadable", message) for case_id, message in refused.items()]
    outcome = outcome_of(
        kept if out is None else case_log(Path(out)), plan=judged_by, seal=seal, declared=declared, allow=allow,
        good=good, names=called, problems=known, files=pairs, settings=settings,
    )  # fmt: skip
    if judged_by is not None:
        log_verdict(judged_by, outcome.verdict, outcome.hashes)
    return outcome


def _listed(folder: Path) -> list[Path]:
    """List the masks of a folder without opening them; logs and pages beside them are left out."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    masks = [path for path in files if path.parent == folder and path.name.lower().endswith(ENDINGS)]
    return masks or [path for path in files if path.suffix.lower() in ("", ".dcm", ".ima")]


def _is_younger(log: Path | None, masks: Sequence[Path]) -> bool:
    """Return True if the log of a comparison is newer than the masks, so that it may have compared these masks."""
    if log is None or not log.is_file():
        return False
    return log.stat().st_mtime >= max((path.stat().st_mtime for path in masks if path.exists()), default=0.0)


def _readable(
    old: Path, new: Path, places: Mapping[str, Folder | None], keep: Path
) -> tuple[list[Path], dict[str, Path | None], dict[str, str]]:
    """Return the folders of old, new and labels, further inputs, and by case why a mask is left out.

    DICOM masks become NIfTI files in ``keep``.
    """
    given = {name: None if at is None else Path(at) for name, at in places.items()}
    read, patients, refused = nifti_folders([old, new, given["labels"]], keep, images=given["images"])
    folders = [folder for folder in read if folder is not None]
    if patients is not None:
        given["cases"] = given["cases"] or patients
        given["images"] = keep / IMAGES if (keep / IMAGES).is_dir() else given["images"]
    if given["labels"] is not None:
        given["labels"] = folders[2]
    return folders, given, refused


def check_place(out: Path, folders: Iterable[Path | None]) -> None:
    """Refuse to write among the inputs, or over files that no earlier comparison wrote."""
    for folder in folders:
        if folder is not None and os.path.realpath(out) == os.path.realpath(folder):
            raise BadInput(f"{out} holds inputs of this comparison; choose another folder with -o")
    there = [name for name in WRITTEN if (out / name).exists()]
    if there and not (out / LOG).exists():
        raise BadInput(
            f"{out} holds {', '.join(there)}, which casewise compare did not write and this run would replace; "
            f"choose another folder with -o"
        )


def outcome_of(
    lines: Sequence[Mapping[str, Any]], *, plan: ChangePlan | None = None, seal: Seal | None = None,
    declared: Sequence[Measure] = (), allow: Sequence[str] = (), good: float = GOOD,
    names: Mapping[int, str] | None = None, problems: Iterable[tuple[str, str, str]] = (),
    files: Mapping[str, Pair] | None = None, settings: Settings | None = None,
) -> Outcome:  # fmt: skip
    """Compute the summary, the verdict and the problems from the lines of all pairs, in any order.

    ``lines`` (those of :func:`case_log`) are read a few times and not kept. ``names`` are the names of the labels;
    ``problems`` are known before: (case, kind, message).
    """
    known = Registry("kind of problem", KINDS)
    allowed = {kind for kind in allow if known[kind]}
    settings, names = settings or Settings(), names or {}

    def case_at(at: int) -> ComparedCase:
        line = lines[at]
        found = comparison_of(line["comparison"])
        return ComparedCase(intern(line["case"]), found, line["group"], line["cluster"], line["scan"])

    compared, problems = [], list(problems)
    unread = {case_id for case_id, kind, _ in problems if kind == "unreadable"}
    hashes: dict[str, dict[str, str]] = {}
    for at, line in enumerate(lines):  # one by one, because a line is much larger than the numbers that are kept
        told = ("missing", "unlabelled") if line["case"] in unread else ()  # its file is there, and cannot be read
        problems += [(line["case"], one["kind"], one["message"]) for one in line["problems"] if one["kind"] not in told]
        unread.discard(line["case"])
        for side, sha256 in (line["sha256"] or {}).items():
            hashes.setdefault(side, {})[line["case"]] = sha256
        if line["comparison"] is not None:
            compared.append((line["case"], at))
    problems.sort(key=lambda problem: problem[0])
    if not compared:
        first = problems[0][2] if problems else "there is none"
        raise BadInput(f"none of {len(lines)} pairs could be compared; the first one: {first}")
    cases = MadeOnDemand(case_at, np.array([at for _, at in sorted(compared)], np.int64))
    cohort = Comparisons(cases, good)
    if settings.classes is None:
        only = label_sets(cohort.cohort.held, lambda label: label_name(label, names))
        problems += [(case_id, "labels", message) for case_id, message in only]
    labels = [number for number in cohort.label_numbers if number or not settings.zero_is_label]
    values, measured = measure_results(cases, declared, names)
    measured += volume_results(cohort.cohort, labels, names)
    folders = {side: json_sha256(dict(sorted(of.items()))) for side, of in hashes.items()}
    checks: tuple[Check, ...] = ()
    if plan is not None:
        checks = (*checks_of(plan.acceptance, cohort.cohort, names), *measure_checks(values, plan.measure_criteria))
        checks = (*checks, *_patients_check(plan, cohort))
    return Outcome(
        cohort, checks, tuple(Problem(kind, case_id, message, kind in allowed) for case_id, kind, message in problems),
        len(lines) + len(unread), names, tuple(measured), plan, seal, folders,
        () if plan is None or seal is None else tuple(_notes(plan, seal, folders)), files or {}, settings,
    )  # fmt: skip


def _patients_check(plan: ChangePlan, cohort: Comparisons) -> Iterator[Check]:
    """Check that there are as many labelled patients as the plan asks for."""
    if plan.patients is None:
        return
    row = cohort.summary
    there = row["labelled_clusters"] if "labelled" in row else row["clusters"]
    enough = there >= plan.patients
    yield Check(
        "patients", "all", f"{UNIT[1]} that the plan needs", plan.patients, 0.0, there, None, row["cases"], there, 0,
        MET if enough else UNDECIDED,
        f"the plan needs {plan.patients} {UNIT[1]}{' with labels' if 'labelled' in row else ''}, there are {there}",
        None if enough else plan.patients,
    )  # fmt: skip


def _notes(plan: ChangePlan, seal: Seal, folders: Mapping[str, str]) -> Iterator[str]:
    """Yield sentences that belong before the verdict: about the seal, and about other data than planned."""
    yield from seal.notes
    for side, sha256 in plan.data.items():
        found = folders.get("label" if side == "labels" else side)
        if found != sha256:
            what = "labels" if side == "labels" else f"{side} masks"
            yield f"the {what} differ from those of the plan (sha256 {(found or 'none')[:12]}, planned {sha256[:12]})"


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
