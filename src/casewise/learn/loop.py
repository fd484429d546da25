"""The training loop of tuning.

The rate is learning_rate * (1 - update / updates)^0.9, with AdamW or with nnU-Net's SGD. The norm of the gradient is
clipped at 12, as in nnU-Net. Only the selected parameters require a gradient, so autograd stops below the first
selected layer. Dropout is off.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from casewise.adapt.backbones.nnunet import members_of
from casewise.adapt.parameters import norm_layers, select
from casewise.core.errors import NotFinite, NothingToAdapt
from casewise.learn.tuning import Progress, Tuning

if TYPE_CHECKING:
    from casewise.learn.generic import GenericTask
    from casewise.learn.nnunet_task import NnUNetTask

CLIP = 12.0  # largest norm of a gradient, as in nnU-Net
POWER = 0.9  # power of the decay of the learning rate, as in nnU-Net


Task: TypeAlias = "GenericTask | NnUNetTask"
"""Draws patches and labels, and computes the loss."""


class Loop:
    """Trains a network; the caller restores it afterwards.

    Args:
        network: One network, or an ``Ensemble`` whose members are trained on the same patches.
        task: Source of patches and labels, and the loss.
        tuning: Options of the training.
    """

    def __init__(self, network: nn.Module, task: Task, tuning: Tuning) -> None:
        self.network, self.task, self.tuning, self.made = network, task, tuning, 0
        self.members = members_of(network)
        network.eval()
        network.requires_grad_(False)
        for member in self.members:
            task.start(member)
        self.parameters = self._selected(task.draw()[0][:1])
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        self.optimizer = self._optimizer()
        self.schedule = torch.optim.lr_scheduler.PolynomialLR(self.optimizer, tuning.updates, POWER)

    def _optimizer(self) -> torch.optim.Optimizer:
        values, rate = self.parameters.values(), self.tuning.rate
        if self.tuning.optimizer == "sgd":  # as nnUNetTrainer sets it up
            return torch.optim.SGD(values, lr=rate, momentum=0.99, nesterov=True, weight_decay=3e-5)
        return torch.optim.AdamW(values, lr=rate)

    def update(self, on_progress: Progress | None = None) -> float:
        """Draw a batch and make one update; returns its loss.

        Raises:
            NotFinite: The loss or the gradient is NaN or infinite.
        """
        loss = self.step(*self.task.draw())
        if on_progress is not None:
            on_progress(self.made, loss)
        return loss

    def step(self, inputs: Tensor, target: Any) -> float:
        """Forward, backward and optimizer on one batch."""
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for member in self.members:
            loss = self.task.loss(self.task.outputs(member, inputs), target)
            torch.autograd.backward(loss)
            total += float(loss.detach()) / len(self.members)
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), CLIP))
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise NotFinite(
                f"the loss of update {self.made + 1} is {total:g} and the norm of its gradient {norm:g}; lower "
                f"the learning rate, now {self.tuning.rate:g}, or check the images"
            )
        self.optimizer.step()
        self.schedule.step()
        self.made += 1
        return total

    def values(self) -> dict[str, Tensor]:
        """Return the tuned tensors, float32 on the CPU.

        Raises:
            NotFinite: The last update left NaN or infinite weights.
        """
        found = {name: tensor.detach().float().cpu().clone() for name, tensor in self.parameters.items()}
        if wrong := [name for name, value in found.items() if not torch.isfinite(value).all()]:
            raise NotFinite(f"the tuned {wrong[0]} is NaN or infinite; lower the learning rate or check the images")
        return found

    def _selected(self, inputs: Tensor) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by their name in the whole network."""
        asked = self.tuning.parameters
        if asked not in ("norm", "norm+head"):
            return select(self.network, asked)
        layers = [layer for _, layer in norm_layers(self.network)]
        chosen = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
        if not chosen:
            raise NothingToAdapt(
                f"{type(self.network).__name__} has no normalization layer with a scale and a shift, so {asked!r} "
                "cannot be tuned; use parameters='all', or patterns of parameter names"
            )
        if asked == "norm+head":
            heads = [layer for member in self.members for layer in self._heads(member, inputs)]
            chosen |= {id(parameter) for layer in heads for parameter in layer.parameters(recurse=False)}
        return {name: parameter for name, parameter in self.network.named_parameters() if id(parameter) in chosen}

    def _heads(self, member: nn.Module, inputs: Tensor) -> list[nn.Module]:
        """The layers whose outputs the network returns; else the layer with weights that ran last."""
        ran: list[tuple[nn.Module, Any]] = []
        layers = [m for m in member.modules() if any(True for _ in m.parameters(recurse=False))]
        hooks = [layer.register_forward_hook(lambda m, _, output: ran.append((m, output))) for layer in layers]
        try:
            with torch.no_grad():
                outputs = self.task.outputs(member, inputs)
        finally:
            for hook in hooks:
                hook.remove()
        returned = [layer for layer, output in ran if any(output is one for one in outputs)]
        return returned or [layer for layer, _ in ran[-1:]]


def soft_dice(shares: Tensor, truth: Tensor, valid: Tensor, smooth: float = 1e-5) -> Tensor:
    r"""Mean over the channels that occur of :math:`1 - 2 \sum p t / (\sum p + \sum t)`, summed over the batch.

    Args:
        shares: Probabilities (n, channels, *space).
        truth: 0 or 1, of the same shape.
        valid: 0 where a voxel is ignored, (n, 1, *space).
        smooth: Added to numerator and denominator.

    Returns:
        0 for a perfect prediction; 0 too where no channel occurs.
    """
    axes = [axis for axis in range(shares.ndim) if axis != 1]
    both, either = (shares * truth * valid).sum(axes), ((shares + truth) * valid).sum(axes)
    occurs = (truth * valid).sum(axes) > 0
    loss = 1 - (2 * both + smooth) / (either + smooth)
    return loss[occurs].mean() if bool(occurs.any()) else shares.sum() * 0


def segmentation_loss(logits: Tensor, target: Tensor, head: str) -> Tensor:
    """Cross-entropy + soft Dice.

    Args:
        logits: (n, classes, *space).
        target: Labels (n, *space), -1 where a voxel is ignored. For a sigmoid head a label v turns the channels
            0..v-1 on, as masks are read from it (regions from the outermost to the innermost).
        head: "softmax" (Dice over classes from 1 on) or "sigmoid" (binary cross-entropy, Dice over all channels).

    Returns:
        The loss.
    """
    valid = (target >= 0).unsqueeze(1).to(logits.dtype)
    known = target.clamp_min(0)
    if head == "softmax":
        each = functional.cross_entropy(logits, target, ignore_index=-1, reduction="sum")
        truth = functional.one_hot(known, logits.shape[1]).movedim(-1, 1).to(logits.dtype)
        return each / valid.sum().clamp_min(1) + soft_dice(logits.softmax(1)[:, 1:], truth[:, 1:], valid)
    numbers = torch.arange(logits.shape[1], device=logits.device).view(1, -1, *[1] * (logits.ndim - 2))
    truth = (known.unsqueeze(1) > numbers).to(logits.dtype)
    each = functional.binary_cross_entropy_with_logits(logits, truth, reduction="none") * valid
    return each.sum() / (valid.sum() * logits.shape[1]).clamp_min(1) + soft_dice(logits.sigmoid(), truth, valid)
