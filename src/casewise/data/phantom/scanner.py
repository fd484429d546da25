"""Vendor models: what a scanner does to tissue on the way to an image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from casewise.core.registry import Registry

Image = NDArray[np.float32]


@dataclass(frozen=True)
class Vendor:
    """Ranges from which each acquisition is drawn."""

    gamma: tuple[float, float]  # contrast curve
    bias: tuple[float, float]  # amplitude of the bias field
    noise: tuple[float, float]
    blur: tuple[float, float]  # in-plane resolution, as a Gaussian in pixels
    ghost: tuple[float, float]  # strength of a copy shifted along the phase-encoding axis
    washout: tuple[float, float] = (0.0, 0.0)  # share of the blood-muscle contrast that is lost


VENDORS = Registry(
    "vendor",
    {
        "A": Vendor(gamma=(0.9, 1.1), bias=(0.0, 0.15), noise=(0.01, 0.03), blur=(0.3, 0.7), ghost=(0.0, 0.03)),
        "B": Vendor(
            gamma=(0.55, 1.6),
            bias=(0.2, 0.55),
            noise=(0.015, 0.035),
            blur=(0.3, 1.0),
            ghost=(0.0, 0.12),
            washout=(0.0, 0.12),
        ),
    },
)


def acquire(tissue: Image, vendor: Vendor, rng: np.random.Generator) -> Image:
    """Contrast curve, washed-out contrast, resolution, bias field, ghosting and noise, then z-scored per volume."""
    image = np.asarray(tissue, np.float64)
    image = image + rng.uniform(*vendor.washout) * (image.mean() - image)
    image = np.clip(image, 0, 1) ** rng.uniform(*vendor.gamma)
    blur = rng.uniform(*vendor.blur)
    image = ndimage.gaussian_filter(image, (0.0, blur, blur))
    image = image * _bias_field(image.shape, rng.uniform(*vendor.bias), rng)
    image = image + rng.uniform(*vendor.ghost) * np.roll(image, image.shape[1] // int(rng.integers(2, 5)), axis=1)
    image = image + rng.uniform(*vendor.noise) * rng.standard_normal(image.shape)
    return np.asarray((image - image.mean()) / image.std(), np.float32)


def _bias_field(shape: tuple[int, ...], amplitude: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """A smooth multiplicative field: a tilted plane and a bowl, the same in every slice."""
    rows, columns = np.meshgrid(np.linspace(-1, 1, shape[1]), np.linspace(-1, 1, shape[2]), indexing="ij")
    a, b, c = rng.uniform(-1, 1, 3)
    field = a * rows + b * columns + c * (rows**2 + columns**2 - 0.66)
    return np.asarray(np.exp(amplitude * field))[None]
