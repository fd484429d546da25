"""MR of the prostate: Prostate158 (Adams et al. 2022) and the six sites of SAML (Liu et al. 2020)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from casewise.core.errors import BadInput, UnsafeInput
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
from casewise.data.folders import stem_of
from casewise.data.splits import Cohort

TABLES = {"train.csv": "training", "valid.csv": "validation", "test.csv": "test"}
MODALITIES = ("t2", "adc", "dwi")
ZONES = ("background", "central gland", "peripheral zone")
LABEL = "t2_anatomy_reader1"  # column of the table


def is_prostate158(root: Path) -> bool:
    """Return True if a folder is one of the two downloads, or holds them."""
    return root.is_dir() and bool(list(_tables(root)))


def prostate158(root: Path, *, modalities: str = "t2") -> Cohort:
    """Every row of train.csv, valid.csv and test.csv; columns are read by name, paths are relative to their table.

    ``modalities`` names the channels in order, with commas, such as adc,dwi; all modalities of a case share one grid.
    Labels are those of the first reader: 1 central gland, 2 peripheral zone. Masks stored as floats are rounded and
    checked.
    """
    channels = tuple(modalities.split(","))
    if not set(channels) <= set(MODALITIES):
        raise BadInput(f"the modalities of Prostate158 must be {', '.join(MODALITIES)}, got {modalities!r}")
    tables = list(_tables(root))
    if not tables:
        raise BadInput(f"{root} is not Prostate158: expected train.csv, valid.csv or test.csv with the column t2")
    found = [case for table, rows in tables for case in _cases(table, rows, channels)]
    return cohort_of("prostate158", root, found, label=_zones, classes=ZONES, facts={"label": LABEL})


def _tables(root: Path) -> Iterator[tuple[Path, list[dict[str, str]]]]:
    for name in TABLES:
        for path in visible((*root.glob(name), *root.glob(f"prostate158_*/{name}"))):
            if (rows := table_rows(path)) and {"id", "t2"} <= set(rows[0]):
                yield path, rows


def _cases(table: Path, rows: list[dict[str, str]], modalities: tuple[str, ...]) -> Iterator[LocatedCase]:
    for row in rows:
        images = tuple(_file(table, row.get(name, ""), row["id"], name) for name in modalities)
        labels = (_file(table, row[LABEL], row["id"], LABEL),) if row.get(LABEL) else ()
        case_id = safe_id("P158", row["id"].split(".")[0].zfill(3))
        yield LocatedCase(case_id, images, labels, "prostate158", case_id, TABLES[table.name])


def _file(table: Path, name: str, row: str, column: str) -> Path:
    path = table.parent / name
    if not name or not path.is_file():
        raise BadInput(f"{table.name}, ID {row}: {column} is {name!r}, which is not a file beside the table")
    if table.parent.resolve() not in path.resolve().parents:
        raise UnsafeInput(f"{table.name}, ID {row}: {name} points outside of {table.parent}")
    return path


def _zones(found: LocatedCase) -> Mask:
    return check_values(whole_label(found.labels[0]), 2, found.id)


SITES = ("RUNMC", "BMC", "I2CVB", "UCL", "BIDMC", "HK")
"""The benchmark's letters A to F, in order."""

NAME = re.compile(r"(?P<case>case\d+)(?P<label>_segmentation)?", re.IGNORECASE)
NOTICE = "RUNMC overlaps Task05 of the Medical Segmentation Decathlon: do not test a model of Task05 there."


def is_saml_prostate(root: Path) -> bool:
    """Return True if a folder, or its only child that could, holds sites with CaseNN.nii.gz."""
    return only_folder(root, _holds) is not None


def _holds(root: Path) -> bool:
    return any(next((root / site).glob("[Cc]ase*.nii*"), None) is not None for site in SITES)


def saml_prostate(root: Path, *, zones: bool = False) -> Cohort:
    """Every CaseNN of every site as ``SITE_CaseNN``: numbers are not contiguous, and Case05 exists at several sites.

    Labels 1 and 2 are merged to the whole prostate, as every published use does; ``zones=True`` leaves them apart.
    BMC spells ``_Segmentation`` with a capital S, so names are matched without regard to case.
    """
    home = only_folder(root, _holds)
    if home is None:
        raise BadInput(f"{root} is not the multi-site prostate set: expected {'/, '.join(SITES)}/ with CaseNN.nii.gz")
    found = [case for site in SITES for case in _site(home / site)]
    classes = ("background", "zone 1", "zone 2") if zones else ("background", "prostate")
    label = _zones if zones else _whole
    return cohort_of("saml_prostate", home, found, label=label, classes=classes, notice=NOTICE)


def _site(folder: Path) -> Iterator[LocatedCase]:
    files = visible(folder.glob("*.nii*"))
    named = [(match, path) for path in files if (match := NAME.fullmatch(stem_of(path)))]
    labels = {match["case"].lower(): path for match, path in named if match["label"]}
    for match, path in named:
        if not match["label"]:
            label = labels.get(match["case"].lower())
            case_id = safe_id(folder.name, match["case"])
            yield LocatedCase(case_id, (path,), (label,) if label else (), folder.name, case_id)


def _whole(found: LocatedCase) -> Mask:
    return (_zones(found) > 0).astype(np.uint8)
