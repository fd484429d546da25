"""A prediction folder: its paths, which cases are complete, and whether files were changed.

OUT/<case>.nii.gz                     the deployed mask (or .png)
OUT/casewise/<case>.json              the entry of the case; written last, so a case with an entry is complete
OUT/casewise/source/<case>.nii.gz     M0, where something else was deployed
OUT/casewise/candidates/<case>/       every candidate, when asked for
OUT/casewise/overlays/<case>.png      M0, the last candidate, edits, deployed
OUT/audit.jsonl  OUT/summary.json  OUT/report.html
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from casewise import __version__
from casewise.archive.manifest import software
from casewise.core.chain import Chain
from casewise.core.durable import file_sha256, json_sha256, write_durably
from casewise.core.errors import CasewiseError, Refused
from casewise.core.formats import json_bytes, parsed_json
from casewise.core.json_records import read_json
from casewise.core.prediction_record import PredictedCase
from casewise.core.records import Decision
from casewise.core.text import pluralize
from casewise.data.folders import CaseFiles

if TYPE_CHECKING:
    from casewise.deployment import Deployment

PACKAGES = ("numpy", "torch", "nnunetv2", "monai", "transformers", "nibabel", "SimpleITK")
MASKS = (".nii", ".nii.gz", ".png")
MEASURED = "case-measured"  # event: the entry got measures over several scans of the patient


@dataclass(frozen=True)
class Layout:
    """Paths of a prediction folder."""

    out: Path
    ending: str  # of the masks

    @property
    def audit(self) -> Path:
        """The audit log."""
        return self.out / "audit.jsonl"

    def mask(self, case_id: str) -> Path:
        """The deployed mask."""
        return self.out / f"{case_id}{self.ending}"

    def entry(self, case_id: str) -> Path:
        """Entry of a case: decision and reason."""
        return self.out / "casewise" / f"{case_id}.json"

    def source(self, case_id: str) -> Path:
        """M0 where it was not deployed."""
        return self.out / "casewise" / "source" / f"{case_id}{self.ending}"

    def candidates(self, case_id: str) -> Path:
        """The folder of all candidates."""
        return self.out / "casewise" / "candidates" / case_id

    def overlay(self, case_id: str) -> Path:
        """The picture for a person."""
        return self.out / "casewise" / "overlays" / f"{case_id}.png"

    @property
    def claims(self) -> Path:
        """Return the process that works on each case at the moment."""
        return self.out / "casewise" / "running"

    def entries(self) -> list[Path]:
        """The entries of all cases, of other runs and parts too."""
        return sorted((self.out / "casewise").glob("*.json"))

    def forget(self, case_id: str) -> None:
        """Remove every file of a case, the entry first, so that an old mask is never taken for a new one."""
        for path in (self.entry(case_id), self.mask(case_id), self.source(case_id), self.overlay(case_id)):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.candidates(case_id), ignore_errors=True)


def versions() -> dict[str, str]:
    """Software versions."""
    return {**software(PACKAGES), "casewise": __version__}


def run_key(deployment: Deployment, options: Mapping[str, Any]) -> str:
    """sha256 over everything besides the image that the output depends on: an entry with another key is redone."""
    settings = {
        "seed": deployment.adaptation.seed,
        "steps": deployment.policy.steps,
        "device": deployment.device,
        "contract": deployment.contract,
        **options,
    }
    software = {name: version for name, version in versions().items() if name != "python"}
    bound = {"binding": asdict(deployment.binding), "policy": asdict(deployment.policy)}
    return json_sha256({**bound, "options": settings, "versions": software})


def input_hashes(files: CaseFiles) -> dict[str, str]:
    """sha256 of each image file by name; paths are left out for privacy."""
    return {path.name: file_sha256(path) for path in files.images}


def is_complete(layout: Layout, files: CaseFiles, key: str) -> bool:
    """True if a case need not be predicted again: unchanged run, inputs and outputs."""
    entry = read_entry(layout.entry(files.id))
    if entry is None or not entry.is_done or entry.key != key:
        return False
    try:
        if entry.inputs != input_hashes(files):
            return False
        return all(file_sha256(layout.out / name) == digest for name, digest in entry.outputs.items())
    except OSError:
        return False


def check_replaceable(layout: Layout, case_ids: Iterable[str]) -> None:
    """Refuse to replace masks that casewise did not write or that were edited since, such as labels."""
    there = [case_id for case_id in case_ids if layout.mask(case_id).is_file()]
    begun = _begun(layout.audit) if there else frozenset()
    foreign = [layout.mask(case_id).name for case_id in there if case_id not in begun and not _is_own(layout, case_id)]
    refuse_foreign(layout.out, foreign, ", or add --set overwrite=true to lose them")


def refuse_foreign(out: Path, foreign: Sequence[str], remedy: str = "") -> None:
    """Refuse to replace masks that casewise did not write or that were edited since, if there are any."""
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise Refused(
            f"{out} holds {', '.join(foreign[:3])}{more}, which casewise did not write or which changed since; "
            f"this run would replace them. Choose another folder with -o{remedy}"
        )


def _is_own(layout: Layout, case_id: str) -> bool:
    entry, mask = read_entry(layout.entry(case_id)), layout.mask(case_id)
    return entry is not None and file_sha256(mask) == entry.outputs.get(mask.name)


def _begun(audit: Path) -> frozenset[str]:
    """Cases that a run started and did not finish; a mask of such a case without an entry was written by that run."""
    found: set[str] = set()
    for event in Chain(audit).lines():
        if event.get("event") == "run-started":
            found |= set(map(str, event.get("to_do", ())))
        elif event.get("event") in ("case", "case-kept"):
            found.discard(str(event.get("case")))
    return frozenset(found)


def unfinished(out: Path) -> list[str]:
    """Cases that a run started and that have no entry: the run was killed or is still running."""
    return sorted(case for case in _begun(out / "audit.jsonl") if not Layout(out, "").entry(case).is_file())


def write_entry(layout: Layout, entry: PredictedCase) -> None:
    """Write the entry of a case atomically."""
    write_durably(layout.entry(entry.case), json_bytes(entry.as_dict()))


def read_entry(path: Path) -> PredictedCase | None:
    """An entry, or None where there is none that can be read."""
    try:
        return PredictedCase.from_dict(read_json(path))
    except (OSError, CasewiseError):
        return None


def decisions_in(out: Path) -> list[Decision]:
    """Return the decisions of a prediction folder, in the order in which the log has their cases."""
    lines = Chain(out / "audit.jsonl").lines()
    cases = dict.fromkeys(str(line.get("case")) for line in lines if line["event"] == "case")
    entries = [read_entry(Layout(out, "").entry(case)) for case in cases]
    return [entry.decision for entry in entries if entry is not None and entry.decision is not None]


def verify_predictions(out: Path, report: Path | None = None) -> list[str]:
    """Return the problems of a prediction folder; an empty list if there are none.

    ``report`` is the file of ``casewise predict --set report=FILE``, kept elsewhere: it holds the length and
    the last hash of the log, so that a truncated or rewritten log is noticed.
    """
    for log, started, finished in COPIES:
        if Chain(out / log).since(started, finished)[0]:
            return _copy_problems(out, log, started, finished)
    audit = out / "audit.jsonl"
    if not audit.is_file():
        return [f"{out} has no audit.jsonl; it is not a prediction folder"]
    entries = {path.name: read_entry(path) for path in Layout(out, "").entries()}
    readable = [entry for entry in entries.values() if entry is not None]
    problems = [*log_problems(audit), *_unlisted(out, readable), *_pages(out, audit)]
    if left := unfinished(out):
        cases = pluralize(len(left), "case that was", "cases that were")
        problems.append(
            f"{cases} begun {'has' if len(left) == 1 else 'have'} no result (such as {left[0]}): the run was "
            f"killed or is still running; repeat the command with --continue_prediction"
        )
    last, ended = Chain(audit).since("run-started", "pages")
    if not left and not ended and last[0].get("page"):
        problems.append(f"{out} is incomplete: its run was killed; repeat the command with --continue_prediction")
    if report is not None:
        problems += _against_report(out, audit, report)
    problems += [f"{name} cannot be read" for name, entry in entries.items() if entry is None]
    for entry in readable:
        problems += _faults(out, entry.outputs)
    return [*problems, *_against_log(out, audit)]


COPIES = (
    ("audit.jsonl", "take-over-started", "take-over-finished"),
    ("applied.jsonl", "apply-started", "apply-finished"),
)
"""Folders of chosen masks: their log, and the events that begin and end a run."""


def _copy_problems(out: Path, log: str, started: str, finished: str) -> list[str]:
    """Return the problems of a folder of chosen masks: its log, a run that was killed, and files that are not as
    logged."""
    lines, ended = Chain(out / log).since(started, finished)
    problems = log_problems(out / log)
    if not ended:
        problems.append(f"{out} is incomplete: the run was killed or is still running; repeat the command")
    files = {str(line.get("file") or line.get("mask")): str(line["sha256"]) for line in lines if line.get("sha256")}
    unlisted = (path.name for path in sorted(out.iterdir()) if path.name.lower().endswith(MASKS))
    problems += [f"{name} is a mask that the log does not name" for name in unlisted if name not in files and ended]
    return [*problems, *_faults(out, files)]


def review_problems(folder: Path) -> list[str]:
    """Return the problems of the log of reviewers' decisions."""
    reviews = folder / "reviews.jsonl"
    return log_problems(reviews) if reviews.is_file() else []


def log_problems(path: Path) -> list[str]:
    """Return the problems of a hash-chained log, an incomplete last line included."""
    log = Chain(path)
    torn = f"{path.name} ends with half a line, because its process was killed; the next run removes it"
    return [*log.problems, *([torn] if log.torn else [])]


def _faults(out: Path, outputs: Mapping[str, str]) -> Iterator[str]:
    """Say which files are missing or differ from their hash."""
    for name, digest in outputs.items():
        if not (out / name).is_file():
            yield f"{name} is missing"
        elif file_sha256(out / name) != digest:
            yield f"{name} was changed after it was written"


def _unlisted(out: Path, entries: Iterable[PredictedCase]) -> Iterator[str]:
    """Masks without an entry: added by other software, or their entry was deleted."""
    listed = {name for entry in entries for name in entry.outputs}
    for path in sorted(out.iterdir()):
        if path.is_file() and path.name.lower().endswith(MASKS) and path.name not in listed:
            yield f"{path.name} is a mask without an entry"


def _pages(out: Path, audit: Path) -> Iterator[str]:
    """Compare page and summary with the hashes in the log."""
    for event in [event for event in Chain(audit).lines() if event.get("event") == "pages"][-1:]:
        files = event.get("files")
        yield from _faults(out, files if isinstance(files, dict) else {})


def _against_report(out: Path, audit: Path, report: Path) -> Iterator[str]:
    try:
        told = parsed_json(report.read_text(encoding="utf-8"))
        lines, last, files = int(told["audit"]["lines"]), told["audit"]["last_hash"], map(str, told["output_files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"{report} is not a report of casewise predict ({error})"
        return
    found = Chain(audit).lines()
    if len(found) < lines:
        yield f"{audit.name} was truncated: the report has {lines} lines, the log {len(found)}"
    elif lines > 0 and found[lines - 1]["hash"] != last:
        yield f"{audit.name} was replaced: its line {lines} is not that of the report"
    yield from (f"{name} is missing, but the report names it" for name in files if not (out / name).is_file())


def _against_log(out: Path, audit: Path) -> list[str]:
    logged: dict[str, str] = {}
    for event in Chain(audit).lines():
        if event.get("event") in ("case", "case-kept", MEASURED):
            logged[str(event.get("case"))] = str(event.get("entry"))
    files = {path.stem: path for path in Layout(out, "").entries()}
    unlogged = [f"casewise/{case_id}.json has no line in the audit log" for case_id in files if case_id not in logged]
    return unlogged + [
        f"casewise/{case_id}.json is not the file that the audit log names"
        for case_id, digest in sorted(logged.items())
        if case_id not in files or file_sha256(files[case_id]) != digest
    ]
