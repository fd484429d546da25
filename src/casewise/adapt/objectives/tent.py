"""TENT: lower the entropy of the prediction (Wang et al., ICLR 2021; D1).

BatchNorm statistics from source and case, blended (Schneider et al., NeurIPS 2020): no gradient, one forward. A prompt
of the input that brings the case's statistics to the source's (VPTTA; Chen et al., CVPR 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from casewise.adapt.adaptation import PRIOR
from casewise.adapt.logits import entropy
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.parameters import blending, statistics
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


@dataclass(frozen=True)
class Vptta:
    r"""Adam on a prompt P that is multiplied onto the lowest amplitudes of the input; the network stays as it is.

    .. math:: L = \frac{1}{n|B|} \sum_{i, l \in B} \overline{|\mu_{il} - \mu_l|} + \overline{|\sigma_{il} - \sigma_l|},
              \qquad x' = \mathcal{F}^{-1}\big(P \cdot \mathcal{F}(x)\big)

    B are the BatchNorm layers, :math:`\mu_{il}, \sigma_{il}` mean and deviation of what layer l gets from sample i, by
    channel, and :math:`\mu_l, \sigma_l` its running ones. P starts at 1 and covers ``share`` of each side.

    The paper starts the prompt from a memory of earlier cases and lets the target move from the case's statistics to
    the source's as cases go by. Here no case knows another: there is no memory, and the target is the source's.

    An update costs one forward and one backward of its own. A shrunk state lies between P and 1.
    """

    share: float = 0.01
    learning_rate: float = 0.01
    moves: ClassVar[str] = "input"
    entropy_weighted: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise BadInput(
                f"share is the part of each side that the prompt covers, above 0 and up to 1, got {self.share}"
            )

    def prompt(self, network: nn.Module, inputs: Tensor) -> dict[str, nn.Parameter]:
        """What the episode lets move; NothingToAdapt where no BatchNorm layer keeps statistics to align with."""
        statistics(network)
        sides = [max(1, round(self.share * side)) for side in inputs.shape[2:]]
        return {"prompt": nn.Parameter(inputs.new_ones((1, inputs.shape[1], *sides)))}

    def begin(self, subject: Adaptable) -> Update:
        """The prompt sits in a hook on the network, so that every prediction sees it; hooks go when the loan ends."""
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
            subject.changed()  # the forward that made the mask had no graph of the statistics
            misfits.clear()
            value = subject.backward(loss)
            optimizer.step()
            return {} if value is None else {"loss": value}

        return update


def misfit(layer: nn.Module, features: Tensor) -> Tensor:
    """How far means and deviations are from a BatchNorm layer's running ones: (n, channel, *space) -> (n,)."""
    assert isinstance(layer.running_mean, Tensor)
    assert isinstance(layer.running_var, Tensor)
    values = features.flatten(2)
    apart = (values.mean(2) - layer.running_mean).abs().mean(1)
    if values.shape[2] > 1:  # one voxel has no deviation
        apart = apart + (values.std(2) - layer.running_var.sqrt()).abs().mean(1)
    return apart


def prompted(image: Tensor, prompt: Tensor) -> Tensor:
    """The image with its lowest amplitudes, in the middle of the shifted spectrum, times the prompt; phases stay.

    Written as image + change, so that a prompt of ones leaves every bit where it is.
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
