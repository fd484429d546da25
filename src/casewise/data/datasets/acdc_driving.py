"""ACDC, the driving dataset with adverse conditions (Sakaridis et al. 2021); not ACDC, the cardiac challenge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from casewise.core.errors import BadInput
from casewise.core.records import Mask
from casewise.data.cohort import Cohort
from casewise.data.datasets.cityscapes import CLASSES, IGNORE, SPLITS, first_label, read_train_ids
from casewise.data.datasets.located import Found, cohort_of, files_of, safe_id, visible
from casewise.data.pictures import read_label_picture

CONDITIONS = ("fog", "night", "rain", "snow")
IMAGE = "_rgb_anon.png"


def is_acdc_driving(root: Path) -> bool:
    """Whether a folder holds rgb_anon, with or without the folder of the archive around it."""
    return _images(root) is not None


def acdc_driving(root: Path, *, ambiguous: str = "ignore") -> Cohort:
    """Every frame of train, val and test; the condition is the group, the sequence the cluster.

    The normal-condition reference frames (``*_ref``) are no cases. Pixels that ``_gt_invIds.png`` marks as invalid
    become 255 unless ``ambiguous="keep"``; ``invalid_pixels`` gives them, to score valid and invalid ones apart.
    """
    images = _images(root)
    if images is None:
        raise BadInput(
            f"{root} is not ACDC driving: expected [rgb_anon_trainvaltest/]rgb_anon/{{{','.join(CONDITIONS)}}}"
        )
    if ambiguous not in ("ignore", "keep"):
        raise BadInput(f"ambiguous is ignore or keep, got {ambiguous!r}")
    truths = next((path for path in (root / "gt_trainval" / "gt", root / "gt") if path.is_dir()), root / "gt")
    found = [case for condition in CONDITIONS for split in SPLITS for case in _split(images, truths, condition, split)]
    label = _valid_label if ambiguous == "ignore" else _label
    return cohort_of("acdc_driving", root, found, label=label, classes=CLASSES, ignore=IGNORE)


def _images(root: Path) -> Path | None:
    for path in (root / "rgb_anon_trainvaltest" / "rgb_anon", root / "rgb_anon"):
        if any((path / condition).is_dir() for condition in CONDITIONS):
            return path
    return None


def _split(images: Path, truths: Path, condition: str, split: str) -> Iterator[Found]:
    for image in visible((images / condition / split).glob(f"*/*{IMAGE}")):
        name, sequence = image.name.removesuffix(IMAGE), image.parent.name
        stem = truths / condition / split / sequence / f"{name}_gt"
        labels = first_label(stem, ("labelTrainIds", "labelIds"))
        invalid = first_label(stem, ("invIds",)) if labels else ()
        case_id = safe_id(condition, name)
        yield Found(case_id, (image,), (*labels, *invalid), condition, safe_id(sequence), SPLITS[split])


def _label(found: Found) -> Mask:
    return read_train_ids(found.labels[0])


def _valid_label(found: Found) -> Mask:
    label = _label(found)
    if len(found.labels) < 2:
        return label
    return np.where(read_label_picture(found.labels[1]) == 1, np.uint8(IGNORE), label)


def invalid_pixels(cohort: Cohort, case_id: str) -> Mask | None:
    """Where the annotators could not tell (invIds == 1); None for cases without that file."""
    labels = files_of(cohort)[case_id].labels
    return None if len(labels) < 2 else read_label_picture(labels[1]) == 1
