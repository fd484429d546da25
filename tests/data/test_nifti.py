"""Headers are checked before decompression, and masks get exactly the position of their image."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import nibabel
import numpy as np
import pytest

from casewise.core.errors import BadInput, UnsafeInput
from casewise.data.nifti import check_header, place_like, read_label, read_volume, write_mask

TURN = np.array([[0.0, -1, 0], [0.8, 0, 0.6], [-0.6, 0, 0.8]])
AFFINES = {
    "plain": np.diag([1.0, 2.0, 3.0, 1.0]),
    "left-handed": np.diag([-1.0, 2.0, 3.0, 1.0]),
    "oblique": np.block([[TURN * [1.1, 0.9, 4.0], np.array([[5.0], [-7.0], [11.0]])], [0, 0, 0, 1]]),
    "non-orthonormal": np.array([[1.0, 0.2, 0, 3], [0, 1.5, 0.1, 4], [0.3, 0, 2, 5], [0, 0, 0, 1]]),
}


def write(path: Path, voxels: np.ndarray, affine: np.ndarray, *, sform: int = 1, qform: int = 1) -> Path:
    image = nibabel.Nifti1Image(voxels, affine)
    image.set_sform(affine, code=sform)
    image.set_qform(affine, code=qform, strip_shears=True)
    image.header["descrip"] = b"Jane Doe 1970-01-01"
    image.header["db_name"] = b"Doe"
    nibabel.save(image, path)
    return path


@pytest.mark.parametrize("affine", AFFINES.values(), ids=AFFINES)
@pytest.mark.parametrize("codes", [(1, 1), (2, 0), (0, 3), (4, 2)])
def test_a_mask_lies_exactly_where_its_image_lay(tmp_path: Path, affine: np.ndarray, codes: tuple[int, int]) -> None:
    source = write(tmp_path / "a.nii.gz", np.ones((4, 5, 6), np.int16), affine, sform=codes[0], qform=codes[1])
    volume = read_volume(source)
    assert volume.voxels.shape == (6, 5, 4)
    write_mask(tmp_path / "m.nii.gz", np.arange(120).reshape(6, 5, 4) % 3, volume.geometry)
    before, after = nibabel.load(source).header, nibabel.load(tmp_path / "m.nii.gz").header
    np.testing.assert_array_equal(nibabel.load(source).affine, nibabel.load(tmp_path / "m.nii.gz").affine)
    for name in ("sform_code", "qform_code", "srow_x", "srow_y", "srow_z", "quatern_b", "quatern_c", "qoffset_x"):
        np.testing.assert_array_equal(before[name], after[name])
    assert before.get_zooms() == after.get_zooms()
    assert after.get_data_dtype() == np.uint8


def test_names_in_the_header_do_not_reach_the_output(tmp_path: Path) -> None:
    source = write(tmp_path / "a.nii", np.zeros((3, 3, 3), np.int16), np.eye(4))
    write_mask(tmp_path / "m.nii", np.zeros((3, 3, 3), np.uint8), read_volume(source).geometry)
    assert b"Doe" in source.read_bytes()
    assert b"Doe" not in (tmp_path / "m.nii").read_bytes()


def test_scaled_values_are_read_scaled(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(np.arange(8, dtype=np.float64).reshape(2, 2, 2) / 3, np.eye(4))
    image.header.set_data_dtype(np.int16)
    nibabel.save(image, tmp_path / "a.nii.gz")
    assert nibabel.load(tmp_path / "a.nii.gz").dataobj.slope != 1
    np.testing.assert_allclose(read_volume(tmp_path / "a.nii.gz").voxels.T.ravel(), np.arange(8) / 3, atol=1e-3)


def test_equal_masks_are_equal_files(tmp_path: Path) -> None:
    geometry = read_volume(write(tmp_path / "a.nii.gz", np.ones((3, 3, 3), np.int16), np.eye(4))).geometry
    for name in ("one.nii.gz", "two.nii.gz"):
        write_mask(tmp_path / name, np.ones((3, 3, 3), np.uint8), geometry)
    assert (tmp_path / "one.nii.gz").read_bytes() == (tmp_path / "two.nii.gz").read_bytes()


def test_one_frame_of_a_cine_is_read(tmp_path: Path) -> None:
    cine = np.arange(2 * 3 * 4 * 5, dtype=np.int16).reshape(2, 3, 4, 5)
    nibabel.save(nibabel.Nifti1Image(cine, np.eye(4)), tmp_path / "cine.nii.gz")
    np.testing.assert_array_equal(read_volume(tmp_path / "cine.nii.gz", frame=2).voxels.T, cine[..., 2])
    with pytest.raises(BadInput, match="name one frame"):
        read_volume(tmp_path / "cine.nii.gz")


def test_labels_above_254_are_written_as_uint16(tmp_path: Path) -> None:
    geometry = read_volume(write(tmp_path / "a.nii", np.ones((2, 2, 2), np.int16), np.eye(4))).geometry
    write_mask(tmp_path / "m.nii", np.full((2, 2, 2), 300), geometry)
    assert read_label(tmp_path / "m.nii").max() == 300


def test_float_labels_must_be_whole(tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.full((2, 2, 2), 2.0), np.eye(4)), tmp_path / "whole.nii")
    nibabel.save(nibabel.Nifti1Image(np.full((2, 2, 2), 2.5), np.eye(4)), tmp_path / "half.nii")
    assert read_label(tmp_path / "whole.nii").dtype.kind == "i"
    with pytest.raises(BadInput, match="not whole numbers"):
        read_label(tmp_path / "half.nii")


def forged(path: Path, **changes: tuple[int, str, object]) -> Path:
    """A small NIfTI file whose header bytes were changed: name=(offset, format, value)."""
    nibabel.save(nibabel.Nifti1Image(np.zeros((2, 2, 2), np.uint8), np.eye(4)), path.with_suffix(""))
    content = bytearray(path.with_suffix("").read_bytes())
    for offset, kind, value in changes.values():
        struct.pack_into(kind, content, offset, value)
    path.write_bytes(gzip.compress(bytes(content)))
    return path


FORGERIES = {
    "18 GB from 400 bytes": ({"x": (42, "<h", 30000), "y": (44, "<h", 30000), "z": (46, "<h", 20)}, "GiB"),
    "more than gzip can hold": ({"x": (42, "<h", 2000), "y": (44, "<h", 2000), "z": (46, "<h", 20)}, "too few"),
    "negative dimension": ({"x": (42, "<h", -5)}, "must be positive"),
    "zero dimension": ({"x": (42, "<h", 0)}, "must be positive"),
    "nine axes": ({"n": (40, "<h", 9)}, "1 to 7 axes"),
    "offset is NaN": ({"o": (108, "<f", float("nan"))}, "vox_offset"),
    "offset is negative": ({"o": (108, "<f", -1.0)}, "vox_offset"),
    "strange voxels": ({"d": (70, "<h", 5)}, "5 is not a datatype of NIfTI"),
}


@pytest.mark.parametrize(("changes", "message"), FORGERIES.values(), ids=FORGERIES)
def test_a_forged_header_is_refused_before_anything_is_unpacked(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(UnsafeInput, match=message):
        check_header(forged(tmp_path / "a.nii.gz", **changes))


def test_a_truncated_file_is_named_as_one(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (20, 20, 20), dtype=np.uint8)
    nibabel.save(nibabel.Nifti1Image(noise, np.eye(4)), tmp_path / "a.nii.gz")
    content = (tmp_path / "a.nii.gz").read_bytes()
    (tmp_path / "a.nii.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(BadInput, match="truncated or damaged"):
        read_volume(tmp_path / "a.nii.gz")


def test_a_mask_of_another_shape_is_refused(tmp_path: Path) -> None:
    geometry = read_volume(write(tmp_path / "a.nii", np.ones((2, 3, 4), np.int16), np.eye(4))).geometry
    with pytest.raises(BadInput, match=r"shape \(2, 3, 4\), its image \(4, 3, 2\)"):
        write_mask(tmp_path / "m.nii", np.zeros((2, 3, 4), np.uint8), geometry)


def test_a_picture_is_no_nifti(tmp_path: Path) -> None:
    (tmp_path / "a.nii").write_bytes(b"\x89PNG" + bytes(400))
    with pytest.raises(BadInput, match="not a NIfTI file"):
        check_header(tmp_path / "a.nii")


def test_a_header_that_nibabel_refuses_is_reported_in_a_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "a.nii", np.zeros((3, 3, 3), np.int16), np.eye(4))
    content = bytearray(path.read_bytes())
    content[70:72] = struct.pack("<h", 4096)  # a datatype that does not exist
    path.write_bytes(content)
    with pytest.raises(UnsafeInput, match=r"a\.nii: 4096 is not a datatype of NIfTI; export the file again"):
        read_volume(path)


def test_the_size_is_that_of_the_datatype_whatever_bitpix_says(tmp_path: Path) -> None:
    path = write(tmp_path / "a.nii", np.arange(27, dtype=np.int16).reshape(3, 3, 3), np.eye(4))
    content = bytearray(path.read_bytes())
    content[72:74] = struct.pack("<h", 8)  # says half of what int16 needs
    path.write_bytes(content)
    assert check_header(path).bytes == 54
    assert read_volume(path).voxels.max() == 26
    path.write_bytes(content[:-27])
    with pytest.raises(BadInput, match="it is truncated"):
        read_volume(path)


def test_a_mask_file_is_placed_like_its_image_and_keeps_its_voxels(tmp_path: Path) -> None:
    image = write(tmp_path / "a.nii.gz", np.zeros((4, 5, 6), np.int16), AFFINES["oblique"], sform=2, qform=3)
    labels = np.arange(120, dtype=np.uint8).reshape(4, 5, 6) % 3
    mask = write(tmp_path / "m.nii.gz", labels, AFFINES["plain"])
    place_like(mask, image)
    placed, found = nibabel.load(mask), nibabel.load(image)
    np.testing.assert_array_equal(np.asarray(placed.dataobj), labels)
    np.testing.assert_array_equal(placed.affine, found.affine)
    assert (int(placed.header["sform_code"]), int(placed.header["qform_code"])) == (2, 3)


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.float32, np.uint16])
@pytest.mark.parametrize("slope", [None, 1.0, 2.0])
def test_the_fast_way_to_read_gives_what_nibabel_gives(tmp_path: Path, kind: type, slope: float | None) -> None:
    draw = np.random.default_rng(0)
    affine = np.array([[0, -1.5, 0, 7], [1.2, 0, 0.1, -3], [0, 0, 8, 5], [0, 0, 0, 1]])
    image = nibabel.Nifti1Image(draw.integers(0, 9, (5, 4, 3)).astype(kind), affine)
    image.header.set_slope_inter(slope, None if slope is None else 0.0)
    nibabel.save(image, tmp_path / "a.nii.gz")
    image = nibabel.load(tmp_path / "a.nii.gz")
    volume = read_volume(tmp_path / "a.nii.gz")
    wanted = np.asanyarray(image.dataobj)
    assert np.array_equal(volume.voxels, wanted.T)
    assert volume.voxels.dtype == wanted.dtype
    assert volume.voxels.flags.writeable
    assert np.array_equal(read_volume(tmp_path / "a.nii.gz", writable=False).voxels, wanted.T)
    assert np.array_equal(volume.geometry.affine, image.affine)
    assert volume.spacing_mm == tuple(float(zoom) for zoom in image.header.get_zooms()[::-1])
    for name, value in volume.geometry.fields.items():
        assert np.array_equal(value, image.header[name], equal_nan=True), name
