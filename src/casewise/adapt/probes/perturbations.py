"""Agreement of perturbed predictions with the unperturbed one: light augmentations (C10) and dropout (C11).

Signals are 1 - agreement, so that higher means riskier. Cost of each: 8 perturbed forward passes and one unperturbed
one, no backward pass, and at step 0 one more forward pass for the self-test of the augmentations.

Dropout is added before the segmentation heads by forward pre-hooks, so the state dict does not change. If no head is
found, the signal is None ("not computable"), never 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from casewise.adapt.augmentations import IDENTITY, LightView, light_views
from casewise.adapt.logits import labels
from casewise.adapt.objective import Adaptable
from casewise.core.errors import BadInput

RATE = 0.1
SEEDS = range(1000, 1008)  # A7


def segmentation_heads(network: nn.Module, classes: int) -> list[nn.Module]:
    """Return the layers with one output channel per class: the pointwise ones, or all if none is pointwise."""
    ends = [module for module in network.modules() if _width(module) == classes]
    pointwise = [module for module in ends if set(getattr(module, "kernel_size", (1,))) == {1}]
    return pointwise or ends


def _width(module: nn.Module) -> int | None:
    width = getattr(module, "out_channels", getattr(module, "out_features", None))
    return width if isinstance(width, int) and isinstance(getattr(module, "weight", None), Tensor) else None


@contextmanager
def dropped(heads: Sequence[nn.Module], generator: torch.Generator, *, rate: float = RATE) -> Iterator[None]:
    """Set input channels of these layers to 0 with probability ``rate``; scale the others by 1 / (1 - rate)."""

    def drop(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        features: Tensor = inputs[0]
        channels_last = hasattr(module, "out_features")
        kept = torch.rand(_by_channel(features, channels_last), generator=generator) >= rate
        return (features * kept.to(features) / (1 - rate), *inputs[1:])

    handles = [head.register_forward_pre_hook(drop) for head in heads]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _by_channel(features: Tensor, channels_last: bool) -> tuple[int, ...]:
    """Return the shape (n, channel, 1, ...) or, if channels are the last axis, (n, 1, ..., channel)."""
    ones = [1] * (features.ndim - 2)
    samples, channels = features.shape[0], features.shape[-1 if channels_last else 1]
    return (samples, *ones, channels) if channels_last else (samples, channels, *ones)


def augmentation_agreement(subject: Adaptable, *, views: Sequence[LightView] | None = None) -> float:
    r"""Return the mean share of voxels whose label is the same under a light view; logits are mapped back first.

    .. math:: A = \frac1V \sum_v \frac{|\{x : \hat y_v(x) = \hat y(x)\}|}{|\Omega|}

    Views: 8, seeds 1000 to 1007, flips of both in-plane axes with p = 0.5, brightness U[0.9, 1.1], noise with
    sigma U[0, 0.05] on z-scored intensities. Support: all voxels.
    """
    plain = _labels(subject, IDENTITY)
    if subject.step == 0:
        _check_identity(_labels(subject, IDENTITY), plain)
    chosen = light_views(SEEDS) if views is None else views
    return float(np.mean([_share_equal(_labels(subject, view), plain) for view in chosen]))


def augmentation_disagreement(subject: Adaptable) -> float:
    """Return 1 - augmentation agreement (C10)."""
    return 1.0 - augmentation_agreement(subject)


def dropout_agreement(subject: Adaptable) -> float | None:
    """Return the mean share of voxels whose label is the same under dropout before the heads; None without heads.

    The network was not trained with this dropout, so the paper reports it as a secondary signal only.
    """
    heads = segmentation_heads(subject.network, subject.classes)
    if not heads:
        return None
    plain, shares = _labels(subject, IDENTITY), []
    for seed in SEEDS:
        with dropped(heads, torch.Generator().manual_seed(seed)):
            shares.append(_share_equal(_labels(subject, IDENTITY), plain))
    return float(np.mean(shares))


def dropout_disagreement(subject: Adaptable) -> float | None:
    """Return 1 - dropout agreement (C11), or None if it is not computable."""
    agreement = dropout_agreement(subject)
    return None if agreement is None else 1.0 - agreement


@torch.no_grad()
def _labels(subject: Adaptable, view: LightView) -> NDArray[Any]:
    return labels(view.invert(subject.logits(view.apply(subject.inputs))), subject.head)


def _share_equal(seen: NDArray[Any], plain: NDArray[Any]) -> float:
    return float((seen == plain).mean())


def _check_identity(again: NDArray[Any], plain: NDArray[Any]) -> None:
    """Refuse a network whose prediction of the same input differs from run to run (C10)."""
    share = _share_equal(again, plain)
    if share != 1.0:
        raise BadInput(
            f"two predictions of one input must be equal, but only {share:.6f} of voxels agree; the network is random "
            "in eval mode: make it deterministic"
        )
