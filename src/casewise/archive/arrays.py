"""Arrays in a zip, without pickle, and refused before they are opened when they would not fit in memory."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import DamagedArchive, UnsafeInput
from casewise.core.npy import npy_array

LARGEST_BYTES = 16 << 30
_FLAT = re.compile(  # how NumPy begins a flat array of numbers, which is nearly all that an archive holds
    rb"\x93NUMPY\x01\x00..\{'descr': '([|<][buif][1248])', 'fortran_order': False, 'shape': \((\d+),\), \} *\n", re.S
)


def packed(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The bytes of a compressed .npz; equal arrays give equal bytes."""
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise UnsafeInput(f"array {name!r} holds Python objects, which only pickle could store; give numbers")
    buffer = io.BytesIO()
    named: dict[str, Any] = dict(arrays)
    np.savez_compressed(buffer, **named)
    return buffer.getvalue()


def unpacked(path: Path, *, largest_bytes: int = LARGEST_BYTES) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz, not to be written to."""
    try:
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
            size = sum(member.file_size for member in archive.infolist())
            if size > largest_bytes:
                raise UnsafeInput(f"{path} would unpack to {size:,} bytes, more than the allowed {largest_bytes:,}")
            return {name.removesuffix(".npy"): _array(archive.read(name), name) for name in archive.namelist()}
    except FileNotFoundError:
        raise DamagedArchive(f"{path} is missing; restore it or record the case again") from None
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError, KeyError) as error:
        raise DamagedArchive(f"{path} is damaged ({error}); restore it or record the case again") from error


def _array(content: bytes, name: str) -> NDArray[Any]:
    """An array from the bytes of an .npy; a flat one without NumPy's reader, which takes longer than the array."""
    if flat := _FLAT.match(content):
        return np.frombuffer(content, flat[1].decode(), int(flat[2]), flat.end())
    return npy_array(content, name)
