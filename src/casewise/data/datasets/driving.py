"""Street scenes: Cityscapes (Cordts et al. 2016) and ACDC driving (Sakaridis et al. 2021), as they are downloaded.

labelIds become trainIds here. ACDC driving is not ACDC, the cardiac challenge.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from casewise.core.errors import BadInput
from casewise.core.records import Mask
from casewise.data.datasets.located import LocatedCase, cohort_of, safe_id, visible
from casewise.data.pictures import read_label_picture
from casewise.data.splits import Cohort

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
    """Return True if a folder holds leftImg8bit."""
    return any((root / "leftImg8bit" / split).is_dir() for split in SPLITS)


def cityscapes(root: Path) -> Cohort:
    """Every frame as ``city_sequence_frame``; the sequence is the cluster, the city the group.

    The test split is unlabelled: the files under gtFine/test are placeholders.
    """
    if not is_cityscapes(root):
        raise BadInput(f"{root} is not Cityscapes: expected leftImg8bit/{{train,val,test}} and gtFine beside it")
    found = [case for split in SPLITS for case in _split(root, split)]
    return cohort_of("cityscapes", root, found, label=_label, classes=CLASSES, ignore=IGNORE)


def _split(root: Path, split: str) -> Iterator[LocatedCase]:
    for image in visible((root / "leftImg8bit" / split).glob(f"*/*{IMAGE}")):
        name, city = image.name.removesuffix(IMAGE), image.parent.name
        truth = root / "gtFine" / split / city / f"{name}_gtFine"
        labels = () if split == "test" else first_label(truth, ("labelIds", "labelTrainIds"))
        yield LocatedCase(safe_id(name), (image,), labels, city, safe_id(name.rsplit("_", 1)[0]), SPLITS[split])


def first_label(stem: Path, kinds: tuple[str, ...]) -> tuple[Path, ...]:
    """The first of ``<stem>_<kind>.png`` that exists, as a tuple; empty where none does."""
    paths = (stem.with_name(f"{stem.name}_{kind}.png") for kind in kinds)
    return tuple(path for path in paths if path.is_file())[:1]


def _label(found: LocatedCase) -> Mask:
    return read_train_ids(found.labels[0])


def read_train_ids(path: Path) -> Mask:
    """Read a label file as trainIds; its name says whether it has labelIds or trainIds."""
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


CONDITIONS = ("fog", "night", "rain", "snow")
ACDC_IMAGE = "_rgb_anon.png"


def is_acdc_driving(root: Path) -> bool:
    """Return True if a folder holds rgb_anon, with or without the folder of the archive around it."""
    return _images(root) is not None


def acdc_driving(root: Path, *, ambiguous: str = "ignore") -> Cohort:
    """Every frame of train, val and test; the condition is the group, the sequence the cluster.

    The normal-condition reference frames (``*_ref``) are not cases. Pixels that ``_gt_invIds.png`` marks as invalid
    become 255 unless ``ambiguous="keep"``.
    """
    images = _images(root)
    if images is None:
        raise BadInput(
            f"{root} is not ACDC driving: it needs [rgb_anon_trainvaltest/]rgb_anon/{{{','.join(CONDITIONS)}}}"
        )
    if ambiguous not in ("ignore", "keep"):
        raise BadInput(f"ambiguous must be ignore or keep, got {ambiguous!r}")
    truths = next((path for path in (root / "gt_trainval" / "gt", root / "gt") if path.is_dir()), root / "gt")
    found = [case for condition in CONDITIONS for split in SPLITS for case in _frames(images, truths, condition, split)]
    label = _valid_label if ambiguous == "ignore" else _label
    return cohort_of("acdc_driving", root, found, label=label, classes=CLASSES, ignore=IGNORE)


def _images(root: Path) -> Path | None:
    for path in (root / "rgb_anon_trainvaltest" / "rgb_anon", root / "rgb_anon"):
        if any((path / condition).is_dir() for condition in CONDITIONS):
            return path
    return None


def _frames(images: Path, truths: Path, condition: str, split: str) -> Iterator[LocatedCase]:
    for image in visible((images / condition / split).glob(f"*/*{ACDC_IMAGE}")):
        name, sequence = image.name.removesuffix(ACDC_IMAGE), image.parent.name
        stem = truths / condition / split / sequence / f"{name}_gt"
        labels = first_label(stem, ("labelTrainIds", "labelIds"))
        invalid = first_label(stem, ("invIds",)) if labels else ()
        case_id = safe_id(condition, name)
        yield LocatedCase(case_id, (image,), (*labels, *invalid), condition, safe_id(sequence), SPLITS[split])


def _valid_label(found: LocatedCase) -> Mask:
    label = _label(found)
    if len(found.labels) < 2:
        return label
    return np.where(read_label_picture(found.labels[1]) == 1, np.uint8(IGNORE), label)
