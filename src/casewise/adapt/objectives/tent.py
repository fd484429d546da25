"""TENT: lower the entropy of the prediction (Wang et al., ICLR 2021; D1).

BatchNorm statistics from source and case, blended (Schneider et al., NeurIPS 2020): no gradient, one forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from casewise.adapt.adaptation import PRIOR
from casewise.adapt.logits import entropy
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.parameters import blending
from casewise.core.errors import BadInput


@dataclass(frozen=True)
class Tent:
    r"""Adam on the mean entropy of all voxels, through the selected normalization parameters.

    .. math:: L = \frac{1}{|\Omega|} \sum_x H(p(x)), \qquad H = -\sum_c p_c \log p_c

    The published wrapper returns the logits from before its last update; here M_k is predicted after update k.
    """

    learning_rate: float = 5e-4

    def begin(self, subject: Adaptable) -> Update:
        optimizer = torch.optim.Adam(subject.parameters.values(), lr=subject.learning_rate)

        def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, float]:
            voxels = entropy(logits, subject.head)
            return subject.entropy_weight * voxels.sum(), voxels.numel()

        def update() -> Mapping[str, float]:
            value = subject.backward(loss)
            optimizer.step()
            return {} if value is None else {"loss": value}

        return update


@dataclass(frozen=True)
class BnStats:
    r"""Each BatchNorm layer gets, front to back, with n samples in the case and N = ``prior``

    .. math::
        \mu = \frac{N}{N+n}\mu_s + \frac{n}{N+n}\mu_b, \qquad
        \sigma^2 = \frac{N}{N+n}\sigma_s^2 + \frac{n}{N+n}\sigma_b^2

    ``prior=0`` uses the case alone (AdaBN). It has no rate, and one update is all there is: further updates blend the
    source with the case again and change nothing. The whole case is one forward, so ``max_slices`` is refused:
    statistics of micro-batches would not be those of the case.
    """

    prior: float = PRIOR
    moves: ClassVar[str] = "statistics"

    def __post_init__(self) -> None:
        if self.prior < 0:
            raise BadInput(f"prior counts samples and is 0 or more, got {self.prior}")

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
