"""The picture of one case for a person: M0, adapted, edits and deployed side by side, as a PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
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


def overlay_png(preview: Slice) -> bytes:
    """Four panels in a row; the same masks give the same bytes."""
    base = _rgb(preview.image)
    panels = [
        ("M0", _tinted(base, _colors(preview.source), preview.source > 0)),
        ("adapted", _tinted(base, _colors(preview.adapted), preview.adapted > 0)),
        ("edits", _edits(base, preview)),
        ("deployed", _tinted(base, _colors(preview.deployed), preview.deployed > 0)),
    ]
    buffer = io.BytesIO()
    _row(panels).save(buffer, format="PNG")
    return buffer.getvalue()


def _rgb(image: NDArray[Any]) -> Pixels:
    return np.ascontiguousarray(np.repeat(image[..., None], 3, axis=-1) if image.ndim == 2 else image, np.uint8)


def _colors(mask: NDArray[Any]) -> Pixels:
    """Label 0 black, then the palette again and again."""
    wrapped = (mask.astype(np.int64) - 1) % (len(PALETTE) - 1) + 1
    return np.asarray(PALETTE[np.where(mask > 0, wrapped, 0)])


def _tinted(base: Pixels, color: Pixels, where: NDArray[np.bool_], *, weight: float = 0.5) -> Pixels:
    mixed = base * (1 - weight) + color * weight
    return np.where(where[..., None], mixed, base).astype(np.uint8)


def _edits(base: Pixels, preview: Slice) -> Pixels:
    source, deployed, adapted = preview.source, preview.deployed, preview.adapted
    kinds: Sequence[tuple[Pixels, NDArray[np.bool_]]] = (
        (REJECTED, (adapted != source) & (deployed == source)),
        (RELABELED, (deployed != source) & (deployed > 0) & (source > 0)),
        (ADDED, (deployed > 0) & (source == 0)),
        (REMOVED, (deployed == 0) & (source > 0)),
    )
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
