"""Pair the masks of two folders, old and new, and check that they can be compared.

Files are paired by name (``CASE.nii.gz`` in both), or by a table with the columns case, old, new and, where there are
some, label and image. Nothing is skipped silently: an unpaired file is reported as a problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import BadInput, BadPair, CasewiseError, NotAMask, UnsafeInput, in_one_line, without_folders
from casewise.core.formats import as_shaped, parsed_json, read_csv, read_npy
from casewise.core.records import Mask, check_case_id, made_case_id
from casewise.data.folders import CaseTable, read_table, with_table
from casewise.data.nifti import read_label, read_volume, whole_numbers
from casewise.data.pictures import is_picture, read_label_picture, read_picture

ENDINGS = (".nii.gz", ".nii", ".png", ".npy")
KINDS = {
    "missing": "a mask without a counterpart in the other folder",
    "unlabelled": "a pair without a label, where labels were given",
    "unreadable": "a file that cannot be read",
    "channels": "several channels or probabilities instead of one label per voxel",
    "shape": "masks of different shapes",
    "affine": "masks with different positions",
    "labels": "a label value that occurs in only one of the two folders",
    "empty": "a mask without any foreground, where the label (if there is one) has some",
    "broke": "a case whose comparison failed: its process died, or had an unexpected error",
}
"""Kinds of trouble with pairs, by the word that ``--allow`` takes."""

_TOLERANCE = 1e-3  # mm; affines that differ by less are the same place


@dataclass(frozen=True)
class Pair:
    """The files of one case, not yet opened; None where one is missing."""

    id: str
    old: Path | None
    new: Path | None
    label: Path | None = None
    image: Path | None = None
    group: str | None = None
    cluster: str | None = None
    split: str | None = None
    scan: str | None = None  # which scan of the patient: ED, ES, a date

    def __post_init__(self) -> None:
        check_case_id(self.id)


@dataclass(frozen=True, eq=False)
class Placed:
    """A mask with its geometry; pictures and arrays have none."""

    mask: Mask
    spacing_mm: tuple[float, ...] | None = None
    affine: NDArray[np.float64] | None = None  # of (x, y, z) indices as in the file


def find_pairs(
    old: Path, new: Path, *, labels: Path | None = None, images: Path | None = None, names: Path | None = None,
    cases: Path | None = None,
) -> tuple[Pair, ...]:  # fmt: skip
    """The cases of two folders in sorted order, incomplete ones included.

    ``names`` is a table with the columns case, old, new (and label, image) for files whose names differ; ``cases`` a
    table with group and cluster (patient, sequence). Labels and images of other cases are left aside.
    """
    folders = {"old": old, "new": new, "label": labels, "image": images}
    for name, folder in folders.items():
        if folder is not None and not folder.is_dir():
            raise BadInput(f"{folder} is not a folder; give the folder that holds the {name} files")
    pairs = _by_name(folders) if names is None else _by_table(folders, names)
    if not pairs:
        raise BadInput(f"{old} and {new} hold no mask that ends in {', '.join(ENDINGS)}")
    if not any(pair.old and pair.new for pair in pairs):
        few = sorted(path.name for path in (pair.old or pair.new for pair in pairs) if path)[:2]
        raise BadInput(
            f"no file of {old} has the same name as a file in {new} (such as {few}); name the pairs in a table with "
            f"the columns case, old, new: --names pairs.csv"
        )
    return tuple(pairs if cases is None else _described(pairs, read_table(cases)))


def _described(pairs: Sequence[Pair], table: CaseTable) -> list[Pair]:
    """Return the pairs with group, cluster, split and scan from the table."""
    first: Mapping[str, str] = next(iter(table.rows.values()), {})
    column = next((name for name in ("scan", "phase", "timepoint") if name in first), None)
    found = with_table(pairs, table)
    return found if column is None else [replace(one, scan=table.rows[one.id][column] or None) for one in found]


def _by_name(folders: Mapping[str, Path | None]) -> list[Pair]:
    found = {name: {} if folder is None else _masks(folder, name == "image") for name, folder in folders.items()}
    ids = sorted({*found["old"], *found["new"]})
    old, new, labels, images = (found[name] for name in ("old", "new", "label", "image"))
    return [Pair(one, old.get(one), new.get(one), labels.get(one), images.get(one)) for one in ids]


def _masks(folder: Path, images: bool) -> dict[str, Path]:
    """Return the files of a folder by case; the image of a case is nnU-Net's channel 0."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        ending = next((end for end in ENDINGS if path.name.lower().endswith(end)), None)
        if ending is None or path.name.startswith(".") or not (path.is_file() or path.is_symlink()):
            continue  # a link to a missing file is a mask that cannot be read
        stem = path.name[: -len(ending)]
        if images and stem[-5:] == "_0000":
            stem = stem[:-5]
        case_id = made_case_id(stem)
        if case_id in found:
            other = found[case_id].name
            raise BadInput(f"{folder} holds {other} and {path.name}, both of case {case_id}; keep one of them")
        found[case_id] = path
    return found


def _by_table(folders: Mapping[str, Path | None], table: Path) -> list[Pair]:
    rows = read_csv(table)
    if not rows or not {"case", "old", "new"} <= set(rows[0]):
        raise BadInput(f"{table} needs a header with case, old, new (and label, image where there are some) and a row")
    pairs = []
    for row in rows:
        paths = {name: _named(folder, row.get(name)) for name, folder in folders.items()}
        pairs.append(Pair(row["case"], paths["old"], paths["new"], paths["label"], paths["image"]))
    twice = sorted(name for name, count in Counter(pair.id for pair in pairs).items() if count > 1)
    if twice:
        raise BadInput(f"{table} has more than one row for {twice[:5]}; keep one per case")
    return sorted(pairs, key=lambda pair: pair.id)


def _named(folder: Path | None, name: str | None) -> Path | None:
    if folder is None or not name:
        return None
    path = _inside(folder / name, folder)
    return path if path.is_file() else None


def _inside(path: Path, root: Path) -> Path:
    if not path.resolve().is_relative_to(root.resolve()):
        raise UnsafeInput(f"{path.name} points outside of {root}; copy the file into the folder")
    return path


def read_pair(pair: Pair, *, resample: str | None = None) -> tuple[Placed, Placed, Placed | None]:
    """Old, new and label (None where there is none) on the grid of the old mask.

    Other shapes or places are refused; ``resample="nearest"`` brings new and label onto the old grid instead.
    """
    if resample not in (None, "nearest"):
        raise BadInput(f"--resample must be nearest, got {resample!r}; masks hold labels, which cannot be averaged")
    for name in ("old", "new"):
        if getattr(pair, name) is None:
            other = "new" if name == "old" else "old"
            raise BadPair("missing", f"{pair.id} has {other} and no {name} mask; predict it, or remove the case")
    assert pair.old is not None
    assert pair.new is not None
    old = read_placed(pair.old)
    new = _on_grid(pair.id, "new", read_placed(pair.new), old, resample)
    if pair.label is None:
        return old, new, None
    return old, new, _on_grid(pair.id, "label", read_placed(pair.label), old, resample)


def read_placed(path: Path) -> Placed:
    """Read a mask with its spacing and affine; it must have one whole number per voxel."""
    try:
        if path.name.lower().endswith(".npy"):
            placed = Placed(whole_numbers(read_npy(path), path.name))
        elif path.name.lower().endswith(".png"):
            placed = Placed(read_label_picture(path))
        else:
            volume = read_volume(path, writable=False)
            placed = Placed(whole_numbers(volume.voxels, path.name), volume.spacing_mm, volume.geometry.affine)
    except (CasewiseError, ValueError, EOFError, OSError) as error:
        kind = "channels" if isinstance(error, NotAMask) else "unreadable"
        said = without_folders(in_one_line(error) if isinstance(error, OSError) else str(error), (path.parent,))
        raise BadPair(kind, f"{path.name}: {said}".replace(f"{path.name}: {path.name}", path.name)) from error
    if placed.mask.ndim not in (2, 3):
        raise BadPair(
            "channels",
            f"{path.name} has shape {placed.mask.shape}; a mask is (rows, columns) or (slices, rows, columns) with one "
            f"label per voxel: take the argmax over channels first",
        )
    return placed


def _on_grid(case_id: str, name: str, placed: Placed, grid: Placed, resample: str | None) -> Placed:
    placed = replace(placed, mask=as_shaped(placed.mask, grid.mask))
    shapes_differ = placed.mask.shape != grid.mask.shape
    if not shapes_differ and _same_place(placed, grid):
        return placed
    if resample is None and shapes_differ:
        raise BadPair(
            "shape",
            f"{case_id}: old has shape {grid.mask.shape}, {name} {placed.mask.shape}; predict on the same grid, or "
            f"pass --resample nearest",
        )
    if resample is None:
        assert placed.affine is not None
        assert grid.affine is not None
        apart = float(np.abs(placed.affine - grid.affine).max())
        raise BadPair(
            "affine",
            f"{case_id}: old and {name} have the same shape but lie at different places (affines differ by up to "
            f"{apart:.4g}); export both with the image's header, or pass --resample nearest",
        )
    if placed.mask.ndim != grid.mask.ndim:
        raise BadPair(
            "shape", f"{case_id}: old has {grid.mask.ndim} axes, {name} {placed.mask.ndim}; export both alike"
        )
    return replace(grid, mask=_nearest(placed, grid))


def _same_place(one: Placed, other: Placed) -> bool:
    if one.affine is None or other.affine is None:
        return True
    apart = np.abs(one.affine - other.affine)
    return bool((apart <= _TOLERANCE + 1e-5 * np.abs(other.affine)).all())


def _nearest(placed: Placed, grid: Placed) -> Mask:
    """Resample by nearest neighbour, background outside; without affines, both masks cover the same field of view."""
    from scipy import ndimage

    axes = grid.mask.ndim
    if placed.affine is None or grid.affine is None:
        scale = np.array(placed.mask.shape) / np.array(grid.mask.shape)
        matrix, offset = np.diag(scale), (scale - 1) / 2  # centers of voxels onto centers of voxels
    else:
        turned = np.linalg.inv(placed.affine) @ grid.affine  # (x, y, z) of the file; masks are (z, y, x)
        matrix, offset = turned[:axes, :axes][::-1, ::-1], turned[:axes, 3][::-1]
    found: Mask = ndimage.affine_transform(
        placed.mask, matrix, offset, output_shape=grid.mask.shape, order=0, mode="constant"
    )
    return found


def read_mask(path: Path) -> Mask:
    """Read the label numbers of a NIfTI file or a picture: (slices, rows, columns) or (rows, columns)."""
    return read_label_picture(path) if is_picture(path) else read_label(path)


def read_image(path: Path) -> NDArray[Any]:
    """Read the image of a pair: grey (slices, rows, columns) or (rows, columns), or (rows, columns, 3)."""
    if path.name.lower().endswith(".npy"):
        return read_npy(path)
    if is_picture(path):
        return np.ascontiguousarray(np.moveaxis(read_picture(path), 0, -1))
    return read_volume(path).voxels


def label_sets(
    held: Iterable[tuple[str, Sequence[int], Sequence[int]]], called: Callable[[int], str] = "label {}".format
) -> list[tuple[str, str]]:
    """Describe label values that occur only in old, or only in new, masks: (first case with the value, sentence).

    ``held`` yields (case, labels of old, labels of new); ``called`` returns the name of a label.
    """
    first: dict[str, dict[int, str]] = {"old": {}, "new": {}}
    masks: dict[str, Counter[int]] = {"old": Counter(), "new": Counter()}
    for case_id, old, new in held:
        for side, values in (("old", old), ("new", new)):
            masks[side].update(set(values))
            for value in values:
                first[side].setdefault(value, case_id)
    found = []
    for side, other, done in (("old", "new", "lost it"), ("new", "old", "invents it")):
        for value in sorted(set(first[side]) - set(first[other])):
            case_id, count = first[side][value], masks[side][value]
            sentence = (
                f"{called(value)} is in {count} {side} masks (such as {case_id}) and in no {other} one; the new "
                f"version {done}, or its classes differ: name those to compare with --classes"
            )
            found.append((case_id, sentence))
    return found


def label_names(given: str | None, folders: Sequence[Path]) -> tuple[dict[int, str], list[str]]:
    """Return the names of labels, and a sentence for each label that two folders name differently.

    ``given`` is a JSON file such as nnU-Net's dataset.json, or words such as ``1=LV,2=MYO``. Without it, the
    dataset.json that nnU-Net writes into or above the ``folders`` is read; the first one that names a label counts.
    """
    if given is not None:
        return _given_names(given), []
    names: dict[int, str] = {}
    by: dict[int, Path | None] = {}
    said = []
    for folder in folders:
        known = (place / "dataset.json" for place in (folder, folder.parent))
        file = next((one for one in known if one.is_file()), None)
        for label, name in ({} if file is None else _names_of(_json(file))).items():
            if names.setdefault(label, name) != name:
                said.append(
                    f"label {label} is {names[label]!r} in {by[label]} and {name!r} in {file}; the two versions "
                    f"number their classes differently: use one numbering, or give --label-names"
                )
            by.setdefault(label, file)
    return names, said


def _given_names(given: str) -> dict[int, str]:
    if Path(given).is_file():
        plain = _json(Path(given))
    else:
        plain = dict(part.partition("=")[::2] for part in given.split(",") if part.strip())
    names = _names_of(plain)
    if not names:
        raise BadInput(f"--label-names takes nnU-Net's dataset.json or words such as 1=LV,2=MYO, got {given!r}")
    return names


def _json(file: Path) -> Any:
    try:
        return parsed_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _names_of(plain: Any) -> dict[int, str]:
    """Label numbers and names from {"LV": 1} (nnU-Net 2) or {"1": "LV"} (nnU-Net 1), also below the key labels.

    Regions of several labels have no number and are left out, as are entries that cannot be read.
    """
    inner = plain.get("labels", plain) if isinstance(plain, Mapping) else None
    names: dict[int, str] = {}
    for key, value in inner.items() if isinstance(inner, Mapping) else ():
        number, name = (value, key) if isinstance(value, int) else (key, value)
        if str(number).strip().isdecimal() and isinstance(name, str) and name.strip():
            names[int(number)] = "".join(letter for letter in name.strip() if letter.isprintable())[:60]
    return names
