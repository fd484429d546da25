"""The DoFE re-pack of four fundus datasets (Wang et al. 2020): crops and masks by domain, in REFUGE's grey code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from casewise.core.errors import BadInput
from casewise.data.cohort import Cohort
from casewise.data.datasets.label_files import FUNDUS_CLASSES, grey_label
from casewise.data.datasets.located import Found, cohort_of, only_folder, safe_id, visible
from casewise.data.pictures import ENDINGS

DOMAINS = {
    "Domain1": "Drishti-GS", "Domain2": "RIM-ONE-r3", "Domain3": "REFUGE-train", "Domain4": "REFUGE-val",
}  # fmt: skip
SPLITS = {"train": "training", "test": "test"}


def is_dofe(root: Path) -> bool:
    """Whether a folder, or its only child that could, holds DomainK/train/ROIs."""
    return only_folder(root, _holds) is not None


def _holds(root: Path) -> bool:
    return any((root / domain / split / "ROIs" / "image").is_dir() for domain in DOMAINS for split in SPLITS)


def dofe(root: Path) -> Cohort:
    """Every crop as ``DomainK_split_stem``; the original dataset is the group."""
    home = only_folder(root, _holds)
    if home is None:
        raise BadInput(f"{root} is not the DoFE layout: expected DomainK/{{train,test}}/ROIs/{{image,mask}}")
    found = [case for domain in DOMAINS for split in SPLITS for case in _crops(home, domain, split)]
    return cohort_of("dofe", home, found, label=grey_label, classes=FUNDUS_CLASSES)


def _crops(home: Path, domain: str, split: str) -> Iterator[Found]:
    folder = home / domain / split / "ROIs"
    masks = {path.stem: path for path in visible(folder.glob("mask/*")) if path.suffix.lower() in ENDINGS}
    for image in visible(folder.glob("image/*")):
        if image.suffix.lower() in ENDINGS:
            labels = (masks[image.stem],) if image.stem in masks else ()
            yield Found(safe_id(domain, split, image.stem), (image,), labels, DOMAINS[domain], None, SPLITS[split])
