"""M&Ms: cardiac cine MR of four vendors (Campello et al. 2021), the folder ``OpenDataset`` as it is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from casewise.core.errors import BadInput
from casewise.core.records import Mask
from casewise.data.datasets.located import (
    LocatedCase,
    check_values,
    cohort_of,
    only_folder,
    safe_id,
    table_rows,
    visible,
    whole_label,
)
from casewise.data.splits import Cohort

CLASSES = ("background", "LV blood pool", "LV myocardium", "RV")
FOLDERS = {
    "Training/Labeled": "training", "Training/Unlabeled": "unlabeled", "Validation": "validation", "Testing": "test",
}  # fmt: skip
CODE = "external code"
GROUPS = {"vendor": "vendor", "vendor-name": "vendorname", "centre": "centre"}
FAR_MORE = 5  # in 230 volumes of vendors A and B the smallest ratio of contacts was 118


def is_mnms(root: Path) -> bool:
    """Return True if a folder is OpenDataset, or holds it."""
    return only_folder(root, _holds) is not None


def _holds(root: Path) -> bool:
    return bool(_rows(root)) and any((root / name).is_dir() for name in FOLDERS)


def mnms(root: Path, *, group: str = "vendor") -> Cohort:
    """End-diastole and end-systole of every subject, as two cases of one cluster.

    ``group`` is vendor (the letter), vendor-name or centre. Files named ``_gt`` in Training/Unlabeled carry no labels
    and are not taken for labels. Subjects without ED and ES in the table (unlabeled ones) are counted in the facts.
    """
    home = only_folder(root, _holds)
    if home is None:
        raise BadInput(f"{root} is not M&Ms: OpenDataset holds Training/Labeled and a CSV with 'External code', ED, ES")
    if group not in GROUPS:
        raise BadInput(f"the group of M&Ms must be one of {', '.join(GROUPS)}, got {group!r}")
    rows, skipped, found = _rows(home), [], []
    if missing := {"ed", "es", "vendor"} - set(next(iter(rows.values()))):
        raise BadInput(f"the table of {home} lacks the columns {sorted(missing)}; take the CSV of the download")
    for name, split in FOLDERS.items():
        for folder in visible(home.glob(f"{name}/*/")):
            cases = list(_frames(folder, split, rows, GROUPS[group]))
            found += cases
            skipped += [] if cases else [folder.name]
    facts = {"skipped": f"no ED and ES in the table: {', '.join(skipped)}"} if skipped else {}
    return cohort_of("mnms", home, found, label=_label, classes=CLASSES, facts=facts)


def _rows(root: Path) -> dict[str, dict[str, str]]:
    """Rows of the newest table by subject; the names of tables begin with the date. None without a table."""
    tables = [rows for path in visible(root.glob("*.csv")) if (rows := table_rows(path)) and CODE in rows[0]]
    return {row[CODE]: row for row in tables[-1]} if tables else {}


def _frames(folder: Path, split: str, rows: dict[str, dict[str, str]], group: str) -> Iterator[LocatedCase]:
    code = folder.name
    if code not in rows:
        raise BadInput(f"{folder} has no row in the M&Ms table; its first column after the index is External code")
    image, label = folder / f"{code}_sa.nii.gz", folder / f"{code}_sa_gt.nii.gz"
    labelled = split != "unlabeled" and label.is_file()
    for phase in ("ED", "ES"):
        frame = _frame(rows[code][phase.lower()], code, phase)
        if frame is None and split != "unlabeled":
            raise BadInput(f"subject {code} has no frame {phase} in the M&Ms table; it is in {split}, so it needs one")
        if frame is not None:
            where = rows[code].get(group, "").strip() or None
            labels = (label,) if labelled else ()
            yield LocatedCase(safe_id(code, phase), (image,), labels, where, safe_id(code), split, frame)


def _frame(text: str, code: str, phase: str) -> int | None:
    """The 0-based frame in the table, "9" or "9.0"; None where the field is empty."""
    if text.strip().lower() in ("", "nan"):
        return None
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if number < 0 or number != int(number):
        raise BadInput(f"subject {code}: {phase} must be a frame number from 0, got {text!r}")
    return int(number)


def _label(found: LocatedCase) -> Mask:
    return checked_order(check_values(whole_label(found.labels[0], frame=found.frame), 3, found.id), found.id)


def checked_order(label: Mask, name: str) -> Mask:
    """Refuse a label whose numbers cannot mean 1 = LV blood pool, 2 = LV myocardium, 3 = RV.

    The myocardium wraps the blood pool: label 2 touches label 1 far more than label 3 does (else 2 and 3 are swapped),
    and far more of it touches label 1 than label 3 (else 1 and 3 are, which is the order of ACDC-cardiac).
    """
    wrapped, leaked, septum = contacts(label, 1, 2), contacts(label, 1, 3), contacts(label, 2, 3)
    if not label.any():
        raise BadInput(f"{name}: the label is empty at this frame; ED and ES must be the frames of the M&Ms table")
    if wrapped < FAR_MORE * leaked or wrapped < septum:
        raise BadInput(
            f"{name}: labels must be 1 LV blood pool, 2 myocardium, 3 RV, but label 1 touches label 2 {wrapped} times, "
            f"label 3 {leaked} times, and 2 touches 3 {septum} times; the labels are in another order"
        )
    return label


def contacts(label: Mask, one: int, other: int) -> int:
    """Pairs of neighboring pixels within a slice of which one carries each label."""
    count = 0
    for axis in (-1, -2):
        line = np.moveaxis(label, axis, -1)
        ahead, behind = line[..., 1:], line[..., :-1]
        count += int(((ahead == one) & (behind == other) | (ahead == other) & (behind == one)).sum())
    return count
