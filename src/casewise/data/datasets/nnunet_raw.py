"""An nnU-Net v2 raw dataset: ``DatasetXXX_Name`` with dataset.json, imagesTr, labelsTr, imagesTs and labelsTs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from casewise.core.errors import BadInput
from casewise.core.json_records import read_json
from casewise.core.text import pluralize
from casewise.data.datasets.located import LocatedCase, cohort_of
from casewise.data.datasets.plain import read_plain_label
from casewise.data.folders import NAME as TABLE
from casewise.data.folders import READABLE, list_cases, read_table, with_labels, with_table
from casewise.data.nifti import is_volume
from casewise.data.splits import Cohort

SPLITS = {"Tr": "training", "Ts": "test"}


def is_nnunet_raw(root: Path) -> bool:
    """Return True if a folder holds dataset.json and images for training or test."""
    return (root / "dataset.json").is_file() and any((root / f"images{part}").is_dir() for part in SPLITS)


def nnunet_raw(root: Path) -> Cohort:
    """Every case of imagesTr and imagesTs with all its channels; classes and ignore label from dataset.json.

    An optional ``cases.csv`` beside dataset.json has group, cluster and split, which nnU-Net does not store.
    """
    if not is_nnunet_raw(root):
        raise BadInput(f"{root} is not an nnU-Net raw dataset: expected dataset.json beside imagesTr or imagesTs")
    plans = _dataset_json(root / "dataset.json")
    ending, channels = str(plans["file_ending"]), len(plans["channel_names"])
    found = [case for part in SPLITS for case in _part(root, part, ending, channels)]
    facts: dict[str, str] = {"name": str(plans.get("name", root.name))}
    if (root / TABLE).is_file():
        table = read_table(root / TABLE)
        found, facts = with_table(found, table), {**facts, **table.facts}
    color = channels == 3 and all(len(case.images) == 1 for case in found)
    classes, ignore = classes_of(plans), plans["labels"].get("ignore")
    return cohort_of(
        root.resolve().name, root, found, label=read_plain_label, classes=classes, ignore=ignore, color=color,
        facts=facts,
    )  # fmt: skip


def _dataset_json(path: Path) -> Mapping[str, Any]:
    plans = read_json(path)
    if "modality" in plans and "channel_names" not in plans:
        raise BadInput(f"{path} is of nnU-Net v1; run nnUNetv2_convert_old_nnUNet_dataset first")
    missing = sorted({"channel_names", "labels", "file_ending"} - set(plans))
    if missing:
        raise BadInput(f"{path} lacks {', '.join(missing)}, which nnU-Net v2 writes")
    if plans["file_ending"].lower() not in READABLE:
        raise BadInput(f"{path} says file_ending {plans['file_ending']!r}; {', '.join(READABLE)} can be read")
    return plans


def _part(root: Path, part: str, ending: str, channels: int) -> Iterator[LocatedCase]:
    images, labels = root / f"images{part}", root / f"labels{part}"
    if not images.is_dir():
        return
    cases = list_cases(images, ending=ending)
    if labels.is_dir() and any(labels.iterdir()):
        cases = with_labels(cases, labels)
    for case in cases:
        one_color_picture = channels == 3 and len(case.images) == 1 and not is_volume(case.images[0])
        if len(case.images) != channels and not one_color_picture:
            there = ", ".join(path.name for path in case.images)
            raise BadInput(f"case {case.id}: dataset.json has {pluralize(channels, 'channel')}, images{part} {there}")
        yield LocatedCase(case.id, case.images, (case.label,) if case.label else (), split=SPLITS[part])


def classes_of(plans: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the integers in the label files.

    With regions, a list of labels has no integer: ``regions_class_order[i]`` is the integer that the i-th
    region (in the order of ``labels``, without background and ignore) is written as.

    >>> classes_of({"labels": {"background": 0, "tumor": [1, 2], "core": 2}, "regions_class_order": [1, 2]})
    ('background', 'tumor', 'core')
    """
    regions = {name: value for name, value in plans["labels"].items() if name not in ("background", "ignore")}
    order = plans.get("regions_class_order") or list(regions.values())
    if len(order) != len(regions) or not all(isinstance(value, int) for value in order):
        raise BadInput(f"regions need a regions_class_order of {len(regions)} integers, got {order}")
    names = {0: "background", **dict(zip(order, regions, strict=True))}
    return tuple(names.get(value, str(value)) for value in range(max(names) + 1))
