"""Check an archive: every file, every mask and the case list against their hashes.

For tuned weights it checks that no case was predicted by weights that were trained on its patient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from casewise.archive import layout
from casewise.archive.layout import Entry, case_table, ladders
from casewise.archive.store import Archive, open_archive
from casewise.core.durable import file_sha256
from casewise.core.errors import CasewiseError, UnsafeInput
from casewise.core.records import State
from casewise.core.registry import check_names_no_code


def verify(path: str | Path) -> list[str]:
    """Return the problems of an archive as sentences; an intact archive has none."""
    try:
        archive = open_archive(path)
    except CasewiseError as error:
        return [str(error)]
    return list(_problems(archive))


def _problems(archive: Archive) -> Iterator[str]:
    for facts in (archive.manifest, *archive.manifest.get("ladders", {}).values()):
        how = facts.get("configuration", {}).get("adaptation") or {}
        try:  # the objective may be code of the user; it is checked before it is used
            check_names_no_code({name: how[name] for name in how if name != "objective"}, where=layout.MANIFEST)
        except UnsafeInput as error:
            yield str(error)
    cases, seals = archive.cases or archive.entries, archive.manifest.get("cases", {})
    parts = {(name, case_id) for name, part in archive.parts.items() for case_id in part}
    later = {case_id for name, case_id in parts if name not in seals.get(case_id, {}).get("ladders", {})}
    if {*cases} - {*seals} | later or not seals:
        yield "incomplete: not all of its cases are in its list; the run was killed or is still running; repeat it"
    for case_id, sealed in seals.items():
        if cases[case_id].digest != sealed["sha256"]:
            yield f"case {case_id}: entry.json is not the one that was sealed"
        for ladder, digest in sealed.get("ladders", {}).items():
            if archive.parts[ladder][case_id].digest != digest:
                yield f"case {case_id}, ladder {ladder}: entry.json is not the one that was sealed"
    named = {ladder: archive.ladder(ladder) for ladder in archive.ladders if ladder}
    unnamed = archive.ladder("") if "" in archive.ladders else None
    for entry in cases.values():
        folder = archive.path / layout.CASES / entry.id
        found = list(_file_problems(folder, entry, {f"{layout.LADDER}{ladder}" for ladder in named}))
        steps = 0 if unnamed is None else unnamed.steps
        yield from found or _content_problems(unnamed or replace(archive, entries=cases), folder, entry, steps)
        for view in (view for view in named.values() if entry.id in view.entries):
            part = view.entries[entry.id]
            own = archive.path / layout.CASES / part.place
            problems = list(_file_problems(own, part)) or _content_problems(view, own, part, view.steps)
            yield from (f"ladder {part.ladder}, {problem}" for problem in problems)


def _file_problems(folder: Path, entry: Entry, ladders: Collection[str] = ()) -> Iterator[str]:
    for name, expected in entry.files.items():
        file = folder / name
        if not file.is_file():
            yield f"case {entry.id}: {name} is missing"
        elif file_sha256(file) != expected:
            yield f"case {entry.id}: {name} was changed or cut after it was written"
    known = {*entry.files, *ladders, layout.ENTRY}
    for name in sorted(file.name for file in folder.iterdir() if file.name not in known):
        if not name.startswith(layout.HALF_WRITTEN):  # a folder that a killed run left behind
            yield f"case {entry.id}: {name} does not belong to the archive"


def _content_problems(archive: Archive, folder: Path, entry: Entry, steps: int) -> Iterator[str]:
    try:
        masks = archive.masks(entry.id)
        rows = set(ladders(case_table(folder / layout.SIGNALS, entry.id).to_pandas())[entry.id])
    except (CasewiseError, KeyError) as error:
        yield f"case {entry.id}: {error}"
        return
    if (entry.cluster or entry.id) in entry.trained_on:
        yield f"case {entry.id}: its candidates come from weights ({entry.fold}) that were trained on its own patient"
    moved = any(digest != entry.mask_sha256[str(State(0))] for digest in entry.mask_sha256.values())
    if entry.made_by.startswith("tuned") and not entry.trained_on and moved:
        yield f"case {entry.id}: the patients that trained the weights of its candidates are not recorded"
    for state, mask in masks.items():
        if mask.shape != entry.shape or layout.mask_sha256(mask) != entry.mask_sha256.get(str(state)):
            yield f"case {entry.id}: the mask of state {state} is not the one that was recorded"
    if rows != set(entry.states):
        yield f"case {entry.id}: signals exist for {len(rows)} states, masks for {len(entry.states)}"
    expected = steps + 1
    if sum(not state.shrink for state in entry.states) != expected:
        yield f"case {entry.id}: a step is missing, {expected} masks from M0 on are expected"
