"""Synthetic street scenes with the nineteen Cityscapes classes in several weathers, drawn from back to front.

``worlds.streets:street_network`` is an untrained network for them: three channels, nineteen classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage

from casewise.adapt.backbones import Expectation
from casewise.adapt.backbones.module import Module
from casewise.adapt.networks import PlainUNet
from casewise.core.records import Case, Mask
from casewise.core.registry import Registry
from casewise.core.seeds import seed_of
from casewise.data.splits import Cohort, Member


@dataclass(frozen=True)
class Weather:
    """Ranges from which each exposure is drawn."""

    light: tuple[float, float] = (0.9, 1.1)
    fog: tuple[float, float] = (0.0, 0.05)  # share of the far scene that is grey
    noise: tuple[float, float] = (0.01, 0.03)
    lamps: tuple[int, int] = (0, 1)  # glowing spots
    streaks: float = 0.0  # share of columns wet with rain


WEATHERS = Registry(
    "weather",
    {
        "clear": Weather(),
        "fog": Weather(light=(0.85, 1.05), fog=(0.4, 0.8), noise=(0.01, 0.03)),
        "night": Weather(light=(0.18, 0.4), noise=(0.04, 0.08), lamps=(3, 9)),
        "rain": Weather(light=(0.55, 0.85), fog=(0.1, 0.35), noise=(0.02, 0.05), streaks=0.25),
    },
)


def expose(
    paint: NDArray[np.float64], depth: NDArray[np.float64], weather: Weather, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Paint (3, rows, columns) in [0, 1] to an RGB picture in 0..255, as a camera gives it."""
    haze = rng.uniform(*weather.fog) * depth
    picture = paint * rng.uniform(*weather.light) * (1 - haze) + 0.75 * haze
    for _ in range(int(rng.integers(*weather.lamps))):
        picture = picture + _lamp(picture.shape[1:], rng)
    wet = rng.random(picture.shape[2]) < weather.streaks
    picture[:, :, wet] = 0.7 * picture[:, :, wet] + 0.2
    picture = ndimage.gaussian_filter(picture, (0, 0.5, 0.5)) + rng.uniform(*weather.noise) * rng.standard_normal(
        picture.shape
    )
    return np.asarray(np.rint(255 * np.clip(picture, 0, 1)), np.uint8)


def _lamp(shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float64]:
    """A glow somewhere above the road."""
    rows, columns = np.mgrid[: shape[0], : shape[1]]
    row, column = rng.uniform(0, 0.6) * shape[0], rng.uniform(0, 1) * shape[1]
    glow = np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / (2 * rng.uniform(2, 9) ** 2))
    return np.asarray(rng.uniform(0.3, 0.9) * glow)


NOTICE = "These scenes were made by a program. This page shows the system; it is not evidence."
ROWS, COLUMNS = 96, 192
IGNORE = 255
CLASSES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain",
    "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle",
)  # fmt: skip
ROAD, SIDEWALK, BUILDING, WALL, FENCE, POLE, LIGHT, SIGN, TREE, TERRAIN, SKY = range(11)
PERSON, RIDER, CAR, TRUCK, BUS, TRAIN, MOTORCYCLE, BICYCLE = range(11, 19)
_COLORS = np.array(
    [
        (0.35, 0.34, 0.36), (0.55, 0.50, 0.52), (0.52, 0.44, 0.40), (0.60, 0.58, 0.50), (0.50, 0.42, 0.30),
        (0.30, 0.30, 0.28), (0.85, 0.65, 0.15), (0.80, 0.75, 0.30), (0.20, 0.42, 0.20), (0.45, 0.52, 0.25),
        (0.60, 0.75, 0.92), (0.75, 0.45, 0.40), (0.70, 0.30, 0.50), (0.25, 0.30, 0.65), (0.30, 0.50, 0.60),
        (0.75, 0.55, 0.20), (0.45, 0.65, 0.55), (0.20, 0.20, 0.45), (0.55, 0.20, 0.25),
    ]
)  # fmt: skip
_FRAMES_A_SEQUENCE = 4


def driving_cohort(weather: str, cases: int, *, split: str, run: int = 0) -> Cohort:
    """``cases`` scenes under one weather; four frames in a row share a street and belong together."""
    members = {}
    for number in range(cases):
        sequence = f"{split}_{weather}_s{number // _FRAMES_A_SEQUENCE:02d}"
        name = f"{sequence}_f{number % _FRAMES_A_SEQUENCE}"
        members[name] = Member(name, group=weather, cluster=sequence, split=split, labelled=True)
    return Cohort(
        name=f"driving phantom, {weather}",
        members=members,
        read_case=lambda member: _case(member, weather, run),
        read_label=lambda member: _scene(member, run)[0],
        classes=CLASSES,
        ignore=IGNORE,
        notice=NOTICE,
    )


def _case(member: Member, weather: str, run: int) -> Case:
    _, paint, depth, rng = _scene(member, run)
    image = expose(paint, depth, WEATHERS[weather], rng)
    return Case(member.id, image, None, member.group, member.cluster, member.split)


def _scene(member: Member, run: int) -> tuple[Mask, NDArray[np.float64], NDArray[np.float64], np.random.Generator]:
    """Labels (rows, columns), paint (3, rows, columns) and depth in [0, 1], and the generator for the weather."""
    street = np.random.default_rng(seed_of(run, str(member.cluster)))
    rng = np.random.default_rng(seed_of(run, member.id))
    label = _street(street, shift=rng.uniform(-6, 6))
    _things(label, rng)
    horizon = int(np.argmax((label == ROAD).any(axis=1)))
    rows = np.arange(ROWS)[:, None]
    depth = np.clip(1.0 - (rows - horizon) / max(1, ROWS - horizon), 0, 1) * np.ones((1, COLUMNS))
    shade = 1.0 + 0.12 * rng.standard_normal((len(CLASSES), 1))
    texture = 0.05 * rng.standard_normal((3, ROWS, COLUMNS))
    paint = np.clip(np.moveaxis((_COLORS * shade)[label], -1, 0) + texture, 0, 1)
    label[_border(label) & (rng.random(label.shape) < 0.5)] = IGNORE
    return label, paint, depth, rng


def _street(rng: np.random.Generator, *, shift: float) -> Mask:
    """Sky, houses, trees, walls, the road in perspective and its sidewalks."""
    rows, columns = np.mgrid[:ROWS, :COLUMNS].astype(np.float64)
    horizon = ROWS * rng.uniform(0.38, 0.48)
    center = COLUMNS / 2 + rng.uniform(-20, 20) + shift
    label = np.full((ROWS, COLUMNS), SKY, np.uint8)
    for left in range(0, COLUMNS, 24):
        kind = rng.choice([BUILDING, BUILDING, TREE])
        label[int(horizon - rng.uniform(8, 34)) :, left : left + int(rng.integers(14, 30))] = kind
    label[rows > horizon - 3] = rng.choice([WALL, FENCE, TREE])
    ground = np.clip((rows - horizon) / (ROWS - horizon), 0, None)
    offset = np.abs(columns - center)
    label[(rows > horizon)] = TERRAIN
    label[(rows > horizon) & (offset < 12 + 105 * ground)] = SIDEWALK
    label[(rows > horizon) & (offset < 6 + 72 * ground)] = ROAD
    return label


def _things(label: Mask, rng: np.random.Generator) -> None:
    """Poles with lights and signs, vehicles on the road, people beside it; the far ones first."""
    horizon = int(np.argmax((label == ROAD).any(axis=1)))
    for _ in range(int(rng.integers(1, 4))):
        column, top = int(rng.integers(6, COLUMNS - 8)), int(horizon - rng.uniform(10, 26))
        label[max(top, 0) : horizon + 10, column : column + 2] = POLE
        label[max(top, 0) : max(top, 0) + 6, column - 2 : column + 4] = rng.choice([LIGHT, SIGN])
    kinds = [CAR, CAR, CAR, TRUCK, BUS, TRAIN, MOTORCYCLE, BICYCLE, PERSON, PERSON, RIDER]
    for closeness in np.sort(rng.uniform(0.08, 0.75, int(rng.integers(5, 10)))):
        kind = int(rng.choice(kinds))
        foot = int(horizon + closeness * (ROWS - horizon))
        height, width = _extent(kind, closeness)
        left = int(rng.integers(0, COLUMNS - width))
        label[max(foot - height, 0) : foot, left : left + width] = kind


def _extent(kind: int, closeness: float) -> tuple[int, int]:
    """Height and width in pixels of a thing at a closeness in (0, 1)."""
    height, width = {CAR: (24, 40), TRUCK: (42, 46), BUS: (46, 56), TRAIN: (46, 80)}.get(kind, (34, 13))
    return max(4, int(height * closeness)), max(3, int(width * closeness))


def _border(label: Mask) -> NDArray[np.bool_]:
    """Pixels whose right or lower neighbour has another class."""
    border = np.zeros(label.shape, bool)
    border[:, :-1] |= label[:, :-1] != label[:, 1:]
    border[:-1] |= label[:-1] != label[1:]
    return border


def street_network() -> Module:
    """A U-Net with the same random weights each time, for pictures."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network = PlainUNet(channels=3, classes=len(CLASSES))
    return Module(
        network.eval(), classes=len(CLASSES), dimensions=2, name="streets", intensity="imagenet", multiple=8,
        labels=dict(enumerate(CLASSES)), ignore=IGNORE, expects=Expectation(channels=3),
    )  # fmt: skip
