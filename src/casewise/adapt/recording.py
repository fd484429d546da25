"""Records the masks and signals of each step of a case."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from casewise.core.records import Mask, Signals, State, Trajectory
from casewise.measure.masks import count_foreground
from casewise.measure.regions import regions_of
from casewise.measure.signals import FROM_MASKS, of_masks
from casewise.measure.signals.fragmentation import summary


@dataclass(frozen=True, eq=False)
class Prediction:
    """One mask, with the entropy and confidence of its logits."""

    mask: Mask
    entropy: NDArray[Any]  # of each voxel that the logits cover, nats
    msp: float  # mean largest probability


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes, host and accelerator together; 0 where it is not known."""
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    try:
        import resource
    except ImportError:  # not a POSIX system
        return device
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) + device


@dataclass
class Recording:
    """The steps of one case so far."""

    min_area: int
    foreground: bool
    masks: list[Mask] = field(default_factory=list)
    signals: list[Signals] = field(default_factory=list)
    diagnostics: list[Mapping[str, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    spent: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # by signal, one pair per reading
    parameters: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    entropies: dict[str, NDArray[Any]] = field(default_factory=dict)  # by step, for the signal drop
    shrunk: dict[State, Mask] = field(default_factory=dict)
    shrunk_signals: dict[State, Signals] = field(default_factory=dict)

    def add(self, mask: Mask, signals: Signals, began: float, diagnostics: Mapping[str, float] | None) -> Signals:
        """Record a state that was begun at ``began``, and return its signals; M0 has no diagnostics."""
        self.masks.append(mask)
        self.signals.append(signals)
        if diagnostics is not None:
            self.diagnostics.append(dict(diagnostics))
        self.seconds.append(time.perf_counter() - began)
        return signals

    @contextmanager
    def metered(self, signal: str) -> Iterator[None]:
        """Record how long a signal took, and by how much it raised the peak of memory."""
        before, began = peak_bytes(), time.perf_counter()
        yield
        took = 1e3 * (time.perf_counter() - began)
        self.spent.setdefault(signal, []).append((took, (peak_bytes() - before) / 2**20))

    def measured(self, seen: Prediction) -> dict[str, float | None]:
        """Return fragmentation against M0 and the confidence of the prediction; D is computed once for both."""
        with self.metered(FROM_MASKS):
            source = self.masks[0] if self.masks else seen.mask
            found = regions_of(source, seen.mask, min_area=self.min_area, foreground=self.foreground)
            edit = summary(found, foreground_voxels=count_foreground(source))
            return {
                **edit.as_signals(),
                **of_masks(source, seen.mask),
                "entropy": float(seen.entropy.mean(dtype=np.float64)),
                "msp": seen.msp,
                "entropy_on_d": _mean_at(seen, found.voxels),
            }

    def trajectory(self, case_id: str, made_by: str, seed: int) -> Trajectory:
        """Return everything so far."""
        return Trajectory(
            case_id=case_id, masks=tuple(self.masks), signals=tuple(self.signals), shrunk=dict(self.shrunk),
            shrunk_signals=dict(self.shrunk_signals), parameters=tuple(self.parameters) or None, made_by=made_by,
            seed=seed, seconds=tuple(self.seconds), diagnostics=tuple(self.diagnostics),
            spent={
                name: (statistics.median(took for took, _ in each), sum(more for _, more in each))
                for name, each in self.spent.items()
            },
        )  # fmt: skip


def _mean_at(seen: Prediction, voxels: NDArray[np.int64]) -> float | None:
    """Return the mean entropy over flat positions; 0 without positions, None if logits and mask differ in grid."""
    if seen.entropy.shape != seen.mask.shape:
        return None
    return float(seen.entropy.reshape(-1)[voxels].mean(dtype=np.float64)) if len(voxels) else 0.0
