"""Make an archive from masks of other software: other methods, foundation models, an earlier study (S6).

    MASKS/<case>/step_0.*  ...  step_K.*     the source and every step; .nii.gz, .nii, .npy or .png
    MASKS/<case>/step_2~0.5.*                optional: step 2, half the way back to the source
    LABELS/<case>.*                          optional
    signals.csv                              optional: case, step, then one column a signal (blank: not computable)
    groups.csv                               optional: case, group, cluster, split

Reading a file and measuring fragmentation are given as functions, so this file knows neither formats nor regions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from casewise.archive.store import Archive
from casewise.core.errors import BadInput, UnsafeInput
from casewise.core.formats import as_shaped, read_csv
from casewise.core.records import Case, Mask, Signals, State, Trajectory, check_case_id

ReadMask = Callable[[Path], tuple[Mask, tuple[float, ...] | None]]
"""(mask, spacing in mm or None) of a file."""

Compare = Callable[[Mask, Mask], Signals]
"""Label-free signals of (source, adapted)."""

_STEP = re.compile(r"step_(\d+)(?:~(0?\.\d+))?\.(?:nii\.gz|nii|npy|png)")
_ENDINGS = (".nii.gz", ".nii", ".npy", ".png")


@dataclass(frozen=True)
class Found:
    """The files of one case."""

    id: str
    states: Mapping[State, Path]
    label: Path | None

    @property
    def steps(self) -> int:
        """The horizon K."""
        return max(state.step for state in self.states)


def find_masks(masks: Path, labels: Path | None = None) -> tuple[Found, ...]:
    """Find the cases of a folder of masks; a missing step or different numbers of steps are errors."""
    if not masks.is_dir():
        raise BadInput(f"{masks} is not a folder; expected {masks}/<case>/step_0.nii.gz and so on")
    found = tuple(_case(folder, labels) for folder in sorted(masks.iterdir()) if folder.is_dir())
    if not found:
        raise BadInput(f"{masks} holds no case; expected {masks}/<case>/step_0.nii.gz and so on")
    horizons = {case.steps for case in found}
    if len(horizons) > 1:
        few = min(found, key=lambda case: case.steps)
        raise BadInput(
            f"cases have {sorted(horizons)} steps; case {few.id} ends at step {few.steps}. give all "
            f"cases the same number"
        )
    return found


def import_masks(
    archive: Archive, cases: tuple[Found, ...], *, read: ReadMask, compare: Compare, signals: Path | None = None,
    groups: Path | None = None, made_by: str = "imported",
) -> Iterator[str]:  # fmt: skip
    """Add each case to the archive and yield its id; existing cases are skipped."""
    more = {} if signals is None else _read_signals(signals)
    who = {} if groups is None else {row["case"]: row for row in _rows(groups, {"case"})}
    for found in cases:
        if found.id not in archive.entries:
            _add(archive, found, read, compare, more.get(found.id, {}), who.get(found.id, {}), made_by)
        yield found.id


def _case(folder: Path, labels: Path | None) -> Found:
    check_case_id(folder.name)
    states: dict[State, Path] = {}
    for file in sorted(folder.iterdir()):
        if match := _STEP.fullmatch(file.name):
            state = State(int(match[1]), float(match[2] or 0))
            if state in states:
                raise BadInput(
                    f"case {folder.name} has state {state} twice: {states[state].name} and {file.name}; keep one"
                )
            states[state] = _inside(file, folder.parent)
    steps = sorted(state.step for state in states if not state.shrink)
    if len(steps) < 2 or steps != list(range(len(steps))):
        have = ", ".join(map(str, steps)) or "none"
        raise BadInput(f"case {folder.name} needs step_0, step_1, ... without a gap, it has {have}")
    return Found(folder.name, states, None if labels is None else _label(folder.name, labels))


def _label(case_id: str, labels: Path) -> Path:
    for ending in _ENDINGS:
        file = labels / f"{case_id}{ending}"
        if file.is_file():
            return _inside(file, labels)
    raise BadInput(f"there is no label of case {case_id} in {labels}; expected {case_id}.nii.gz, .nii, .npy or .png")


def _inside(file: Path, root: Path) -> Path:
    if not file.resolve().is_relative_to(root.resolve()):
        raise UnsafeInput(f"{file} points outside of {root}; copy the file instead of linking to it")
    return file


def _add(
    archive: Archive, found: Found, read: ReadMask, compare: Compare, more: Mapping[State, Signals],
    who: Mapping[str, str], made_by: str,
) -> None:  # fmt: skip
    masks, spacing = {}, None
    for state in sorted(found.states):
        masks[state], spacing = read(found.states[state])
    source = masks[State(0)]
    measured = {state: {**compare(source, mask), **more.get(state, {})} for state, mask in _same_shape(found, masks)}
    plain = [State(step) for step in range(found.steps + 1)]
    shrunk = [state for state in masks if state.shrink]
    trajectory = Trajectory(
        found.id, tuple(masks[state] for state in plain), tuple(measured[state] for state in plain),
        shrunk={state: masks[state] for state in shrunk}, shrunk_signals={state: measured[state] for state in shrunk},
        made_by=made_by,
    )  # fmt: skip
    told = {name: who.get(name) or None for name in ("group", "cluster", "split")}
    case = Case(found.id, np.empty((1, 0)), spacing_mm=spacing, **told)
    archive.add(case, trajectory, None if found.label is None else as_shaped(read(found.label)[0], source))


def _same_shape(found: Found, masks: Mapping[State, Mask]) -> Iterator[tuple[State, Mask]]:
    shape = masks[State(0)].shape
    for state, mask in masks.items():
        if mask.shape != shape:
            raise BadInput(f"case {found.id}: step 0 has shape {shape}, state {state} has {mask.shape}; resample")
        yield state, mask


def _read_signals(path: Path) -> dict[str, dict[State, Signals]]:
    found: dict[str, dict[State, Signals]] = {}
    for row in _rows(path, {"case", "step"}):
        state = State(int(row["step"]), float(row.get("shrink") or 0))
        values = {
            name: _number(path, name, text) for name, text in row.items() if name not in ("case", "step", "shrink")
        }
        found.setdefault(row["case"], {})[state] = values
    return found


def _number(path: Path, name: str, text: str) -> float | None:
    try:
        return float(text) if text.strip() else None
    except ValueError:
        raise BadInput(
            f"{path}: signal {name} holds {text!r}, which is not a number; leave the cell empty if it is unknown"
        ) from None


def _rows(path: Path, needed: set[str]) -> list[dict[str, str]]:
    rows = read_csv(path)
    if not rows or not needed <= set(rows[0]):
        raise BadInput(f"{path} needs a header with {', '.join(sorted(needed))} and at least one row")
    return rows
