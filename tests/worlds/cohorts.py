"""A made-up cohort with known harm, for tests, documents and benchmarks: no data, no network.

Each case is a ball (or disc) that the source segments with a dent. Adaptation repairs the dent step by step and, in
harmful cases, grows blobs where there is nothing: the more harmful, the more and the earlier.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.archive.layout import measure_words
from casewise.archive.store import Archive, create_archive
from casewise.core.records import Binding, Case, Mask, Signals, State, Trajectory
from casewise.core.seeds import seed_of
from casewise.measure.signals.fragmentation import fragmentation
from casewise.measure.signals.risk import region_drops

SYNTHETIC = Binding(
    model="synthetic", objective="synthetic", loader="synthetic", measure=measure_words(min_area=16, foreground=True)
)


def synthetic_archive(
    path: str | Path,
    *,
    cases: int = 24,
    steps: int = 4,
    shape: tuple[int, ...] = (48, 48),
    seed: int = 0,
    harmful: float = 0.5,
    min_area: int = 16,
    split: str | None = "calibration",
    groups: tuple[str, ...] = ("A", "B"),
    prefix: str = "case",
    labelled: bool = True,
    binding: Binding = SYNTHETIC,
    shrink: tuple[State, ...] = (State(2, 0.5),),
    metric: str = "dice",
    per_cluster: int = 2,
) -> Archive:
    """An archive of ``cases`` cases, a share ``harmful`` of which adaptation harms.

    Signals: fragmentation of each step, entropy, msp, gradient_norm, and region scores (``drop``).
    ``per_cluster`` cases share a cluster; groups alternate.
    """
    configuration = {"metric": metric, "min_area": min_area, "foreground": True, "objective": "synthetic"}
    archive = create_archive(path, binding=binding, steps=steps, configuration=configuration)
    for number in range(cases):
        case_id = f"{prefix}-{number:04d}"
        rng = np.random.default_rng(seed_of(seed, case_id))
        trajectory, label = synthetic_trajectory(
            case_id, rng, steps=steps, shape=shape, harm=rng.random() < harmful, min_area=min_area, shrink=shrink
        )
        case = Case(
            case_id,
            np.empty((1, 0)),
            spacing_mm=(1.0,) * len(shape),
            group=groups[number % len(groups)] if groups else None,
            cluster=f"{prefix}-cluster-{number // per_cluster:04d}",
            split=split,
        )
        archive.add(case, trajectory, label if labelled else None)
    return archive.seal()


def synthetic_trajectory(
    case_id: str,
    rng: np.random.Generator,
    *,
    steps: int = 4,
    shape: tuple[int, ...] = (48, 48),
    harm: bool = False,
    min_area: int = 16,
    shrink: tuple[State, ...] = (State(2, 0.5),),
) -> tuple[Trajectory, Mask]:
    """One case and its label; ``harm`` says whether adaptation grows blobs where there is nothing."""
    center = np.array(shape) / 2 + rng.uniform(-1, 1, len(shape))
    radius = min(length for length in shape if length > 1) * 0.3
    label = _ball(shape, center, radius).astype(np.uint8)
    edge = center.copy()
    edge[-1] += radius
    dents = [_ball(shape, edge, radius * share) for share in np.linspace(0.75, rng.uniform(0.1, 0.45), steps + 1)]
    blobs = [_ball(shape, _corner(shape, rng), rng.uniform(2.5, 6.0)) for _ in range(int(harm) * rng.integers(2, 7))]
    depths = [float(step) for step in range(steps + 1)] + [state.step * (1 - state.shrink) for state in shrink]
    masks = [_mask(label, dents, blobs, depth, steps) for depth in depths]
    extras = [_confidence(rng, depth, harm) for depth in depths]
    drop = np.where(masks[1] == label, 0.05, -0.05) + rng.normal(0, 0.2, shape)
    signals = [_signals(masks[0], mask, extra, min_area) for mask, extra in zip(masks, extras, strict=True)]
    signals[1] = {**signals[1], **region_drops(masks[0], masks[1], drop, min_area=min_area)}
    trajectory = Trajectory(
        case_id,
        tuple(masks[: steps + 1]),
        tuple(signals[: steps + 1]),
        shrunk=dict(zip(shrink, masks[steps + 1 :], strict=True)),
        shrunk_signals=dict(zip(shrink, signals[steps + 1 :], strict=True)),
        made_by="synthetic",
    )
    return trajectory, label


def _ball(shape: tuple[int, ...], center: NDArray[Any], radius: float) -> NDArray[np.bool_]:
    """Voxels within a radius; flat axes are cheap, so a volume of few slices stays round in the plane."""
    distance = np.zeros(shape)
    for axis, (positions, middle) in enumerate(zip(np.indices(shape, sparse=True), center, strict=True)):
        distance += (max(shape) / shape[axis] * (positions - middle)) ** 2
    return np.asarray(distance <= radius**2)


def _corner(shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    """A place far from the middle."""
    sides = rng.choice([0.12, 0.88], len(shape))
    return np.asarray(np.array(shape) * sides + rng.uniform(-1, 1, len(shape)))


def _mask(
    label: Mask, dents: list[NDArray[np.bool_]], blobs: list[NDArray[np.bool_]], depth: float, steps: int
) -> Mask:
    """The mask at a (possibly fractional) depth: the dent closes, and one more blob grows with every step."""
    mask: Mask = np.array(label)
    mask[dents[round(depth)]] = 0
    for blob in blobs[: int(np.ceil(depth * len(blobs) / steps))]:
        mask[blob] = 1
    return mask


def _confidence(rng: np.random.Generator, depth: float, harm: bool) -> dict[str, float | None]:
    entropy = 0.2 * np.exp(-0.2 * depth) * (1.3 if harm else 1.0) * rng.uniform(0.9, 1.1)
    norm = float(rng.uniform(0.5, 1.5)) if depth else None  # no gradient led to M0 (C8)
    return {"entropy": float(entropy), "msp": float(1 - entropy / 2), "gradient_norm": norm}


def _signals(source: Mask, mask: Mask, extra: Signals, min_area: int) -> Signals:
    return {**fragmentation(source, mask, min_area=min_area).as_signals(), **extra}
