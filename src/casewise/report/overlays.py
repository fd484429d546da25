"""The picture of one case for a person: M0, adapted, edits and deployed side by side, as a PNG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Pixels = NDArray[np.uint8]

PALETTE = np.array(
    [
        [0, 0, 0],
        [230, 159, 0],
        [86, 180, 233],
        [0, 158, 115],
        [240, 228, 66],
        [0, 114, 178],
        [213, 94, 0],
        [204, 121, 167],
    ],
    np.uint8,
)  # Okabe and Ito: distinguishable without red and green
STREET = {
    "road": (128, 64, 128), "sidewalk": (244, 35, 232), "building": (70, 70, 70), "wall": (102, 102, 156),
    "fence": (190, 153, 153), "pole": (153, 153, 153), "traffic light": (250, 170, 30), "traffic sign": (220, 220, 0),
    "vegetation": (107, 142, 35), "terrain": (152, 251, 152), "sky": (70, 130, 180), "person": (220, 20, 60),
    "rider": (255, 0, 0), "car": (0, 0, 142), "truck": (0, 0, 70), "bus": (0, 60, 100), "train": (0, 80, 100),
    "motorcycle": (0, 0, 230), "bicycle": (119, 11, 32),
}  # fmt: skip
"""The colors that people who know Cityscapes expect, by class name."""
ADDED = np.array([43, 108, 176], np.uint8)  # in the deployed mask, not in M0
REMOVED = np.array([196, 61, 27], np.uint8)  # in M0, not in the deployed mask
RELABELED = np.array([204, 121, 167], np.uint8)
REJECTED = np.array([150, 150, 150], np.uint8)  # changed by the adaptation, not deployed
TITLE_ROWS = 14


class Slice(Protocol):
    """An image slice and the masks there."""

    @property
    def image(self) -> NDArray[Any]:
        """(rows, columns) or (rows, columns, 3), 8 bits."""
        ...

    @property
    def source(self) -> NDArray[Any]: ...

    @property
    def adapted(self) -> NDArray[Any]: ...

    @property
    def deployed(self) -> NDArray[Any]: ...

    @property
    def names(self) -> Mapping[int, str]: ...

    @property
    def background(self) -> bool: ...


def overlay_png(preview: Slice) -> bytes:
    """Four panels in a row; the same masks give the same bytes."""
    base = _rgb(preview.image)
    panels = [
        ("M0", _painted(base, preview.source, preview)),
        ("adapted", _painted(base, preview.adapted, preview)),
        ("edits", _edits(base, preview)),
        ("deployed", _painted(base, preview.deployed, preview)),
    ]
    buffer = io.BytesIO()
    _row(panels).save(buffer, format="PNG")
    return buffer.getvalue()


def _rgb(image: NDArray[Any]) -> Pixels:
    return np.ascontiguousarray(np.repeat(image[..., None], 3, axis=-1) if image.ndim == 2 else image, np.uint8)


def legend(names: Mapping[int, str], *, background: bool) -> list[tuple[str, str]]:
    """(class name, color as #rrggbb) of every class that a panel paints, in the order of their numbers."""
    shown = [value for value in sorted(names) if value or not background]
    return [(names[value], "#{:02x}{:02x}{:02x}".format(*_color(value, names))) for value in shown]


def _color(value: int, names: Mapping[int, str]) -> tuple[int, ...]:
    """The street's own color where the name is one of them, else the palette again and again."""
    known = STREET.get(str(names.get(value, "")).lower())
    return known if known is not None else tuple(int(part) for part in PALETTE[(value - 1) % (len(PALETTE) - 1) + 1])


def _painted(base: Pixels, mask: NDArray[Any], preview: Slice) -> Pixels:
    """The mask's classes over the image; label 0 is left free where it is background."""
    values = np.unique(mask)
    colors = np.array([_color(int(value), preview.names) for value in values], np.uint8)
    painted = colors[np.searchsorted(values, mask)]
    return _tinted(base, painted, mask > 0 if preview.background else np.ones(mask.shape, bool))


def _tinted(base: Pixels, color: Pixels, where: NDArray[np.bool_], *, weight: float = 0.5) -> Pixels:
    mixed = base * (1 - weight) + color * weight
    return np.where(where[..., None], mixed, base).astype(np.uint8)


def _edits(base: Pixels, preview: Slice) -> Pixels:
    source, deployed, adapted = preview.source, preview.deployed, preview.adapted
    rejected = (REJECTED, (adapted != source) & (deployed == source))
    changed = deployed != source
    kinds: Sequence[tuple[Pixels, NDArray[np.bool_]]] = (
        (rejected, (RELABELED, changed & (deployed > 0) & (source > 0)), (ADDED, changed & (source == 0)),
         (REMOVED, changed & (deployed == 0)))
        if preview.background
        else (rejected, (RELABELED, changed))
    )  # fmt: skip
    drawn = base
    for color, where in kinds:
        drawn = _tinted(drawn, np.broadcast_to(color, base.shape), where, weight=0.8)
    return drawn


def _row(panels: Sequence[tuple[str, Pixels]]) -> Image.Image:
    scale = max(1, 192 // max(panels[0][1].shape[:2]))
    large = [(title, Image.fromarray(np.kron(p, np.ones((scale, scale, 1), np.uint8)))) for title, p in panels]
    width, height = large[0][1].size
    sheet = Image.new("RGB", (width * len(large) + 4 * (len(large) - 1), height + TITLE_ROWS), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (title, picture) in enumerate(large):
        left = index * (width + 4)
        draw.text((left + 2, 1), title, fill="black")
        sheet.paste(picture, (left, TITLE_ROWS))
    return sheet
