"""Read and write NIfTI: headers are checked before decompression, and outputs have the geometry of their image.

The header is checked first because 377 bytes can ask for 18 GB. Outputs copy the geometry fields of the input header
and nothing else: free-text fields can contain a patient's name.
nibabel, not ITK: ITK refuses the non-orthonormal affines of real scanners.
"""

from __future__ import annotations

import gzip
import itertools
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import BadInput, CasewiseError, NotAMask, UnsafeInput
from casewise.core.records import Mask
from casewise.core.text import brief

MAX_BYTES = 8 * 2**30
DEFLATE_LIMIT = 1032  # no gzip stream unpacks to more than 1032 times its size

_NIFTI1, _NIFTI2 = 348, 540
_AT_ONCE = 2**28  # bytes; larger volumes are unpacked piece by piece
_GEOMETRY_FIELDS = (
    "pixdim", "xyzt_units", "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d",
    "qoffset_x", "qoffset_y", "qoffset_z", "srow_x", "srow_y", "srow_z",
)  # fmt: skip


@dataclass(frozen=True)
class Header:
    """Shape, type and size from the first bytes of a file."""

    shape: tuple[int, ...]
    bits: int  # bits of a voxel, from the datatype; the field bitpix is ignored
    offset: float
    zooms: tuple[float, ...]

    @property
    def bytes(self) -> int:
        """Size of the voxels, unpacked."""
        return math.prod(self.shape) * self.bits // 8


@dataclass(frozen=True, eq=False, repr=False)
class Geometry:
    """The geometry fields of a header, as they were stored."""

    __repr__ = brief

    shape: tuple[int, ...]  # (x, y, z) as in the file
    affine: NDArray[np.float64]
    fields: dict[str, Any]  # raw values of the geometry fields


@dataclass(frozen=True, eq=False, repr=False)
class Volume:
    """Voxels in the order (slices, rows, columns), which is (z, y, x) of the file, with their geometry."""

    __repr__ = brief

    voxels: NDArray[Any]
    spacing_mm: tuple[float, ...]  # in the order of the voxels' axes
    geometry: Geometry


def is_volume(path: Path) -> bool:
    """Return True if a file is named like a NIfTI file."""
    return path.name.lower().endswith((".nii", ".nii.gz"))


def check_header(path: Path, *, max_bytes: int = MAX_BYTES) -> Header:
    """Read a NIfTI header without unpacking the rest, and refuse impossible claims."""
    return _judged(path, _first_bytes(path, _NIFTI2), path.stat().st_size, packed=_is_packed(path), max_bytes=max_bytes)


def _judged(path: Path, start: bytes, size: int, *, packed: bool, max_bytes: int) -> Header:
    """Return the header of a file of this size; refuse it if it cannot be true."""
    fields = _fields(path, start)
    header = _header(path, fields)
    _check_place(path, fields)
    if any(size <= 0 for size in header.shape):
        raise UnsafeInput(f"{path.name}: dimensions must be positive, the header says {header.shape}; export it again")
    if not math.isfinite(header.offset) or header.offset < 0 or header.offset > 2**31:
        raise UnsafeInput(f"{path.name}: the header's vox_offset is {header.offset}; export the file again")
    if header.bytes > max_bytes:
        raise UnsafeInput(
            f"{path.name}: the header asks for {header.bytes / 2**30:.1f} GiB, at most {max_bytes / 2**30:.1f} GiB "
            f"are allowed; crop the volume or raise the limit"
        )
    needed = header.bytes + int(header.offset)
    if packed and needed > DEFLATE_LIMIT * size + 2**16:
        raise UnsafeInput(
            f"{path.name}: {size} packed bytes are too few for the {needed} bytes that the header announces; the "
            f"file is truncated or forged"
        )
    if not packed and size < needed:
        raise BadInput(f"{path.name}: the header announces {needed} bytes, the file has {size}; it is truncated")
    return header


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _first_bytes(path: Path, count: int) -> bytes:
    if not path.is_file():
        raise BadInput(f"{path} is not a file")
    try:
        with gzip.open(path, "rb") if _is_packed(path) else path.open("rb") as file:
            return file.read(count)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path.name} cannot be unpacked ({error}); it is truncated or damaged") from error


def _fields(path: Path, start: bytes) -> Any:
    """Return the fields of a NIfTI-1 or NIfTI-2 header by name, in either byte order; values are not checked."""
    from nibabel import Nifti1Header, Nifti2Header

    if len(start) < _NIFTI1:
        raise BadInput(f"{path.name} is {len(start)} bytes long, a NIfTI header has {_NIFTI1}; copy it again")
    for order in "<>":
        size = struct.unpack(f"{order}i", start[:4])[0]
        if size == _NIFTI1 and start[344:347] in (b"n+1", b"ni1"):
            return np.frombuffer(start[:_NIFTI1], Nifti1Header.template_dtype.newbyteorder(order))[0]
        if size == _NIFTI2 and len(start) >= _NIFTI2 and start[4:7] in (b"n+2", b"ni2"):
            return np.frombuffer(start[:_NIFTI2], Nifti2Header.template_dtype.newbyteorder(order))[0]
    raise BadInput(f"{path.name} is not a NIfTI file; its first bytes are {start[:8]!r}")


_BITS = {2: 8, 4: 16, 8: 32, 16: 32, 64: 64, 256: 8, 512: 16, 768: 32, 1024: 64, 1280: 64, 1536: 128}
"""Bits of one voxel by datatype code: whole and real numbers."""

_UNUSABLE = {
    1: "single bits", 32: "complex numbers", 128: "colors (RGB)", 1792: "complex numbers", 2048: "complex numbers",
    2304: "colors (RGBA)",
}  # fmt: skip


def _header(path: Path, fields: Any) -> Header:
    dims, kind = fields["dim"].tolist(), int(fields["datatype"])
    axes = dims[0]
    if not 1 <= axes <= 7:
        raise UnsafeInput(f"{path.name}: a NIfTI file has 1 to 7 axes, the header says {axes}")
    if kind in _UNUSABLE:
        raise BadInput(f"{path.name} holds {_UNUSABLE[kind]}; write one number for each voxel, one file per channel")
    if kind not in _BITS:
        raise UnsafeInput(f"{path.name}: {kind} is not a datatype of NIfTI; export the file again")
    zooms = tuple(fields["pixdim"].tolist()[1 : axes + 1])
    return Header(tuple(dims[1 : axes + 1]), _BITS[kind], float(fields["vox_offset"]), zooms)


def _check_place(path: Path, fields: Any) -> None:
    """Refuse a header without a valid geometry: NaN, flat axes, a quaternion longer than 1.

    Fields that the header says are not used (their code is 0) may hold anything.
    """
    zooms, turn = fields["pixdim"][1:4], [float(fields[f"quatern_{axis}"]) for axis in "bcd"]
    wrong = ""
    if not np.isfinite(zooms).all():
        wrong = f"spacing {[float(zoom) for zoom in zooms]}"
    elif fields["sform_code"] > 0:
        affine = np.array([fields[f"srow_{axis}"] for axis in "xyz"], np.float64)
        lengths = np.linalg.norm(affine[:, :3], axis=0)
        if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:, :3])) <= 1e-12 * lengths.prod():
            wrong = f"sform {affine.tolist()}"
    elif fields["qform_code"] > 0:
        offsets = [float(fields[f"qoffset_{axis}"]) for axis in "xyz"]
        if not np.isfinite([*turn, *offsets]).all() or sum(part**2 for part in turn) > 1 + 1e-3:
            wrong = f"quaternion {turn} at {offsets}"
    if wrong:
        raise BadInput(f"{path.name}: {wrong} places no volume; set qform or sform anew, or export the file again")


def read_volume(path: Path, *, frame: int | None = None, max_bytes: int = MAX_BYTES, writable: bool = True) -> Volume:
    """Read a volume after its header was checked; ``frame`` picks one time point of a 4-D file without unpacking the
    others. The voxels may be read-only unless ``writable``, which saves a copy."""
    volume = _plain_volume(path, max_bytes=max_bytes, writable=writable) if frame is None else None
    if volume is not None:
        return volume
    header = check_header(path, max_bytes=max_bytes)
    image = opened_image(path)
    try:
        voxels = _voxels(path, image, header, frame)
    except CasewiseError:
        raise
    except (OSError, EOFError, zlib.error, ValueError, ArithmeticError, KeyError, IndexError) as error:
        raise BadInput(f"{path.name} cannot be read ({error}); it is truncated or damaged") from error
    zooms = tuple(abs(float(zoom)) for zoom in image.header.get_zooms()[: voxels.ndim])
    return Volume(voxels.T, zooms[::-1], _geometry(image.header, image.affine, voxels.shape))


def _plain_volume(path: Path, *, max_bytes: int, writable: bool) -> Volume | None:
    """Read the usual kind of file in one step: compressed NIfTI-1, one volume of unscaled numbers after the header.

    This is several times faster than nibabel, with the same result. Other files return None, and nibabel reads them.
    The header is checked first, and no more bytes than it states are unpacked.
    """
    from nibabel import Nifti1Header
    from nibabel.spatialimages import HeaderDataError

    if not path.is_file() or path.stat().st_size > _AT_ONCE:
        return None
    packed, stream = path.read_bytes(), zlib.decompressobj(wbits=31)
    if packed[:2] != b"\x1f\x8b":
        return None
    try:
        start = stream.decompress(packed, _NIFTI1 + 4)
        if len(start) < _NIFTI1 + 4 or start[:4] != struct.pack("<i", _NIFTI1) or start[344:348] != b"n+1\0":
            return None
        header = _judged(path, start, len(packed), packed=True, max_bytes=max_bytes)
        slope, shift = struct.unpack("<2f", start[112:120])
        scaled = not (slope == 0 or slope != slope or (slope == 1 and shift == 0))
        if header.bytes > _AT_ONCE or header.offset != len(start) or len(header.shape) != 3 or scaled:
            return None
        zooms = struct.unpack("<4f", start[76:92])
        codes = struct.unpack("<2h", start[252:256])
        usual = abs(zooms[0]) == 1 and min(zooms[1:]) > 0 and 0 <= min(codes) <= max(codes) <= 4  # nothing to mend
        fields = Nifti1Header(start[:_NIFTI1], "<", check=not usual)
        content = stream.decompress(stream.unconsumed_tail, header.bytes)
        stream.decompress(stream.unconsumed_tail, 1)  # read to the end, so that the checksum is compared
    except (zlib.error, HeaderDataError):
        return None  # nibabel then reads the file and reports the error
    if len(content) != header.bytes:
        return None
    store = bytearray(content) if writable else content
    voxels = np.frombuffer(store, fields.get_data_dtype()).reshape(header.shape[::-1])
    spacing = tuple(abs(float(zoom)) for zoom in fields.get_zooms()[:3])
    return Volume(voxels, spacing[::-1], _geometry(fields, fields.get_best_affine(), header.shape))


def opened_image(path: Path) -> Any:
    """Open an image without unpacking its voxels; errors of nibabel become one sentence."""
    import nibabel
    from nibabel.filebasedimages import ImageFileError
    from nibabel.spatialimages import HeaderDataError

    try:
        return nibabel.load(path)
    except (OSError, EOFError, zlib.error, ImageFileError) as error:
        raise BadInput(f"{path.name} cannot be read ({error}); it is truncated or damaged") from error
    except (HeaderDataError, ValueError, ArithmeticError, KeyError) as error:
        raise BadInput(f"{path.name}: its header is invalid ({error}); export the file again") from error


def _voxels(path: Path, image: Any, header: Header, frame: int | None) -> NDArray[Any]:
    shape = tuple(size for size in header.shape[3:] if size != 1)
    if shape and frame is None:
        raise NotAMask(f"{path.name} has {len(header.shape)} axes {header.shape}; name one frame or split it")
    data = image.dataobj[..., frame] if frame is not None and len(header.shape) > 3 else image.dataobj
    voxels = np.asanyarray(data)
    return np.asarray(voxels.reshape(voxels.shape[:3]))


def read_label(path: Path, *, frame: int | None = None) -> Mask:
    """Read a label as integers in (slices, rows, columns); floats must be whole numbers."""
    return whole_numbers(read_volume(path, frame=frame).voxels, path.name)


def whole_numbers(voxels: NDArray[Any], name: str, *, within: float = 0.0) -> Mask:
    """Return the voxels of a label as integers; refuse floats further than ``within`` from a whole number."""
    if voxels.dtype.kind in "biu":
        return voxels
    if (
        voxels.dtype.kind != "f"
        or not np.isfinite(voxels).all()
        or np.abs(voxels - np.rint(voxels)).max(initial=0) > within
    ):
        raise NotAMask(f"{name} has values that are not whole numbers; it is not a label")
    return np.asarray(np.rint(voxels).astype(np.int32))


def read_geometry(path: Path) -> Geometry:
    """Return the geometry of a volume from its header."""
    header, image = check_header(path), opened_image(path)
    return _geometry(image.header, image.affine, header.shape)


def check_same_place(image: Path, label: Path, *, reorients: bool = False) -> None:
    """Refuse a label whose position differs from that of its image.

    Masks are compared voxel by voxel, so a label whose affine is shifted or flipped against its image would be paired
    with other tissue. A corner of the label may be off by half the smallest voxel side. Files that are not NIfTI,
    headers without qform and sform, and an affine that is exactly the identity say nothing and are accepted.

    Args:
        image: File of the image.
        label: File of its label.
        reorients: True if the reader turns both to one orientation; then flips are no difference.

    Raises:
        BadInput: If their positions differ; the message holds both affines.
    """
    import nibabel

    if not (is_volume(image) and is_volume(label)):
        return
    there, here = read_geometry(image), read_geometry(label)
    if any(_says_nothing(one) for one in (there, here)):
        return
    shapes, affines = [(*one.shape, 1, 1)[:3] for one in (there, here)], [there.affine, here.affine]
    if shapes[0] != shapes[1] and not reorients:
        return  # reported when the label is paired
    if reorients:
        turns = [nibabel.io_orientation(affine) for affine in affines]
        affines = [
            affine @ nibabel.orientations.inv_ornt_aff(turn, shape)
            for affine, turn, shape in zip(affines, turns, shapes, strict=True)
        ]
        shapes = [tuple(np.take(shape, np.argsort(turn[:, 0]))) for shape, turn in zip(shapes, turns, strict=True)]
    corners = np.array([[*corner, 1] for corner in itertools.product(*((0, size - 1) for size in shapes[0]))]).T
    gap = float(np.abs(affines[0] @ corners - affines[1] @ corners).max())
    if gap > 0.5 * float(np.linalg.norm(affines[0][:3, :3], axis=0).min()):
        said = [np.array2string(affine[:3], precision=4, separator=", ").replace("\n", "") for affine in affines]
        raise BadInput(
            f"{label.name} is up to {gap:.3g} mm away from the other file of its case; correct it (casewise record "
            f"accepts it with --set ignore-geometry=true). Its affine is {said[1]}, the other is {said[0]}"
        )


def _says_nothing(geometry: Geometry) -> bool:
    """Return True if a header has no geometry: no qform and no sform, or an identity affine."""
    coded = int(geometry.fields["qform_code"]) or int(geometry.fields["sform_code"])
    return not coded or np.array_equal(geometry.affine, np.eye(4))


def _geometry(header: Any, affine: Any, shape: tuple[int, ...]) -> Geometry:
    fields = {name: np.array(header[name]) for name in _GEOMETRY_FIELDS}
    return Geometry(shape[:3], np.array(affine, dtype=np.float64), fields)


def placed_volume(voxels: NDArray[Any], affine: NDArray[np.float64]) -> Volume:
    """Voxels in (slices, rows, columns) that came without a NIfTI header, placed by an affine from (x, y, z) to RAS."""
    import nibabel

    image = nibabel.Nifti1Image(voxels.T, affine)
    image.header.set_xyzt_units("mm")
    image.set_qform(affine, code=1)
    image.set_sform(affine, code=1)
    zooms = tuple(float(size) for size in np.linalg.norm(affine[:3, :3], axis=0))
    return Volume(voxels, zooms[::-1], _geometry(image.header, image.affine, voxels.T.shape))


def write_volume(path: Path, volume: Volume) -> None:
    """Write voxels with their geometry; free text of the source header is not copied."""
    _write(path, volume.voxels, volume.geometry)


def write_mask(path: Path, mask: Mask, geometry: Geometry) -> None:
    """Write labels in (slices, rows, columns) with the geometry of their image; uint8 below 255 labels, else uint16.

    The gzip stream holds no name and no time, so equal masks are equal files.
    """
    if mask.T.shape != tuple(geometry.shape):
        raise BadInput(f"the mask has shape {mask.shape}, its image {tuple(geometry.shape)[::-1]}; resample it first")
    _write(path, mask.astype(np.uint8 if mask.size == 0 or mask.max() < 255 else np.uint16), geometry)


def _write(path: Path, voxels: NDArray[Any], geometry: Geometry) -> None:
    """Write voxels in (slices, rows, columns) with a geometry; the zooms of further axes are dropped."""
    import nibabel

    header = nibabel.Nifti1Header()
    header.set_data_dtype(voxels.dtype)
    header.set_data_shape(voxels.T.shape)
    zooms = header["pixdim"].copy()
    for name, value in geometry.fields.items():
        header[name] = value
    zooms[: voxels.ndim + 1] = geometry.fields["pixdim"][: voxels.ndim + 1]
    header["pixdim"] = zooms
    nibabel.save(nibabel.Nifti1Image(voxels.T, None, header), path)


def place_like(path: Path, image: Path) -> None:
    """Write a mask file again with the affine, codes, zooms and units of its image, exactly (decision 0008)."""
    write_mask(path, read_label(path), read_geometry(image))
