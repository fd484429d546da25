"""DICOM around a run: series become NIfTI cases on the way in, masks become SEG and a structured report on the way out.

Every backbone reads NIfTI, so a series is written once as NIfTI below the output
folder: voxels and place, no name, no date. The same series gives the same bytes, so a continued run finds its cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.durable import replacing
from casewise.core.errors import BadInput, CasewiseError, in_one_line
from casewise.core.prediction_record import PredictedCase
from casewise.core.records import Mask
from casewise.data.dicom_objects import Statement, read_codes, write_report, write_segmentation
from casewise.data.dicom_series import Series, check_channels, read_series, survey_series
from casewise.data.folders import CaseFiles
from casewise.data.nifti import read_geometry, read_label, write_volume
from casewise.measure.masks import label_volumes
from casewise.study.deployed_measures import measure_text

FOLDER = "dicom"  # of a prediction folder: <case>.seg.dcm and <case>.sr.dcm


Gathered = tuple[tuple[CaseFiles, ...], dict[str, str]]
"""Cases, and by case why others were refused."""


def series_cases(
    folder: Path, keep: Path, *, ending: str | None = None, channels: Sequence[str] = (), wanted: int | None = None
) -> Gathered:
    """Every series of ``folder`` as a case whose NIfTI file will be written below ``keep``, with its patient as the
    cluster.

    With ``channels`` a study is a case; ``wanted`` is how many the model takes.

    Also returns, by case, why a series was refused; the other series are still used. Nothing is written yet.
    """
    ending = ending or ".nii.gz"
    if ending not in (".nii.gz", ".nii"):
        raise BadInput(f"casewise converts DICOM to NIfTI, but this model reads only {ending}; convert the series")
    found, problems = survey_series(folder, channels=channels)
    refused = {case_id: str(error) for case_id, error in problems.items()}
    if not found:
        raise BadInput(f"no series of {folder} can be read: {'; '.join(refused.values())}")
    check_channels(found, channels, wanted)
    cases = [
        CaseFiles(
            series.case_id,
            tuple(keep / f"{series.case_id}_{number:04d}{ending}" for number in range(1 + len(series.more))),
            cluster=series.cluster,
            modality=series.modality if series.modality.isalnum() else None,
        )
        for series in found
    ]
    return tuple(cases), refused


def write_series(folder: Path, cases: Sequence[CaseFiles], *, channels: Sequence[str] = ()) -> Gathered:
    """Write the series of these cases as NIfTI; the readable cases, and why others were refused."""
    by_id = {series.case_id: series for series in survey_series(folder, channels=channels)[0]}
    made, refused = [], {}
    for files in cases:
        try:
            volumes = [read_series(one) for one in (by_id[files.id], *by_id[files.id].more)]
        except CasewiseError as error:
            refused[files.id] = str(error)
            continue
        for path, volume in zip(files.images, volumes, strict=True):
            with replacing(path) as temporary:
                write_volume(temporary, volume)
        made.append(files)
    if cases and not made:
        raise BadInput(f"no series of {folder} can be read: {'; '.join(refused.values())}")
    return tuple(made), refused


def write_objects(
    folder: Path,  # with the series
    out: Path,
    masks: Mapping[str, Path],
    entries: Sequence[PredictedCase],
    *,
    classes: Mapping[int, str],
    codes: Path | None = None,
    certificate: str = "",
    channels: Sequence[str] = (),
    kind: str = "binary",  # or labelmap
) -> dict[str, str]:
    """``OUT/dicom/<case>.seg.dcm`` and ``<case>.sr.dcm`` for every case that has a mask; the problems by case."""
    known = read_codes(codes)
    series = {one.case_id: one for one in survey_series(folder, channels=channels)[0]}
    failed: dict[str, str] = {}
    for entry in entries:
        case_id = entry.case
        if case_id not in series or case_id not in masks or not masks[case_id].is_file():
            continue
        try:
            _write_case(out / FOLDER, series[case_id], masks[case_id], entry, classes, known, certificate, kind)
        except Exception as error:  # highdicom raises many kinds; one case must not cost the others their objects
            failed[case_id] = in_one_line(error)
    return failed


def _write_case(
    folder: Path, series: Series, file: Path, entry: PredictedCase, classes: Mapping[int, str],
    codes: Mapping[str, Mapping[str, Any]], certificate: str, kind: str,
) -> None:  # fmt: skip
    software = f"casewise {entry.versions.get('casewise', '')}".strip()
    mask = read_label(file)
    if not np.allclose(read_geometry(file).affine, series.affine, atol=1e-2):
        raise BadInput(f"{file.name} is not placed like series {series.case_id}; predict with --set keep-header=true")
    segmentation, report = folder / f"{series.case_id}.seg.dcm", folder / f"{series.case_id}.sr.dcm"
    with replacing(segmentation) as temporary:
        write_segmentation(
            temporary, mask, series, classes=_named(classes, mask), codes=codes, software=software, kind=kind
        )
    measured = [measure_text(name, found) for name, found in entry.measures.items()]
    volumes = "; ".join([volume_sentence(mask, read_geometry(file).affine, classes), *measured])
    promised = certificate_sentence(entry, certificate)
    said = Statement(decision_sentence(entry), flag_sentence(entry), promised, software, volumes)
    with replacing(report) as temporary:
        write_report(temporary, series, segmentation, said)


def volume_sentence(mask: Mask, affine: NDArray[np.float64], classes: Mapping[int, str]) -> str:
    """The volume of every class in ml, in one sentence."""
    spacing_mm = np.linalg.norm(affine[:3, :3], axis=0)[::-1].tolist()
    volumes = label_volumes(mask, spacing_mm)
    named = {number: name for number, name in classes.items() if number} or {number: str(number) for number in volumes}
    return ", ".join(f"{name} {volumes.get(number, 0.0):.1f} ml" for number, name in named.items())


def _named(classes: Mapping[int, str], mask: Mask) -> dict[int, str]:
    """Return the class names of the model; the number of a class without a name."""
    held = {int(value): f"class {value}" for value in np.unique(mask) if value}
    return {**held, **classes} if {**held, **classes}.keys() - {0} else {1: "class 1"}


def decision_sentence(entry: PredictedCase) -> str:
    """Say which mask is used and why, for a radiologist."""
    kept = entry.decision is None or entry.decision.rolled_back
    used = "the model's original mask" if kept else f"a new mask ({entry.candidate}), not the model's original one"
    return f"Used: {used}. Why: {entry.reason or 'no reason was given'}"


def certificate_sentence(entry: PredictedCase, certificate: str) -> str:
    """Sentence about the certificate for the report of one case."""
    if certificate and entry.uncovered is not None:
        return f"the certificate does not cover this case: {entry.uncovered}"
    return certificate


def flag_sentence(entry: PredictedCase) -> str:
    """Return why a person should check the case; empty if no check is needed."""
    reasons = [entry.error] if entry.error else []
    if entry.decision is not None and entry.decision.flagged:
        low = None if entry.uncovered else entry.decision.quality_low
        reasons.append("flagged by the policy" + ("" if low is None else f": quality may be as low as {low:.2f}"))
    return "; ".join([*reasons, *entry.warnings])
