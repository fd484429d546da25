"""Modulation: updates that are more careful if the last edit was risky (D8, D9).

    r = (z(regions) + z(delta)) / 2,    z(x) = (x - mean) / sigma

The statistics are those of step 1 on the calibration cases (C6). Update k reads r_{k-1}, which is known before it;
update 1 reads r_0 with regions = delta = 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from casewise.adapt.objective import Adaptable, Objective, Update
from casewise.adapt.parameters import in_decoder
from casewise.core.errors import BadInput, NothingToAdapt
from casewise.core.records import Signals
from casewise.measure.signals.risk import RiskStatistics

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

    Adam hardly depends on the scale of a loss. A weight matters only if the loss has two terms, so use the weights with
    ``eata``.
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
            raise BadInput(f"a modulation must be one of {', '.join(MODES)}, got '{self.mode}'")
        if not isinstance(self.objective, Objective):
            raise BadInput(f"a modulation needs an objective with begin(subject), got {type(self.objective).__name__}")
        if self.mode in _ENTROPY and not getattr(self.objective, "entropy_weighted", True):
            raise BadInput(
                f"{self.mode} weighs an entropy term, which {type(self.objective).__name__} does not have; use the "
                "objective eata, or the mode param-subset"
            )
        if self.mode in _ANCHORED and not hasattr(self.objective, "anchor_weight"):
            raise BadInput(
                f"{self.mode} weighs an anchor to the source weights, and {type(self.objective).__name__} has none; "
                "use the objective eata, or the mode param-subset"
            )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the objective."""
        return float(self.objective.learning_rate)

    @property
    def moves(self) -> str:
        """Kind of tensors that the objective may move."""
        return str(getattr(self.objective, "moves", "parameters"))

    def risk_after(self, signals: Signals) -> float:
        """Return r of a step from its signals."""
        regions, delta = signals["regions"], signals["delta"]
        if regions is None or delta is None:
            raise BadInput("risk needs the signals regions and delta, and one of them is not computable here")
        return float(self.statistics.risk(regions, delta))

    def entropy_weight_at(self, risk: float) -> float:
        """Return the entropy weight w for a risk r; 1 if the mode does not change it."""
        if self.mode == "loss-switch":
            return 0.0 if risk > self.threshold else 1.0
        if self.mode not in ("entropy-weight", "combo"):
            return 1.0
        return min(1.0, max(self.least_weight, math.exp(min(50.0, -self.beta * risk))))

    def anchor_weight_at(self, risk: float) -> float | None:
        """Return the anchor weight lambda for a risk r; None if the objective keeps its own."""
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
