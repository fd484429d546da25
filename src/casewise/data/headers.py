"""Where images lie, from their headers alone, and the headers that bite: sheared, unset, mixed, in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import BadInput, CasewiseError
from casewise.data.datasets.located import Found, is_volume
from casewise.data.nifti import check_header
from casewise.data.pictures import check_picture

SHEAR = 1e-4  # direction cosines further than this from orthonormal are refused by ITK


@dataclass(frozen=True, eq=False)
class Grid:
    """What the header of an image says."""

    shape: tuple[int, ...]  # as in the file: (x, y, z[, t]) of a volume, (rows, columns) of a picture
    spacing_mm: tuple[float, ...] | None = None
    dtype: str = "uint8"
    affine: NDArray[np.float64] | None = None
    coded: bool = True  # qform or sform says where the volume lies

    @property
    def orientation(self) -> str | None:
        """Directions of the axes such as "LPS"; None for pictures."""
        import nibabel

        return None if self.affine is None else "".join(str(code) for code in nibabel.aff2axcodes(self.affine))

    @property
    def is_sheared(self) -> bool:
        """Whether the axes are not at right angles: nibabel reads such files, ITK refuses them."""
        if self.affine is None:
            return False
        axes = self.affine[:3, :3] / np.linalg.norm(self.affine[:3, :3], axis=0)
        return bool(np.abs(axes.T @ axes - np.eye(3)).max() > SHEAR)

    @property
    def is_unset(self) -> bool:
        """Whether the affine is the identity, as files have it whose spacing was lost."""
        return self.affine is not None and bool(np.array_equal(np.abs(self.affine[:3, :3]), np.eye(3)))

    @property
    def words(self) -> dict[str, str]:
        """Each property in words, to be counted."""
        words = {"shape": " x ".join(map(str, self.shape)), "dtype": self.dtype}
        if self.spacing_mm is not None:
            words["spacing_mm"] = " x ".join(f"{size:.4g}" for size in self.spacing_mm)
        return words if self.orientation is None else {**words, "orientation": self.orientation}


def grid_of(path: Path) -> Grid:
    """The grid of an image file; only the header is read, behind the gate."""
    if not is_volume(path):
        return Grid(check_picture(path))
    import nibabel
    from nibabel.filebasedimages import ImageFileError
    from nibabel.spatialimages import HeaderDataError

    header = check_header(path)
    try:
        image = nibabel.load(path)
    except (ImageFileError, HeaderDataError) as error:
        raise BadInput(f"{path.name} cannot be read ({error}); export it again") from error
    coded = bool(image.header["qform_code"]) or bool(image.header["sform_code"])
    affine = np.array(image.affine, dtype=np.float64)
    if not np.isfinite(affine).all() or np.linalg.matrix_rank(affine) < 4:
        raise BadInput(f"{path.name}: the affine places no volume (zero, flat or NaN axes); set qform or sform anew")
    return Grid(header.shape, header.zooms[:3], str(image.get_data_dtype()), affine, coded)


def grid_problems(grids: Mapping[str, Grid], found: Mapping[str, Found]) -> list[str]:
    """Sentences about the headers of a cohort, one for each kind of trouble, with its number and an example."""
    sheared = [case_id for case_id, grid in grids.items() if grid.is_sheared]
    unset = [case_id for case_id, grid in grids.items() if grid.is_unset]
    uncoded = [case_id for case_id, grid in grids.items() if not grid.coded]
    timed = [c for c, grid in grids.items() if np.prod(grid.shape[3:]) > 1 and found[c].frame is None]
    apart = [case_id for case_id in grids if _apart(grids[case_id], found[case_id])]
    sentences = (
        (sheared, "axes are not at right angles: read with nibabel (nnU-Net: NibabelIO), ITK refuses them"),
        (unset, "the affine is the identity: the spacing was probably lost, so distances are in voxels"),
        (uncoded, "neither qform nor sform is set: orientation is a guess"),
        (timed, "the file has a time axis: choose a frame or split it into volumes"),
        (apart, "image and label lie at different places (shape or affine)"),
    )
    problems = [f"{sentence} ({len(cases)} cases, such as {cases[0]})" for cases, sentence in sentences if cases]
    return problems + _mixed(grids)


def _apart(grid: Grid, found: Found) -> bool:
    if not found.labels or grid.affine is None or not is_volume(found.labels[0]):
        return False
    try:
        label = grid_of(found.labels[0])
    except (CasewiseError, OSError):
        return False  # the label itself is reported where it is read
    assert label.affine is not None
    return label.shape[:3] != grid.shape[:3] or not np.allclose(label.affine, grid.affine, atol=1e-3)


def _mixed(grids: Mapping[str, Grid]) -> list[str]:
    problems = []
    orientations = Counter(grid.orientation for grid in grids.values() if grid.orientation)
    if len(orientations) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in orientations.most_common())
        problems.append(f"orientations are mixed ({counts}): a model that saw one will not know the others")
    axes = {len([size for size in grid.shape[:3] if size > 1]) for grid in grids.values()}
    if len(axes) > 1:
        problems.append("pictures and volumes are mixed: load them apart")
    return problems
