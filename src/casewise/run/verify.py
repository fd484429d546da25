"""A prediction folder against its own records: the audit chain, each entry, and the bytes of each output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from casewise.core.chain import Chain
from casewise.core.durable import file_sha256
from casewise.run.entry import read_entry

_OWN = ("time", "previous", "hash")  # what a line has of its own log


def verify_predictions(out: Path) -> list[str]:
    """What is wrong with a prediction folder; an empty list where nothing is."""
    audit = out / "audit.jsonl"
    if not audit.is_file():
        return [f"{out} has no audit.jsonl; it is no prediction folder"]
    problems = log_problems(audit)
    for path in sorted((out / "casewise").glob("*.json")):
        entry = read_entry(path)
        if entry is None:
            problems.append(f"{path.name} cannot be read")
            continue
        problems += [f"{name} {fault}" for name, fault in _faults(out, entry.get("outputs", {}))]
    return [*problems, *_against_log(out, audit)]


def review_problems(folder: Path) -> list[str]:
    """What is wrong with the reviewers' decisions: a chain of their own, and the same ones in the audit log."""
    reviews, audit = folder / "reviews.jsonl", folder / "audit.jsonl"
    if not reviews.is_file():
        return []
    problems = log_problems(reviews)
    if audit.is_file() and _decisions(reviews) != _decisions(audit):
        problems.append("reviews.jsonl and audit.jsonl do not hold the same reviews: added or removed")
    return problems


def log_problems(path: Path) -> list[str]:
    """What is wrong with a hash-chained log, half a line at its end included."""
    log = Chain(path)
    torn = f"{path.name} ends with half a line: its writer was killed; the next one cuts it off"
    return [*log.problems, *([torn] if log.torn else [])]


def _decisions(log: Path) -> list[dict[str, object]]:
    events = [event for event in Chain(log).lines() if event.get("event") == "review"]
    return [{name: value for name, value in event.items() if name not in _OWN} for event in events]


def _faults(out: Path, outputs: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, digest in outputs.items():
        if not (out / name).is_file():
            yield name, "is missing"
        elif file_sha256(out / name) != digest:
            yield name, "was changed after it was written"


def _against_log(out: Path, audit: Path) -> list[str]:
    logged: dict[str, str] = {}
    for event in Chain(audit).lines():
        if event.get("event") in ("case", "case-kept"):
            logged[str(event.get("case"))] = str(event.get("entry"))
    return [
        f"casewise/{case_id}.json is not the entry that the audit log saw"
        for case_id, digest in sorted(logged.items())
        if not (out / "casewise" / f"{case_id}.json").is_file()
        or file_sha256(out / "casewise" / f"{case_id}.json") != digest
    ]
