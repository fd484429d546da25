"""Write one case, or one more ladder of it, into an archive: a synced folder is renamed into place."""

from __future__ import annotations

import hashlib
import io
import math
import os
import platform
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from casewise.archive import layout
from casewise.archive.layout import Entry, packed
from casewise.core import durable
from casewise.core.durable import is_alive
from casewise.core.errors import BadInput, Mismatch, NotFinite
from casewise.core.formats import json_text
from casewise.core.records import Case, Mask, State, Trajectory


def write_case(path: Path, case: Case, trajectory: Trajectory, label: Mask | None = None) -> Entry:
    """Write one case atomically; return its entry, or the entry of a process that wrote it first."""
    masks = _masks(trajectory)
    if label is not None and label.shape != masks[State(0)].shape:
        raise BadInput(f"label of case {case.id} has shape {label.shape}, its masks {masks[State(0)].shape}; resample")
    files = {layout.MASKS: packed(layout.encode_masks(list(masks.values()))), layout.SIGNALS: _signals(trajectory)}
    if label is not None:
        files[layout.LABEL] = packed(layout.encode_masks([label]))
    entry = Entry(
        id=case.id, shape=tuple(masks[State(0)].shape), group=case.group, cluster=case.cluster, split=case.split,
        spacing_mm=None if case.spacing_mm is None else tuple(float(x) for x in case.spacing_mm),
        labelled=label is not None, label_sha256=None if label is None else layout.mask_sha256(label),
        input_sha256=layout.image_sha256(case.image), appearance=dict(trajectory.appearance),
        **_produced(trajectory, masks, files),
    )  # fmt: skip
    return _written(path, entry, files)


def write_ladder(path: Path, case: Entry, trajectory: Trajectory) -> Entry:
    """Add a ladder to a recorded case atomically; its M0 must be the M0 of the case."""
    masks = _masks(trajectory)
    files = {
        layout.MASKS: packed(layout.without_source(layout.encode_masks(list(masks.values())))),
        layout.SIGNALS: _signals(trajectory),
    }
    own = _produced(trajectory, masks, files)
    entry = replace(case, **own, ladder=trajectory.ladder)
    if wrong := entry.contradicts(case):
        raise Mismatch(
            f"{' and '.join(wrong)} of case {case.id} differs from that in {path}, so ladder "
            f"{trajectory.ladder!r} was not added; record it with the same model and images, or into another archive"
        )
    return _written(path, entry, files)


def _written(path: Path, entry: Entry, files: dict[str, bytes]) -> Entry:
    """Return the entry that is on disk afterwards, of this writer or of a faster one."""
    files[layout.ENTRY] = json_text(entry.as_dict()).encode()
    if _write_folder(path / layout.CASES / entry.place, files):
        return entry
    return Entry.from_dict(layout.read_json(path / layout.CASES / entry.place / layout.ENTRY))


def _masks(trajectory: Trajectory) -> dict[State, Mask]:
    plain = {State(step): mask for step, mask in enumerate(trajectory.masks)}
    return {**plain, **trajectory.shrunk}


def _signals(trajectory: Trajectory) -> bytes:
    """Return the signals of every state as a Parquet file."""
    ladder = {State(step): signals for step, signals in enumerate(trajectory.signals)}
    ladder |= {state: trajectory.shrunk_signals.get(state, {}) for state in trajectory.shrunk}
    names = sorted({name for signals in ladder.values() for name in signals})
    columns: dict[str, pa.Array] = {
        "step": pa.array([state.step for state in ladder], pa.int32()),
        "shrink": pa.array([state.shrink for state in ladder], pa.float64()),
    }
    for name in names:
        values = [_checked(trajectory.case_id, state, name, signals.get(name)) for state, signals in ladder.items()]
        columns[name] = pa.array(values, pa.float64())
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd", use_dictionary=False, write_statistics=False)
    return buffer.getvalue()


def _checked(case_id: str, state: State, name: str, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise NotFinite(f"signal {name} of case {case_id} at state {state} is {value}; None means not computable")
    return None if value is None else float(value)


def _produced(trajectory: Trajectory, masks: Mapping[State, Mask], files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the fields of an entry about how its masks were made and which files were written."""
    return {
        "seed": trajectory.seed,
        "made_by": trajectory.made_by,
        "seconds": tuple(float(x) for x in trajectory.seconds),
        "spent": {name: (round(took, 4), round(more, 3)) for name, (took, more) in trajectory.spent.items()},
        "diagnostics": tuple({k: float(v) for k, v in one.items()} for one in trajectory.diagnostics),
        "states": tuple(masks),
        "mask_sha256": {str(state): layout.mask_sha256(mask) for state, mask in masks.items()},
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        "rungs": trajectory.rungs,
        "fold": trajectory.fold,
        "trained_on": trajectory.trained_on,
    }


def sweep(path: Path) -> None:
    """Remove incomplete folders and files of killed writers; those of living writers stay."""
    durable.sweep(path)
    cases = path / layout.CASES
    for folder in (*cases.glob(f"{layout.HALF_WRITTEN}*"), *cases.glob(f"*/{layout.HALF_WRITTEN}*")):
        writer = folder.name.removeprefix(layout.HALF_WRITTEN).rpartition("-")[0]
        number = writer.rpartition("-")[2]
        if number.isdigit() and writer == _writer(int(number)) and not is_alive(int(number)):
            shutil.rmtree(folder, ignore_errors=True)


def _writer(process: int) -> str:
    return f"{platform.node()}-{process}"


def _write_folder(place: Path, files: Mapping[str, bytes]) -> bool:
    """Return True if this writer put the folder into place, False if another one was first."""
    parent = place.parent
    fresh = parent / f"{layout.HALF_WRITTEN}{_writer(os.getpid())}-{uuid.uuid4().hex}"
    fresh.mkdir(parents=True)
    try:
        for file, content in files.items():
            with (fresh / file).open("wb") as handle:
                handle.write(content)
                handle.flush()
                os.fsync(handle.fileno())
        durable.sync_folder(fresh)
        os.rename(fresh, place)
    except BaseException as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if isinstance(error, OSError) and (place / layout.ENTRY).exists():
            return False
        raise
    durable.sync_folder(parent)
    return True
