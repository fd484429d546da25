"""VPTTA: learn a change of the input that matches BatchNorm statistics to the source (Chen et al., CVPR 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.parameters import statistics
from casewise.core.errors import BadInput


@dataclass(frozen=True)
class Vptta:
    r"""Learn a prompt P that multiplies the lowest frequencies of the input (Adam); the network is not changed.

    .. math:: L = \frac{1}{n|B|} \sum_{i, l \in B} \overline{|\mu_{il} - \mu_l|} + \overline{|\sigma_{il} - \sigma_l|},
              \qquad x' = \mathcal{F}^{-1}\big(P \cdot \mathcal{F}(x)\big)

    B is the set of BatchNorm layers. :math:`\mu_{il}, \sigma_{il}` are the mean and standard deviation, by channel, of
    the input of layer l for sample i; :math:`\mu_l, \sigma_l` are the running ones of the layer. P starts at 1 and
    covers ``share`` of each side of the spectrum.

    The published method starts P from a memory of earlier cases and moves the target from the statistics of the case to
    those of the source. Here cases are independent: there is no memory, and the target is the source.

    Cost of an update: one forward and one backward pass. A shrunk state is an interpolation of P and 1.
    """

    share: float = 0.01
    learning_rate: float = 0.01
    moves: ClassVar[str] = "input"
    entropy_weighted: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise BadInput(
                f"share, the part of each side that the prompt covers, must be above 0 and at most 1, got {self.share}"
            )

    def prompt(self, network: nn.Module, inputs: Tensor) -> dict[str, nn.Parameter]:
        """Return the parameters of the episode; raise NothingToAdapt if no BatchNorm layer has running statistics."""
        statistics(network)
        sides = [max(1, round(self.share * side)) for side in inputs.shape[2:]]
        return {"prompt": nn.Parameter(inputs.new_ones((1, inputs.shape[1], *sides)))}

    def begin(self, subject: Adaptable) -> Update:
        """Apply the prompt by a hook on the network, so every prediction uses it; the episode removes the hooks."""
        prompt = subject.parameters["prompt"]
        misfits: list[Tensor] = []

        def aligned(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            if torch.is_grad_enabled():
                misfits.append(misfit(layer, given[0]))

        layers = [m for m in subject.network.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
        for layer in layers:
            layer.register_forward_pre_hook(aligned)
        subject.network.register_forward_pre_hook(lambda _, given: (prompted(given[0], prompt), *given[1:]))
        optimizer = torch.optim.Adam([prompt], lr=subject.learning_rate, betas=(0.9, 0.99))

        def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, float]:
            numerator = torch.stack(misfits).mean(0).sum()
            misfits.clear()
            return numerator, len(inputs)

        def update() -> Mapping[str, float]:
            subject.changed()  # the forward pass that predicted the mask has no graph of the statistics
            misfits.clear()
            value = subject.backward(loss)
            optimizer.step()
            return {} if value is None else {"loss": value}

        return update


def misfit(layer: nn.Module, features: Tensor) -> Tensor:
    """Return the mean distance of means and deviations to the layer's running ones: (n, channel, *space) -> (n,)."""
    assert isinstance(layer.running_mean, Tensor)
    assert isinstance(layer.running_var, Tensor)
    values = features.flatten(2)
    apart = (values.mean(2) - layer.running_mean).abs().mean(1)
    if values.shape[2] > 1:  # one voxel has no standard deviation
        apart = apart + (values.std(2) - layer.running_var.sqrt()).abs().mean(1)
    return apart


def prompted(image: Tensor, prompt: Tensor) -> Tensor:
    """Multiply the lowest frequencies of the image (the middle of the shifted spectrum) by the prompt; keep phases.

    Computed as image + change, so that a prompt of ones returns the image bit for bit.
    """
    axes = tuple(range(2, image.ndim))
    spectrum = torch.fft.fftshift(torch.fft.fftn(image.float(), dim=axes), dim=axes)
    starts = [side // 2 - size // 2 for side, size in zip(image.shape[2:], prompt.shape[2:], strict=True)]
    low: tuple[Any, ...] = (
        ...,
        *(slice(first, first + size) for first, size in zip(starts, prompt.shape[2:], strict=True)),
    )
    change = torch.zeros_like(spectrum)
    change[low] = spectrum[low] * (prompt.float() - 1)
    back: Tensor = torch.fft.ifftn(torch.fft.ifftshift(change, dim=axes), dim=axes).real
    moved: Tensor = image + back.to(image.dtype)
    return moved
