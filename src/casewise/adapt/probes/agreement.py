"""Agreement of perturbed predictions with the plain one: light augmentations (C10) and injected dropout (C11).

Signals are 1 - agreement, so that higher means riskier. They read only: 8 forwards each beyond one plain forward, no
backward, and one forward more at step 0 for the self-test of the augmentations.

Dropout is injected before the segmentation heads by forward pre-hooks, so the state dict stays as it is. On a network
without dropout, plain Monte Carlo dropout repeats one answer and its agreement is the constant 1: that is "not
computable", never 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from casewise.adapt.augmentations import IDENTITY, View, light_views
from casewise.adapt.logits import labels
from casewise.adapt.objective import Adaptable
from casewise.core.errors import BadInput

RATE = 0.1
DROPOUT_SEEDS = range(1000, 1010)  # of stochastic passes, as in AETTA and ADIC


def segmentation_heads(network: nn.Module, classes: int) -> list[nn.Module]:
    """Layers that end in one channel for each class: the pointwise ones, or all where none is pointwise."""
    ends = [module for module in network.modules() if _width(module) == classes]
    pointwise = [module for module in ends if set(getattr(module, "kernel_size", (1,))) == {1}]
    return pointwise or ends


def _width(module: nn.Module) -> int | None:
    width = getattr(module, "out_channels", getattr(module, "out_features", None))
    return width if isinstance(width, int) and isinstance(getattr(module, "weight", None), Tensor) else None


@contextmanager
def dropped(heads: Sequence[nn.Module], generator: torch.Generator, *, rate: float = RATE) -> Iterator[None]:
    """Whole channels that go into these layers vanish with probability ``rate``; the others grow by 1 / (1 - rate)."""

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
    """(n, channel, 1, ...) or, where channels are the last axis, (n, 1, ..., channel)."""
    ones = [1] * (features.ndim - 2)
    samples, channels = features.shape[0], features.shape[-1 if channels_last else 1]
    return (samples, *ones, channels) if channels_last else (samples, channels, *ones)


def stochastic_logits(
    subject: Adaptable,
    *,
    seeds: Sequence[int] = DROPOUT_SEEDS,
    rate: float = RATE,
    heads: Sequence[nn.Module] | None = None,
) -> Iterator[Tensor] | None:
    """Logits of one pass for each seed, or None where the network has no head that could be found."""
    found = list(heads) if heads is not None else segmentation_heads(subject.network, subject.classes)
    return _passes(subject, found, seeds, rate) if found else None


def _passes(subject: Adaptable, heads: Sequence[nn.Module], seeds: Sequence[int], rate: float) -> Iterator[Tensor]:
    for seed in seeds:
        with torch.no_grad(), dropped(heads, torch.Generator().manual_seed(seed), rate=rate):
            logits = subject.logits(subject.inputs)
        yield logits


SEEDS = range(1000, 1008)  # A7


def augmentation_agreement(subject: Adaptable, *, views: Sequence[View] | None = None) -> float:
    r"""Mean share of voxels whose label stays the same under a light view, geometry inverted on the logits.

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
    """1 - augmentation agreement (C10)."""
    return 1.0 - augmentation_agreement(subject)


def dropout_agreement(subject: Adaptable, *, seeds: Sequence[int] = SEEDS, rate: float = RATE) -> float | None:
    """Mean share of voxels whose label stays the same when channels before the heads drop out; None without heads.

    The network was never trained under this dropout, so the perturbation is out of its distribution; the paper reports
    it as a secondary signal for that reason.
    """
    passes = stochastic_logits(subject, seeds=seeds, rate=rate)
    if passes is None:
        return None
    plain = _labels(subject, IDENTITY)
    return float(np.mean([_share_equal(labels(logits, subject.head), plain) for logits in passes]))


def dropout_disagreement(subject: Adaptable) -> float | None:
    """1 - dropout agreement (C11); None where it is not computable, never a stand-in number."""
    agreement = dropout_agreement(subject)
    return None if agreement is None else 1.0 - agreement


@torch.no_grad()
def _labels(subject: Adaptable, view: View) -> NDArray[Any]:
    return labels(view.invert(subject.logits(view.apply(subject.inputs))), subject.head)


def _share_equal(seen: NDArray[Any], plain: NDArray[Any]) -> float:
    return float((seen == plain).mean())


def _check_identity(again: NDArray[Any], plain: NDArray[Any]) -> None:
    """The self-test: an identity view agrees exactly, or nothing is logged (C10)."""
    share = _share_equal(again, plain)
    if share != 1.0:
        raise BadInput(
            f"the same input must give the same labels before agreement means anything, but only {share:.6f} of voxels "
            "agree; the network is random in eval mode: switch that off"
        )
