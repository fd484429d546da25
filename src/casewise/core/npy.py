"""NumPy arrays from strangers: no pickle, and no memory for more numbers than the bytes that are there can hold."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import UnsafeInput


def read_npy(path: Path) -> NDArray[Any]:
    """The array of an .npy file; what claims more than the file holds is refused before memory is asked for."""
    with path.open("rb") as file:
        _check_claim(file, path.stat().st_size, path.name)
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def npy_array(content: bytes, name: str) -> NDArray[Any]:
    """The array in the bytes of an .npy file; ``name`` is what an error calls it."""
    file = io.BytesIO(content)
    _check_claim(file, len(content), name)
    return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def _check_claim(file: BinaryIO, size: int, name: str) -> None:
    """Refuse a header that promises more than follows it; the file stands at its beginning afterwards."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    claimed, held = math.prod(shape) * dtype.itemsize, size - file.tell()
    if any(side < 0 for side in shape) or claimed > held:
        raise UnsafeInput(f"{name} claims {claimed:,} bytes of numbers and holds {held:,}; it is truncated or forged")
    file.seek(0)
