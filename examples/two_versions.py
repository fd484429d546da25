"""Write made-up masks of an old and a new model version, with labels, for the tutorial about new versions.

    python examples/two_versions.py FOLDER [CASES]

The folder then has old/, new/, labels/ and cases.csv. Two cases belong to one patient, half of the patients to each
site. Both versions make errors at the border of a chamber; the new one makes fewer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray


def heart(size: float) -> NDArray[np.uint8]:
    """A blood pool (1) in a ring of muscle (2), and a second chamber (3)."""
    mask = np.zeros((5, 28, 32), np.uint8)
    rows, columns = np.ogrid[:28, :32]
    radius = np.hypot(rows - 14, columns - 11)
    mask[:, radius < size] = 2
    mask[:, radius < size - 3] = 1
    mask[1:4, 8:20, 22:27] = 3
    return mask


def with_errors(label: NDArray[np.uint8], rows: int) -> NDArray[np.uint8]:
    """The mask with some rows of the second chamber missing."""
    mask = label.copy()
    mask[1:4, 8 : 8 + rows, 22:27] = 0
    return mask


def save(folder: Path, name: str, mask: NDArray[Any]) -> None:
    """Write a mask (slices, rows, columns) as NAME.nii.gz."""
    folder.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(mask.T, np.diag([1.5, 1.5, 8.0, 1.0])), folder / f"{name}.nii.gz")


def main(folder: str, cases: int = 80) -> None:
    """Write the masks and say where they are."""
    root, rng = Path(folder), np.random.default_rng(0)
    rows = ["case,site,patient"]
    for number in range(cases):
        name, label = f"h{number:02d}", heart(8.0 + number % 2)
        errors = int(rng.integers(1, 5))
        save(root / "labels", name, label)
        save(root / "old", name, with_errors(label, errors))
        save(root / "new", name, with_errors(label, errors // 2))
        rows.append(f"{name},{'A' if number < cases // 2 else 'B'},p{number // 2}")
    (root / "cases.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"masks of {cases} cases in {root}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
