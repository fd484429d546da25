"""TTT: train on, with the auxiliary task that the network learned beside its own (Sun et al., ICML 2020)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from casewise.adapt.augmentations import View
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.optimizers import check_optimizer, optimizer_of
from casewise.core.errors import BadInput


@dataclass(frozen=True)
class Ttt:
    r"""Minimize the self-supervised loss of a network that brings an auxiliary head.

    ``task="rotation"``: the network's method gives (n, 4) logits that say by how many quarter turns a picture was
    turned, and every sample is shown in all four orientations,

    .. math:: L = \frac{1}{4n} \sum_{i} \sum_{t=0}^{3} -\log \mathrm{softmax}(a(\mathrm{rot}^t x_i))_t

    ``task="loss"``: the method gives the loss itself, one number for each sample (n,), such as a reconstruction error.
    ``method`` names it (``auxiliary``). Published: SGD, the shared encoder and the auxiliary head (name them with
    ``parameters=``), one update; the paper does not use TTT.

    An update costs four backwards through the auxiliary path (``task="loss"``: one) and as many forwards.
    """

    method: str = "auxiliary"
    task: str = "rotation"
    optimizer: str = "adam"
    learning_rate: float = 5e-4

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)
        if self.task not in ("rotation", "loss"):
            raise BadInput(f"task is 'rotation' or 'loss', got {self.task!r}")

    def begin(self, subject: Adaptable) -> Update:
        """Prepare one case."""
        optimizer = optimizer_of(subject, self.optimizer)
        auxiliary = self._auxiliary(subject)

        def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, float]:
            losses = rotation_losses(auxiliary, inputs) if self.task == "rotation" else auxiliary(inputs)
            _check_one_for_each_sample(losses, inputs)
            return losses.sum(), len(inputs)

        def update() -> Mapping[str, float]:
            value = subject.backward(loss)
            optimizer.step()
            return {} if value is None else {"loss": value}

        return update

    def _auxiliary(self, subject: Adaptable) -> Callable[[Tensor], Tensor]:
        found = getattr(subject.network, self.method, None)
        if not callable(found):
            raise BadInput(
                f"TTT needs a network with an auxiliary head: {type(subject.network).__name__} has no method "
                f"'{self.method}'; give it one that returns (n, 4) rotation logits (task='rotation') or (n,) losses "
                "(task='loss'), or choose another objective"
            )
        return lambda inputs: subject.through(found, inputs)


def rotation_losses(auxiliary: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Mean over the four orientations of the cross-entropy with the true one, (n,)."""
    losses = []
    for turns in range(4):
        said = auxiliary(View(quarter_turns=turns).apply(inputs))
        if said.shape != (len(inputs), 4):
            raise BadInput(f"rotation logits are (n, 4), here ({len(inputs)}, 4), got {tuple(said.shape)}")
        truth = torch.full((len(inputs),), turns, device=inputs.device)
        losses.append(functional.cross_entropy(said, truth, reduction="none"))
    return torch.stack(losses).mean(0)


def _check_one_for_each_sample(losses: Tensor, inputs: Tensor) -> None:
    if losses.shape != (len(inputs),):
        raise BadInput(f"an auxiliary loss is one number for each sample, ({len(inputs)},), got {tuple(losses.shape)}")
