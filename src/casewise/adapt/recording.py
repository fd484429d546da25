"""What is kept of each step, and the trajectory that is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.records import Mask, Signals, State, Trajectory
from casewise.measure.signals.fragmentation import fragmentation


@dataclass(frozen=True, eq=False)
class Prediction:
    """One mask with what the logits say about it."""

    mask: Mask
    entropy: NDArray[Any]  # of each voxel that the logits cover, nats
    msp: float  # mean largest probability


@dataclass
class Recording:
    """The steps of one case so far."""

    min_area: int
    foreground: bool
    masks: list[Mask] = field(default_factory=list)
    signals: list[Signals] = field(default_factory=list)
    diagnostics: list[Mapping[str, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    parameters: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    entropies: dict[str, NDArray[Any]] = field(default_factory=dict)
    shrunk: dict[State, Mask] = field(default_factory=dict)
    shrunk_signals: dict[State, Signals] = field(default_factory=dict)

    def measured(self, seen: Prediction) -> dict[str, float | None]:
        """Fragmentation against M0 and the confidence of the prediction (C1-C7)."""
        source = self.masks[0] if self.masks else seen.mask
        edit = fragmentation(source, seen.mask, min_area=self.min_area, foreground=self.foreground)
        return {
            **edit.as_signals(),
            "entropy": float(seen.entropy.mean(dtype=np.float64)),
            "msp": seen.msp,
            "entropy_on_d": self._entropy_on_d(source, seen),
        }

    def _entropy_on_d(self, source: Mask, seen: Prediction) -> float | None:
        """Mean entropy of M_k over D; 0 where D is empty, None where logits and mask have different grids (C4)."""
        if seen.entropy.shape != seen.mask.shape:
            return None
        changed = (seen.mask > 0) != (source > 0) if self.foreground else seen.mask != source
        return float(seen.entropy[changed].mean(dtype=np.float64)) if changed.any() else 0.0

    def trajectory(self, case_id: str, made_by: str, seed: int, *, with_entropies: bool) -> Trajectory:
        """Everything so far."""
        return Trajectory(
            case_id=case_id,
            masks=tuple(self.masks),
            signals=tuple(self.signals),
            shrunk=dict(self.shrunk),
            shrunk_signals=dict(self.shrunk_signals),
            parameters=tuple(self.parameters) or None,
            probabilities=dict(self.entropies) if with_entropies else None,
            made_by=made_by,
            seed=seed,
            seconds=tuple(self.seconds),
            diagnostics=tuple(self.diagnostics),
        )
