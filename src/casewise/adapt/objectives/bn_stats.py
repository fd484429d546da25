"""BN-stats: mix the BatchNorm statistics of the source and of the case (Schneider et al., NeurIPS 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from casewise.adapt.adaptation import PRIOR
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.parameters import blending
from casewise.core.errors import BadInput


@dataclass(frozen=True)
class BnStats:
    r"""Replace the statistics of every BatchNorm layer by a weighted mean of source and case; no gradient.

    With n samples in the case and N = ``prior``, from the first layer to the last:

    .. math::
        \mu = \frac{N}{N+n}\mu_s + \frac{n}{N+n}\mu_b, \qquad
        \sigma^2 = \frac{N}{N+n}\sigma_s^2 + \frac{n}{N+n}\sigma_b^2

    ``prior=0`` uses the case alone (AdaBN). There is no learning rate. Further updates compute the same mean again and
    change nothing. The whole case is one forward pass, so ``max_slices`` is refused: the statistics of micro-batches
    differ from those of the case.
    """

    prior: float = PRIOR
    moves: ClassVar[str] = "statistics"

    def __post_init__(self) -> None:
        if self.prior < 0:
            raise BadInput(f"prior is a number of samples and must be at least 0, got {self.prior}")

    def begin(self, subject: Adaptable) -> Update:
        buffers = dict(subject.network.named_buffers())

        @torch.no_grad()
        def update() -> Mapping[str, float]:
            for name, value in subject.source.items():
                buffers[name].copy_(value)
            with blending(subject.network, self.prior):
                subject.logits(subject.inputs)
            return {}

        return update
