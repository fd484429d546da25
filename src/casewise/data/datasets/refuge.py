"""REFUGE (Orlando et al. 2020): fundus photographs of two cameras, in any of the folder spellings it is unpacked to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from casewise.core.errors import BadInput
from casewise.data.cohort import Cohort
from casewise.data.datasets.label_files import FUNDUS_CLASSES, grey_label
from casewise.data.datasets.located import Found, cohort_of, safe_id, visible
from casewise.data.pictures import ENDINGS

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
