"""A made cohort (a phantom) as files, in the plain layout that every command reads; it has no geometry to keep."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
from PIL import Image

from casewise.core.errors import BadInput
from casewise.core.records import Case, Mask
from casewise.data.cases_csv import write_table
from casewise.data.cohort import Cohort


def write_cohort(cohort: Cohort, folder: Path) -> Path:
    """Write ``images/<case>``, ``labels/<case>`` and ``cases.csv``: NIfTI for volumes, PNG for pictures."""
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for case_id, member in cohort.members.items():
        _write_image(cohort.case(case_id), folder / "images")
        if member.labelled:
            _write_label(case_id, cohort.label(case_id), folder / "labels")
    write_table(cohort, folder)
    return folder


def _write_image(case: Case, folder: Path) -> None:
    if case.image.ndim == 3:
        Image.fromarray(np.moveaxis(case.image, 0, -1)).save(folder / f"{case.id}.png")
        return
    if len(case.image) != 1:
        raise BadInput(f"case {case.id} has {len(case.image)} channels; volumes are written with one channel")
    _write_volume(case.image[0], folder / f"{case.id}.nii.gz")


def _write_label(case_id: str, label: Mask, folder: Path) -> None:
    if label.ndim == 2:
        Image.fromarray(label.astype(np.uint8)).save(folder / f"{case_id}.png")
    else:
        _write_volume(label.astype(np.uint8), folder / f"{case_id}.nii.gz")


def _write_volume(voxels: Mask, path: Path) -> None:
    """(slices, rows, columns) to a file in (x, y, z) order."""
    nibabel.save(nibabel.Nifti1Image(voxels.transpose(2, 1, 0), np.eye(4)), path)
