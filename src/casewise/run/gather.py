"""The cases of a folder that this process takes, with labels and groups where there are any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from casewise.adapt.backbones import Backbone
from casewise.core.errors import BadInput
from casewise.core.text import UNIT, pluralize
from casewise.data.dicom_series import is_dicom_folder
from casewise.data.folders import CaseFiles, list_cases, part_of, table_for, with_groups, with_labels
from casewise.data.splits import count_patients
from casewise.run.dicom import series_cases, write_series


def gathered_cases(
    backbone: Backbone, images: Path, *, labels: Path | None = None, groups: Path | None = None,
    parts: tuple[int | None, int | None] = (None, None), environment: Mapping[str, str] | None = None,
    keep: Path | None = None, refused: dict[str, str] | None = None, channels: Sequence[str] = (),
    notes: list[str] | None = None,
) -> tuple[CaseFiles, ...]:  # fmt: skip
    """The cases of a folder that this process takes, with labels and groups where there are any.

    Without ``groups`` a ``cases.csv`` in the folder or one level above it is read, if it has all the cases; ``notes``
    gets a sentence about it.

    DICOM series are written as NIfTI below ``keep``; ``refused`` gets those that cannot be read, and why.
    ``channels`` says by description which series of a study is which channel.
    """
    series = is_dicom_folder(images)
    if channels and not series:
        raise BadInput(f"--set channels works only with DICOM series, and {images} has none; leave it out")
    if series:
        if keep is None:
            raise BadInput(f"{images} has DICOM files, which only casewise predict and record can read")
        wanted = backbone.expects.channels
        cases, problems = series_cases(images, keep, ending=backbone.ending, channels=channels, wanted=wanted)
        (refused if refused is not None else {}).update(problems)
    else:
        cases = list_cases(images, ending=backbone.ending, broken_links=True)
    if labels is not None:
        cases = with_labels(cases, labels)
    beside = table_for(images) if groups is None and not series else None
    if groups is not None:
        cases = with_groups(cases, groups)
    elif beside is not None:
        cases, said = _described_beside(cases, beside)
        (notes if notes is not None else []).append(said)
    number, own = part_from(*parts, environment or {})
    cases = part_of(cases, parts=number, part=own)
    if series:
        cases, problems = write_series(images, cases, channels=channels)
        (refused if refused is not None else {}).update(problems)
    return cases


def _described_beside(cases: tuple[CaseFiles, ...], table: Path) -> tuple[tuple[CaseFiles, ...], str]:
    """Apply a table that was found beside the images, and return a sentence about it; unchanged if it does not fit."""
    try:
        described = with_groups(cases, table)
    except BadInput as error:
        return (
            cases,
            f"{table} is not used: {error} if patients have several scans, or name another table with --groups",
        )
    patients = count_patients(described)
    of = f"{pluralize(len(described), 'case')} of {pluralize(patients, *UNIT)}"
    return described, f"{table} says which {UNIT[0]} and which group a case belongs to ({of})"


def part_from(num_parts: int | None, part_id: int | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """Return (number of parts, own part). Flags have priority; without flags each task of a SLURM array is one part.

    >>> part_from(None, None, {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "1"})
    (4, 2)
    """
    if num_parts is not None or part_id is not None:
        return num_parts or 1, part_id or 0
    count = environment.get("SLURM_ARRAY_TASK_COUNT")
    if count is None:
        return 1, 0
    try:
        first = int(environment.get("SLURM_ARRAY_TASK_MIN", "0"))
        step = int(environment.get("SLURM_ARRAY_TASK_STEP", "1"))
        return int(count), (int(environment["SLURM_ARRAY_TASK_ID"]) - first) // step
    except (KeyError, ValueError) as error:
        raise BadInput(f"the SLURM array variables are incomplete ({error}); pass -num_parts and -part_id") from error
