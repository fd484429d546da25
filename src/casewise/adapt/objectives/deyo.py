"""DeYO: minimize the entropy of slices whose prediction depends on the shape of objects (Lee et al., ICLR 2024; D7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from casewise.adapt.augmentations import block_shuffle
from casewise.adapt.logits import entropy, largest_entropy, slice_means
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.optimizers import optimizer_of
from casewise.core.errors import BadInput


@dataclass(frozen=True)
class Deyo:
    r"""Minimize the entropy of slices that are certain *and* whose labels change when 4 x 4 blocks are shuffled.

    For a slice with mean entropy H and pseudo-label probability difference :math:`\mathrm{PLPD} = \operatorname{mean}_x
    [p_{\hat y}(x) - p_{\hat y}(x')]` under a block shuffle x',

    .. math::
        L = \operatorname{mean}_{\text{kept}} w H, \qquad w = e^{-(H - 0.4 \ln C)} + e^{\mathrm{PLPD}}, \qquad
        \text{kept: } H < 0.5 \ln C \ \wedge\ \mathrm{PLPD} > 0.2

    w carries no gradient. ``reduction="foreground"`` averages PLPD over the pseudo-labelled foreground (0 for a slice
    without foreground); the paper made this change after it saw results. ``reduction="all"`` averages over every pixel,
    as was pre-registered; in the paper no slice was selected then, because background makes PLPD small.

    If no slice is selected, there is no step. Cost of an update: one backward pass, and one forward pass without a
    graph more than the forward pass that predicted the mask.
    """

    entropy_margin: float = 0.5  # tau_Ent as a share of ln C
    weight_margin: float = 0.4  # Ent_0 as a share of ln C
    drop_margin: float = 0.2  # tau_PLPD
    blocks: int = 4
    reduction: str = "foreground"
    optimizer: str = "adam"
    learning_rate: float = 5e-4

    def __post_init__(self) -> None:
        if self.reduction not in ("foreground", "all"):
            raise BadInput(f"reduction must be 'foreground' or 'all', got {self.reduction!r}")

    @classmethod
    def published(cls, **options: Any) -> Deyo:
        """Return the official settings, by slice: all pixels, SGD with momentum 0.9 at 2.5e-4."""
        return cls(**{"reduction": "all", "optimizer": "sgd-momentum", "learning_rate": 2.5e-4, **options})

    def begin(self, subject: Adaptable) -> Update:
        """Prepare one case."""
        optimizer = optimizer_of(subject, self.optimizer)
        scale = largest_entropy(subject.classes, subject.head)

        def update() -> Mapping[str, float]:
            shuffled = block_shuffle(subject.inputs, subject.generator(), blocks=self.blocks)
            slices = kept_slices = 0

            def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
                nonlocal slices, kept_slices
                uncertainty = slice_means(entropy(logits, subject.head))
                with torch.no_grad():
                    drop = slice_drop(logits, subject.logits(shuffled[rows]), subject.head, self.reduction)
                    kept = (uncertainty < self.entropy_margin * scale) & (drop > self.drop_margin)
                    weight = torch.exp(self.weight_margin * scale - uncertainty) + torch.exp(drop)
                slices, kept_slices = slices + kept.numel(), kept_slices + int(kept.sum())
                return subject.entropy_weight * (weight * uncertainty)[kept].sum(), kept.sum()

            value = subject.backward(loss)
            optimizer.step()
            kept_share = {"kept": kept_slices / slices}
            return kept_share if value is None else kept_share | {"loss": value}

        return update


def slice_drop(logits: Tensor, shuffled: Tensor, head: str, reduction: str = "foreground") -> Tensor:
    """Return PLPD of each slice, the probability that its pseudo-labels lose under the shuffle: (slices,)."""
    drop = _decided(logits, logits, head) - _decided(logits, shuffled, head)
    if reduction == "all":
        return slice_means(drop)
    said = logits.argmax(1) > 0 if head == "softmax" else (logits > 0).any(1)
    share = slice_means(said.to(drop))
    return torch.where(share > 0, slice_means(drop * said) / share.clamp_min(torch.finfo(drop.dtype).tiny), 0.0)


def _decided(logits: Tensor, seen: Tensor, head: str) -> Tensor:
    """Return the probability under ``seen`` of the decision of ``logits``: (n, *space); sigmoid: all channels."""
    if head == "softmax":
        return seen.softmax(1).gather(1, logits.argmax(1, keepdim=True)).squeeze(1)
    answers = torch.where(logits > 0, 1.0, -1.0)
    return functional.logsigmoid(answers * seen).sum(1).exp()
