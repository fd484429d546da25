"""SAML multi-site prostate T2: six sites, whole prostate (Liu et al. 2020; NCI-ISBI13, I2CVB and PROMISE12)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from casewise.core.errors import BadInput
from casewise.core.records import Mask
from casewise.data.cohort import Cohort
from casewise.data.datasets.label_files import check_values, whole_label
from casewise.data.datasets.located import Found, cohort_of, only_folder, safe_id, stem_of, visible

SITES = ("RUNMC", "BMC", "I2CVB", "UCL", "BIDMC", "HK")
"""The benchmark's letters A to F, in order."""

NAME = re.compile(r"(?P<case>case\d+)(?P<label>_segmentation)?", re.IGNORECASE)
NOTICE = (
    "RUNMC overlaps Task05 of the Medical Segmentation Decathlon: do not test a model there that was trained on it."
)


def is_saml_prostate(root: Path) -> bool:
    """Whether a folder, or its only child that could, holds sites with CaseNN.nii.gz."""
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


def _site(folder: Path) -> Iterator[Found]:
    files = visible(folder.glob("*.nii*"))
    named = [(match, path) for path in files if (match := NAME.fullmatch(stem_of(path)))]
    labels = {match["case"].lower(): path for match, path in named if match["label"]}
    for match, path in named:
        if not match["label"]:
            label = labels.get(match["case"].lower())
            case_id = safe_id(folder.name, match["case"])
            yield Found(case_id, (path,), (label,) if label else (), folder.name, case_id)


def _zones(found: Found) -> Mask:
    return check_values(whole_label(found.labels[0]), 2, found.id)


def _whole(found: Found) -> Mask:
    return (_zones(found) > 0).astype(np.uint8)
