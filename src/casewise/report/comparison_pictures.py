"""Pictures of one case of a comparison: image, old, new, what changed and, with a label, how."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from casewise.core.records import Mask
from casewise.render.mask_pictures import STREET

Pixels = NDArray[np.uint8]
Flags = NDArray[np.bool_]

ADDED, REMOVED, RELABELED = (74, 144, 226), (226, 84, 48), (214, 120, 190)
WORSE, BETTER = (255, 92, 60), (96, 176, 255)
_LABELS = np.array(
    [[230, 175, 60], [110, 190, 160], [150, 140, 215], [215, 205, 120], [120, 170, 215], [215, 140, 110]], np.uint8
)  # quiet, apart from each other without red against green
_SIDE = 208  # pixels of a panel's longer side


def case_pictures(
    old: Mask,
    new: Mask,
    label: Mask | None = None,
    image: NDArray[Any] | None = None,
    *,
    names: Mapping[int, str] | None = None,
    zero_is_label: bool = False,
) -> list[tuple[str, str]]:
    """(title, data URI) of the slice with the most trouble: image, old, new, what changed and, with a label, how.

    Where label 0 is a class it is painted too, and nothing is added or removed: a change is another class.
    """
    colors, lowest = label_colors(names or {}), 0 if zero_is_label else 1
    changed = old != new
    wrong_now = None if label is None else changed & (old == label)
    right_now = None if label is None else changed & (new == label)
    trouble = next(flags for flags in (wrong_now, changed, (old > 0) | (new > 0)) if flags is not None and flags.any())
    at = int(np.argmax(trouble.sum(axis=(1, 2)))) if old.ndim == 3 else None
    planes = {name: _plane(flags, at) for name, flags in (("old", old), ("new", new), ("changed", changed))}
    truth = None if label is None else _plane(label, at)
    window = _window(np.logical_or.reduce([planes["old"] > 0, planes["new"] > 0, planes["changed"]]))
    ground = _grey(image, at, planes["old"].shape)[window]
    before, after = planes["old"][window], planes["new"][window]
    where = "" if at is None else f", slice {at + 1} of {old.shape[0]}"
    shown = [] if image is None else [(f"image{where}", ground)]
    shown += [
        (f"old{where if image is None else ''}", _tinted(ground, before, colors, lowest)),
        ("new", _tinted(ground, after, colors, lowest)),
        ("change", _change(ground, before, after, lowest)),
    ]
    if truth is not None and wrong_now is not None and right_now is not None:
        shown.append(("label", _tinted(ground, truth[window], colors, lowest)))
        judged = _painted(ground, _plane(right_now, at)[window], BETTER)
        shown.append(("judgement", _painted(judged, _plane(wrong_now, at)[window], WORSE)))
    return [(title, _data_uri(_fitted(picture))) for title, picture in shown]


def _plane(mask: NDArray[Any], at: int | None) -> NDArray[Any]:
    return mask if at is None else mask[at]


def _window(present: Flags, margin: int = 8) -> tuple[slice, slice]:
    sides = []
    for axis, size in ((1, present.shape[0]), (0, present.shape[1])):
        hit = np.flatnonzero(present.any(axis=axis))
        sides.append(slice(max(0, hit[0] - margin), min(size, hit[-1] + 1 + margin)) if hit.size else slice(0, size))
    return sides[0], sides[1]


def _grey(image: NDArray[Any] | None, at: int | None, shape: tuple[int, ...]) -> Pixels:
    """The image behind the masks as (rows, columns, 3); near-black without one, or where it does not fit."""
    plane = None if image is None else np.asarray(image if at is None else image[at] if image.ndim > 2 else image)
    if plane is None or plane.shape[:2] != shape:
        return np.full((*shape, 3), 22, np.uint8)
    if plane.ndim == 3:
        return np.ascontiguousarray(plane[..., :3], np.uint8)
    low, high = np.percentile(plane, (1, 99.5))
    scaled = np.clip((plane - low) / max(float(high - low), 1e-6), 0, 1)
    return np.repeat(np.asarray(255 * scaled, np.uint8)[..., None], 3, axis=-1)


def _tinted(ground: Pixels, mask: NDArray[Any], colors: Pixels, lowest: int, weight: float = 0.45) -> Pixels:
    """The labels from ``lowest`` on in color over the image, with a line where each ends."""
    color, shown = colors[mask.astype(np.int64) % 256], (mask >= lowest) & (mask != 255)
    mixed = np.where(shown[..., None], ground * (1 - weight) + color * weight, ground)
    edge = shown & (ndimage.grey_erosion(mask, size=3) != ndimage.grey_dilation(mask, size=3))
    return np.where(edge[..., None], color, mixed).astype(np.uint8)


def _painted(ground: Pixels, where: Flags, color: tuple[int, int, int]) -> Pixels:
    return np.where(where[..., None], np.array(color, np.uint8), ground).astype(np.uint8)


def _change(ground: Pixels, old: NDArray[Any], new: NDArray[Any], lowest: int) -> Pixels:
    drawn = (ground * 0.75).astype(np.uint8)
    if lowest == 0:
        return _painted(drawn, old != new, RELABELED)
    drawn = _painted(drawn, (old != new) & (old > 0) & (new > 0), RELABELED)
    return _painted(_painted(drawn, (old == 0) & (new > 0), ADDED), (old > 0) & (new == 0), REMOVED)


def _fitted(picture: Pixels) -> Pixels:
    """Enlarged by a whole factor, or thinned by a whole stride, to about the side of a panel."""
    longest = max(picture.shape[:2])
    if longest > 2 * _SIDE:
        return picture[:: longest // _SIDE, :: longest // _SIDE]
    factor = max(1, round(_SIDE / longest))
    return picture.repeat(factor, axis=0).repeat(factor, axis=1)


def _data_uri(picture: Pixels) -> str:
    buffer = io.BytesIO()
    Image.fromarray(picture).quantize(128, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def label_colors(names: Mapping[int, str]) -> Pixels:
    """The color that pictures and legend give to the labels 0 to 255: the street's own by name, else quiet ones."""
    table = _LABELS[(np.arange(256) - 1) % len(_LABELS)]
    for label, name in names.items():
        if 0 <= label < 256 and str(name).lower() in STREET:
            table[label] = STREET[str(name).lower()]
    return table
