"""Short-axis cardiac volumes under vendor models: left ventricle, myocardium, right ventricle, base to apex."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from casewise.core.records import Case, Mask
from casewise.core.registry import Registry
from casewise.core.seeds import seed_of
from casewise.data.splits import Cohort, Member

Image = NDArray[np.float32]


@dataclass(frozen=True)
class Vendor:
    """Model of a scanner: ranges from which the parameters of each acquisition are drawn."""

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
        "B": Vendor(gamma=(0.15, 0.8), bias=(0.0, 0.35), noise=(0.01, 0.04), blur=(0.3, 0.8), ghost=(0.0, 0.06)),
        "C": Vendor(gamma=(0.5, 0.9), bias=(0.2, 0.5), noise=(0.12, 0.2), blur=(1.2, 1.8), ghost=(0.1, 0.25)),
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
    """Return a smooth field, exp(amplitude (a y + b x + c (x^2 + y^2 - 0.66))), the same in every slice."""
    rows, columns = np.meshgrid(np.linspace(-1, 1, shape[1]), np.linspace(-1, 1, shape[2]), indexing="ij")
    a, b, c = rng.uniform(-1, 1, 3)
    field = a * rows + b * columns + c * (rows**2 + columns**2 - 0.66)
    return np.asarray(np.exp(amplitude * field))[None]


NOTICE = "These cases are simulated. They show how casewise works and are no evidence that it helps patients."
CLASSES = ("background", "left ventricle", "myocardium", "right ventricle")
SIZE = 96
_LV, _MYO, _RV = 1, 2, 3


@dataclass(frozen=True)
class Heart:
    """One anatomy, in pixels and radians."""

    slices: int
    center: tuple[float, float]
    radius: float  # of the left ventricle's cavity at the base
    wall: float  # thickness of the myocardium
    squash: float  # axis ratio
    turn: float  # where the right ventricle lies
    rv_size: float
    scar: float  # share of the wall that is thinned
    tilt: tuple[float, float]  # drift of the axis from base to apex

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Heart:
        """A random heart: one in four is dilated, one in four is hypertrophic, one in four has a scar."""
        pathology = rng.integers(4)
        return cls(
            slices=int(rng.integers(5, 8)),
            center=(SIZE / 2 + rng.uniform(-6, 6), SIZE / 2 + rng.uniform(-6, 6)),
            radius=rng.uniform(10, 13) * (1.3 if pathology == 1 else 1.0) * (0.8 if pathology == 2 else 1.0),
            wall=rng.uniform(4.0, 5.5) * (1.6 if pathology == 2 else 1.0),
            squash=rng.uniform(0.88, 1.12),
            turn=rng.uniform(-0.5, 0.5) + np.pi,
            rv_size=rng.uniform(0.85, 1.15),
            scar=0.25 if pathology == 3 else 0.0,
            tilt=(rng.uniform(-4, 4), rng.uniform(-4, 4)),
        )


def cardiac_cohort(vendor: str, cases: int, *, split: str, run: int = 0) -> Cohort:
    """``cases`` volumes of one vendor; the same (vendor, split, run) gives the same voxels on every machine."""
    members = {
        name: Member(name, group=f"vendor {vendor}", cluster=name, split=split, labelled=True)
        for name in (f"{split}_{vendor}_{number:03d}" for number in range(cases))
    }
    return Cohort(
        name=f"cardiac phantom, vendor {vendor}", members=members, read_case=lambda member: _case(member, vendor, run),
        read_label=lambda member: _anatomy(member, run)[0], classes=CLASSES, notice=NOTICE,
    )  # fmt: skip


def _case(member: Member, vendor: str, run: int) -> Case:
    _, tissue, rng = _anatomy(member, run)
    image = acquire(tissue, VENDORS[vendor], rng)
    return Case(member.id, image[None], None, member.group, member.cluster, member.split)


def _anatomy(member: Member, run: int) -> tuple[Mask, NDArray[np.float32], np.random.Generator]:
    """Labels and tissue intensities, both (slices, rows, columns), and the generator for the scanner."""
    rng = np.random.default_rng(seed_of(run, member.id))
    heart = Heart.draw(rng)
    depth = np.linspace(0.0, 1.0, heart.slices)
    label = np.stack([_slice_label(heart, z) for z in depth])
    return label, _tissue(label, rng), rng


def _slice_label(heart: Heart, depth: float) -> Mask:
    """One short-axis slice; depth 0 is the base, 1 the apex, where cavities close."""
    rows, columns = np.mgrid[:SIZE, :SIZE].astype(np.float32)
    y = (rows - heart.center[0] - heart.tilt[0] * depth) * heart.squash
    x = columns - heart.center[1] - heart.tilt[1] * depth
    distance, angle = np.hypot(x, y), np.arctan2(y, x)
    cavity = heart.radius * np.sqrt(max(0.0, 1.0 - (0.92 * depth) ** 2.2))
    thinned = heart.scar * np.exp(-((np.angle(np.exp(1j * (angle - heart.turn - 2.2))) / 0.6) ** 2))
    outer = cavity + heart.wall * (1.0 - 0.25 * depth) * (1.0 - 2.2 * thinned)
    label = np.zeros((SIZE, SIZE), np.uint8)
    label[_right_ventricle(heart, depth, x, y)] = _RV
    label[distance < outer] = _MYO
    label[distance < cavity] = _LV
    return label


def _right_ventricle(heart: Heart, depth: float, x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.bool_]:
    """A crescent beside the septum that ends before the apex; the left ventricle is painted over it."""
    reach = heart.radius + heart.wall
    size = heart.rv_size * heart.radius * np.sqrt(max(0.0, 1.0 - (1.15 * depth) ** 2))
    along, across = np.cos(heart.turn), np.sin(heart.turn)
    u = x * along + y * across - 0.75 * reach
    v = -x * across + y * along
    return np.asarray((u / max(size, 1e-3)) ** 2 + (v / max(1.45 * size, 1e-3)) ** 2 < 1.0)


def _tissue(label: Mask, rng: np.random.Generator) -> NDArray[np.float32]:
    """Intensities in [0, 1] before the scanner: bright blood, dark muscle, chest wall, lungs, papillary muscles."""
    shape = label.shape
    background = 0.35 + 0.25 * _smooth_noise(shape, (1.0, 9.0, 9.0), rng)
    fat = _smooth_noise(shape, (1.5, 6.0, 6.0), rng) > 1.1
    lungs = _smooth_noise(shape, (2.0, 12.0, 12.0), rng) < -0.9
    tissue = np.where(lungs, 0.08, np.where(fat, 0.85, background))
    tissue = np.where(label == _LV, rng.uniform(0.72, 0.85), tissue)
    tissue = np.where(label == _RV, rng.uniform(0.66, 0.80), tissue)
    tissue = np.where(label == _MYO, rng.uniform(0.22, 0.32), tissue)
    papillary = (_smooth_noise(shape, (1.0, 1.5, 1.5), rng) > 1.6) & ndimage.binary_erosion(label == _LV)
    tissue = np.where(papillary, 0.35, tissue)
    return np.clip(tissue + 0.03 * _smooth_noise(shape, (0.0, 1.0, 1.0), rng), 0, 1).astype(np.float32)


def _smooth_noise(shape: tuple[int, ...], sigma: tuple[float, ...], rng: np.random.Generator) -> NDArray[np.float64]:
    """Gaussian noise, blurred, with unit spread."""
    noise = ndimage.gaussian_filter(rng.standard_normal(shape), sigma, mode="wrap")
    return np.asarray(noise / max(float(noise.std()), 1e-9))
