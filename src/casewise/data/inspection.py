"""What a folder is: its layout, cases, groups, labels and geometry, and what in it would go wrong later."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from casewise.core.errors import CasewiseError
from casewise.data.cohort import Cohort
from casewise.data.datasets import load_dataset, recognize
from casewise.data.datasets.located import Found, files_of
from casewise.data.headers import Grid, grid_of, grid_problems

SAMPLE = 20
LABEL_NAME = re.compile(r"[-_](gt|seg|segmentation|label|mask)$", re.IGNORECASE)


@dataclass(frozen=True)
class Inspection:
    """What is seen in a folder; everything plain enough for JSON."""

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

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def inspect_cohort(cohort: Cohort, *, layout: str, sample: int | None = SAMPLE) -> Inspection:
    """Look at every header, and at ``sample`` labels and images spread over the cases (None: at all of them)."""
    found = files_of(cohort)
    grids, problems = _grids(found)
    seen, read, wrong = _labels(cohort, _spread([c for c, m in cohort.members.items() if m.labelled], sample))
    dark = _images(cohort, _spread(cohort.ids, sample))
    members = cohort.members.values()
    clusters = {member.cluster for member in members}
    return Inspection(
        layout=layout,
        name=cohort.name,
        cases=len(cohort),
        labelled=sum(member.labelled for member in members),
        clusters=None if clusters == {None} else len({member.cluster or member.id for member in members}),
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


def inspect_folder(
    path: Path, *, dataset: str | None = None, sample: int | None = SAMPLE, **options: Any
) -> Inspection:
    """Recognize a folder (or take it for ``dataset``), load it and look at it."""
    cohort = load_dataset(path, dataset, **options)
    return inspect_cohort(cohort, layout=dataset or recognize(path) or "plain", sample=sample)


def _counts(values: Any) -> dict[str, int]:
    return dict(sorted(Counter(value for value in values if value is not None).items()))


def _spread(ids: Sequence[str], sample: int | None) -> list[str]:
    """At most ``sample`` ids, evenly over the list."""
    if sample is None or len(ids) <= sample:
        return list(ids)
    return [ids[i] for i in np.linspace(0, len(ids) - 1, sample).round().astype(int)] if sample else []


def _grids(found: Mapping[str, Found]) -> tuple[dict[str, Grid], list[str]]:
    grids, problems = {}, []
    for case_id, one in found.items():
        try:
            grids[case_id] = grid_of(one.images[0])
        except (CasewiseError, OSError) as error:
            problems.append(f"{case_id}: {error}")
    return grids, problems


def _geometry(grids: Any) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for grid in grids:
        for name, value in grid.words.items():
            counts.setdefault(name, Counter())[value] += 1
    return {name: dict(counter.most_common()) for name, counter in counts.items()}


def _labels(cohort: Cohort, ids: Sequence[str]) -> tuple[dict[int, int], int, list[str]]:
    seen: Counter[int] = Counter()
    problems, read = [], 0
    for case_id in ids:
        try:
            label = cohort.label(case_id)
        except (CasewiseError, OSError) as error:
            problems.append(f"{case_id}: {error}")
            continue
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
        return ["label 255 is seen, and nothing says that it is to be ignored (plain folders: ignore=255)"]
    return []


def _images(cohort: Cohort, ids: Sequence[str]) -> list[str]:
    problems = []
    for case_id in ids:
        try:
            image = cohort.case(case_id).image
        except (CasewiseError, OSError) as error:
            problems.append(f"{case_id}: {error}")
            continue
        if not np.isfinite(image).all():
            problems.append(f"{case_id}: the image holds NaN or infinite values")
        elif image.min() == image.max():
            problems.append(f"{case_id}: every voxel of the image is {image.flat[0]}")
    return problems


def _gaps(cohort: Cohort) -> list[str]:
    members = list(cohort.members.values())
    unlabelled, gaps = sum(not member.labelled for member in members), []
    if unlabelled:
        gaps.append(f"{unlabelled} of {len(members)} cases have no label: they can be segmented, not scored")
    if all(member.cluster is None for member in members):
        gaps.append(
            "nothing says which cases belong to one patient or sequence: each will count as its own "
            "(say it in cases.csv, or with the loader option cluster)"
        )
    truths = [member.id for member in members if LABEL_NAME.search(member.id)]
    if truths:
        gaps.append(f"{len(truths)} files look like labels among the images, such as {truths[0]}: move them to labels/")
    splits: dict[str, set[str | None]] = {}
    for member in members:
        splits.setdefault(member.cluster or member.id, set()).add(member.split)
    torn = [cluster for cluster, names in splits.items() if len(names) > 1]
    if torn:
        gaps.append(f"{len(torn)} clusters lie in more than one split, such as {torn[0]}: move their cases together")
    return gaps
