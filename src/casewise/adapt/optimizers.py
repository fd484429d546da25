"""How parameters move within one case: one optimizer, and looking at the loss from somewhere else.

The paper moves everything with Adam (A6); published forms may say SGD with momentum.

Updates that grow careful as the last edit grew risky: modulation by r_{k-1} (D8, D9).

    r = (z(regions) + z(delta)) / 2,    z(x) = (x - mean) / sigma

with statistics of step 1 on the calibration cases (C6). Update k reads r_{k-1}, which is known before it; update 1
reads r_0 with regions = delta = 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from casewise.adapt.objective import Adaptable, Objective, Update
from casewise.adapt.parameters import in_decoder
from casewise.core.errors import BadInput, NothingToAdapt, UnknownName
from casewise.core.records import Signals
from casewise.measure.signals.risk import RiskStatistics

OPTIMIZERS = ("adam", "sgd", "sgd-momentum")


def check_optimizer(name: str) -> None:
    """Refuse a name that :func:`optimizer_of` does not know."""
    if name not in OPTIMIZERS:
        raise UnknownName(f"no optimizer is called '{name}'. Known: {', '.join(OPTIMIZERS)}")


def optimizer_of(subject: Adaptable, name: str) -> torch.optim.Optimizer:
    """A new optimizer over all parameters of the case; those without a gradient stay where they are.

    ``adam`` has default betas and no weight decay (A6), ``sgd`` no momentum, ``sgd-momentum`` 0.9.
    """
    check_optimizer(name)
    if name == "adam":
        return torch.optim.Adam(subject.parameters.values(), lr=subject.learning_rate)
    momentum = 0.9 if name == "sgd-momentum" else 0.0
    return torch.optim.SGD(subject.parameters.values(), lr=subject.learning_rate, momentum=momentum)


# Look at the loss from somewhere else: the parameters hold other values for a while, then exactly the old ones again.
#
# SAR looks from the top of a small hill, GraTa from one entropy step ahead, CoTTA through its teacher, FOA through
# every candidate of a generation. None of them owns a second network.


Values = Mapping[str, Tensor]
"""Parameter values or gradients by name."""


@contextmanager
def displaced(subject: Adaptable, values: Values) -> Iterator[None]:
    """Hold ``values`` in the parameters of these names; the old storage comes back bit for bit, also after an error.

    Storage is swapped, not written, so a forward that was made before stays valid for its backward.
    """
    held = {name: subject.parameters[name].data for name in values}
    try:
        for name, value in values.items():
            subject.parameters[name].data = value.to(held[name])
        yield
    finally:
        for name, old in held.items():
            subject.parameters[name].data = old


def current(subject: Adaptable) -> dict[str, Tensor]:
    """A copy of the values that the parameters hold now."""
    return {name: parameter.detach().clone() for name, parameter in subject.parameters.items()}


def gradients(subject: Adaptable) -> dict[str, Tensor]:
    """A copy of the gradients of the parameters that may move in this update; a missing one is zero."""
    moving = {id(parameter) for parameter in subject.moving()}
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in subject.parameters.items()
        if id(parameter) in moving
    }


def norm(values: Values) -> float:
    """The Euclidean norm over all of them at once."""
    return float(
        torch.sqrt(sum((value.double().square().sum() for value in values.values()), torch.zeros(()).double()))
    )


def cosine(first: Values, second: Values) -> float:
    """Cosine of the angle between two sets of gradients, 0 where one of them vanishes."""
    dot = sum(float((first[name].double() * second[name].double()).sum()) for name in first)
    return dot / (norm(first) * norm(second) + 1e-12)


def shifted(subject: Adaptable, direction: Values, length: float) -> dict[str, Tensor]:
    """The current values, ``length`` times ``direction`` further."""
    return {name: subject.parameters[name].detach() + length * step for name, step in direction.items()}


_ENTROPY = ("entropy-weight", "combo", "loss-switch")
_ANCHORED = ("anchor-weight", "combo", "loss-switch")
MODES = ("param-subset", "entropy-weight", "anchor-weight", "combo", "loss-switch")


@dataclass(frozen=True)
class Modulated:
    r"""An objective whose updates depend on the risk r of the step before.

    - ``param-subset``: decoder normalization only where r > threshold, else everything that is selected (FragSubset).
    - ``entropy-weight``: the entropy term times :math:`w = \operatorname{clip}(e^{-\beta r}, w_{min}, 1)`.
    - ``anchor-weight``: replaces the objective's own anchor weight by
      :math:`\lambda = \operatorname{clip}(\lambda_0 e^{\beta r}, \lambda_0, \lambda_{max})`.
    - ``combo``: both weights.
    - ``loss-switch``: the entropy term alone where r <= threshold, the anchor alone above.

    Adam is nearly blind to the scale of a loss, so a weight matters where two terms share it: use these with ``eata``.
    """

    objective: Any
    mode: str
    statistics: RiskStatistics
    threshold: float = 0.0  # t_mid
    beta: float = 0.7
    least_weight: float = 0.1  # w_min
    anchor_weight: float = 1.0  # lambda_0
    largest_anchor_weight: float = 4.0  # lambda_max

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise BadInput(f"a modulation is one of {', '.join(MODES)}, got '{self.mode}'")
        if not isinstance(self.objective, Objective):
            raise BadInput(f"a modulation needs an objective with begin(subject), got {type(self.objective).__name__}")
        if self.moves == "input":
            raise BadInput(
                f"{type(self.objective).__name__} moves a prompt of the input and no parameters; use it without a "
                "modulation"
            )
        if self.mode in _ENTROPY and not getattr(self.objective, "entropy_weighted", True):
            raise BadInput(
                f"{self.mode} weighs an entropy term, and {type(self.objective).__name__} has none that a weight could "
                "reach; use the objective eata, or the mode param-subset"
            )
        if self.mode in _ANCHORED and not hasattr(self.objective, "anchor_weight"):
            raise BadInput(
                f"{self.mode} weighs an anchor to the source weights, and {type(self.objective).__name__} has none; "
                "use the objective eata, or the mode param-subset"
            )

    @property
    def learning_rate(self) -> float:
        """The rate of the objective itself."""
        return float(self.objective.learning_rate)

    @property
    def moves(self) -> str:
        """What the objective itself may change."""
        return str(getattr(self.objective, "moves", "parameters"))

    def risk_after(self, signals: Signals) -> float:
        """r of the step that has these signals."""
        regions, delta = signals["regions"], signals["delta"]
        if regions is None or delta is None:
            raise BadInput("risk needs the signals regions and delta, and one of them is not computable here")
        return float(self.statistics.risk(regions, delta))

    def entropy_weight_at(self, risk: float) -> float:
        """w of r; 1 where the mode does not lower it."""
        if self.mode == "loss-switch":
            return 0.0 if risk > self.threshold else 1.0
        if self.mode not in ("entropy-weight", "combo"):
            return 1.0
        return min(1.0, max(self.least_weight, math.exp(min(50.0, -self.beta * risk))))

    def anchor_weight_at(self, risk: float) -> float | None:
        """lambda of r; None where the objective keeps its own."""
        if self.mode == "loss-switch":
            return self.anchor_weight if risk > self.threshold else 0.0
        if self.mode not in ("anchor-weight", "combo"):
            return None
        grown = self.anchor_weight * math.exp(min(50.0, self.beta * risk))
        return min(self.largest_anchor_weight, max(self.anchor_weight, grown))

    def begin(self, subject: Adaptable) -> Update:
        inner: Update = self.objective.begin(subject)
        decoder = frozenset(name for name in subject.parameters if in_decoder(name))
        if self.mode == "param-subset" and not decoder:
            raise NothingToAdapt(
                "param-subset needs selected parameters in a decoder, and no selected name passes through one; "
                f"selected: {', '.join(list(subject.parameters)[:6])}"
            )

        def update() -> Mapping[str, float]:
            risk = self.risk_after(subject.signals[subject.step - 1])
            careful = risk > self.threshold
            subject.active = decoder if self.mode == "param-subset" and careful else None
            subject.entropy_weight = self.entropy_weight_at(risk)
            subject.anchor_weight = self.anchor_weight_at(risk)
            return {**inner(), "risk": risk}

        return update
