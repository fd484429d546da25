"""Masks in DICOM objects: segmentations (SEG: BINARY, FRACTIONAL, LABELMAP) and contours (RTSTRUCT).

Masks of one image series are one case, whatever their files are called. :func:`nifti_folders` writes them once as NIfTI
on one grid, with the same label number for the same name in every folder, so that ``compare``, ``import`` and ``qc``
read them as any other folder. The grid is that of the images where they are given, else the one of the segmentations;
contours alone have none.

highdicom reads segmentations. Contours are filled here (decision 0019): a voxel belongs to a structure if its center
lies inside an odd number of the structure's contours on its slice, so a contour within a contour is a hole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.durable import replacing, write_durably
from casewise.core.errors import BadInput, CasewiseError, MissingExtra, UnsafeInput, in_one_line
from casewise.core.formats import json_text
from casewise.core.records import Mask, made_case_id
from casewise.data.dicom_objects import LABEL
from casewise.data.dicom_series import (
    first_dicom_files,
    is_dicom,
    is_dicom_folder,
    plain_files,
    pydicom_module,
    read_series,
    short_hash,
    survey_series,
    unique_names,
)  # fmt: skip
from casewise.data.nifti import MAX_BYTES, placed_volume, write_volume

Affine = NDArray[np.float64]
KINDS = ("SEG", "RTSTRUCT")
IMAGES = "images"  # where the images of the cases are written beside their masks
CLOSED = ("CLOSED_PLANAR", "CLOSED_PLANAR_XOR", "CLOSEDPLANAR_XOR")  # contours that bound an area
FRACTION = 0.5  # a voxel of a FRACTIONAL segmentation belongs to a segment from this value on
_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])  # DICOM counts toward left and posterior, NIfTI toward right and anterior
_REVERSED = [2, 1, 0, 3]  # (slice, row, column) of DICOM masks, (x, y, z) of NIfTI


@dataclass(frozen=True)
class MaskObject:
    """One SEG or RTSTRUCT file: its image series and its structures."""

    path: Path
    kind: str  # SEG or RTSTRUCT
    series_uid: str
    patient: str  # a hash of the PatientID
    names: Mapping[int, str]  # names of segments or ROIs by their numbers in the file
    values: Mapping[str, int]  # label numbers that the file states for names


@dataclass(frozen=True)
class MaskGrid:
    """Geometry of a voxel grid: (slice, row, column) to millimetres in DICOM's LPS."""

    affine: Affine
    shape: tuple[int, int, int]


def is_mask_folder(folder: Path) -> bool:
    """Return True if one of the first 50 files of a folder is a DICOM segmentation or contour."""
    return folder.is_dir() and any(_modality(path) in KINDS for path in first_dicom_files(folder, 50))


def _modality(path: Path) -> str:
    pydicom = pydicom_module()
    try:
        return str(pydicom.dcmread(path, stop_before_pixels=True, specific_tags=["Modality"]).get("Modality", ""))
    except Exception:  # pydicom raises many kinds on damaged files
        return ""


def nifti_folders(
    folders: Sequence[Path | None], keep: Path, *, images: Path | None = None
) -> tuple[list[Path | None], Path | None, dict[str, str]]:
    """Convert folders with DICOM masks to NIfTI; other folders are returned unchanged.

    Args:
        folders: Folders with masks; None stays None.
        keep: Folder for the NIfTI files: ``keep/0``, ``keep/1``, ... in the order of the folders.
        images: Folder with the image series, which gives every mask the grid of its series.

    Returns:
        The folders to read instead; a table with the patient (a hash) of each case, None where nothing was DICOM; and
        by case why its masks are left out: a file cannot be read, contours have no grid, a structure does not fit it.

    Raises:
        BadInput: No mask can be used, or two files give one structure different label numbers.
    """
    ours = {at: folder for at, folder in enumerate(folders) if folder is not None and is_mask_folder(folder)}
    if not ours:
        return list(folders), None, {}
    for stale in (file for name in (*map(str, ours), IMAGES) for file in (keep / name).glob("*.nii.gz")):
        stale.unlink()  # files of an earlier run, perhaps of masks that no longer exist
    headless: dict[Path, str] = {}
    found = {at: find_mask_objects(folder, headless) for at, folder in ours.items()}
    every = [one for objects in found.values() for one in objects]
    numbers = label_numbers(every)
    ids = _case_ids(every)
    refused: dict[str, str] = {}
    for path, why in headless.items():  # under the name of its case, where another file of the case is intact
        stem, folder = made_case_id(_stem(path)), made_case_id(path.parent.name)
        own = stem if path.parent in ours.values() else made_case_id(_placed_name(path))
        refused[next((name for name in (stem, folder) if name in ids.values()), own)] = why
    shown = {} if images is None or not is_dicom_folder(images) else {one.uid: one for one in survey_series(images)[0]}
    for series_uid in dict.fromkeys(one.series_uid for one in every):
        members = {at: [one for one in objects if one.series_uid == series_uid] for at, objects in found.items()}
        series = shown.get(series_uid)
        grid = None if series is None else MaskGrid(_TO_RAS @ series.affine[:, _REVERSED], series.shape)
        try:
            masks = read_masks(members, numbers, grid)
            image = None if series is None else read_series(series)
        except MissingExtra:
            raise
        except Exception as error:  # highdicom raises many kinds on damaged files, and the other cases go on
            files = ", ".join(_placed_name(one.path) for objects in members.values() for one in objects)
            damaged = f"{files}: {in_one_line(error)}; export it again"
            refused[ids[series_uid]] = str(error) if isinstance(error, CasewiseError) else damaged
            continue
        if image is not None:
            with replacing(keep / IMAGES / f"{ids[series_uid]}.nii.gz") as temporary:
                write_volume(temporary, image)
        for at, (mask, grid) in masks.items():
            volume = placed_volume(mask, _TO_RAS @ grid.affine[:, _REVERSED])
            path = keep / str(at) / f"{ids[series_uid]}.nii.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                write_volume(temporary, volume)
    if not set(ids.values()) - set(refused):
        raise BadInput("; ".join(list(refused.values())[:3]))
    for at in ours:
        names = {"background": 0, **numbers}
        write_durably(keep / str(at) / "dataset.json", json_text({"labels": names}, indent=1).encode())
    patients = {ids[one.series_uid]: one.patient for one in every}
    rows = ["case,cluster", *(f"{case_id},{patient}" for case_id, patient in sorted(patients.items()))]
    write_durably(keep / "cases.csv", ("\n".join(rows) + "\n").encode())
    read = [keep / str(at) if at in ours else folder for at, folder in enumerate(folders)]
    return read, keep / "cases.csv", refused


def find_mask_objects(folder: Path, refused: dict[Path, str]) -> list[MaskObject]:
    """Find every SEG and RTSTRUCT below a folder; damaged ones go into ``refused``, other DICOM files are ignored."""
    found = []
    for path in plain_files(folder):
        if path.suffix.lower() != ".dcm" and not is_dicom(path):
            continue
        kind = _modality(path)
        try:
            if not kind:  # every DICOM object has a modality
                raise BadInput(f"{_placed_name(path)} cannot be read as DICOM; export it again")
            if kind in KINDS:
                found.append(_object(path))
        except BadInput as error:
            refused[path] = str(error)
    return found


def _placed_name(path: Path) -> str:
    """Name a file with its folder, because exports give all patients files of one name."""
    return f"{path.parent.name}/{path.name}"


def _damaged(about: MaskObject, error: Exception) -> BadInput:
    """The refusal of one file; highdicom and pydicom raise many kinds on damaged files."""
    return BadInput(f"{_placed_name(about.path)} cannot be read ({in_one_line(error)}); export it again")


def _stem(path: Path) -> str:
    return re.sub(r"(\.seg|\.rtstruct)?(\.dcm)?$", "", path.name)


def _object(path: Path) -> MaskObject:
    try:
        header = pydicom_module().dcmread(path, stop_before_pixels=True)
        kind = str(header.Modality)
        if kind == "SEG":
            series_uid = str(header.ReferencedSeriesSequence[0].SeriesInstanceUID)
            names, values = _segments(header)
        else:
            study = header.ReferencedFrameOfReferenceSequence[0].RTReferencedStudySequence[0]
            series_uid = str(study.RTReferencedSeriesSequence[0].SeriesInstanceUID)
            names, values = {int(one.ROINumber): str(one.ROIName).strip() for one in header.StructureSetROISequence}, {}
    except (AttributeError, KeyError, IndexError, ValueError) as error:
        raise BadInput(f"{_placed_name(path)} does not name its series ({error}); export it again") from error
    patient = f"patient-{short_hash(str(header.get('PatientID', '') or series_uid))}"
    return MaskObject(path, kind, series_uid, patient, names, values)


def _segments(header: Any) -> tuple[dict[int, str], dict[str, int]]:
    names, values = {}, {}
    for segment in header.SegmentSequence:
        number, name = int(segment.SegmentNumber), str(segment.SegmentLabel).strip()
        if number == 0:  # the background of a LABELMAP
            continue
        names[number] = name
        said = str(segment.get("SegmentDescription", ""))
        if said.startswith(LABEL) and said[len(LABEL) :].isdecimal():
            values[name] = int(said[len(LABEL) :])
    return names, values


def label_numbers(objects: Iterable[MaskObject]) -> dict[str, int]:
    """Return one number for each name over all files: the stated one, else the next free one in the order of names."""
    numbers: dict[str, int] = {}
    given = list(objects)
    for one in given:
        for name, value in one.values.items():
            if numbers.setdefault(name, value) != value:
                raise BadInput(
                    f"{one.path.name} calls {name!r} label {value}, another file label {numbers[name]}; use one number"
                )
    following = max(numbers.values(), default=0) + 1
    for name in sorted({name for one in given for name in one.names.values()} - set(numbers)):
        numbers[name] = following
        following += 1
    return numbers


def _case_ids(objects: Sequence[MaskObject]) -> dict[str, str]:
    """Name the case of each series after its first file, or after the folder of it where several share that name.

    Names that are still equal get a part of the hash of the UID.
    """
    stems = {one.path: _stem(one.path) for one in objects}
    count = Counter(stem for stem, _ in {(stems[one.path], one.series_uid) for one in objects})
    names: dict[str, str] = {}
    for one in objects:
        stem = stems[one.path]
        names.setdefault(one.series_uid, made_case_id(stem if count[stem] == 1 else one.path.parent.name))
    return unique_names(names, "-")


def read_masks(
    members: Mapping[int, Sequence[MaskObject]], numbers: Mapping[str, int], grid: MaskGrid | None
) -> dict[int, tuple[Mask, MaskGrid]]:
    """Read the masks of one series by folder, on the given grid, or on one that contains all segmentations."""
    read = {one.path: _Segmentation(one) for objects in members.values() for one in objects if one.kind == "SEG"}
    if grid is None:
        grid = _common_grid([one.grid for one in read.values()])
    if grid is None:
        names = ", ".join(dict.fromkeys(_placed_name(one.path) for objects in members.values() for one in objects))
        raise BadInput(f"{names}: contours have no grid of their own; give the image series with -i IMAGES")
    found = {}
    for at, objects in members.items():
        if not objects:
            continue
        mask = np.zeros(grid.shape, np.uint16 if max(numbers.values(), default=0) > 255 else np.uint8)
        for one in objects:
            try:
                if one.kind == "SEG":
                    _place(mask, grid, read[one.path], numbers)
                else:
                    _fill(mask, grid, one, numbers)
            except CasewiseError:
                raise
            except Exception as error:
                raise _damaged(one, error) from error
        found[at] = (mask, grid)
    return found


class _Segmentation:
    """The voxels of a SEG on its own grid, which may leave out empty slices at both ends."""

    def __init__(self, about: MaskObject) -> None:
        self.about = about

    @cached_property
    def _stored(self) -> Any:
        try:
            from highdicom.seg import segread
        except ImportError as error:
            raise MissingExtra("DICOM segmentations need highdicom; pip install 'casewise[dicom]'") from error
        try:
            return segread(self.about.path)
        except Exception as error:
            raise _damaged(self.about, error) from error

    def _volume(self, **options: Any) -> NDArray[Any]:
        return np.asarray(self._stored.get_volume(allow_missing_positions=True, **options).array)

    @cached_property
    def grid(self) -> MaskGrid:
        geometry = self._stored.get_volume_geometry()
        if geometry is None:
            raise BadInput(f"{self.about.path.name}: its frames are not slices at even distances; resample it first")
        shape = tuple(int(side) for side in geometry.spatial_shape)
        if int(np.prod(shape)) > MAX_BYTES:
            raise UnsafeInput(f"{self.about.path.name} asks for {int(np.prod(shape)):,} voxels; crop it")
        return MaskGrid(np.asarray(geometry.affine, float), (shape[0], shape[1], shape[2]))

    def segment(self, number: int) -> NDArray[np.bool_]:
        return self._volume(segment_numbers=[number], combine_segments=False)[..., 0] >= FRACTION

    def labelmap(self) -> NDArray[Any] | None:
        """All segments in one pass if they cannot overlap."""
        if str(self._stored.SegmentationType) == "FRACTIONAL":
            return None
        return self._volume(combine_segments=True, skip_overlap_checks=True)


def _common_grid(grids: Sequence[MaskGrid]) -> MaskGrid | None:
    """Return the smallest grid that contains all grids that are parts of one; others are ignored."""
    if not grids:
        return None
    base = grids[0]
    low, high = np.zeros(3), np.array(base.shape, float)
    for other in grids[1:]:
        turned = np.linalg.inv(base.affine) @ other.affine
        if not _is_shift(turned):
            continue
        ends = np.stack([turned[:3, 3], turned[:3, 3] + np.diag(turned)[:3] * (np.array(other.shape) - 1)])
        low, high = np.minimum(low, ends.min(axis=0)), np.maximum(high, ends.max(axis=0) + 1)
    low, high = np.rint(low), np.rint(high)
    shift = np.eye(4)
    shift[:3, 3] = low
    shape = (high - low).astype(int).tolist()
    return MaskGrid(base.affine @ shift, (shape[0], shape[1], shape[2]))


def _is_shift(turned: Affine, tolerance: float = 0.02) -> bool:
    """Return True if one grid is the other, moved by whole voxels and perhaps counted backward along an axis."""
    straight = np.allclose(np.abs(turned[:3, :3]), np.eye(3), atol=1e-3)
    return bool(straight and np.allclose(turned[:3, 3], np.rint(turned[:3, 3]), atol=tolerance))


def _place(mask: Mask, grid: MaskGrid, segmentation: _Segmentation, numbers: Mapping[str, int]) -> None:
    """Write a segmentation into a mask on another grid of the same voxels."""
    own, about = segmentation.grid, segmentation.about
    turned = np.linalg.inv(grid.affine) @ own.affine
    if not _is_shift(turned):
        raise BadInput(f"{about.path.name} is not on the grid of its series or of the other masks; resample it first")
    begin = np.rint(turned[:3, 3]).astype(int)
    flips = tuple(axis for axis in range(3) if turned[axis, axis] < 0)
    for axis in flips:
        begin[axis] -= own.shape[axis] - 1
    inside, into = [], []
    for axis in range(3):
        first, last = max(0, -begin[axis]), min(own.shape[axis], grid.shape[axis] - begin[axis])
        inside.append(slice(first, max(first, last)))
        into.append(slice(begin[axis] + first, begin[axis] + max(first, last)))
    whole = segmentation.labelmap()
    for number, name in about.names.items():
        held = segmentation.segment(number) if whole is None else whole == number
        part = np.flip(held, flips)[tuple(inside)]
        if int(np.count_nonzero(part)) < int(np.count_nonzero(held)):
            raise BadInput(f"{about.path.name}: {name} reaches beyond the images of its series; give the whole series")
        mask[tuple(into)][part] = numbers[name]


def _fill(mask: Mask, grid: MaskGrid, about: MaskObject, numbers: Mapping[str, int]) -> None:
    """Fill the contours of an RTSTRUCT into a mask."""
    stored = pydicom_module().dcmread(about.path)
    inverse = np.linalg.inv(grid.affine)
    for structure in stored.get("ROIContourSequence", []):
        name = about.names.get(int(structure.ReferencedROINumber))
        if name is None:
            continue
        planes: dict[int, NDArray[np.bool_]] = {}
        for contour in structure.get("ContourSequence", []):
            if str(contour.get("ContourGeometricType", "")) not in CLOSED:
                continue
            points = np.asarray([float(value) for value in contour.ContourData]).reshape(-1, 3)
            index = (inverse[:3, :3] @ points.T + inverse[:3, 3:]).T
            at = round(float(index[:, 0].mean()))
            if float(np.abs(index[:, 0] - at).max()) > 0.5 or not 0 <= at < grid.shape[0]:
                raise BadInput(f"{about.path.name}: a contour of {name} lies on no slice; give its images with -i")
            plane = planes.setdefault(at, np.zeros(grid.shape[1:], bool))
            plane ^= filled_polygon(index[:, 1:], grid.shape[1:])
        for at, plane in planes.items():
            mask[at][plane] = numbers[name]


def filled_polygon(points: NDArray[np.float64], shape: Sequence[int]) -> NDArray[np.bool_]:
    """The pixels whose centers lie inside a polygon of (row, column) points, by the even-odd rule.

    Example:
        >>> square = np.array([[0.5, 0.5], [0.5, 2.5], [2.5, 2.5], [2.5, 0.5]])
        >>> filled_polygon(square, (4, 4)).sum()
        np.int64(4)
    """
    rows, columns = shape
    inside = np.zeros((rows, columns + 1), bool)
    following = np.roll(points, -1, axis=0)
    for (row, column), (next_row, next_column) in zip(points.tolist(), following.tolist(), strict=True):
        low, high = sorted((row, next_row))
        hit = np.arange(max(0, int(np.ceil(low))), min(rows, int(np.ceil(high))))  # centers with low <= row < high
        if not hit.size:
            continue
        crossing = column + (hit - row) / (next_row - row) * (next_column - column)
        first = np.clip(np.ceil(crossing), 0, columns).astype(int)  # the first center right of the edge
        np.logical_xor.at(inside, (hit, first), True)
    return np.logical_xor.accumulate(inside, axis=1)[:, :columns]
