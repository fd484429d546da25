"""Input contract: check that an image is like the training images of the model, as its folder describes them.

A swapped axis, a spacing in meters or CT numbers without their offset are errors of a file, not domain shift. Adapting
to them would hide the error, so the check runs before any update.

This file also estimates the memory of a case from its header.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from casewise.adapt.backbones import Backbone, Expectation
from casewise.core.errors import BadInput
from casewise.core.prediction_record import ContractFinding
from casewise.core.records import Case

CONTRACTS = ("refuse", "warn", "off")
"""What happens to a case that breaks the contract."""

WARN_RATIO = 2.5  # a spacing this many times larger or smaller than the median is worth a warning
REFUSE_RATIO = 10.0
_SAMPLES = 200_000

HINT = "this looks like a wrong header, not like a domain shift"


def check_contract(case: Case, expects: Expectation) -> tuple[ContractFinding, ...]:
    """Return all differences between a case and the training images of the model."""
    return (*_spacing(case, expects), *_intensity(case, expects))


def _spacing(case: Case, expects: Expectation) -> Iterator[ContractFinding]:
    want, have = expects.spacing_mm, case.spacing_mm
    if want is None or have is None or len(want) != len(have):
        return
    if any(size <= 0 or not np.isfinite(size) for size in have):
        yield ContractFinding("refusal", "spacing", f"the spacing {_mm(have)} is not positive: {HINT}")
        return
    ratio = _largest_ratio(have, want)
    if _permuted(have, want):
        text = f"the axes seem to be swapped: spacing {_mm(have)}, in training {_mm(want)}: {HINT}"
        yield ContractFinding("refusal", "axes", text)
    elif ratio >= REFUSE_RATIO:
        text = f"the spacing {_mm(have)} is {ratio:.0f} times above or below the training median {_mm(want)}: {HINT}"
        yield ContractFinding("refusal", "spacing", text)
    elif ratio >= WARN_RATIO:
        text = f"the spacing {_mm(have)} is {ratio:.1f} times above or below the training median {_mm(want)}"
        yield ContractFinding("warning", "spacing", text)


def _largest_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    return max(max(a / b, b / a) for a, b in zip(one, other, strict=True))


def unlike_spacings(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    """True if two spacings differ in their axes or by a large factor; an unknown spacing is never unlike."""
    if one is None or other is None:
        return False
    return len(one) != len(other) or _permuted(one, other) or _largest_ratio(one, other) >= WARN_RATIO


def _permuted(have: Sequence[float], want: Sequence[float]) -> bool:
    """True if both have one clearly thickest axis, and it is another axis than in training."""
    thick = [int(np.argmax(sizes)) for sizes in (have, want)]
    clear = [max(sizes) >= WARN_RATIO * sorted(sizes)[-2] for sizes in (have, want)]
    return all(clear) and thick[0] != thick[1]


def _mm(sizes: Sequence[float]) -> str:
    return " x ".join(f"{size:.3g}" for size in sizes) + " mm"


def _intensity(case: Case, expects: Expectation) -> Iterator[ContractFinding]:
    if expects.channels not in (None, len(case.image)):
        return  # another error, which names the shape
    for channel, image in enumerate(case.image):
        values = image.ravel()[:: max(1, image.size // _SAMPLES)]
        if values.min() == values.max():
            text = f"channel {channel} holds one value everywhere ({values[0]:g})"
            yield ContractFinding("refusal", "intensity", text)
            continue
        facts = expects.intensity.get(channel)
        absolute = channel < len(expects.absolute) and expects.absolute[channel]
        if not facts or not absolute:
            continue
        low, high = np.percentile(values, (0.5, 99.5))
        if high < facts["percentile_00_5"] or low > facts["percentile_99_5"]:
            trained = f"{facts['percentile_00_5']:.3g}..{facts['percentile_99_5']:.3g}"
            text = f"channel {channel} lies in {low:.3g}..{high:.3g}, the training foreground in {trained}: {HINT}"
            yield ContractFinding("refusal", "intensity", text)


def check_orientations(orientations: dict[str, str]) -> dict[str, ContractFinding]:
    """Return cases whose orientation differs from that of most cases; a reader may not reorient them."""
    if len(set(orientations.values())) < 2:
        return {}
    values = list(orientations.values())
    usual = max(sorted(set(values)), key=values.count)
    return {
        case_id: ContractFinding("warning", "orientation", f"axes point {found}, those of most cases {usual}: {HINT}")
        for case_id, found in orientations.items()
        if found != usual
    }


BYTES_PER_FEATURE = 106  # peak per voxel and feature of the first layer, forward and backward: 1686 / 16 measured
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def estimate_bytes(backbone: Backbone, shape: Sequence[int], *, adapts: bool, max_slices: int | None = None) -> int:
    """Estimate the peak bytes of a case: image, inputs, one logit volume and its copies, masks, activations."""
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
    """Return the output channels of the first convolution, or 16 without one."""
    widths = (getattr(layer, "out_channels", None) for layer in backbone.network.modules())
    return next((width for width in widths if isinstance(width, int)), 16)


def parse_size(text: str) -> int:
    """Bytes from "8G", "500M" or a plain number.

    >>> parse_size("2G")
    2147483648
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    if not found:
        raise BadInput(f"a size must be a number with K, M, G or T, such as 8G, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])


def available_bytes() -> int | None:
    """Return the free memory of the system in bytes, or None if it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
    return int(found[0]) * 1024 if found else None
