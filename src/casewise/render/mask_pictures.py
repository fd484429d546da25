"""Pictures of masks: the slice with most harm for reports, and the PNG of one case for prediction folders.

Edits made worse are outlined in red, edits made better in blue.
"""

from __future__ import annotations

import base64
import colorsys
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage

from casewise.core.records import Mask
from casewise.measure.metrics.harm import Harm, harm
from casewise.render.ink import canvas, inked

WORSE = (255, 90, 60)
BETTER = (90, 169, 255)
_GROUND = (13, 15, 17)
_VOID = (44, 48, 52)

Pixels = NDArray[np.uint8]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class SliceView:
    """The part of a case that is shown: a slice (None in 2-D) and a window of it; by default the whole slice."""

    index: int | None
    rows: slice = field(default_factory=lambda: slice(None))
    columns: slice = field(default_factory=lambda: slice(None))

    def of(self, mask: Any) -> Any:
        """Return this part of an array of the case's shape."""
        plane = mask if self.index is None else mask[self.index]
        return plane[self.rows, self.columns]

    def words(self, shape: tuple[int, ...]) -> str:
        """Describe the slice and the window."""
        where = "" if self.index is None else f"slice {self.index + 1} of {shape[0]}, "
        rows, columns = (f"{part.start}–{part.stop}" for part in (self.rows, self.columns))
        return f"{where}rows {rows} of {shape[-2]}, columns {columns} of {shape[-1]}"


@dataclass(frozen=True, eq=False)
class Edits:
    """The change from M0 to one mask: which voxels changed, and which became worse or better."""

    worse: Flags
    better: Flags
    changed: Flags
    found: Harm

    def ha_of(self, view: SliceView) -> float:
        """HA of a slice: harmful changed voxels in view / changed voxels in view."""
        changed = int(view.of(self.changed).sum())
        return float(view.of(self.worse).sum() / changed) if changed else 0.0


def edits(source: Mask, adapted: Mask, label: Mask, *, measure: Mapping[str, Any]) -> Edits:
    """Return the changed voxels, and those of regions that became worse or better by the label (B5)."""
    found = harm(source, adapted, label, **measure)
    pieces = found.found
    side, changed = np.zeros(source.shape, np.int8), np.zeros(source.shape, bool)
    side.flat[pieces.voxels] = np.where(pieces.kept, np.sign(found.worse), 0)[pieces.number]
    changed.flat[pieces.voxels] = True
    return Edits(side > 0, side < 0, changed, found)


def view_of(change: Edits, *masks: Mask, index: int | None = None, margin: int = 6) -> SliceView:
    """Return the given slice, or the one with most worse (else changed, else foreground) voxels, cropped."""
    present = np.logical_or.reduce([(mask > 0) & (mask != 255) for mask in masks])
    if present.ndim == 2:
        return SliceView(None, *window_of(present | change.changed, margin))
    if index is None:
        shown = next((planes for planes in (change.worse, change.changed, present) if planes.any()), present)
        index = int(np.argmax(shown.sum(axis=(1, 2))))
    return SliceView(index, *window_of(present[index] | change.changed[index], margin))


def window_of(present: Flags, margin: int) -> tuple[slice, slice]:
    """Return a square around all set pixels; the whole plane if none is set or the square would cover most of it."""
    rows, columns = (np.flatnonzero(present.any(axis=axis)) for axis in (1, 0))
    whole = slice(0, present.shape[0]), slice(0, present.shape[1])
    if not rows.size:
        return whole
    side = max(rows[-1] - rows[0], columns[-1] - columns[0]) + 1 + 2 * margin
    if side > 0.8 * max(present.shape):
        return whole

    def span(where: NDArray[Any], length: int) -> slice:
        start = max(0, min((int(where[0]) + int(where[-1]) + 1) // 2 - side // 2, length - side))
        return slice(start, min(start + side, length))

    return span(rows, present.shape[0]), span(columns, present.shape[1])


def painted(
    mask: Mask, view: SliceView, *, change: Edits | None = None, side: int = 176, boxes: bool = False,
    classes: Classes | None = None,
) -> Pixels:  # fmt: skip
    """Paint a mask in the colors of its classes, (rows, columns, 3), with the outlines of a change if one is given.

    ``boxes`` adds a rectangle around each region made worse, for scenes in which outlines are small. Without
    ``classes`` label 0 is background, and nothing has a name.
    """
    picture = (classes or Classes({})).quiet[fitted(np.asarray(view.of(mask)).astype(np.int64) % 256, side)]
    if change is not None:
        for flags, color in ((change.better, BETTER), (change.worse, WORSE)):
            inside = fitted(view.of(flags), side)
            picture[ndimage.binary_dilation(inside, iterations=2) & ~inside] = color
        if boxes:
            _box(picture, fitted(view.of(change.worse), side))
    return np.asarray(picture)


def _box(picture: Pixels, inside: Flags, *, margin: int = 4, line: int = 2) -> None:
    """Draw a rectangle around each connected part of the flags."""
    for rows, columns in ndimage.find_objects(ndimage.label(inside, np.ones((3, 3)))[0]):
        top, left = max(0, rows.start - margin), max(0, columns.start - margin)
        frame = picture[top : rows.stop + margin, left : columns.stop + margin]
        for edge in (frame[:line], frame[-line:], frame[:, :line], frame[:, -line:]):
            edge[:] = WORSE


def fitted(plane: NDArray[Any], side: int) -> NDArray[Any]:
    """Scale to about ``side`` pixels by a whole factor or stride; a flag stays set if any pixel of its block is."""
    longest = max(plane.shape[:2])
    if longest <= side:
        factor = max(1, side // longest)
        return plane.repeat(factor, axis=0).repeat(factor, axis=1)
    stride = -(-longest // side)
    if plane.dtype != bool:
        return plane[::stride, ::stride]
    rows, columns = (-(-length // stride) * stride for length in plane.shape)
    padded = np.zeros((rows, columns), bool)
    padded[: plane.shape[0], : plane.shape[1]] = plane
    return np.asarray(padded.reshape(rows // stride, stride, columns // stride, stride).any(axis=(1, 3)))


@dataclass(frozen=True)
class Classes:
    """Names of the classes, and whether label 0 is background or a class."""

    names: Mapping[int, str]
    background: bool = True

    @property
    def quiet(self) -> Pixels:
        """Return a color for each label 0 to 255: that of Cityscapes for its class names, else a quiet color."""
        table = _colors()
        if not self.background:
            table[0] = table[254]
        for value, name in self.names.items():
            if 0 <= value < 255 and str(name).lower() in STREET and (value or not self.background):
                table[value] = STREET[str(name).lower()]
        return table

    @property
    def legend(self) -> list[tuple[str, str]]:
        """(class name, color as #rrggbb) as :func:`painted` paints them, in the order of their numbers."""
        table, shown = self.quiet, {value: name for value, name in self.names.items() if 0 <= value < 255}
        return legend(shown, background=self.background, color=table.__getitem__)


def _colors() -> Pixels:
    """Quiet colors that differ from the red and blue of the outlines: three for few classes, then a wheel of hues."""
    table = np.zeros((256, 3), np.uint8)
    table[0], table[255] = _GROUND, _VOID
    table[1:4] = (214, 200, 166), (134, 168, 142), (150, 140, 178)
    for label in range(4, 255):
        red, green, blue = colorsys.hls_to_rgb((label * 0.381966) % 1.0, 0.45 + 0.12 * (label % 3), 0.22)
        table[label] = round(255 * red), round(255 * green), round(255 * blue)
    return table


def data_uri(picture: Pixels) -> str:
    """Encode the picture as a palette PNG in a data URI of one or two kilobytes."""
    content = png_bytes(Image.fromarray(picture).quantize(64, dither=Image.Dither.NONE), optimize=True)
    return "data:image/png;base64," + base64.b64encode(content).decode()


def png_bytes(image: Image.Image, **options: Any) -> bytes:
    """Encode an image as a PNG."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", **options)
    return buffer.getvalue()


def draw_masks(panels: Sequence[tuple[str, Any]], *, rows: int = 1) -> Figure:
    """Draw panels (title, picture of (rows, columns, 3)), row by row, without smoothing."""
    tall = max(picture.shape[0] / picture.shape[1] for _, picture in panels)
    columns = len(panels) // rows
    with inked():
        figure, axes = canvas(9.2, (9.2 / columns * tall + 0.5) * rows, columns=columns, rows=rows)
        for axis, (title, picture) in zip(axes.flat, panels, strict=True):
            axis.imshow(picture, interpolation="nearest")
            axis.set_title(title, fontsize=8.5, fontweight="normal")
            axis.set_axis_off()
    return figure


PALETTE = (
    (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167),
)  # fmt: skip
"""Colors of Okabe and Ito, which people who confuse red and green can tell apart."""
STREET = {
    "road": (128, 64, 128), "sidewalk": (244, 35, 232), "building": (70, 70, 70), "wall": (102, 102, 156),
    "fence": (190, 153, 153), "pole": (153, 153, 153), "traffic light": (250, 170, 30), "traffic sign": (220, 220, 0),
    "vegetation": (107, 142, 35), "terrain": (152, 251, 152), "sky": (70, 130, 180), "person": (220, 20, 60),
    "rider": (255, 0, 0), "car": (0, 0, 142), "truck": (0, 0, 70), "bus": (0, 60, 100), "train": (0, 80, 100),
    "motorcycle": (0, 0, 230), "bicycle": (119, 11, 32),
}  # fmt: skip
"""Colors of the Cityscapes classes, by class name."""
ADDED = np.array([43, 108, 176], np.uint8)  # in the deployed mask, not in M0
REMOVED = np.array([196, 61, 27], np.uint8)  # in M0, not in the deployed mask
RELABELED = np.array([204, 121, 167], np.uint8)
REJECTED = np.array([235, 190, 40], np.uint8)  # changed by the adaptation, not deployed; grey would vanish on MRI
SAMPLED = 2**20  # values from which percentiles are taken, at most
LARGEST_PANEL = 720  # pixels of its longer side; a street at full size would make sheets of many megabytes
SHOWN_WIDTH = 832  # pixels of a page that a sheet fills at most
TITLE_SIZE = 12  # in pixels of the sheet
FONT = str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"))


@dataclass(frozen=True, eq=False)
class Preview:
    """An image slice in 8 bits and the masks of the case on it."""

    image: Pixels  # (rows, columns) or (rows, columns, 3)
    source: Mask
    adapted: Mask
    deployed: Mask
    slice: int | None  # number of the slice in a volume
    names: Mapping[int, str] = field(default_factory=dict)  # of the classes
    background: bool = True  # False where label 0 is a class, as in street scenes
    more: tuple[Preview, ...] = ()  # further slices of the volume


def grey_levels(image: NDArray[Any]) -> Pixels:
    """Convert (channel, rows, columns) to 8 bits: colors if there are three byte channels, else the first channel.

    Gray values are 255 (x - p1) / (p99 - p1), clipped, with the 1st and 99th percentile.
    """
    if image.shape[0] == 3 and image.dtype == np.uint8:
        return np.ascontiguousarray(np.moveaxis(image, 0, -1))
    return windowed(image[0])


def windowed(values: NDArray[Any], within: NDArray[Any] | None = None) -> Pixels:
    """Convert values to 0..255 between two percentiles of them, or of a part of them; values that are not finite
    become 0."""
    part = values if within is None else within
    sample = part.reshape(-1)[:: max(1, part.size // SAMPLED)].astype(np.float64)
    sample = sample[np.isfinite(sample)]
    low, high = np.percentile(sample, (1, 99)) if sample.size else (0.0, 1.0)
    scale, shown = 255.0 / max(high - low, 1e-12), np.empty(values.shape, np.uint8)
    for row, line in enumerate(values):  # slice by slice: no second copy of a volume in floats
        shown[row] = np.nan_to_num(np.clip(np.rint((line - low) * scale), 0, 255))
    return shown


def before_after(
    image: NDArray[Any], masks: Sequence[Mask], label: Mask, classes: Classes, *, side: int = 264
) -> list[Pixels]:
    """Paint several masks of one case over one slice of its image, each with the outline of the label in white.

    Args:
        image: The image, ``(channel, *space)``.
        masks: Masks of the case. The slice is the one where the first and the last differ most.
        label: The true mask.
        classes: Names of the classes; they give the colors.
        side: Longest side of a picture in pixels.

    Returns:
        One picture for each mask.
    """
    differ = next((one for one in (masks[0] != masks[-1], masks[0] != label, label > 0) if one.any()), label == 0)
    index = None if label.ndim == 2 else int(differ.sum(axis=(1, 2)).argmax())
    image = image.reshape(len(image), *label.shape)  # axes of length 1 may differ: a volume of one slice
    image = image if index is None else image[:, index]
    present = np.logical_or.reduce([(mask if index is None else mask[index]) > 0 for mask in (*masks, label)])
    view = SliceView(index, *window_of(present, 8))
    base = as_rgb(fitted(grey_levels(image)[view.rows, view.columns], side))
    truth = fitted(view.of(label), side)
    edge = (ndimage.grey_dilation(truth, 3) != truth) & (truth != 255)
    made = []
    for mask in masks:
        picture = painted_over(base, fitted(view.of(mask), side), classes.names, classes.background)
        picture[edge] = 255
        made.append(picture)
    return made


def overlay_png(preview: Preview) -> bytes:
    """Draw one case as PNG: four panels, then the same for further slices of a volume.

    Frames that are much wider than tall are placed two in a row. The same masks give the same bytes.
    """
    rows = [_panels(one) for one in (preview, *preview.more)]
    return sheet_png(rows, side=min(max(192, *preview.image.shape[:2]), LARGEST_PANEL))


def sheet_png(rows: Sequence[list[tuple[str, Pixels]]], *, side: int) -> bytes:
    """Put rows of titled panels on one white sheet; ``side`` is the longest side of a panel in pixels."""
    sheets = [_row(part, side=side) for row in rows if row for part in _in_lines(row)]
    sheet = Image.new("RGB", (max(one.width for one in sheets), sum(one.height for one in sheets)), "white")
    top = 0
    for one in sheets:
        sheet.paste(one, (0, top))
        top += one.height
    return png_bytes(sheet)


PANELS = 4  # side by side


def _panels(preview: Preview) -> list[tuple[str, Pixels]]:
    """Return the original mask, the written or rejected mask, the change, and the change enlarged."""
    base = as_rgb(preview.image)
    replaced = bool((preview.deployed != preview.source).any())
    proposed = bool((preview.adapted != preview.source).any())
    second = preview.deployed if replaced else preview.adapted
    where = "" if preview.slice is None else f", slice {preview.slice + 1}"
    named = "written mask" if replaced else "new mask, not used" if proposed else "new mask, the same"
    drawn = edits_over(base, preview)
    window = _busiest((preview.source != preview.deployed) | (preview.source != preview.adapted))
    return [
        (f"original mask{where}", painted_over(base, preview.source, preview.names, preview.background)),
        (named, painted_over(base, second, preview.names, preview.background)),
        ("what changed" if replaced else "where they differ", drawn),
        ("enlarged", drawn[window]),
    ]


def _busiest(flags: Flags) -> tuple[slice, slice]:
    """Return a quarter, a third or half of the plane in each direction: the smallest with all flags, or with most."""
    total = np.pad(flags.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    for parts in (4, 3, 2):
        tall, wide = (max(1, length // parts) for length in flags.shape)
        inside = total[tall:, wide:] - total[:-tall, wide:] - total[tall:, :-wide] + total[:-tall, :-wide]
        if inside.max() == total[-1, -1]:
            break
    best = np.argwhere(inside == inside.max())
    top, left = best[len(best) // 2]  # the middle one of equally good places
    return slice(int(top), int(top) + tall), slice(int(left), int(left) + wide)


def as_rgb(image: NDArray[Any]) -> Pixels:
    """The image with three color channels."""
    return np.ascontiguousarray(np.repeat(image[..., None], 3, axis=-1) if image.ndim == 2 else image, np.uint8)


def legend(
    names: Mapping[int, str], *, background: bool, color: Callable[[int], Any] | None = None
) -> list[tuple[str, str]]:
    """Return (class name, color as #rrggbb) of every class that an overlay paints, in the order of their numbers."""
    painted = color or (lambda value: color_of(value, names))
    shown = [value for value in sorted(names) if value or not background]
    return [(names[value], "#{:02x}{:02x}{:02x}".format(*painted(value))) for value in shown]


def color_of(value: int, names: Mapping[int, str]) -> tuple[int, ...]:
    """Return (red, green, blue) of a class on overlays: that of Cityscapes if the class has one of its names."""
    return STREET.get(str(names.get(value, "")).lower(), PALETTE[(value - 1) % len(PALETTE)])


def painted_over(base: Pixels, mask: NDArray[Any], names: Mapping[int, str], background: bool) -> Pixels:
    """Paint the classes of a mask over the image; label 0 is left free where it is background."""
    values = np.unique(mask)
    colors = np.array([color_of(int(value), names) for value in values], np.uint8)
    painted = colors[np.searchsorted(values, mask)]
    return _tinted(base, painted, mask > 0 if background else np.ones(mask.shape, bool))


def _tinted(base: Pixels, color: Pixels, where: NDArray[np.bool_], *, weight: float = 0.5) -> Pixels:
    mixed = base * (1 - weight) + color * weight
    return np.where(where[..., None], mixed, base).astype(np.uint8)


def edits_over(base: Pixels, preview: Preview) -> Pixels:
    """Paint added, removed, relabeled, and proposed but unused voxels over the image."""
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


def _in_lines(panels: list[tuple[str, Pixels]]) -> list[list[tuple[str, Pixels]]]:
    """Put all panels in one line, or two in a line if a panel is much wider than tall."""
    tall, wide = panels[0][1].shape[:2]
    most = 2 if wide > 1.5 * tall else len(panels)
    return [panels[at : at + most] for at in range(0, len(panels), most)]


def _row(panels: Sequence[tuple[str, Pixels]], *, side: int) -> Image.Image:
    """Put panels side by side under their titles; titles are wrapped, not cut."""
    tall, wide = panels[0][1].shape[:2]
    width, height = round(wide * side / max(tall, wide)), round(tall * side / max(tall, wide))
    near = Image.Resampling.NEAREST
    large = [(title, Image.fromarray(panel).resize((width, height), near)) for title, panel in panels]
    step = width + 4
    across = (2 if wide > 1.5 * tall else PANELS) * step - 4  # width of the sheet
    size = max(TITLE_SIZE - 1, round(TITLE_SIZE * across / SHOWN_WIDTH))
    font, line = ImageFont.truetype(FONT, size), size + 4
    titles = [_wrapped(title, font, width - 4) for title, _ in large]
    top = line * max(len(lines) for lines in titles)
    sheet = Image.new("RGB", (step * (len(large) - 1) + width, height + top), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (lines, (_, picture)) in enumerate(zip(titles, large, strict=True)):
        for number, text in enumerate(lines):
            draw.text((index * step + 2, number * line), text, fill="black", font=font)
        sheet.paste(picture, (index * step, top))
    return sheet


def _wrapped(text: str, font: Any, width: int) -> list[str]:
    """Break text into lines of at most ``width`` pixels, after a space or comma if possible."""
    lines = [""]
    for word in re.findall(r"[^ ,]*[ ,]*", text):
        if lines[-1] and font.getlength(lines[-1] + word.rstrip()) > width:
            lines.append("")
        for letter in word:
            if lines[-1] and font.getlength((lines[-1] + letter).rstrip()) > width:
                lines.append("")
            lines[-1] += letter
    return [line.rstrip() for line in lines]
