"""Folders of images, labels and cases.csv, as a benchmark reads them."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np


def write_data(folder: Path, cases: int, *, prefix: str = "case", split: bool = True, per_patient: int = 1) -> Path:
    """Smooth noise and what is bright in it; the first half calibrates."""
    rng = np.random.default_rng(len(prefix) + cases)
    rows = ["case,cluster,split" if split else "case,cluster"]
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    for number in range(cases):
        name = f"{prefix}_{number:02d}"
        image = rng.normal(size=(24, 24, 2)).cumsum(0).cumsum(1).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(image, np.eye(4)), folder / "images" / f"{name}_0000.nii.gz")
        label = (image > image.mean()).astype(np.uint8)
        nibabel.save(nibabel.Nifti1Image(label, np.eye(4)), folder / "labels" / f"{name}.nii.gz")
        side = "calibration" if number < cases / 2 else "evaluation"
        rows.append(f"{name},{prefix}-p{number // per_patient}" + (f",{side}" if split else ""))
    (folder / "cases.csv").write_text("\n".join(rows) + "\n")
    return folder
