"""Two folders of masks, old and new, with regressions planted in the new one, and which case has which."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np

SHAPE = (5, 28, 32)
AFFINE = np.diag([1.5, 1.5, 8.0, 1.0])
PLANTED = {
    "hole": "h01",
    "lost": "h02",
    "swapped": "h03",
    "shifted": "h04",
    "gained": "h05",
    "vanished": "h06",
}
"""What is wrong with the new mask of which case."""


def heart(size: float = 8.0) -> np.ndarray:
    """A blood pool (1) in a ring of muscle (2), a second chamber (3), and a small separate piece of it."""
    mask = np.zeros(SHAPE, np.uint8)
    _, y, x = np.ogrid[: SHAPE[0], : SHAPE[1], : SHAPE[2]]
    radius = np.hypot(y - 14, x - 11) + np.zeros((SHAPE[0], 1, 1))
    mask[radius < size] = 2
    mask[radius < size - 3] = 1
    mask[1:4, 8:20, 22:27] = 3
    mask[2, 2:4, 28:31] = 3
    return mask


def write(folder: Path, case_id: str, mask: np.ndarray, affine: np.ndarray = AFFINE) -> Path:
    """A mask (slices, rows, columns) as CASE.nii.gz."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case_id}.nii.gz"
    nibabel.save(nibabel.Nifti1Image(np.ascontiguousarray(mask.T), affine), path)
    return path


def planted(kind: str, mask: np.ndarray) -> np.ndarray:
    """The new mask of a case with this regression."""
    new = mask.copy()
    if kind == "hole":
        new[2, 13:16, 10:13] = 0
    elif kind == "lost":
        new[2, 2:4, 28:31] = 0
    elif kind == "swapped":
        new = np.array([0, 3, 2, 1], np.uint8)[mask]
    elif kind == "shifted":
        new = np.roll(mask, 1, axis=2)
    elif kind == "gained":
        new[4, 24:27, 2:6] = 1
    elif kind == "vanished":
        new[new == 3] = 0
    return new


def update(root: Path, *, cases: int = 12, wrong: bool = True, bad_site: str | None = None) -> Path:
    """ROOT/{old,new,labels} and cases.csv: two cases per patient, two sites; old is right, new is equal but for plants.

    At a bad site every new mask has lost its outermost ring.
    """
    kinds = {case_id: kind for kind, case_id in PLANTED.items()}
    rows = ["case,site,patient"]
    for number in range(cases):
        case_id = f"h{number:02d}"
        site = "A" if number < cases // 2 else "B"
        label = heart(8.0 + number % 2)
        new = planted(kinds.get(case_id, ""), label) if wrong else label
        if site == bad_site:
            new = np.where((new == 2) & (heart(7.0 + number % 2) != 2), 0, new).astype(np.uint8)
        for name, mask in (("old", label), ("new", new), ("labels", label)):
            write(root / name, case_id, mask)
        rows.append(f"{case_id},{site},p{number // 2}")
    (root / "cases.csv").write_text("\n".join(rows) + "\n")
    return root
