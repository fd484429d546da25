"""A model by name, loaded once a process, and everything that a run binds its results to."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from casewise.adapt.backbones import Backbone, load_backbone
from casewise.core.errors import BadInput
from casewise.core.records import Binding
from casewise.measure.signals.risk import RiskStatistics

if TYPE_CHECKING:
    from casewise.adapt.objective import Objective

_MODULATED = ("modulation", "statistics")


@dataclass(frozen=True)
class Model:
    """What to load, and how; hashable and picklable, so that workers load their own."""

    spec: str
    weights: Path | None = None
    folds: tuple[int | str, ...] | None = None
    checkpoint: str = "checkpoint_final.pth"
    device: str = "cpu"
    step_size: float = 0.5
    mirroring: bool = True
    trust: bool = False
    trust_bundle: bool = False
    trust_architectures: tuple[str, ...] = ()

    def load(self) -> Backbone:
        """The backbone; the same object each time in one process."""
        return _loaded(self)


@functools.lru_cache(maxsize=1)
def _loaded(model: Model) -> Backbone:
    return load_backbone(
        model.spec,
        weights=model.weights,
        fold=model.folds,
        checkpoint=model.checkpoint,
        device=model.device,
        step_size=model.step_size,
        mirroring=model.mirroring,
        trust=model.trust,
        trust_bundle=model.trust_bundle,
        trust_architectures=model.trust_architectures,
    )


@dataclass(frozen=True)
class Adaptation:
    """How cases are adapted: part of the binding of archive, policy and predictions."""

    objective: str = "eata"
    learning_rate: float | None = None
    parameters: str = "all-norm"
    steps: int = 4
    seed: int = 0
    min_area: int = 16
    foreground: bool = True
    max_slices: int | None = None  # micro-batch: changes memory, not results
    modulation: str | None = None  # a mode of adapt.modulation: updates that grow careful as edits grow risky (D8)
    statistics: RiskStatistics | None = None  # what the risk of a modulation is measured with (C6)

    def built(self) -> Objective:
        """The objective, under its modulation where there is one."""
        from casewise.adapt.modulation import Modulated
        from casewise.adapt.objectives import objective_of

        plain = objective_of(self.objective)
        if self.modulation is None:
            return plain
        if self.statistics is None:
            raise BadInput(
                f"modulation {self.modulation} measures risk with the statistics of calibration cases; record them "
                "without modulation first, and name that archive with --statistics"
            )
        return Modulated(plain, self.modulation, self.statistics)

    def as_plain(self) -> dict[str, Any]:
        """For JSON; a modulation only where there is one."""
        return {name: value for name, value in asdict(self).items() if value is not None or name not in _MODULATED}

    def binding(self, backbone: Backbone) -> Binding:
        """What a policy that was fitted with this may be used with. The number of steps is the policy's own."""
        from casewise.adapt.episode import DEFAULT_RATE

        objective = self.built()
        default = getattr(objective, "learning_rate", DEFAULT_RATE)
        rate = float(default if self.learning_rate is None else self.learning_rate)
        how = f"{objective!r} learning_rate={rate:g} parameters={self.parameters}"
        measure = f"min_area={self.min_area} foreground={self.foreground} connectivity=1"
        return Binding(backbone.fingerprint, how, backbone.loader, measure)


def device_of(asked: str | None) -> str:
    """The device that was asked for, else the GPU where there is one."""
    if asked is not None:
        return asked
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
