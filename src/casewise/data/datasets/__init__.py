"""Loaders of public datasets in their official layouts, without preprocessing.

``DATASETS`` is the list: name to loader ``(root, **options) -> Cohort``. ``recognize`` says which of them a folder is.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from casewise.core.errors import BadInput
from casewise.core.registry import Registry
from casewise.data.datasets.driving import acdc_driving, cityscapes, is_acdc_driving, is_cityscapes
from casewise.data.datasets.fundus import is_rimone_dl, rimone_dl
from casewise.data.datasets.mnms import is_mnms, mnms
from casewise.data.datasets.nnunet_raw import is_nnunet_raw, nnunet_raw
from casewise.data.datasets.plain import is_plain, plain
from casewise.data.datasets.prostate import is_prostate158, is_saml_prostate, prostate158, saml_prostate
from casewise.data.dicom_series import is_dicom_folder
from casewise.data.splits import Cohort

_LAYOUTS: dict[str, tuple[Callable[[Path], bool], Callable[..., Cohort]]] = {  # the first one that fits a folder counts
    "nnunet_raw": (is_nnunet_raw, nnunet_raw),
    "mnms": (is_mnms, mnms),
    "saml_prostate": (is_saml_prostate, saml_prostate),
    "prostate158": (is_prostate158, prostate158),
    "acdc_driving": (is_acdc_driving, acdc_driving),
    "cityscapes": (is_cityscapes, cityscapes),
    "rimone_dl": (is_rimone_dl, rimone_dl),
    "plain": (is_plain, plain),
}
DATASETS: Registry[Callable[..., Cohort]] = Registry("dataset", {name: load for name, (_, load) in _LAYOUTS.items()})


def recognize(path: Path) -> str | None:
    """Return the name of the dataset that has the layout of a folder; None if no layout fits."""
    return next((name for name, (is_here, _) in _LAYOUTS.items() if is_here(path)), None)


def load_dataset(path: Path, name: str | None = None, **options: Any) -> Cohort:
    """Load the cohort of a folder by name, or by its layout; unknown options are refused."""
    if not path.is_dir():
        raise BadInput(f"{path} is not a folder")
    name = name or recognize(path)
    if name is None:
        if is_dicom_folder(path):
            commands = "fit, predict and record read; compare, import and qc read DICOM masks"
            raise BadInput(f"{path} holds DICOM series, which {commands}")
        raise BadInput(f"{path} has the layout of none of {', '.join(DATASETS)}; see docs/how-to/datasets.md")
    loader = DATASETS[name]
    known = list(signature(loader).parameters)[1:]
    if unknown := sorted(set(options) - set(known)):
        raise BadInput(f"{name} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    return loader(path, **options)
