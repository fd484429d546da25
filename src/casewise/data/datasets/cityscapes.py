"""Cityscapes (Cordts et al. 2016) as it is downloaded: labelIds become trainIds here, no script needs to run before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from casewise.core.errors import BadInput
from casewise.core.records import Mask
from casewise.data.cohort import Cohort
from casewise.data.datasets.located import Found, cohort_of, safe_id, visible
from casewise.data.pictures import read_label_picture

CLASSES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain",
    "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle",
)  # fmt: skip
LABEL_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
"""The labelId of each trainId 0..18."""

IGNORE = 255
SPLITS = {"train": "training", "val": "validation", "test": "test"}
IMAGE = "_leftImg8bit.png"


def is_cityscapes(root: Path) -> bool:
    """Whether a folder holds leftImg8bit."""
    return any((root / "leftImg8bit" / split).is_dir() for split in SPLITS)


def cityscapes(root: Path) -> Cohort:
    """Every frame as ``city_sequence_frame``; the sequence is the cluster, the city the group.

    The test split is unlabelled: the files under gtFine/test are placeholders.
    """
    if not is_cityscapes(root):
        raise BadInput(f"{root} is not Cityscapes: expected leftImg8bit/{{train,val,test}} and gtFine beside it")
    found = [case for split in SPLITS for case in _split(root, split)]
    return cohort_of("cityscapes", root, found, label=_label, classes=CLASSES, ignore=IGNORE)


def _split(root: Path, split: str) -> Iterator[Found]:
    for image in visible((root / "leftImg8bit" / split).glob(f"*/*{IMAGE}")):
        name, city = image.name.removesuffix(IMAGE), image.parent.name
        truth = root / "gtFine" / split / city / f"{name}_gtFine"
        labels = () if split == "test" else first_label(truth, ("labelIds", "labelTrainIds"))
        yield Found(safe_id(name), (image,), labels, city, safe_id(name.rsplit("_", 1)[0]), SPLITS[split])


def first_label(stem: Path, kinds: tuple[str, ...]) -> tuple[Path, ...]:
    """The first of ``<stem>_<kind>.png`` that exists, as a tuple; empty where none does."""
    paths = (stem.with_name(f"{stem.name}_{kind}.png") for kind in kinds)
    return tuple(path for path in paths if path.is_file())[:1]


def _label(found: Found) -> Mask:
    return read_train_ids(found.labels[0])


def read_train_ids(path: Path) -> Mask:
    """A label file in trainIds, whichever of the two codes it is named after."""
    values = read_label_picture(path)
    return values.astype(np.uint8) if path.name.endswith("_labelTrainIds.png") else train_ids(values)


def train_ids(label_ids: Mask) -> Mask:
    """The 19 evaluated classes as 0..18, everything else (also -1, the license plate) as 255.

    >>> train_ids(np.array([7, 33, 0, -1, 4])).tolist()
    [0, 18, 255, 255, 255]
    """
    table = np.full(256, IGNORE, dtype=np.uint8)
    table[list(LABEL_IDS)] = np.arange(len(LABEL_IDS))
    inside = (label_ids >= 0) & (label_ids < 256)
    return np.where(inside, table[np.where(inside, label_ids, 0)], IGNORE).astype(np.uint8)


def label_ids(mask: Mask) -> Mask:
    """The way back, for the evaluation server: trainIds to labelIds, 255 to 0 (unlabeled).

    >>> label_ids(np.array([0, 18, 255])).tolist()
    [7, 33, 0]
    """
    table = np.zeros(256, dtype=np.uint8)
    table[: len(LABEL_IDS)] = LABEL_IDS
    return table[mask]
