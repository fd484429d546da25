"""Stochastic passes through a network that was trained without dropout: inject it before the segmentation heads (C11).

Injection is by forward pre-hooks, so the state dict stays as it is. On a network without dropout, plain Monte Carlo
dropout repeats one answer and its agreement is the constant 1: that is "not computable", never 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from casewise.adapt.objective import Adaptable

RATE = 0.1
SEEDS = range(1000, 1010)


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
    subject: Adaptable, *, seeds: Sequence[int] = SEEDS, rate: float = RATE, heads: Sequence[nn.Module] | None = None
) -> Iterator[Tensor] | None:
    """Logits of one pass for each seed, or None where the network has no head that could be found."""
    found = list(heads) if heads is not None else segmentation_heads(subject.network, subject.classes)
    return _passes(subject, found, seeds, rate) if found else None


def _passes(subject: Adaptable, heads: Sequence[nn.Module], seeds: Sequence[int], rate: float) -> Iterator[Tensor]:
    for seed in seeds:
        with torch.no_grad(), dropped(heads, torch.Generator().manual_seed(seed), rate=rate):
            logits = subject.logits(subject.inputs)
        yield logits
