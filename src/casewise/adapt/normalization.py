"""Whose statistics a normalization layer uses. A change lasts until the episode's snapshot is restored.

BatchNorm has three modes. ``source``: the running statistics of training, so that M0 and M_k differ by the update
alone. ``batch``: the case's own mean and variance, with gradients through them (the published TENT). ``blend``: between
the two, without gradients through them (Schneider et al., NeurIPS 2020; MEMO). Other layers use the sample's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from casewise.adapt.adaptation import PRIOR
from casewise.core.errors import BadInput


def depends_on_batch(network: nn.Module, mode: str) -> bool:
    """Whether a sample's output depends on the others in its batch, so that micro-batches are not the same step."""
    layers = [layer for layer in network.modules() if isinstance(layer, _BatchNorm)]
    return any(mode != "source" or layer.running_mean is None for layer in layers)


def use_statistics(network: nn.Module, mode: str, prior: float = PRIOR) -> bool:
    """Switch every BatchNorm layer to a mode; whether that changed anything."""
    layers = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if mode == "source" or not layers:
        return False
    for layer in layers:
        layer.forward = _batch(layer) if mode == "batch" else _blend(layer, prior)  # type: ignore[method-assign, assignment]
    return True


def blended(layer: _BatchNorm, inputs: Tensor, prior: float) -> tuple[Tensor, Tensor]:
    r"""Source and batch statistics mixed: :math:`\mu = \frac{N}{N+n}\mu_s + \frac{n}{N+n}\mu_b`, and so the variance.

    n is the number of samples in the batch, N = ``prior``; the batch variance is unbiased, as running variances are.
    """
    axes = [axis for axis in range(inputs.ndim) if axis != 1]
    variance, mean = torch.var_mean(inputs.detach(), dim=axes, correction=1)
    share = prior / (prior + len(inputs))
    known_mean, known_variance = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
    return torch.lerp(mean, known_mean, share), torch.lerp(variance, known_variance, share)


@contextmanager
def blending(network: nn.Module, prior: float = PRIOR) -> Iterator[None]:
    """Inside, a forward writes the blend of each BatchNorm layer into its running statistics, front to back."""
    layers = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    found = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = _blend(layer, prior, remember=True)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for layer, forward in zip(layers, found, strict=True):
            del layer.forward
            if forward is not None:
                layer.__dict__["forward"] = forward


@contextmanager
def blending_by(network: nn.Module, share: float) -> Iterator[None]:
    """Inside, every BatchNorm layer uses (1 - share) of the source's statistics and ``share`` of its input's own.

    The input's variance is the biased one, as in the layer's own training mode.
    """
    layers = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not layers:
        raise BadInput(
            "statistics(share) mixes the statistics of BatchNorm, and this network has no such layer; use other views"
        )
    found = [layer.__dict__.get("forward") for layer in layers]
    try:
        for layer in layers:
            layer.forward = _mixed(layer, share)  # type: ignore[method-assign, assignment]
        yield
    finally:
        for layer, forward in zip(layers, found, strict=True):
            layer.__dict__.pop("forward", None)
            if forward is not None:
                layer.__dict__["forward"] = forward


def _mixed(layer: _BatchNorm, share: float) -> Callable[[Tensor], Tensor]:
    def forward(inputs: Tensor) -> Tensor:
        axes = [axis for axis in range(inputs.ndim) if axis != 1]
        variance, mean = torch.var_mean(inputs, dim=axes, correction=0)
        known_mean, known_variance = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
        mixed = torch.lerp(known_mean, mean, share), torch.lerp(known_variance, variance, share)
        return functional.batch_norm(inputs, *mixed, layer.weight, layer.bias, eps=layer.eps)

    return forward


def group_instance_norm(network: nn.Module) -> None:
    """Compute InstanceNorm as GroupNorm with one channel per group: faster on CPU, equal up to rounding."""
    for layer in network.modules():
        if isinstance(layer, _InstanceNorm) and not layer.track_running_stats:
            layer.forward = _grouped(layer)  # type: ignore[method-assign, assignment]


def _batch(layer: _BatchNorm) -> Callable[[Tensor], Tensor]:
    def forward(inputs: Tensor) -> Tensor:
        return functional.batch_norm(inputs, None, None, layer.weight, layer.bias, training=True, eps=layer.eps)

    return forward


def _blend(layer: _BatchNorm, prior: float, *, remember: bool = False) -> Callable[[Tensor], Tensor]:
    def forward(inputs: Tensor) -> Tensor:
        mean, variance = blended(layer, inputs, prior)
        if remember:
            layer.get_buffer("running_mean").copy_(mean)
            layer.get_buffer("running_var").copy_(variance)
        return functional.batch_norm(inputs, mean, variance, layer.weight, layer.bias, eps=layer.eps)

    return forward


def _grouped(layer: _InstanceNorm) -> Callable[[Tensor], Tensor]:
    def forward(inputs: Tensor) -> Tensor:
        return functional.group_norm(inputs, inputs.shape[1], layer.weight, layer.bias, layer.eps)

    return forward
