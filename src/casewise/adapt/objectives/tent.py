"""TENT: minimize the entropy of the prediction (Wang et al., ICLR 2021; D1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from casewise.adapt.logits import entropy
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.optimizers import descent


@dataclass(frozen=True)
class Tent:
    r"""Minimize the mean entropy of all voxels with Adam, over the selected normalization parameters.

    .. math:: L = \frac{1}{|\Omega|} \sum_x H(p(x)), \qquad H = -\sum_c p_c \log p_c

    The published code returns the logits from before its last update; here M_k is predicted after update k.
    """

    learning_rate: float = 5e-4

    def begin(self, subject: Adaptable) -> Update:
        def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, float]:
            voxels = entropy(logits, subject.head)
            return subject.entropy_weight * voxels.sum(), voxels.numel()

        return descent(subject, loss)
