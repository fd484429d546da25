"""Layout of an archive on disk (schema 3).

    ARCHIVE/
      manifest.json             schema, origin of each ladder, horizon, configuration, software; the sealed cases
      cases/<id>/entry.json     the case: group, cluster, split, geometry, seed, sha256 of every file and every mask
      cases/<id>/signals.parquet    one row for each state: step, shrink, then the label-free signals
      cases/<id>/masks.npz      M0 whole, as runs; every other state as a sparse difference from M0
      cases/<id>/label.npz      optional, apart from everything that a controller may see
      cases/<id>/ladder-<name>/     one more ladder of the case: entry.json, signals.parquet, masks.npz without M0, ...
      .lock                     held while the manifest is read, changed and written
      cache/                    derived tables, named by the hash of their source; may be deleted

The files of a case itself hold M0 and, where the archive has one, the unnamed ladder. A case, and each named ladder of
it, is written into a folder ``.new-...`` and renamed, so it exists completely or not at all.

Arrays are stored as .npz without pickle; an array that would not fit in memory is refused before it is opened.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from casewise.core import json_records
from casewise.core.durable import json_sha256, replacing
from casewise.core.errors import BadInput, DamagedArchive, UnsafeInput
from casewise.core.formats import npy_array
from casewise.core.json_records import from_plain
from casewise.core.records import Mask, Signals, State, check_case_id

SCHEMA = 3
MANIFEST, CASES, CACHE, LOCK = "manifest.json", "cases", "cache", ".lock"
ENTRY, SIGNALS, MASKS, LABEL = "entry.json", "signals.parquet", "masks.npz", "label.npz"
HALF_WRITTEN, LADDER = ".new-", "ladder-"
LARGEST_MASK = 2**32  # voxels; 1,600 cubed


@dataclass(frozen=True)
class Entry:
    """The entry of one archived case, as in ``entry.json``."""

    id: str
    shape: tuple[int, ...]
    group: str | None = None
    cluster: str | None = None
    split: str | None = None
    spacing_mm: tuple[float, ...] | None = None
    labelled: bool = False  # True if a label is stored
    label_sha256: str | None = None
    input_sha256: str | None = None
    seed: int = 0
    made_by: str = ""
    seconds: tuple[float, ...] = ()
    spent: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # by signal: ms of a reading, MiB of peak
    diagnostics: tuple[Mapping[str, float], ...] = ()
    states: tuple[State, ...] = ()
    mask_sha256: Mapping[str, str] = field(default_factory=dict)  # by str(state)
    files: Mapping[str, str] = field(default_factory=dict)  # sha256 by file name
    ladder: str = ""  # name of the ladder, if the archive holds several; its files are then in a separate folder
    rungs: tuple[str, ...] = ()  # names of the steps after M0, if they are not updates
    fold: str = ""  # tuned weights that made the candidates: "fold-2", "mean"
    trained_on: tuple[str, ...] = ()  # patients whose labels trained those weights
    appearance: Mapping[str, float] = field(default_factory=dict)  # appearance of the image for the model

    @property
    def digest(self) -> str:
        """Return the sha256 of the entry without its wall time; it covers all files of the case through ``files``."""
        plain = {name: value for name, value in self.as_dict().items() if name not in ("seconds", "spent")}
        return json_sha256(plain)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types; empty optional fields are left out."""
        plain = {name: value for name, value in asdict(self).items() if value or name not in _ONLY_SOME}
        return {**plain, "states": [state.as_dict() for state in self.states]}

    @property
    def place(self) -> str:
        """The folder of its files, below the folder ``cases``."""
        return f"{self.id}/{LADDER}{self.ladder}" if self.ladder else self.id

    def contradicts(self, case: Entry) -> list[str]:
        """Return the facts in which this ladder differs from its case: fields of the case, and M0."""
        facts = ("id", "shape", "spacing_mm", "labelled", "label_sha256", "input_sha256")
        wrong = [name for name in facts if getattr(self, name) != getattr(case, name)]
        source = str(State(0))
        return wrong + (["M0"] if self.mask_sha256.get(source) != case.mask_sha256.get(source) else [])

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Entry:
        """The inverse of :meth:`as_dict`."""
        entry = from_plain(cls, plain, "entry.json")
        check_case_id(entry.id)
        return entry


_ONLY_SOME = ("ladder", "rungs", "spent", "fold", "trained_on", "appearance")


def compact_mask(mask: Mask) -> Mask:
    """Return labels as the smallest unsigned integer type; refuse arrays that are not label maps."""
    if mask.dtype in (np.uint8, np.bool_):
        return np.ascontiguousarray(mask).view(np.uint8)
    if mask.dtype.kind not in "ui":
        raise BadInput(f"a mask must have integers or booleans, got {mask.dtype}; take the argmax or threshold first")
    if mask.size and (mask.min() < 0 or mask.max() > 65535):
        raise BadInput(f"labels must be from 0 to 65535, got {mask.min()}..{mask.max()}; map void labels to 255")
    return np.ascontiguousarray(mask, dtype=np.uint8 if not mask.size or mask.max() < 256 else np.uint16)


def mask_sha256(mask: Mask) -> str:
    """sha256 of a mask's shape and labels, the same for every integer type that holds them (E13)."""
    compact = compact_mask(mask)
    digest = hashlib.sha256(repr(tuple(compact.shape)).encode())
    digest.update((compact if compact.dtype == np.uint8 else compact.astype("<u2")).data)
    return digest.hexdigest()


def image_sha256(image: NDArray[Any]) -> str | None:
    """Return the sha256 of an image's values, which identifies a case under any name; None without an image."""
    whole = np.ascontiguousarray(image)
    return hashlib.sha256(whole.tobytes()).hexdigest() if whole.size else None


def encode_masks(masks: Sequence[Mask]) -> dict[str, NDArray[Any]]:
    """M0 as runs of equal labels; every other mask where it differs from M0, as gaps between positions and labels."""
    source, *others = (compact_mask(mask).ravel() for mask in masks)
    starts = np.flatnonzero(np.diff(source, prepend=source[0] ^ 1)) if source.size else np.empty(0, np.int64)
    parts = [(np.diff(starts, append=source.size), source[starts])]
    for mask in others:
        at = np.flatnonzero(mask != source)
        parts.append((np.diff(at, prepend=0), mask[at]))
    return {
        "counts": np.array([len(labels) for _, labels in parts], dtype=np.int64),
        "lengths": np.concatenate([lengths for lengths, _ in parts]).astype(np.uint32),
        "labels": np.concatenate([labels for _, labels in parts]),
    }


def without_source(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Remove M0 from encoded masks; the case stores it once for all ladders."""
    runs = int(arrays["counts"][0])
    counts = np.concatenate([[0], arrays["counts"][1:]]).astype(np.int64)
    return {"counts": counts, "lengths": arrays["lengths"][runs:], "labels": arrays["labels"][runs:]}


def with_source(arrays: Mapping[str, NDArray[Any]], case: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Add M0 from the encoded masks of the case: the inverse of :func:`without_source`."""
    runs = int(case["counts"][0])
    return {
        "counts": np.concatenate([[runs], arrays["counts"][1:]]).astype(np.int64),
        "lengths": np.concatenate([case["lengths"][:runs], arrays["lengths"]]),
        "labels": np.concatenate([case["labels"][:runs], arrays["labels"]]),
    }


def decode_masks(
    arrays: Mapping[str, NDArray[Any]], shape: tuple[int, ...], wanted: Collection[int]
) -> dict[int, Mask]:
    """The inverse of :func:`encode_masks`: the wanted masks, and M0, by their place in the list."""
    ends = np.cumsum(arrays["counts"])
    runs = slice(0, ends[0])
    _check_runs(arrays["lengths"][runs], shape)
    source = np.repeat(arrays["labels"][runs], arrays["lengths"][runs]).reshape(shape)
    masks = {0: source}
    for place, end in enumerate(ends[1:], start=1):
        if place in wanted:
            part = slice(ends[place - 1], end)
            masks[place] = mask = source.copy()
            mask.reshape(-1)[np.cumsum(arrays["lengths"][part], dtype=np.int64)] = arrays["labels"][part]
    return masks


def _check_runs(lengths: NDArray[Any], shape: tuple[int, ...]) -> None:
    """Refuse runs that do not fill the mask exactly, before memory is allocated."""
    voxels, asked = math.prod(shape), int(lengths.sum(dtype=np.float64))
    if voxels > LARGEST_MASK or min(shape, default=0) < 0:
        raise UnsafeInput(f"a mask of shape {shape} has {voxels:,} voxels, at most {LARGEST_MASK:,} are read")
    if asked != voxels:
        raise DamagedArchive(f"the runs of a mask of shape {shape} fill {asked:,} voxels instead of {voxels:,}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of an archive; an error names the damaged file."""
    try:
        return json_records.read_json(path, "restore it or record the case again")
    except FileNotFoundError:
        raise DamagedArchive(f"{path} is missing; {path.parent} may not be an archive; record or import one") from None
    except (BadInput, OSError) as error:
        raise DamagedArchive(str(error)) from error


def measure_words(*, min_area: int, foreground: bool, connectivity: str = "face") -> str:
    """Return the options of the measure as the text of a binding."""
    return f"min_area={min_area} foreground={foreground} connectivity={connectivity}"


def measure_options(words: str) -> dict[str, Any]:
    """The inverse of :func:`measure_words`.

    >>> measure_options(measure_words(min_area=16, foreground=True))
    {'min_area': 16, 'foreground': True, 'connectivity': 'face'}
    """
    said = dict(part.split("=", 1) for part in words.split() if "=" in part)
    try:
        return {
            "min_area": int(said["min_area"]),
            "foreground": {"True": True, "False": False}[said["foreground"]],
            "connectivity": said["connectivity"],
        }
    except (KeyError, ValueError):
        raise BadInput(f"a measure must have min_area, foreground and connectivity, got {words!r}") from None


LARGEST_BYTES = 16 << 30
_FLAT = re.compile(  # first bytes of a flat array of numbers, as nearly all arrays of an archive are
    rb"\x93NUMPY\x01\x00..\{'descr': '([|<][buif][1248])', 'fortran_order': False, 'shape': \((\d+),\), \} *\n", re.S
)


def packed(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The bytes of a compressed .npz; equal arrays give equal bytes."""
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise UnsafeInput(f"array {name!r} has Python objects; an archive stores only numbers")
    buffer = io.BytesIO()
    named: dict[str, Any] = dict(arrays)
    np.savez_compressed(buffer, **named)
    return buffer.getvalue()


def unpacked(path: Path, *, largest_bytes: int = LARGEST_BYTES) -> dict[str, NDArray[Any]]:
    """Return the read-only arrays of an .npz."""
    try:
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
            size = sum(member.file_size for member in archive.infolist())
            if size > largest_bytes:
                raise UnsafeInput(f"{path} would unpack to {size:,} bytes, more than the allowed {largest_bytes:,}")
            return {name.removesuffix(".npy"): _array(archive.read(name), name) for name in archive.namelist()}
    except FileNotFoundError:
        raise DamagedArchive(f"{path} is missing; restore it or record the case again") from None
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError, KeyError) as error:
        raise DamagedArchive(f"{path} is damaged ({error}); restore it or record the case again") from error


def _array(content: bytes, name: str) -> NDArray[Any]:
    """Read an array from the bytes of an .npy; flat arrays bypass NumPy's slower reader."""
    if flat := _FLAT.match(content):
        return np.frombuffer(content, flat[1].decode(), int(flat[2]), flat.end())
    return npy_array(content, name)


KEYS = ["case", "step", "shrink"]


def cached_table(path: Path, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """Return a derived table, computed once and cached if the folder is writable."""
    file = path / CACHE / f"{name}.parquet"
    if file.exists():
        try:
            return pd.read_parquet(file)
        except (OSError, ValueError):
            file.unlink(missing_ok=True)
    table = make()
    try:
        with replacing(file) as temporary:
            table.to_parquet(temporary)
    except OSError:
        pass
    return table


def ladders(table: pd.DataFrame) -> dict[str, dict[State, Signals]]:
    """Signals by case and state; a signal that is not computable is None."""
    names = [name for name in table.columns if name not in KEYS]
    values = table[names].astype(object).where(table[names].notna(), None).to_numpy().tolist()
    found: dict[str, dict[State, Signals]] = {}
    keys = zip(table["case"].tolist(), table["step"].tolist(), table["shrink"].tolist(), strict=True)
    for (case, step, shrink), row in zip(keys, values, strict=True):
        found.setdefault(case, {})[State(step, shrink)] = dict(zip(names, row, strict=True))
    return found


def signal_table(path: Path, entries: Mapping[str, Entry]) -> pd.DataFrame:
    """Read the signals of all cases: one row for each (case, step, shrink)."""
    if not entries:
        return pd.DataFrame(columns=KEYS)
    tables = [case_table(path / CASES / entry.place / SIGNALS, entry.id) for entry in entries.values()]
    return pa.concat_tables(tables, promote_options="default").to_pandas()


def case_table(file: Path, case_id: str) -> pa.Table:
    """Return the signals of one case."""
    try:
        table = pq.ParquetFile(file).read()
    except FileNotFoundError:
        raise DamagedArchive(f"{file} is missing; restore it or record case {case_id} again") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DamagedArchive(f"{file} is damaged ({error}); restore it or record case {case_id} again") from error
    return table.add_column(0, "case", pa.array([case_id] * len(table), pa.string()))
