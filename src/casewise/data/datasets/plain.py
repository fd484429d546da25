"""A plain folder: ``images/`` with or without ``labels/`` and ``cases.csv``, or several such folders side by side.

Any cohort can be written in this layout (``write_plain``, ``write_cohort``), which every command reads.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from casewise.core.errors import BadInput
from casewise.core.records import Mask
from casewise.data.datasets.located import LocatedCase, cohort_of, files_of, safe_id, visible, volume_of, whole_label
from casewise.data.folders import (
    NAME,
    READABLE,
    CaseFiles,
    list_cases,
    read_table,
    table_for,
    with_groups,
    with_labels,
    with_table,
    write_table,
)
from casewise.data.nifti import is_volume, write_mask, write_volume
from casewise.data.pictures import read_label_picture, write_label_picture
from casewise.data.splits import Cohort


def is_plain(root: Path) -> bool:
    """Return True if a folder holds images/, or folders that do, or images itself."""
    return root.is_dir() and (bool(_parts(root)) or _holds_images(root))


def plain(root: Path, *, cluster: str | None = None, ignore: int | None = None) -> Cohort:
    """The cases of a plain folder; of several side by side, each is a group named after its folder.

    If cases of several folders have equal names, an id is the name of the folder and that of the case.

    ``cases.csv`` (in the folder, or one level up if it has any of the cases; columns case, group, cluster, split or
    their usual other names) describes the cases. ``cluster`` is a pattern whose first bracket is the cluster in a case
    id, such as ``(.+)_frame_`` for frames of a sequence; ``ignore`` is a label value that is not scored, such as 255.
    """
    parts = _parts(root)
    found = [case for part in parts for case in _part(part, part.name if part != root else None)]
    if len({case.id for case in found}) < len(found):  # sites that name their cases alike
        found = [replace(case, id=safe_id(case.group or "", case.id)) for case in found]
    if not parts:
        found = [LocatedCase(case.id, case.images) for case in list_cases(root)]
    facts = {"group": "name of the folder"} if parts and root not in parts else {}
    table = table_for(root)
    read = None if table is None else read_table(table)
    if read is not None and ((root / NAME).is_file() or any(one.id in read.rows for one in found)):
        found, facts = with_table(found, read), {**facts, **read.facts}
    if cluster is not None:
        found, facts = list(_clustered(found, cluster)), {**facts, "cluster": f"pattern {cluster} in the id"}
    return cohort_of(root.resolve().name, root, found, label=read_plain_label, ignore=ignore, facts=facts)


def _parts(root: Path) -> list[Path]:
    """The folders that hold images/: the folder itself, else its children."""
    if (root / "images").is_dir():
        return [root]
    return [path for path in visible(root.iterdir()) if (path / "images").is_dir()]


def _holds_images(root: Path) -> bool:
    return any(path.is_file() and path.name.lower().endswith(READABLE) for path in visible(root.iterdir()))


def _part(root: Path, group: str | None) -> Iterator[LocatedCase]:
    cases = list_cases(root / "images")
    if (root / "labels").is_dir() and any((root / "labels").iterdir()):
        cases = with_labels(cases, root / "labels")
    for case in cases:
        yield LocatedCase(case.id, case.images, (case.label,) if case.label else (), group)


def _clustered(found: Sequence[LocatedCase], pattern: str) -> Iterator[LocatedCase]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise BadInput(f"{pattern!r} is not a pattern ({error})") from error
    if expression.groups < 1:
        raise BadInput(f"the pattern {pattern!r} needs brackets around the cluster, such as (.+)_frame_")
    for one in found:
        match = expression.match(one.id)
        if match is None:
            raise BadInput(f"the pattern {pattern!r} does not match case {one.id}; it must match every id")
        yield replace(one, cluster=match[1])


def read_plain_label(found: LocatedCase) -> Mask:
    """A label without any mapping: integers of a NIfTI file or of a picture."""
    path = found.labels[0]
    return whole_label(path) if is_volume(path) else read_label_picture(path)


def write_plain(cohort: Cohort, folder: Path) -> Iterator[str]:
    """Write ``images/<case>_XXXX``, ``labels/<case>`` and ``cases.csv``; yields each id after its files were written.

    Volumes keep affine, codes, spacing and dtype; one frame of a 4-D file becomes a 3-D file. Labels are written in
    the integers of the cohort, so the mappings of the loader are done once and for all. The table comes last.
    """
    if folder.exists() and any(folder.iterdir()):
        raise BadInput(f"{folder} is not empty; write to a new folder, so that old and new cases do not mix")
    labelled = any(member.labelled for member in cohort.members.values())
    for name in ("images", "labels") if labelled else ("images",):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for case_id, found in files_of(cohort).items():
        (_write_volumes if is_volume(found.images[0]) else _write_picture)(cohort, found, folder)
        yield case_id
    write_table(cohort, folder)


def plain_files(cohort: Cohort, folder: Path, *, as_it_lies: bool) -> tuple[CaseFiles, ...]:
    """Files of a cohort as models read them: where they are, or a copy in ``folder`` with the loader's mappings.

    A complete copy from an earlier run is used as it is.
    """
    if as_it_lies:
        return tuple(
            CaseFiles(one.id, one.images, one.labels[0] if one.labels else None, who.group, who.cluster, who.split)
            for one, who in zip(files_of(cohort).values(), cohort.members.values(), strict=True)
        )
    if not (folder / NAME).exists():  # the table is written last, so a copy without one is incomplete
        shutil.rmtree(folder, ignore_errors=True)
        for _ in write_plain(cohort, folder):
            pass
    return with_groups(with_labels(list_cases(folder / "images"), folder / "labels"), folder / NAME)


def _write_volumes(cohort: Cohort, found: LocatedCase, folder: Path) -> None:
    for channel, path in enumerate(found.images):
        volume = volume_of(path, found.frame)
        write_volume(folder / "images" / f"{found.id}_{channel:04d}.nii.gz", volume)
    if cohort.members[found.id].labelled:
        write_mask(folder / "labels" / f"{found.id}.nii.gz", cohort.label(found.id), volume.geometry)


def _write_picture(cohort: Cohort, found: LocatedCase, folder: Path) -> None:
    image = cohort.case(found.id).image
    if len(image) == 3 and len(found.images) == 1:
        Image.fromarray(np.moveaxis(image, 0, -1)).save(folder / "images" / f"{found.id}_0000.png")
    else:
        for channel, values in enumerate(image):
            write_label_picture(folder / "images" / f"{found.id}_{channel:04d}.png", values)
    if cohort.members[found.id].labelled:
        write_label_picture(folder / "labels" / f"{found.id}.png", cohort.label(found.id))


def write_cohort(cohort: Cohort, folder: Path) -> Path:
    """Write ``images/<case>``, ``labels/<case>`` and ``cases.csv``: NIfTI for volumes, PNG for pictures."""
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for case_id, member in cohort.members.items():
        image = cohort.case(case_id).image
        picture = image.ndim == 3
        if not picture and len(image) != 1:
            raise BadInput(f"case {case_id} has {len(image)} channels; volumes are written with one channel")
        _write_array(np.moveaxis(image, 0, -1) if picture else image[0], folder / "images" / case_id, picture=picture)
        if member.labelled:
            _write_array(cohort.label(case_id).astype(np.uint8), folder / "labels" / case_id, picture=picture)
    write_table(cohort, folder)
    return folder


def _write_array(values: NDArray[Any], stem: Path, *, picture: bool) -> None:
    """Write (rows, columns) or (rows, columns, 3) as PNG, (slices, rows, columns) as NIfTI in the order (x, y, z)."""
    if picture:
        Image.fromarray(values).save(f"{stem}.png")
    else:
        nibabel.save(nibabel.Nifti1Image(values.transpose(2, 1, 0), np.eye(4)), f"{stem}.nii.gz")
