"""Fundus photographs with disc and cup: REFUGE, RIM-ONE DL and DoFE.

REFUGE (Orlando et al. 2020): fundus photographs of two cameras, in any of the folder spellings it is unpacked to.

RIM-ONE DL (Fumero et al. 2020): fundus crops around the disc; disc and cup are two binary pictures.

The DoFE re-pack of four fundus datasets (Wang et al. 2020): crops and masks by domain, in REFUGE's grey code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from casewise.core.errors import BadInput
from casewise.core.records import Mask
from casewise.data.datasets.located import (
    FUNDUS_CLASSES,
    Found,
    cohort_of,
    grey,
    grey_label,
    only_folder,
    safe_id,
    visible,
)
from casewise.data.pictures import ENDINGS
from casewise.data.splits import Cohort

SPLITS = {"train": "training", "valid": "validation", "val": "validation", "test": "test"}
CAMERAS = {"training": "Zeiss", "validation": "Canon", "test": "Canon"}
DROP = re.compile(r"(train|valid|val|test)(ing|ation)?-?400|refuge-?(train|valid|val|test)", re.IGNORECASE)
NO_IMAGE = re.compile(r"annotation|mask|[-_]gt$", re.IGNORECASE)

Key = tuple[str, str]  # (split, stem)


def is_refuge(root: Path) -> bool:
    """Whether one of the first three levels is named like a part of REFUGE."""
    levels = ("*/", "*/*/", "*/*/*/")
    return root.is_dir() and any(DROP.search(path.name) for level in levels for path in root.glob(level))


def refuge(root: Path) -> Cohort:
    """Every photograph as ``split_stem``, paired with its mask by stem within its split; the camera is the group.

    Folders are searched to any depth. A name is never paired across splits: test names partly repeat training names.
    """
    pictures = [path for path in visible(root.rglob("*")) if path.suffix.lower() in ENDINGS]
    truths = (path for path in pictures if "disc_cup_mask" in str(path.relative_to(root)).lower())
    masks = {key: (path,) for key, path in _by_key(root, truths).items()}
    images = _by_key(root, (path for path in pictures if not _annotates(path.relative_to(root))))
    if not images:
        raise BadInput(f"{root} is not REFUGE: expected folders such as Training400, REFUGE-Validation400 or Test400")
    found = [
        Found(safe_id(key[0], path.stem), (path,), masks.get(key, ()), CAMERAS[key[0]], None, key[0])
        for key, path in images.items()
    ]
    orphans = sorted(masks.keys() - images.keys())
    facts = {"masks without image": ", ".join("/".join(key) for key in orphans[:5])} if orphans else {}
    return cohort_of("refuge", root, found, label=grey_label, classes=FUNDUS_CLASSES, facts=facts)


def _annotates(path: Path) -> bool:
    return any(NO_IMAGE.search(part) for part in path.parts[:-1])


def _by_key(root: Path, paths: Iterable[Path]) -> dict[Key, Path]:
    keyed: dict[Key, Path] = {}
    for path in paths:
        split = _split(path.relative_to(root))
        if split is None:
            continue
        key = (split, path.stem.lower())
        if key in keyed:
            raise BadInput(f"{path} and {keyed[key]} are both {path.stem} of the {split} part; remove one copy")
        keyed[key] = path
    return keyed


def _split(path: Path) -> str | None:
    for part in path.parts[:-1]:
        if match := DROP.search(part):
            return SPLITS[(match[1] or match[3]).lower()]
    return None


IMAGES, TRUTHS = "RIM-ONE_DL_images", "RIM-ONE_DL_reference_segmentations"
PARTITIONS = {"by-hospital": "partitioned_by_hospital", "randomly": "partitioned_randomly"}
SETS = {"training_set": "training", "test_set": "test"}
HOSPITALS = {"training": "HUC", "test": "HUMS+HCSC"}
NOTICE = "Patients are not published: two eyes of one patient may count as two. Research and education only."


def is_rimone_dl(root: Path) -> bool:
    """Whether a folder holds the images of RIM-ONE DL."""
    return any((root / IMAGES / name).is_dir() for name in PARTITIONS.values())


def rimone_dl(root: Path, *, partition: str = "by-hospital") -> Cohort:
    """Every image of one partition as ``diagnosis_stem``; the group is the hospital where the partition says it."""
    if partition not in PARTITIONS:
        raise BadInput(f"RIM-ONE DL is partitioned {' or '.join(PARTITIONS)}, got {partition!r}")
    folder = root / IMAGES / PARTITIONS[partition]
    if not folder.is_dir():
        raise BadInput(f"{root} is not RIM-ONE DL or lacks this partition: expected {IMAGES}/{PARTITIONS[partition]}")
    found = [case for name in SETS for case in _set(root, folder / name, by_hospital=partition == "by-hospital")]
    return cohort_of("rimone_dl", root, found, label=_label, classes=FUNDUS_CLASSES, notice=NOTICE)


def _set(root: Path, folder: Path, *, by_hospital: bool) -> Iterator[Found]:
    split = SETS[folder.name]
    for image in visible(folder.glob("*/*.png")):
        diagnosis = image.parent.name
        labels = _pair(root / TRUTHS / diagnosis, image.stem)
        hospital = HOSPITALS[split] if by_hospital else None
        yield Found(safe_id(diagnosis, image.stem), (image,), labels, hospital, None, split)


def _pair(folder: Path, stem: str) -> tuple[Path, ...]:
    pair = (folder / f"{stem}-1-Disc-T.png", folder / f"{stem}-1-Cup-T.png")
    there = tuple(path for path in pair if path.is_file())
    if len(there) == 1:
        raise BadInput(f"{there[0].name} has no partner; RIM-ONE DL has a disc and a cup for every image")
    return there


def _label(found: Found) -> Mask:
    """0 outside the disc, 1 in the disc, 2 in the part of the cup that lies in the disc."""
    disc, cup = (grey(path) > 0 for path in found.labels)
    if disc.shape != cup.shape:
        raise BadInput(f"case {found.id}: disc {disc.shape} and cup {cup.shape} must share one grid")
    return np.where(disc, np.where(cup, 2, 1), 0).astype(np.uint8)


DOMAINS = {
    "Domain1": "Drishti-GS", "Domain2": "RIM-ONE-r3", "Domain3": "REFUGE-train", "Domain4": "REFUGE-val",
}  # fmt: skip
DOFE_SPLITS = {"train": "training", "test": "test"}


def is_dofe(root: Path) -> bool:
    """Whether a folder, or its only child that could, holds DomainK/train/ROIs."""
    return only_folder(root, _holds) is not None


def _holds(root: Path) -> bool:
    return any((root / domain / split / "ROIs" / "image").is_dir() for domain in DOMAINS for split in DOFE_SPLITS)


def dofe(root: Path) -> Cohort:
    """Every crop as ``DomainK_split_stem``; the original dataset is the group."""
    home = only_folder(root, _holds)
    if home is None:
        raise BadInput(f"{root} is not the DoFE layout: expected DomainK/{{train,test}}/ROIs/{{image,mask}}")
    found = [case for domain in DOMAINS for split in DOFE_SPLITS for case in _crops(home, domain, split)]
    return cohort_of("dofe", home, found, label=grey_label, classes=FUNDUS_CLASSES)


def _crops(home: Path, domain: str, split: str) -> Iterator[Found]:
    folder = home / domain / split / "ROIs"
    masks = {path.stem: path for path in visible(folder.glob("mask/*")) if path.suffix.lower() in ENDINGS}
    for image in visible(folder.glob("image/*")):
        if image.suffix.lower() in ENDINGS:
            labels = (masks[image.stem],) if image.stem in masks else ()
            yield Found(safe_id(domain, split, image.stem), (image,), labels, DOMAINS[domain], None, DOFE_SPLITS[split])
