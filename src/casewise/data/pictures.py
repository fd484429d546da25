"""Read and write PNG, JPEG and BMP; other formats are refused, and the number of pixels is limited."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from casewise.core.errors import BadInput, NotAMask, UnsafeInput
from casewise.core.records import Mask

FORMATS = ("PNG", "JPEG", "BMP")
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp")
MAX_PIXELS = 64 * 2**20


def is_picture(path: Path) -> bool:
    """Return True if a file is named like a picture."""
    return path.name.lower().endswith(ENDINGS)


def read_picture(path: Path, *, gray: bool = False, max_pixels: int = MAX_PIXELS) -> NDArray[Any]:
    """A picture as (channel, rows, columns): three channels of 8 bits, or one, of 16 bits where the file has them."""
    image = _opened(path, max_pixels)
    if image.mode.startswith("I") and not gray:
        raise BadInput(f"{path.name} has 16-bit grays, and the model takes colors of 8 bits; convert the picture")
    values = np.asarray(image if image.mode.startswith("I") else image.convert("L" if gray else "RGB"))
    return values[None] if gray else np.ascontiguousarray(np.moveaxis(values, -1, 0))


def read_label_picture(path: Path, *, max_pixels: int = MAX_PIXELS) -> Mask:
    """A label picture as (rows, columns); palette indices stay indices, 16-bit greys stay 16-bit."""
    image = _opened(path, max_pixels)
    values = np.asarray(image)
    if values.ndim != 2:
        raise NotAMask(f"{path.name} has {values.ndim} axes; a label picture holds one number per pixel, not colors")
    return values.astype(np.uint8) if values.dtype == bool else values


def write_label_picture(path: Path, mask: Mask) -> None:
    """Write (rows, columns) labels as a PNG without loss; uint8 below 256 labels, else 16-bit grey."""
    dtype = np.uint8 if mask.size == 0 or mask.max() < 256 else np.uint16
    Image.fromarray(np.ascontiguousarray(mask.astype(dtype))).save(path, format="PNG")


def check_picture(path: Path, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Rows and columns that a picture claims, before it is unpacked; too many are refused."""
    with _judged(path, max_pixels) as image:
        return image.height, image.width


def _opened(path: Path, max_pixels: int) -> Any:
    with _judged(path, max_pixels) as image:
        image.load()
        return image


@contextmanager
def _judged(path: Path, max_pixels: int) -> Iterator[Any]:
    if not path.is_file():
        raise BadInput(f"{path} is not a file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=list(FORMATS)) as image:
                if image.width * image.height > max_pixels:
                    raise UnsafeInput(
                        f"{path.name} claims {image.width} x {image.height} pixels; allowed: {max_pixels}"
                    )
                yield image
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise UnsafeInput(f"{path.name} is a decompression bomb: {error}") from error
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise BadInput(f"{path.name} cannot be read as {', '.join(FORMATS)} ({error}); save it again") from error
