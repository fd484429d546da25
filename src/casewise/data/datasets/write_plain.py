"""A dataset as plain files: what record and predict read, with the geometry of the original images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from casewise.core.errors import BadInput
from casewise.data.cases_csv import write_table
from casewise.data.cohort import Cohort
from casewise.data.datasets.located import Found, files_of, is_volume, volume_of
from casewise.data.nifti import Geometry, write_mask
from casewise.data.pictures import write_label_picture


def write_plain(cohort: Cohort, folder: Path) -> Iterator[str]:
    """Write ``images/<case>_XXXX``, ``labels/<case>`` and ``cases.csv``; yields each id when its files are there.

    Volumes keep affine, codes, spacing and dtype; one frame of a 4-D file becomes a 3-D file. Labels are written in
    the integers of the cohort, so the mappings of the loader are done once and for all. The table comes last.
    """
    if folder.exists() and any(folder.iterdir()):
        raise BadInput(f"{folder} is not empty; write to a new folder, so that no old case stands among the new ones")
    labelled = any(member.labelled for member in cohort.members.values())
    for name in ("images", "labels") if labelled else ("images",):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for case_id, found in files_of(cohort).items():
        (_write_volumes if is_volume(found.images[0]) else _write_picture)(cohort, found, folder)
        yield case_id
    write_table(cohort, folder)


def _write_volumes(cohort: Cohort, found: Found, folder: Path) -> None:
    for channel, path in enumerate(found.images):
        volume = volume_of(path, found.frame)
        write_image(folder / "images" / f"{found.id}_{channel:04d}.nii.gz", volume.voxels, volume.geometry)
    if cohort.members[found.id].labelled:
        write_mask(folder / "labels" / f"{found.id}.nii.gz", cohort.label(found.id), volume.geometry)


def write_image(path: Path, voxels: NDArray[Any], geometry: Geometry) -> None:
    """Write voxels in (slices, rows, columns) where the geometry says; free-text fields of the header stay behind."""
    import nibabel

    header = nibabel.Nifti1Header()
    header.set_data_dtype(voxels.dtype)
    header.set_data_shape(voxels.T.shape)
    zooms = header["pixdim"].copy()
    for name, value in geometry.fields.items():
        header[name] = value
    zooms[: voxels.ndim + 1] = geometry.fields["pixdim"][: voxels.ndim + 1]
    header["pixdim"] = zooms
    nibabel.save(nibabel.Nifti1Image(voxels.T, None, header), path)


def _write_picture(cohort: Cohort, found: Found, folder: Path) -> None:
    image = cohort.case(found.id).image
    if len(image) == 3 and len(found.images) == 1:
        Image.fromarray(np.moveaxis(image, 0, -1)).save(folder / "images" / f"{found.id}_0000.png")
    else:
        for channel, values in enumerate(image):
            write_label_picture(folder / "images" / f"{found.id}_{channel:04d}.png", values)
    if cohort.members[found.id].labelled:
        write_label_picture(folder / "labels" / f"{found.id}.png", cohort.label(found.id))
