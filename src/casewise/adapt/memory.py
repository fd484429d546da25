"""How much memory a case will need, estimated from its header before anything is unpacked."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from casewise.adapt.backbones import Backbone
from casewise.core.errors import BadInput, CasewiseError
from casewise.data import nifti, pictures
from casewise.data.folders import CaseFiles

BYTES_PER_FEATURE = (
    106  # a voxel's peak in forward and backward over the features of the first layer: 1686 / 16 measured
)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def shape_of(files: CaseFiles) -> tuple[int, ...] | None:
    """(channel, *space) from the headers, None where the format has none that is read here."""
    name = files.images[0].name.lower()
    try:
        if name.endswith((".nii", ".nii.gz")):
            return (len(files.images), *nifti.check_header(files.images[0]).shape[:3][::-1])
        if name.endswith(pictures.ENDINGS):
            return (3 * len(files.images), *pictures.check_picture(files.images[0]))
    except CasewiseError:
        return None
    return None


def estimate_bytes(backbone: Backbone, shape: Sequence[int], *, adapts: bool, max_slices: int | None = None) -> int:
    """Peak bytes of one case: image, inputs, ONE logit volume (half, float and its resampling), masks, activations."""
    channels, space = shape[0], math.prod(shape[1:])
    weights = sum(parameter.numel() * parameter.element_size() for parameter in backbone.network.parameters())
    logits = backbone.classes * space * (2 + 4 + 4)
    image = channels * space * 4 * 3
    masks = space * 8
    slices = shape[1] if len(shape) == 4 else 1
    at_once = space if max_slices is None else space * min(max_slices, slices) // max(slices, 1)
    activations = at_once * BYTES_PER_FEATURE * _width(backbone) // (1 if adapts else 8)
    return int(image + logits + masks + 3 * weights + activations)


def _width(backbone: Backbone) -> int:
    """Output channels of the first convolution; 16 where there is none."""
    widths = (getattr(layer, "out_channels", None) for layer in backbone.network.modules())
    return next((width for width in widths if isinstance(width, int)), 16)


def parse_size(text: str) -> int:
    """Bytes from "8G", "500M" or a plain number.

    >>> parse_size("2G")
    2147483648
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    if not found:
        raise BadInput(f"a size is a number with K, M, G or T, such as 8G, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])


def available_bytes() -> int | None:
    """Memory that the system says is free, None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
    return int(found[0]) * 1024 if found else None
