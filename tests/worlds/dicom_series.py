"""Small DICOM series made by hand, for the tests of DICOM in and out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

from casewise.core.errors import BadInput
from casewise.data.dicom_series import survey_series

STRAIGHT = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
OBLIQUE = (0.8, 0.6, 0.0, -0.36, 0.48, 0.8)  # two unit vectors at a right angle


def write_series(
    folder: Path,
    values: NDArray[Any],  # (slices, rows, columns) as stored, before the rescale
    *,
    orientation: tuple[float, ...] = STRAIGHT,
    step_mm: float = 2.5,  # along the normal; negative writes a descending series
    origin_mm: tuple[float, float, float] = (-10.0, 5.0, 30.0),
    pixel_mm: tuple[float, float] = (0.75, 1.25),
    slope: float = 1,
    intercept: float = 0,
    series_uid: str | None = None,
    patient: str = "P1",
    name: str = "{:03d}.dcm",
    **tags: Any,
) -> list[Path]:
    """Write one file per slice, numbered in the order of ``values``."""
    folder.mkdir(parents=True, exist_ok=True)
    uid, study = series_uid or generate_uid(), generate_uid()
    normal = np.cross(orientation[:3], orientation[3:])
    paths = []
    for number, plane in enumerate(values):
        meta = FileMetaDataset()
        meta.MediaStorageSOPClassUID = CTImageStorage
        meta.MediaStorageSOPInstanceUID = generate_uid()
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        data = FileDataset(str(folder), {}, file_meta=meta, preamble=b"\0" * 128)
        data.SOPClassUID, data.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
        data.PatientID, data.PatientName, data.PatientBirthDate, data.PatientSex = patient, "Doe^Jane", "19700101", "O"
        data.StudyInstanceUID, data.SeriesInstanceUID, data.FrameOfReferenceUID = (
            study,
            uid,
            generate_uid(entropy_srcs=[uid]),
        )
        data.StudyDate, data.StudyTime, data.StudyID, data.AccessionNumber = "20260101", "120000", "1", "A1"
        data.ReferringPhysicianName, data.Manufacturer, data.PositionReferenceIndicator = "", "phantom", ""
        data.Modality, data.SeriesNumber, data.InstanceNumber = "CT", 3, number + 1
        data.ImagePositionPatient = [float(x) for x in np.asarray(origin_mm) + number * step_mm * normal]
        data.ImageOrientationPatient, data.PixelSpacing = list(orientation), list(pixel_mm)
        data.SliceThickness = abs(step_mm)
        data.Rows, data.Columns = plane.shape
        data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
        data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = 16, 16, 15, 1
        data.RescaleSlope, data.RescaleIntercept = slope, intercept
        data.PixelData = plane.astype("<i2").tobytes()
        for tag, value in tags.items():
            setattr(data, tag, value)
        paths.append(folder / name.format(number))
        pydicom.dcmwrite(paths[-1], data, enforce_file_format=True)
    return paths


def find_series(folder, **options):
    """Every image series under a folder, one case each; the first that is not one whole volume is refused by name.

    A case is called after the folder that holds its files, with the series number where a folder holds several.
    """
    found, refused = survey_series(folder, **options)
    for error in refused.values():
        raise error
    return found


def read_segmentation(path, series):
    """The mask of a SEG in (slices, rows, columns) of the series that it refers to, with the model's label numbers."""
    import highdicom
    import highdicom.seg

    try:
        stored = highdicom.seg.segread(path)
    except Exception as error:  # highdicom raises many kinds on what is no SEG
        raise BadInput(f"{path.name} is no DICOM segmentation ({' '.join(str(error).split())})") from error
    wanted = [one.instance_uid for one in series.slices]
    here = {uid for _, _, uid in stored.get_source_image_uids()}
    if not here <= set(wanted):
        raise BadInput(f"{path.name} refers to images that are not in series {series.case_id}; give its own series")
    numbers = stored.get_pixels_by_source_instance(
        wanted, combine_segments=True, assert_missing_frames_are_empty=True, ignore_spatial_locations=True
    )
    values = np.zeros(stored.number_of_segments + 1, np.uint16)
    for number in range(1, stored.number_of_segments + 1):
        said = str(stored.get_segment_description(number).get("SegmentDescription", ""))
        values[number] = int(said[len("label ") :]) if said.startswith("label ") else number
    mask = np.asarray(values[numbers])
    return mask.astype(np.uint8) if mask.max(initial=0) < 255 else mask


def read_report(path):
    """The sentences of a structured report that :func:`write_report` wrote, by what they say."""
    import pydicom

    items = pydicom.dcmread(path).get("ContentSequence", [])
    return {
        str(item.ConceptNameCodeSequence[0].CodeValue): str(item.TextValue)
        for item in items
        if item.ValueType == "TEXT" and item.ConceptNameCodeSequence[0].CodingSchemeDesignator == "99CASEWISE"
    }
