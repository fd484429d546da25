"""DICOM output: a segmentation (SEG) and a structured report (SR) that refer to their images.

Both copy the patient and study of their source images, as an archive in a hospital needs it: they copy these fields
from the images. Segments are named as the model names its classes; their codes come from a small JSON file
(``dicom_codes.json``, or your own), and a class without an entry is coded as tissue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from casewise.core.errors import BadInput, MissingExtra
from casewise.core.formats import parsed_json
from casewise.core.records import Mask
from casewise.data.dicom_series import Series

SEGMENTATION_NUMBER, REPORT_NUMBER = 9001, 9002  # series numbers: far above what scanners use
LABEL = "label "  # SegmentDescription is "label 3": the label number, which SEG itself counts from 1 without gaps
_CATEGORIES = {
    "anatomy": ("91723000", "SCT", "Anatomical Structure"),
    "abnormal": ("49755003", "SCT", "Morphologically Abnormal Structure"),
    "tissue": ("85756007", "SCT", "Tissue"),
}
_SCHEME = "99CASEWISE"  # a private scheme; DICOM requires the prefix 99


@dataclass(frozen=True)
class Statement:
    """Content of a report: the decision, the flag, and the promise."""

    decision: str  # one sentence
    flag: str  # why a person should look at it; empty where nobody needs to
    certificate: str  # the certificate's sentence; empty where there is none
    software: str  # "casewise 0.2.0"
    measures: str = ""  # volumes and other measures, in one sentence


def read_codes(path: Path | None = None) -> dict[str, Mapping[str, Any]]:
    """Return codes by class name in lower case; those of ``path`` replace built-in ones."""
    built_in = resources.files("casewise.data").joinpath("dicom_codes.json").read_text(encoding="utf-8")
    codes = _parsed_codes(built_in, "dicom_codes.json")
    if path is None:
        return codes
    try:
        return codes | _parsed_codes(path.read_text(encoding="utf-8"), path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read ({error}); give a JSON file of codes") from error


def check_kind(kind: str) -> None:
    """Refuse a kind of segmentation that cannot be written."""
    if kind not in ("binary", "labelmap"):
        raise BadInput(f"a segmentation must be binary or labelmap, got {kind!r}")


def _parsed_codes(text: str, name: str) -> dict[str, Mapping[str, Any]]:
    try:
        rows = parsed_json(text)
        for row in rows.values():
            assert row["category"] in _CATEGORIES
            assert len(row["type"]) == 3
            assert all(isinstance(word, str) and word for word in row["type"])
    except (ValueError, AttributeError, KeyError, TypeError, AssertionError) as error:
        raise BadInput(
            f'{name}: a row of codes is "class name": {{"category": "{" | ".join(_CATEGORIES)}", '
            f'"type": ["value", "scheme", "meaning"]}}'
        ) from error
    return {str(key).lower(): row for key, row in rows.items()}


def write_segmentation(
    path: Path, mask: Mask, series: Series, *, classes: Mapping[int, str],
    codes: Mapping[str, Mapping[str, Any]] | None = None, software: str = "casewise", kind: str = "binary",
) -> str:  # fmt: skip
    """Write a mask in (slices, rows, columns) of its series as DICOM SEG.

    Every class of the model becomes a segment, also if the mask lacks it. Label 0 is background and gets no segment.

    Args:
        path: The file.
        mask: Label numbers.
        series: The series that was segmented.
        classes: Names by label number.
        codes: Codes by class name; default: the built-in codes.
        software: Name and version of the software.
        kind: ``binary`` (one frame per slice and segment, read by every viewer) or ``labelmap`` (one frame per slice,
            smaller with many classes; added to DICOM in 2024, so only newer viewers read it).

    Returns:
        The UID of the new object.

    Raises:
        BadInput: The mask does not fit the series, or holds a label without a name.
    """
    check_kind(kind)
    highdicom = _highdicom()
    if mask.shape != series.shape:
        raise BadInput(f"the mask has shape {mask.shape}, series {series.case_id} {series.shape}; resample it first")
    named = {value: name for value, name in sorted(classes.items()) if value != 0}
    unknown = sorted(set(np.unique(mask).tolist()) - {0, *named})
    if unknown or not named:
        raise BadInput(f"the mask of {series.case_id} holds labels {unknown} that no class name was given for")
    numbers = np.zeros(max(int(mask.max()), *named) + 1, np.uint8)
    for number, value in enumerate(named, 1):
        numbers[value] = number
    segmentation = highdicom.seg.Segmentation(
        source_images=_headers(series),
        pixel_array=numbers[mask.astype(np.int64)],
        segmentation_type=highdicom.seg.SegmentationTypeValues(kind.upper()),
        segment_descriptions=_segments(highdicom, named, codes if codes is not None else read_codes(), software),
        series_instance_uid=highdicom.UID(),
        series_number=SEGMENTATION_NUMBER,
        sop_instance_uid=highdicom.UID(),
        instance_number=1,
        manufacturer="casewise",
        manufacturer_model_name="casewise",
        software_versions=software,
        device_serial_number="0",
        content_description="Guarded segmentation",
        content_label="CASEWISE",
        omit_empty_frames=bool(mask.any()),
    )
    segmentation.SeriesDescription = "casewise segmentation"
    segmentation.save_as(path)
    return str(segmentation.SOPInstanceUID)


def _highdicom() -> Any:
    try:
        import highdicom
        import highdicom.seg
        import highdicom.sr
    except ImportError as error:
        raise MissingExtra("DICOM output needs highdicom; pip install 'casewise[dicom]'") from error
    return highdicom


def _headers(series: Series) -> list[Any]:
    """Read the headers of the source images in the order of the slices; SEG and SR copy and reference them."""
    import pydicom

    headers = [pydicom.dcmread(path, stop_before_pixels=True) for path in series.files]
    for header in headers:
        for tag in _MAY_BE_EMPTY:
            if tag not in header:
                setattr(header, tag, "")
        header.SliceThickness = header.get("SliceThickness") or float(np.linalg.norm(series.affine[:3, 2]))
    return headers


_MAY_BE_EMPTY = (
    "PatientID", "PatientName", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "StudyID",
    "AccessionNumber", "ReferringPhysicianName", "PositionReferenceIndicator", "Manufacturer",
)  # fmt: skip
"""Attributes of type 2, which a file may leave empty; some lack them altogether, and highdicom copies them."""


def _segments(
    highdicom: Any, named: Mapping[int, str], codes: Mapping[str, Mapping[str, Any]], software: str
) -> list[Any]:
    algorithm = highdicom.AlgorithmIdentificationSequence(
        name="casewise", version=software, family=_code(("123109", "DCM", "Artificial Intelligence"))
    )
    segments = []
    for number, (value, name) in enumerate(named.items(), 1):
        row = codes.get(name.lower().replace("_", " "), {"category": "tissue", "type": _CATEGORIES["tissue"]})
        segment = highdicom.seg.SegmentDescription(
            segment_number=number, segment_label=name[:64],
            segmented_property_category=_code(_CATEGORIES[row["category"]]), segmented_property_type=_code(row["type"]),
            algorithm_type=highdicom.seg.SegmentAlgorithmTypeValues.AUTOMATIC, algorithm_identification=algorithm,
        )  # fmt: skip
        segment.SegmentDescription = f"{LABEL}{value}"
        segments.append(segment)
    return segments


def _code(parts: Sequence[str]) -> Any:
    from pydicom.sr.coding import Code

    return Code(parts[0], parts[1], parts[2])


def write_report(path: Path, series: Series, segmentation: Path, said: Statement) -> str:
    """Write the decision, the flag and the certificate's sentence as a structured report; the UID of the new object.

    It refers to its segmentation and, through its evidence, to every source image.
    """
    highdicom = _highdicom()
    import pydicom

    masks = pydicom.dcmread(segmentation, stop_before_pixels=True)
    report = highdicom.sr.ComprehensiveSR(
        evidence=[*_headers(series), masks], content=_content(highdicom, masks, said),
        series_instance_uid=highdicom.UID(), series_number=REPORT_NUMBER, sop_instance_uid=highdicom.UID(),
        instance_number=1, manufacturer="casewise", is_complete=True, is_final=False, is_verified=False,
    )  # fmt: skip
    report.SeriesDescription = "casewise decision"
    report.save_as(path)
    return str(report.SOPInstanceUID)


def _content(highdicom: Any, masks: Any, said: Statement) -> Any:
    sr = highdicom.sr
    contains, context = sr.RelationshipTypeValues.CONTAINS, sr.RelationshipTypeValues.HAS_OBS_CONTEXT
    title = _code(("18748-4", "LN", "Diagnostic imaging report"))
    root = sr.ContainerContentItem(name=title, is_content_continuous=False)
    device = _code(("121007", "DCM", "Device"))

    def section(code: str, meaning: str, text: str) -> Any:
        return sr.TextContentItem(_code((code, _SCHEME, meaning)), text, relationship_type=contains)

    items = [
        sr.CodeContentItem(_code(("121005", "DCM", "Observer Type")), device, relationship_type=context),
        sr.TextContentItem(_code(("121013", "DCM", "Device Observer Name")), said.software, relationship_type=context),
        section("decision", "Decision about the mask", said.decision),
        section("flag", "For a person to look at", said.flag or "nothing was flagged"),
        section("certificate", "Certificate", said.certificate or "no certificate was given"),
        *([section("measures", "Measures", said.measures)] if said.measures else []),
        sr.ImageContentItem(
            _code(("segmentation", _SCHEME, "Segmentation")), masks.SOPClassUID, masks.SOPInstanceUID,
            relationship_type=contains,
        ),
    ]  # fmt: skip
    root.ContentSequence = sr.ContentSequence(items, is_root=False)
    return root
