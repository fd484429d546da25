"""Read DICOM: one series is one case, with slices sorted by position and values rescaled.

Only pydicom reads here, headers before pixels, behind a size gate. A DICOMDIR is never followed: the files of a folder
are read one by one. A series that is not one complete volume is refused, with the names of the files: mixed
geometries, a missing slice, two slices at one place, a tilted gantry, colour, several frames in one file.

A model of several channels gets the series of one study, each found by a pattern of its SeriesDescription.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import BadInput, MissingExtra, UnsafeInput, in_one_line
from casewise.core.records import check_case_id
from casewise.data.nifti import DEFLATE_LIMIT, MAX_BYTES, Volume, placed_volume

TOLERANCE_MM = 1e-2
"""Largest distance of a slice from an even grid: scanners round positions, a missing slice is at least a millimetre."""

_HEADER_TAGS = (
    "SOPClassUID", "SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID", "PatientID", "Modality", "SeriesNumber",
    "SeriesDescription", "InstanceNumber", "ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing",
    "SliceThickness", "Rows", "Columns", "BitsAllocated", "SamplesPerPixel", "NumberOfFrames", "RescaleSlope",
    "RescaleIntercept", "NumberOfSeriesRelatedInstances",
)  # fmt: skip
DEFLATED = b"1.2.840.10008.1.2.1.99"  # transfer syntax; pydicom unpacks such a file whole, before its header is known
_NOT_IMAGES = frozenset({"SEG", "SR", "PR", "KO", "RTSTRUCT", "RTDOSE", "RTPLAN", "REG", "RWV", "AU", "DOC"})


@dataclass(frozen=True)
class Slice:
    """The header of one file of a series, before its pixels are read."""

    path: Path
    instance_uid: str
    position_mm: tuple[float, float, float]
    orientation: tuple[float, ...]  # direction cosines of a row, then of a column
    shape: tuple[int, int]  # rows, columns
    pixel_mm: tuple[float, float]  # between rows, between columns
    thickness_mm: float | None

    @property
    def normal(self) -> NDArray[np.float64]:
        """Normal of the slice, by the right-hand rule."""
        return np.cross(self.orientation[:3], self.orientation[3:])

    @property
    def height_mm(self) -> float:
        """Position of the slice along its normal."""
        return float(self.normal @ np.asarray(self.position_mm))


@dataclass(frozen=True)
class Series:
    """The files of one volume in the order of their positions, and the id of the case."""

    case_id: str
    uid: str
    study_uid: str
    modality: str
    cluster: str  # hash of the PatientID: it groups cases of one patient without storing the PatientID
    slices: tuple[Slice, ...]
    description: str = ""
    more: tuple[Series, ...] = ()  # further channels of the same study, on the same grid

    def __post_init__(self) -> None:
        check_case_id(self.case_id)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Slices, rows, columns."""
        return (len(self.slices), *self.slices[0].shape)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files in the order of the slices."""
        return tuple(one.path for one in self.slices)

    @property
    def affine(self) -> NDArray[np.float64]:
        """From (column, row, slice) to millimetres in NIfTI's RAS; DICOM itself counts toward left and posterior."""
        first, last = self.slices[0], self.slices[-1]
        step = np.asarray(last.position_mm) - np.asarray(first.position_mm)
        step = step / (len(self.slices) - 1) if len(self.slices) > 1 else first.normal * (first.thickness_mm or 1.0)
        columns = np.asarray(first.orientation[:3]) * first.pixel_mm[1]
        rows = np.asarray(first.orientation[3:]) * first.pixel_mm[0]
        lps = np.eye(4)
        lps[:3, :] = np.stack([columns, rows, step, np.asarray(first.position_mm)], axis=1)
        return np.asarray(np.diag([-1.0, -1.0, 1.0, 1.0]) @ lps)


def is_dicom(path: Path) -> bool:
    """Return True if a file has "DICM" after its first 128 bytes, as DICOM files do."""
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def is_dicom_folder(folder: Path) -> bool:
    """Return True if the first few files under a folder are DICOM; a DICOMDIR is ignored."""
    return folder.is_dir() and any(True for _ in first_dicom_files(folder, 21))


def first_dicom_files(folder: Path, count: int) -> Iterable[Path]:
    """Yield the DICOM files among the first ``count`` files of a folder; links are not opened."""
    few = itertools.islice(plain_files(folder, links=True), count)
    return (path for path in few if not path.is_symlink() and is_dicom(path))


def plain_files(folder: Path, *, links: bool = False) -> Iterable[Path]:
    """Yield every file that could be a slice; ``links`` also yields links out of the folder and to no file."""
    for path in sorted(folder.rglob("*")):
        if (path.is_file() or path.is_symlink()) and path.name != "DICOMDIR" and not path.name.startswith("."):
            if not links:
                _check_link(path, folder)
            yield path


def _check_link(path: Path, folder: Path) -> None:
    if path.is_symlink() and (not path.is_file() or folder.resolve() not in path.resolve().parents):
        raise UnsafeInput(f"{path.name} is a link out of {folder} or to no file; copy the file into the folder")


def survey_series(
    folder: Path, *, channels: Sequence[str] = (), max_bytes: int = MAX_BYTES
) -> tuple[tuple[Series, ...], dict[str, BadInput | UnsafeInput]]:
    """Return the series that can be read, and by case the reason why another cannot; only that series fails.

    With ``channels``, patterns of series descriptions in the model's order, one study is one case.
    """
    by_series: dict[str, list[tuple[Path, Any]]] = {}
    refused: dict[str, BadInput | UnsafeInput] = {}
    damaged: dict[Path, dict[str, BadInput | UnsafeInput]] = {}
    for path in plain_files(folder, links=True):
        try:
            _check_link(path, folder)
            header = _header(path)
        except (BadInput, UnsafeInput) as error:
            damaged.setdefault(path.parent, {})[_safe("_".join(path.relative_to(folder).parts))] = error
            continue
        if header is not None:
            by_series.setdefault(str(header.SeriesInstanceUID), []).append((path, header))
    if not by_series:
        for problem in (one for files in damaged.values() for one in files.values()):
            raise problem
        raise BadInput(f"{folder} holds no DICOM image; give the folder that holds the series")
    names = _names(folder, by_series)
    homes = {uid: {path.parent for path, _ in headers} for uid, headers in by_series.items()}
    shared = Counter(place for places in homes.values() for place in places)
    found = []
    for uid, headers in sorted(by_series.items(), key=lambda item: names[item[0]]):
        lost = [damaged.pop(place) for place in homes[uid] & {*damaged} if shared[place] == 1]
        try:
            if lost:
                raise BadInput(
                    f"series {names[uid]}: a slice may be missing, because a file beside its slices cannot be read "
                    f"({next(iter(lost[0].values()))}); send the series again, or remove that file"
                )
            found.append(_series(names[uid], headers, max_bytes))
        except (BadInput, UnsafeInput) as error:
            refused[names[uid]] = error
        except Exception as error:  # pydicom raises many kinds on damaged values
            refused[names[uid]] = BadInput(f"series {names[uid]}: bad headers ({in_one_line(error)}); export it again")
    for files in damaged.values():  # beside no series, or beside several
        refused.update(files)
    return _studies(folder, found, refused, channels) if channels else (tuple(found), refused)


def _studies(
    folder: Path, found: Sequence[Series], refused: dict[str, BadInput | UnsafeInput], channels: Sequence[str]
) -> tuple[tuple[Series, ...], dict[str, BadInput | UnsafeInput]]:
    """Return one case per study, named after the folder of its channels; series that match no pattern are ignored."""
    by_study: dict[str, list[Series]] = {}
    for series in found:
        by_study.setdefault(series.study_uid, []).append(series)
    files = {study: [path for one in group for path in one.files] for study, group in by_study.items()}
    places = {study: _common_parent(paths).relative_to(folder).parts for study, paths in files.items()}
    stems = {study: _safe("_".join(parts) or folder.name) for study, parts in places.items()}
    cases = []
    for study, case_id in unique_names(stems).items():
        try:
            cases.append(_with_channels(case_id, by_study[study], channels))
        except BadInput as error:
            refused[case_id] = error
    return tuple(sorted(cases, key=lambda case: case.case_id)), refused


def _with_channels(case_id: str, group: Sequence[Series], channels: Sequence[str]) -> Series:
    """The series of a study that the patterns name, one each, on one grid."""
    chosen = []
    for pattern in channels:
        fitting = [one for one in group if fnmatchcase(one.description.lower(), pattern.lower())]
        if len(fitting) != 1:
            there = ", ".join(f"{one.description!r} ({one.case_id})" for one in fitting or group)
            raise BadInput(
                f"study {case_id}: {len(fitting)} series are called {pattern!r}, one is expected; "
                f"{'they are' if fitting else 'there are'} {there}; give channels patterns that fit one series each"
            )
        chosen.append(fitting[0])
    first, *others = chosen
    for other in others:
        if other.shape != first.shape or not np.allclose(other.affine, first.affine, atol=TOLERANCE_MM):
            raise BadInput(
                f"study {case_id}: series {first.description!r} ({_joined_numbers(first.shape)}) and "
                f"{other.description!r} ({_joined_numbers(other.shape)}) do not lie on one grid; "
                "register and resample them before"
            )
    return replace(first, case_id=case_id, more=tuple(others))


def channel_patterns(text: str) -> tuple[str, ...]:
    """The patterns of the setting ``channels``.

    >>> channel_patterns("T1*, FLAIR*")
    ('T1*', 'FLAIR*')
    """
    patterns = tuple(word.strip() for word in text.split(",")) if text else ()
    if not all(patterns):
        raise BadInput(f"channels must name a series description for each channel, such as 'T1*,FLAIR*', got {text!r}")
    return patterns


def check_channels(series: Sequence[Series], channels: Sequence[str], wanted: int | None) -> None:
    """Refuse a model of several channels if the setting ``channels`` is missing."""
    if wanted in (None, len(channels) or 1):
        return
    study = [one for one in series if one.study_uid == series[0].study_uid]
    there = ", ".join(repr(one.description) for one in (*study, *(more for one in study for more in one.more)))
    given = f"{len(channels)} series per case are" if channels else "1 series per case is"
    raise BadInput(
        f"the model takes {wanted} channels, and {given} given; name a series for each by its description, in the "
        f"model's order: --set channels='T1*,FLAIR*'. A study here holds {there}"
    )


def _header(path: Path) -> Any:
    """Return the header of an image file; None if it is not DICOM or no image (a report, plan or mask)."""
    pydicom = pydicom_module()
    if not is_dicom(path) and path.suffix.lower() != ".dcm":
        return None
    try:
        with path.open("rb") as file:
            deflated = DEFLATED in file.read(1024)
        if deflated and path.stat().st_size * DEFLATE_LIMIT > MAX_BYTES:
            raise UnsafeInput("it may unpack to too much; export it without deflate")
        header = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=list(_HEADER_TAGS))
        modality, uid, _ = (str(header.get(tag) or "") for tag in ("Modality", "SeriesInstanceUID", "SeriesNumber"))
    except Exception as error:  # pydicom raises many kinds on damaged files
        raise BadInput(f"{path.name} cannot be read as DICOM ({in_one_line(error)}); export it again") from error
    if modality in _NOT_IMAGES or (uid and "Rows" not in header and "ImagePositionPatient" not in header):
        return None
    if not uid:
        raise BadInput(f"{path.name} names no series (SeriesInstanceUID); export it again")
    return header


def pydicom_module() -> Any:
    """Return the module pydicom, or say what to install."""
    try:
        import pydicom
    except ImportError as error:
        raise MissingExtra("DICOM needs pydicom and highdicom; pip install 'casewise[dicom]'") from error
    return pydicom


def _names(folder: Path, by_series: dict[str, list[tuple[Path, Any]]]) -> dict[str, str]:
    """Name each series after the folder of its files; equal names get the series number, then a part of a hash."""
    places = {uid: _common_parent([path for path, _ in headers]) for uid, headers in by_series.items()}
    stems = {uid: _safe("_".join(place.relative_to(folder).parts) or folder.name) for uid, place in places.items()}
    shared = Counter(stems.values())
    numbered = {
        uid: f"{stem}_{by_series[uid][0][1].get('SeriesNumber', 0) or 0}" if shared[stem] > 1 else stem
        for uid, stem in stems.items()
    }
    return unique_names(numbered)


def unique_names(names: Mapping[str, str], joint: str = "_") -> dict[str, str]:
    """Return the names by UID; a name that occurs twice gets a part of the hash of its UID."""
    count = Counter(names.values())
    return {uid: f"{name}{joint}{short_hash(uid)}" if count[name] > 1 else name for uid, name in names.items()}


def _common_parent(paths: Sequence[Path]) -> Path:
    parents = [{path.parent, *path.parent.parents} for path in paths]
    return max(set.intersection(*parents), key=lambda place: len(place.parts))


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip(".-")[:96] or "case"


def short_hash(text: str) -> str:
    """Return the first 12 digits of the sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _series(case_id: str, headers: Sequence[tuple[Path, Any]], max_bytes: int) -> Series:
    slices = [_slice(case_id, path, header) for path, header in headers]
    first = headers[0][1]
    _check_alike(case_id, slices)
    _check_size(case_id, slices, [header for _, header in headers], max_bytes)
    slices.sort(key=lambda one: one.height_mm)
    _check_even(case_id, slices)
    if len({one.instance_uid for one in slices}) < len(slices):
        raise BadInput(f"series {case_id}: several slices have one SOPInstanceUID; export it again")
    promised = int(first.get("NumberOfSeriesRelatedInstances", 0) or 0)
    if promised > len(slices):
        raise BadInput(f"series {case_id}: {promised} images are announced, {len(slices)} are present; send it again")
    cluster = f"patient-{short_hash(str(first.get('PatientID', '') or first.SeriesInstanceUID))}"
    study, modality = str(first.get("StudyInstanceUID", "")), str(first.get("Modality", ""))
    description = str(first.get("SeriesDescription", "") or "")
    return Series(case_id, str(first.SeriesInstanceUID), study, modality, cluster, tuple(slices), description)


def _slice(case_id: str, path: Path, header: Any) -> Slice:
    if int(header.get("NumberOfFrames", 1) or 1) > 1:
        raise BadInput(f"series {case_id}: {path.name} holds several frames; export it as one file per slice")
    if int(header.get("SamplesPerPixel", 1)) != 1:
        raise BadInput(f"series {case_id}: {path.name} is in color; a series must have grey slices")
    needed = ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing")
    missing = ", ".join(tag for tag in needed if not header.get(tag))
    if missing:
        raise BadInput(f"series {case_id}: {path.name} lacks {missing}, so its position is unknown; export it again")
    pixel_mm = (float(header.PixelSpacing[0]), float(header.PixelSpacing[1]))
    if not all(np.isfinite(size) and size > 0 for size in pixel_mm):
        raise BadInput(
            f"series {case_id}: {path.name} has PixelSpacing {_joined_numbers(pixel_mm)}; it must be positive"
        )
    thickness = header.get("SliceThickness")
    x, y, z = (float(value) for value in header.ImagePositionPatient)
    axes = np.asarray(header.ImageOrientationPatient, np.float64).reshape(2, 3)
    if not np.isfinite([x, y, z]).all() or not np.allclose(axes @ axes.T, np.eye(2), atol=1e-2):
        raise BadInput(
            f"series {case_id}: {path.name} has ImagePositionPatient {_joined_numbers((x, y, z))} and "
            f"ImageOrientationPatient {_joined_numbers(axes.ravel().tolist())}; the position must be finite and the "
            "orientation two unit vectors at a right angle; export the series again"
        )
    return Slice(
        path, str(header.SOPInstanceUID), (x, y, z), tuple(axes.ravel().tolist()),
        (int(header.Rows), int(header.Columns)), pixel_mm, None if thickness in (None, "") else float(thickness),
    )  # fmt: skip


def _check_alike(case_id: str, slices: Sequence[Slice]) -> None:
    first = slices[0]
    for other in slices[1:]:
        for what, one, two, close in (
            ("size", first.shape, other.shape, 0.0),
            ("orientation", first.orientation, other.orientation, 1e-4),
            ("pixel spacing", first.pixel_mm, other.pixel_mm, 1e-4),
        ):
            if not np.allclose(one, two, rtol=0, atol=close):
                raise BadInput(
                    f"series {case_id} mixes slices: {first.path.name} has {what} {_joined_numbers(one)}, "
                    f"{other.path.name} has {_joined_numbers(two)}; one series must be one volume, split it"
                )


def _joined_numbers(values: Sequence[float]) -> str:
    return " x ".join(f"{value:.4g}" for value in values)


def _check_size(case_id: str, slices: Sequence[Slice], headers: Sequence[Any], max_bytes: int) -> None:
    rows, columns = slices[0].shape
    asked = rows * columns * len(slices) * 4
    if min(rows, columns) < 1 or asked > max_bytes:
        raise UnsafeInput(
            f"series {case_id} needs {asked / 2**30:.1f} GiB ({len(slices)} slices of {rows} x {columns}), "
            f"at most {max_bytes / 2**30:.1f} GiB are allowed; crop it or raise the limit"
        )
    for one, header in zip(slices, headers, strict=True):
        packed = one.path.stat().st_size
        compressed = header.file_meta.TransferSyntaxUID.is_compressed
        if not compressed and packed < rows * columns * int(header.get("BitsAllocated", 16)) // 8:
            raise BadInput(f"series {case_id}: {one.path.name} has {packed} bytes, less than its pixels; send it again")


def _check_even(case_id: str, slices: Sequence[Slice]) -> None:
    """Refuse slices that are unevenly spaced, shifted, missing or duplicated."""
    if len(slices) == 1:
        return
    heights = np.array([one.height_mm for one in slices])
    gaps = np.diff(heights)
    for place in np.flatnonzero(gaps < TOLERANCE_MM).tolist():
        raise BadInput(
            f"series {case_id}: {slices[place].path.name} and {slices[place + 1].path.name} have the same "
            f"position; export each phase, echo or time point as its own series"
        )
    usual = float(np.quantile(gaps, 0.5, method="lower"))
    for place in np.flatnonzero(np.abs(gaps - usual) > max(TOLERANCE_MM, 0.02 * usual)).tolist():
        missing = round(gaps[place] / usual) - 1
        what = f"{missing} slice{'s are' if missing > 1 else ' is'} missing" if missing > 0 else "slices are uneven"
        raise BadInput(
            f"series {case_id}: {what} between {slices[place].path.name} and {slices[place + 1].path.name} "
            f"({gaps[place]:.2f} mm apart, others {usual:.2f} mm); send the series again"
        )
    drift = np.asarray(slices[-1].position_mm) - np.asarray(slices[0].position_mm)
    aside = drift - (drift @ slices[0].normal) * slices[0].normal
    if np.linalg.norm(aside) > max(0.1, 0.01 * float(heights[-1] - heights[0])):
        raise BadInput(
            f"series {case_id}: its slices are shifted against each other (a tilted gantry, "
            f"{np.linalg.norm(aside):.1f} mm aside); resample it to a straight grid first"
        )


def read_series(series: Series) -> Volume:
    """Read the voxels of a series as (slices, rows, columns), rescaled slice by slice, with their geometry.

    Integers stay integers; a rescale slope or intercept that is not a whole number gives float32.
    """
    planes = [_pixels(series, one) for one in series.slices]
    whole = all(np.issubdtype(plane.dtype, np.integer) for plane in planes)
    low, high = min(plane.min() for plane in planes), max(plane.max() for plane in planes)
    integer = np.int16 if low >= -(2**15) and high < 2**15 else np.int32
    return placed_volume(np.stack(planes).astype(integer if whole else np.float32), series.affine)


def _pixels(series: Series, one: Slice) -> NDArray[Any]:
    try:
        stored = pydicom_module().dcmread(one.path)
        pixels = np.asarray(stored.pixel_array)
        scale = (stored.get(tag) for tag in ("RescaleSlope", "RescaleIntercept"))
        if pixels.shape != one.shape:
            raise BadInput(f"they have shape {pixels.shape}, the header says {one.shape}")
        slope, intercept = (
            usual if value is None else float(value) for value, usual in zip(scale, (1.0, 0.0), strict=True)
        )
    except Exception as error:  # pydicom raises many kinds of errors for a missing decoder or a damaged stream
        raise BadInput(
            f"series {series.case_id}: the pixels of {one.path.name} cannot be read ({in_one_line(error)}); "
            f"export the series uncompressed"
        ) from error
    if not np.isfinite(slope * intercept) or slope == 0:
        raise BadInput(
            f"series {series.case_id}: {one.path.name} has RescaleSlope {slope:g} and RescaleIntercept "
            f"{intercept:g}; both must be finite and the slope not 0; export it again"
        )
    if slope.is_integer() and intercept.is_integer():
        return np.asarray(pixels.astype(np.int64) * int(slope) + int(intercept))
    return np.asarray(pixels * slope + intercept)
