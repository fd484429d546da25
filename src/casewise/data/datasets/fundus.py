"""Fundus photographs with disc and cup: RIM-ONE DL (Fumero et al. 2020), crops around the disc.

Disc and cup are two binary pictures.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from casewise.core.errors import BadInput
from casewise.core.records import Mask
from casewise.data.datasets.located import LocatedCase, cohort_of, grey, safe_id, visible
from casewise.data.splits import Cohort

CLASSES = ("background", "disc rim", "cup")
IMAGES, TRUTHS = "RIM-ONE_DL_images", "RIM-ONE_DL_reference_segmentations"
PARTITION = "partitioned_by_hospital"
SETS = {"training_set": "training", "test_set": "test"}
HOSPITALS = {"training": "HUC", "test": "HUMS+HCSC"}
NOTICE = "Patients are not published: two eyes of one patient may count as two. Research and education only."


def is_rimone_dl(root: Path) -> bool:
    """Return True if a folder holds the images of RIM-ONE DL."""
    return (root / IMAGES / PARTITION).is_dir()


def rimone_dl(root: Path) -> Cohort:
    """Return the images of the partition by hospital as ``diagnosis_stem``; the group is the hospital."""
    if not is_rimone_dl(root):
        raise BadInput(f"{root} is not RIM-ONE DL, or lacks its partition by hospital: expected {IMAGES}/{PARTITION}")
    found = [case for name in SETS for case in _set(root, root / IMAGES / PARTITION / name)]
    return cohort_of("rimone_dl", root, found, label=_label, classes=CLASSES, notice=NOTICE)


def _set(root: Path, folder: Path) -> Iterator[LocatedCase]:
    split = SETS[folder.name]
    for image in visible(folder.glob("*/*.png")):
        diagnosis = image.parent.name
        labels = _pair(root / TRUTHS / diagnosis, image.stem)
        yield LocatedCase(safe_id(diagnosis, image.stem), (image,), labels, HOSPITALS[split], None, split)


def _pair(folder: Path, stem: str) -> tuple[Path, ...]:
    pair = (folder / f"{stem}-1-Disc-T.png", folder / f"{stem}-1-Cup-T.png")
    there = tuple(path for path in pair if path.is_file())
    if len(there) == 1:
        raise BadInput(f"{there[0].name} lacks its disc or cup; RIM-ONE DL has a disc and a cup for every image")
    return there


def _label(found: LocatedCase) -> Mask:
    """0 outside the disc, 1 in the disc, 2 in the part of the cup that lies in the disc."""
    disc, cup = (grey(path) > 0 for path in found.labels)
    if disc.shape != cup.shape:
        raise BadInput(f"case {found.id}: disc {disc.shape} and cup {cup.shape} must share one grid")
    return np.where(disc, np.where(cup, 2, 1), 0).astype(np.uint8)
