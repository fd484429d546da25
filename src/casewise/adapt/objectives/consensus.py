"""Consensus: a few steps toward what several views of the case agree on; the teacher is fixed, so nothing drifts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from casewise.adapt.consensus import Mean
from casewise.adapt.logits import cross_entropy, probabilities
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.views import Drawn, View, inverted, views_of
from casewise.core.errors import BadInput


@dataclass(frozen=True)
class Consensus:
    r"""Adam on the soft cross-entropy to the mean of the source's probabilities over M0 and some views.

    .. math:: L = \frac{1}{|A|} \sum_{x \in A} -\sum_c q_c(x) \log p_c(x), \qquad
              q = \frac{1}{V+1} \Big(p_0 + \sum_v v^{-1}\big(p_0(v(x))\big)\Big)

    The target q is formed once, with the source's weights, before the first update. A is all voxels, or those at which
    the largest q is at least ``agree``. Views that move voxels are used where logits and inputs share one grid (a
    bare network, nnU-Net's patches); elsewhere they would need the backbone's whole pipeline, and are passed over.

    It costs V forwards beyond those of TENT for each case.
    """

    views: str = "random(8)"
    agree: float = 0.0
    learning_rate: float = 5e-3

    def __post_init__(self) -> None:
        views_of(self.views)
        if not 0 <= self.agree <= 1:
            raise BadInput(f"agree is a probability from 0 to 1, got {self.agree}")

    def begin(self, subject: Adaptable) -> Update:
        """Form the target; each update is then a step toward it."""
        target = self._target(subject)
        counts = (target.amax(1) >= self.agree) if self.agree else None
        optimizer = torch.optim.Adam(subject.parameters.values(), lr=subject.learning_rate)

        def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, float]:
            voxels = cross_entropy(logits, target[rows], subject.head)
            if counts is None:
                return voxels.sum(), voxels.numel()
            return voxels[counts[rows]].sum(), float(counts[rows].sum())

        def update() -> Mapping[str, float]:
            value = subject.backward(loss)
            optimizer.step()
            return {} if value is None else {"loss": value}

        return update

    @torch.no_grad()
    def _target(self, subject: Adaptable) -> Tensor:
        mean = Mean()
        plain = probabilities(subject.logits(subject.inputs), subject.head).clone()
        one_grid = plain.shape[2:] == subject.inputs.shape[2:]
        mean.add(plain)
        for view in self._drawn(subject):
            seen = view.apply(subject.inputs)
            usable = bool(torch.isfinite(seen).all()) and (one_grid or not _moves(view))
            if usable:
                mean.add(probabilities(inverted(view, subject.logits(seen)), subject.head))
        return mean.value.clone()

    def _drawn(self, subject: Adaptable) -> list[View]:
        generator = subject.generator()
        found: list[View] = []
        for view in views_of(self.views):
            found += view.with_generator(generator) if isinstance(view, Drawn) else [view]
        return found


def _moves(view: View) -> bool:
    """Whether a view, or a part of it, moves voxels."""
    parts: tuple[View, ...] = getattr(view, "views", (view,))
    return any(hasattr(part, "invert") for part in parts)
