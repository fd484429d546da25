"""TENT: minimize the entropy of the prediction (Wang et al., ICLR 2021; D1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from casewise.adapt.logits import entropy
from casewise.adapt.objective import Adaptable, Update


@dataclass(frozen=True)
class Tent:
    r"""Minimize the mean entropy of all voxels with Adam, over the selected normalization parameters.

    .. math:: L = \frac{1}{|\Omega|} \sum_x H(p(x)), \qquad H = -\sum_c p_c \log p_c

    The published code returns the logits from before its last update; here M_k is predicted after update k.
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
