"""Cases that a loader found but did not open: their files and the facts of the layout; and label files of datasets.

Label files may hold floats for integers, grey values for classes, or other ids.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import BadInput, UnsafeInput
from casewise.core.formats import read_csv
from casewise.core.records import Case, Mask
from casewise.data.nifti import Volume, check_header, is_volume, read_volume, whole_numbers
from casewise.data.pictures import check_picture, read_label_picture, read_picture
from casewise.data.splits import Cohort, Member


@dataclass(frozen=True)
class LocatedCase:
    """A case in files that has not been opened."""

    id: str
    images: tuple[Path, ...]  # one file per channel, or one color picture
    labels: tuple[Path, ...] = ()  # empty: the case has no label
    group: str | None = None
    cluster: str | None = None
    split: str | None = None
    frame: int | None = None  # the time point of a 4-D file

    @property
    def member(self) -> Member:
        """The entry of the case in a cohort."""
        return Member(self.id, self.group, self.cluster, self.split, bool(self.labels))


LabelReader = Callable[[LocatedCase], Mask]


@dataclass(frozen=True, eq=False)
class Files:
    """``Cohort.read_case`` of every dataset in files; ``found`` has the files."""

    found: Mapping[str, LocatedCase] = field(repr=False)
    color: bool = True  # a single picture is read as three colors; otherwise as one grey channel

    def __call__(self, member: Member) -> Case:
        found = self.found[member.id]
        image, spacing_mm = (_volumes if is_volume(found.images[0]) else self._pictures)(found)
        return Case(member.id, image, spacing_mm, member.group, member.cluster, member.split)

    def _pictures(self, found: LocatedCase) -> tuple[NDArray[Any], None]:
        if self.color and len(found.images) == 1:
            return read_picture(found.images[0]), None
        return _stacked(found, [read_label_picture(path) for path in found.images]), None


def files_of(cohort: Cohort) -> Mapping[str, LocatedCase]:
    """The files of each member, for cohorts in files."""
    if not isinstance(cohort.read_case, Files):
        raise BadInput(f"{cohort.name} was not read from files; load it from a folder")
    return {case_id: cohort.read_case.found[case_id] for case_id in cohort.members}


def cohort_of(
    name: str, root: Path, found: Iterable[LocatedCase], *, label: LabelReader, classes: tuple[str, ...] = (),
    ignore: int | None = None, color: bool = True, notice: str = "", facts: Mapping[str, str] | None = None,
) -> Cohort:  # fmt: skip
    """Make a cohort in the order of its ids. No file is opened; ids must be unique, files must be under the root."""
    by_id: dict[str, LocatedCase] = {}
    for one in sorted(found, key=lambda one: one.id):
        if one.id in by_id:
            raise BadInput(
                f"{name}: {one.images[0]} and {by_id[one.id].images[0]} would both be case {one.id}; rename one"
            )
        by_id[one.id] = one
    if not by_id:
        raise BadInput(f"{root} has the layout of {name} but none of its images; the download may be incomplete")
    _check_inside(by_id.values(), root)

    def read_label(member: Member) -> Mask:
        return _of_the_image(by_id[member.id], label(by_id[member.id]))

    members = {case_id: one.member for case_id, one in by_id.items()}
    return Cohort(name, members, Files(by_id, color), read_label, classes, ignore, notice, dict(facts or {}))


def _check_inside(found: Iterable[LocatedCase], root: Path) -> None:
    inside = Path(os.path.realpath(root))  # resolve() raises where a link points to itself
    for path in (path for one in found for path in (*one.images, *one.labels)):
        if inside not in Path(os.path.realpath(path)).parents:
            raise UnsafeInput(f"{path} points outside of {root}; copy the file into the dataset")


def _of_the_image(found: LocatedCase, label: Mask) -> Mask:
    shape = shape_of(found)
    if label.shape != shape:
        raise BadInput(f"case {found.id}: label of shape {label.shape}, image of {shape}; they must share one grid")
    return label


def shape_of(found: LocatedCase) -> tuple[int, ...]:
    """Space of a case from the first bytes of its image: (slices, rows, columns) or (rows, columns)."""
    if is_volume(found.images[0]):
        return check_header(found.images[0]).shape[:3][::-1]
    return check_picture(found.images[0])


def volume_of(path: Path, frame: int | None) -> Volume:
    """A volume; of a 4-D file only the frame, refused when the file ends before it."""
    shape = check_header(path).shape
    if frame is not None and len(shape) > 3 and not 0 <= frame < shape[3]:
        raise BadInput(f"{path.name} has frames 0 to {shape[3] - 1}, got frame {frame}; check the table")
    return read_volume(path, frame=frame)


def _volumes(found: LocatedCase) -> tuple[NDArray[Any], tuple[float, ...]]:
    volumes = [volume_of(path, found.frame) for path in found.images]
    return _stacked(found, [volume.voxels for volume in volumes]), volumes[0].spacing_mm


def _stacked(found: LocatedCase, channels: list[NDArray[Any]]) -> NDArray[Any]:
    shapes = {channel.shape for channel in channels}
    if len(shapes) > 1:
        raise BadInput(
            f"case {found.id}: the channels of a case must share one grid, got {sorted(shapes)}; resample them"
        )
    return np.stack(channels)


def safe_id(*parts: str) -> str:
    """Parts of a name joined to a case id; characters that an id must not have become underscores.

    >>> safe_id("BMC", "Case 05(1)")
    'BMC_Case_05_1'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "_", "_".join(parts)).strip("_.-")[:128]


def visible(paths: Iterable[Path]) -> Iterator[Path]:
    """Paths in order, without hidden files and files that macOS adds to archives."""
    return (path for path in sorted(paths) if not path.name.startswith(".") and "__MACOSX" not in path.parts)


def table_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV with the names of its columns in lower case; none where it cannot be read."""
    try:
        return [{name.lower(): cell for name, cell in row.items()} for row in read_csv(path)]
    except BadInput:
        return []


def only_folder(root: Path, holds: Callable[[Path], bool]) -> Path | None:
    """Return the folder, or its only matching child, because archives often unpack one level deeper."""
    if not root.is_dir():
        return None
    if holds(root):
        return root
    children = [path for path in visible(root.iterdir()) if path.is_dir() and holds(path)]
    return children[0] if len(children) == 1 else None


WHOLE = 1e-3  # a float label this near to a whole number is that number


def whole_label(path: Path, *, frame: int | None = None) -> Mask:
    """A label volume of any dtype; floats are rounded, and refused where they are not whole numbers."""
    return whole_numbers(volume_of(path, frame).voxels, path.name, within=WHOLE)


def grey(path: Path) -> NDArray[np.uint8]:
    """A grey picture as (rows, columns) of 0..255, also when it was stored as bits, a palette or equal colors."""
    colors = read_picture(path)
    values: NDArray[np.uint8] = colors[0]
    if (colors != values).any():
        raise BadInput(f"{path.name} is colored; a mask holds one grey value per pixel")
    return values


def check_values(label: Mask, allowed: int, name: str) -> Mask:
    """Refuse labels outside 0..allowed."""
    if label.size and not (label.min() >= 0 and label.max() <= allowed):
        raise BadInput(f"{name} holds labels {label.min()} to {label.max()}; 0 to {allowed} were expected")
    return label
