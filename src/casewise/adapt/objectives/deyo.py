"""DeYO: trust slices whose objects vanish when the picture is cut up (Lee et al., ICLR 2024; D7)."""

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
from casewise.adapt.optimizers import check_optimizer, optimizer_of
from casewise.core.errors import BadInput


@dataclass(frozen=True)
class Deyo:
    r"""Weighted entropy of the slices that are sure *and* lose their labels when 4 x 4 blocks change places.

    For a slice with mean entropy H and pseudo-label drop :math:`\mathrm{PLPD} = \operatorname{mean}_x
    [p_{\hat y}(x) - p_{\hat y}(x')]` under a block shuffle x',

    .. math::
        L = \operatorname{mean}_{\text{kept}} w H, \qquad w = e^{-(H - 0.4 \ln C)} + e^{\mathrm{PLPD}}, \qquad
        \text{kept: } H < 0.5 \ln C \ \wedge\ \mathrm{PLPD} > 0.2

    with w detached. ``reduction="foreground"`` averages the drop over pseudo-labelled foreground and gives a slice
    without any the drop 0: the paper's post-hoc change. ``reduction="all"`` averages over every pixel, as it was
    pre-registered, and selected no slice at all there: background dilutes the drop.

    No slice kept: no step. An update costs one backward, and one forward without a graph beyond the forward that
    predicted the mask.
    """

    entropy_margin: float = 0.5  # tau_Ent as a share of ln C
    weight_margin: float = 0.4  # Ent_0 as a share of ln C
    drop_margin: float = 0.2  # tau_PLPD
    blocks: int = 4
    reduction: str = "foreground"
    optimizer: str = "adam"
    learning_rate: float = 5e-4

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)
        if self.reduction not in ("foreground", "all"):
            raise BadInput(f"reduction is 'foreground' or 'all', got {self.reduction!r}")

    @classmethod
    def published(cls, **options: Any) -> Deyo:
        """All pixels and SGD with momentum 0.9 at 2.5e-4, still by slice: the official code has no segmentation."""
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
    """How much probability the pseudo-label of each slice loses under the shuffle, PLPD: (slices,)."""
    drop = _decided(logits, logits, head) - _decided(logits, shuffled, head)
    if reduction == "all":
        return slice_means(drop)
    said = logits.argmax(1) > 0 if head == "softmax" else (logits > 0).any(1)
    share = slice_means(said.to(drop))
    return torch.where(share > 0, slice_means(drop * said) / share.clamp_min(torch.finfo(drop.dtype).tiny), 0.0)


def _decided(logits: Tensor, seen: Tensor, head: str) -> Tensor:
    """Probability under ``seen`` of what ``logits`` decide, (n, *space): one class, or all yes/no answers together."""
    if head == "softmax":
        return seen.softmax(1).gather(1, logits.argmax(1, keepdim=True)).squeeze(1)
    answers = torch.where(logits > 0, 1.0, -1.0)
    return functional.logsigmoid(answers * seen).sum(1).exp()
