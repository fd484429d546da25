"""Inspect a folder: layout, cases, groups, labels, geometry, and problems that would appear later.

Geometry is read from headers only; sheared, unset, mixed and 4-D headers are reported.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import BadInput, CasewiseError
from casewise.core.text import pluralize
from casewise.data.datasets.located import LocatedCase, files_of
from casewise.data.nifti import check_header, is_volume, opened_image
from casewise.data.pictures import check_picture
from casewise.data.splits import Cohort, cluster_of, count_patients

SHEAR = 1e-4  # direction cosines further than this from orthonormal are refused by ITK


@dataclass(frozen=True, eq=False)
class ImageGrid:
    """Geometry from the header of an image."""

    shape: tuple[int, ...]  # as in the file: (x, y, z[, t]) of a volume, (rows, columns) of a picture
    spacing_mm: tuple[float, ...] | None = None
    dtype: str = "uint8"
    affine: NDArray[np.float64] | None = None
    coded: bool = True  # qform or sform says where the volume lies

    @property
    def orientation(self) -> str | None:
        """Directions of the axes such as "LPS"; None for pictures."""
        import nibabel

        return None if self.affine is None else "".join(str(code) for code in nibabel.aff2axcodes(self.affine))

    @property
    def is_sheared(self) -> bool:
        """True if the axes are not orthogonal: nibabel reads such files, ITK refuses them."""
        if self.affine is None:
            return False
        axes = self.affine[:3, :3] / np.linalg.norm(self.affine[:3, :3], axis=0)
        return bool(np.abs(axes.T @ axes - np.eye(3)).max() > SHEAR)

    @property
    def is_unset(self) -> bool:
        """True if the affine is the identity, which usually means that the spacing was lost."""
        return self.affine is not None and bool(np.array_equal(np.abs(self.affine[:3, :3]), np.eye(3)))

    @property
    def words(self) -> dict[str, str]:
        """Each property in words, to be counted."""
        words = {"shape": " x ".join(map(str, self.shape)), "dtype": self.dtype}
        if self.spacing_mm is not None:
            words["spacing_mm"] = " x ".join(f"{size:.4g}" for size in self.spacing_mm)
        return words if self.orientation is None else {**words, "orientation": self.orientation}


def grid_of(path: Path) -> ImageGrid:
    """Return the grid of an image file from its header."""
    if not is_volume(path):
        return ImageGrid(check_picture(path))
    header, image = check_header(path), opened_image(path)
    coded = bool(image.header["qform_code"]) or bool(image.header["sform_code"])
    affine = np.array(image.affine, dtype=np.float64)
    if not np.isfinite(affine).all() or np.linalg.matrix_rank(affine) < 4:
        raise BadInput(f"{path.name}: the affine places no volume (zero, flat or NaN axes); set qform or sform anew")
    return ImageGrid(header.shape, header.zooms[:3], str(image.get_data_dtype()), affine, coded)


def grid_problems(grids: Mapping[str, ImageGrid], found: Mapping[str, LocatedCase]) -> list[str]:
    """Return one sentence for each kind of problem in the headers, with a count and an example."""
    sheared = [one for one, grid in grids.items() if grid.is_sheared]
    unset = [one for one, grid in grids.items() if grid.is_unset]
    uncoded = [one for one, grid in grids.items() if not grid.coded]
    timed = [one for one, grid in grids.items() if np.prod(grid.shape[3:]) > 1 and found[one].frame is None]
    apart = [one for one, grid in grids.items() if _apart(grid, found[one])]
    sentences = (
        (sheared, "axes are not at right angles: read with nibabel (nnU-Net: NibabelIO), ITK refuses them"),
        (unset, "the affine is the identity: the spacing was probably lost, so distances are in voxels"),
        (uncoded, "neither qform nor sform is set: orientation is a guess"),
        (timed, "the file has a time axis: choose a frame or split it into volumes"),
        (apart, "image and label lie at different places (shape or affine)"),
    )
    problems = [
        f"{sentence} ({pluralize(len(cases), 'case')}, such as {cases[0]})" for cases, sentence in sentences if cases
    ]
    return problems + _mixed(grids)


def _apart(grid: ImageGrid, found: LocatedCase) -> bool:
    if not found.labels or grid.affine is None or not is_volume(found.labels[0]):
        return False
    try:
        label = grid_of(found.labels[0])
    except (CasewiseError, OSError):
        return False  # a bad label is reported where it is read
    assert label.affine is not None
    return label.shape[:3] != grid.shape[:3] or not np.allclose(label.affine, grid.affine, atol=1e-3)


def _mixed(grids: Mapping[str, ImageGrid]) -> list[str]:
    problems = []
    orientations = Counter(grid.orientation for grid in grids.values() if grid.orientation)
    if len(orientations) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in orientations.most_common())
        problems.append(f"orientations are mixed ({counts}): a model that was trained on one may fail on the others")
    axes = {len([size for size in grid.shape[:3] if size > 1]) for grid in grids.values()}
    if len(axes) > 1:
        problems.append("pictures and volumes are mixed: load them separately")
    return problems


SAMPLE = 20
LABEL_NAME = re.compile(r"[-_](gt|seg|segmentation|label|mask)$", re.IGNORECASE)


@dataclass(frozen=True)
class Inspection:
    """Result of an inspection, in plain JSON types."""

    layout: str
    name: str
    cases: int
    labelled: int
    clusters: int | None  # None: nothing says which cases belong together
    groups: Mapping[str, int]
    splits: Mapping[str, int]
    classes: tuple[str, ...]
    ignore: int | None
    labels_seen: Mapping[int, int]  # label value: in how many of the labels that were read
    labels_read: int
    geometry: Mapping[str, Mapping[str, int]]  # shape, spacing, orientation, dtype: each value with its count
    facts: Mapping[str, str]
    notice: str
    problems: tuple[str, ...]


def inspect_cohort(cohort: Cohort, *, layout: str, sample: int | None = SAMPLE) -> Inspection:
    """Read every header, and ``sample`` labels and images spread over the cases (None: all of them)."""
    found = files_of(cohort)
    problems: list[str] = []
    grids = dict(_read(found, lambda one: grid_of(found[one].images[0]), problems))
    seen, read, wrong = _labels(cohort, _spread([c for c, m in cohort.members.items() if m.labelled], sample))
    dark = _images(cohort, _spread(cohort.ids, sample))
    members = cohort.members.values()
    clusters = {member.cluster for member in members}
    return Inspection(
        layout=layout,
        name=cohort.name,
        cases=len(cohort),
        labelled=sum(member.labelled for member in members),
        clusters=None if clusters == {None} else count_patients(members),
        groups=_counts(member.group for member in members),
        splits=_counts(member.split for member in members),
        classes=cohort.classes,
        ignore=cohort.ignore,
        labels_seen=seen,
        labels_read=read,
        geometry=_geometry(grids.values()),
        facts=cohort.facts,
        notice=cohort.notice,
        problems=(
            *problems, *grid_problems(grids, found), *wrong, *_strange_labels(cohort, seen), *dark, *_gaps(cohort)
        ),
    )  # fmt: skip


def _counts(values: Any) -> dict[str, int]:
    return dict(sorted(Counter(value for value in values if value is not None).items()))


def _spread(ids: Sequence[str], sample: int | None) -> list[str]:
    """Return at most ``sample`` ids, evenly spaced."""
    if sample is None or len(ids) <= sample:
        return list(ids)
    return [ids[i] for i in np.linspace(0, len(ids) - 1, sample).round().astype(int)] if sample else []


def _read(ids: Iterable[str], read: Callable[[str], Any], problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield (id, what was read); add a problem for a file that cannot be read."""
    for case_id in ids:
        try:
            yield case_id, read(case_id)
        except (CasewiseError, OSError) as error:
            problems.append(f"{case_id}: {error}")


def _geometry(grids: Any) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for grid in grids:
        for name, value in grid.words.items():
            counts.setdefault(name, Counter())[value] += 1
    return {name: dict(counter.most_common()) for name, counter in counts.items()}


def _labels(cohort: Cohort, ids: Sequence[str]) -> tuple[dict[int, int], int, list[str]]:
    seen: Counter[int] = Counter()
    problems: list[str] = []
    read = 0
    for case_id, label in _read(ids, cohort.label, problems):
        seen.update(int(value) for value in np.unique(label))
        read += 1
        if not label.any():
            problems.append(f"{case_id}: the label is empty")
    return dict(sorted(seen.items())), read, problems


def _strange_labels(cohort: Cohort, seen: Mapping[int, int]) -> list[str]:
    known = set(range(len(cohort.classes))) | {cohort.ignore}
    strange = [value for value in seen if cohort.classes and value not in known]
    if strange:
        return [f"labels {strange} are none of the {len(cohort.classes)} classes {', '.join(cohort.classes)}"]
    if not cohort.classes and 255 in seen and cohort.ignore is None:
        return ["label 255 is seen, and it is not declared as ignored (plain folders: --option ignore=255)"]
    return []


def _images(cohort: Cohort, ids: Sequence[str]) -> list[str]:
    problems: list[str] = []
    for case_id, case in _read(ids, cohort.case, problems):
        if not np.isfinite(case.image).all():
            problems.append(f"{case_id}: the image holds NaN or infinite values")
        elif case.image.min() == case.image.max():
            problems.append(f"{case_id}: every voxel of the image is {case.image.flat[0]}")
    return problems


def _gaps(cohort: Cohort) -> list[str]:
    members = list(cohort.members.values())
    unlabelled, gaps = sum(not member.labelled for member in members), []
    if unlabelled:
        where = "; to read labels, name the folder that holds images/ and labels/" * (unlabelled == len(members))
        gaps.append(f"{unlabelled} of {len(members)} cases have no label: they can be segmented, not scored{where}")
    if all(member.cluster is None for member in members):
        gaps.append(
            "no patient is named, so every case will count as one (name patients in cases.csv, or with the "
            "loader option cluster)"
        )
    truths = [member.id for member in members if LABEL_NAME.search(member.id)]
    if truths:
        gaps.append(f"{len(truths)} files look like labels among the images, such as {truths[0]}: move them to labels/")
    splits: dict[str, set[str | None]] = {}
    for member in members:
        splits.setdefault(cluster_of(member), set()).add(member.split)
    torn = [cluster for cluster, names in splits.items() if len(names) > 1]
    if torn:
        gaps.append(f"{pluralize(len(torn), 'cluster')} in several splits, such as {torn[0]}: keep each in one")
    return gaps
