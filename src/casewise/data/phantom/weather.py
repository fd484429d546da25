"""Weather models: what fog, night and rain do to a scene on the way to a picture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from casewise.core.registry import Registry


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
