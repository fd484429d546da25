"""Logits: find them in the output of a network, resize them, and compute labels, probabilities and losses.

Logits are (n, classes, *space). The channels of a sigmoid head are independent: its entropy is the sum over channels,
its largest probability the product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from casewise.core.errors import BadInput, NotFinite
from casewise.core.records import Mask

_KEYS = ("logits", "out", "pred", "seg", "masks")
_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


def logits_of(output: Any, *, classes: int | None = None) -> Tensor:
    """Find the logits in a tensor, tuple or list (deep supervision: the finest), dict, or object with ``.logits``.

    If the tensors of a tuple differ in channels, the logits are those with ``classes`` channels. If no tensor has that
    number, the tuple is refused, because the finest tensor may be a feature map.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(getattr(output, "logits", None), Tensor):
        return output.logits  # type: ignore[no-any-return]
    if isinstance(output, Mapping):
        for key in _KEYS:
            if isinstance(output.get(key), Tensor):
                return output[key]  # type: ignore[no-any-return]
        raise BadInput(
            f"a network that returns a dict needs one of the keys {_KEYS}, got {sorted(map(str, output))}; "
            "pass forward= to run_episode"
        )
    if isinstance(output, Sequence):
        tensors = [item for item in output if isinstance(item, Tensor) and item.ndim >= 3]
        channels = sorted({int(item.shape[1]) for item in tensors})
        if classes in channels:
            tensors = [item for item in tensors if item.shape[1] == classes]
        elif len(channels) > 1:
            raise BadInput(
                f"the network returns tensors with {', '.join(map(str, channels[:-1]))} and {channels[-1]} channels, "
                "and it is not clear which are the logits; return the logits alone, or pass forward= to run_episode"
            )
        if tensors:
            return max(tensors, key=lambda item: item[0, 0].numel())
    raise BadInput(
        f"expected logits as a tensor, a tuple or list of tensors, a dict or an object with .logits, "
        f"got {type(output).__name__}; pass forward= to run_episode"
    )


def at_resolution(logits: Tensor, space: Sequence[int]) -> Tensor:
    """Resize logits (n, classes, *small) to ``space``: (bi-, tri-)linear, align_corners=False."""
    if tuple(logits.shape[2:]) == tuple(space):
        return logits
    if logits.ndim - 2 != len(space):
        raise BadInput(f"logits {tuple(logits.shape)} do not fit a mask of shape {tuple(space)}; pass forward=")
    return functional.interpolate(logits, size=tuple(space), mode=_MODES[len(space)], align_corners=False)


def check_finite(logits: Tensor, where: str) -> Tensor:
    """Return the logits; raise NotFinite if one is NaN or infinite (the sum is then not finite, a cheap first test)."""
    if not torch.isfinite(logits.detach().sum()) and not torch.isfinite(logits).all():
        bad = int((~torch.isfinite(logits)).sum())
        raise NotFinite(
            f"{bad} of {logits.numel()} logits are NaN or infinite {where}; lower the learning rate or check the "
            f"image; the network was restored"
        )
    return logits


def labels(logits: Tensor, head: str) -> NDArray[Any]:
    """Return labels (n, *space) of logits (n, classes, *space).

    Softmax: argmax. Sigmoid: 0 where no channel is above 0, else 1 + the last channel that is (regions listed from the
    outermost to the innermost, as nnU-Net orders them).
    """
    if head == "softmax":
        chosen = _largest(logits.detach())
    else:
        numbers = torch.arange(1, logits.shape[1] + 1, device=logits.device).view(1, -1, *[1] * (logits.ndim - 2))
        chosen = ((logits > 0) * numbers).amax(1)
    kind = torch.uint8 if logits.shape[1] < 256 else torch.int16
    return np.asarray(chosen.to(kind).cpu().numpy())


def mask_of(logits: Tensor, head: str) -> Mask:
    """Return the labels of logits as one mask; a batch of one loses its batch axis."""
    found = labels(logits, head)
    return np.asarray(found[0] if len(found) == 1 else found)


def _largest(logits: Tensor) -> Tensor:
    """Return the index of the largest channel, the first of equal ones: argmax(1).

    On the CPU, comparing one class after the other with one-byte indices is four times faster than ``max``, which is
    many times faster than ``argmax``.
    """
    if logits.is_cuda or logits.shape[1] > 255:
        return logits.max(1).indices
    best = logits[:, 0].clone()
    chosen = torch.zeros(best.shape, dtype=torch.uint8, device=best.device)
    for place in range(1, logits.shape[1]):
        other = logits[:, place]
        chosen = torch.maximum(chosen, (other > best).view(torch.uint8) * place)
        torch.maximum(best, other, out=best)
    return chosen


def probabilities(logits: Tensor, head: str = "softmax") -> Tensor:
    """Softmax over classes, or a sigmoid of each channel."""
    return logits.softmax(1) if head == "softmax" else logits.sigmoid()


def entropy(logits: Tensor, head: str = "softmax") -> Tensor:
    r"""Entropy of each voxel in nats, (n, *space).

    Softmax: :math:`H = -\sum_c p_c \log p_c`. Sigmoid:
    :math:`H = -\sum_c [\sigma_c \log \sigma_c + (1-\sigma_c) \log (1-\sigma_c)]`. Exact at any logit: no epsilon.
    """
    if head == "softmax":
        logs = logits.log_softmax(1)
        return -(logs.exp() * logs).sum(1)
    yes, no = functional.logsigmoid(logits), functional.logsigmoid(-logits)
    return -(yes.exp() * yes + no.exp() * no).sum(1)


def largest_entropy(classes: int, head: str = "softmax") -> float:
    """Return the largest possible entropy: ln C for a softmax over C classes, C ln 2 for C sigmoids."""
    return math.log(classes) if head == "softmax" else classes * math.log(2)


@torch.no_grad()
def confidence(logits: Tensor, head: str = "softmax") -> tuple[Tensor, Tensor]:
    """Return (entropy, largest probability) of each voxel, both (n, *space), from one softmax (C7)."""
    if head == "softmax":
        logs = logits.log_softmax(1)
        return -(logs.exp() * logs).sum(1), logs.amax(1).exp_()
    return entropy(logits, head), functional.logsigmoid(logits.abs()).sum(1).exp_()


def slice_means(voxels: Tensor) -> Tensor:
    """Return the mean over each slice: (n, rows, columns) -> (n,), and (n, slices, rows, columns) -> (n * slices,)."""
    return voxels.flatten(-2).mean(-1).flatten()


def cross_entropy(logits: Tensor, target: Tensor, head: str = "softmax") -> Tensor:
    r"""Return :math:`-\sum_c q_c \log p_c` of each voxel with soft targets q of the logits' shape, (n, *space)."""
    if head == "softmax":
        return -(target * logits.log_softmax(1)).sum(1)
    return functional.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(1)


def anchor(parameters: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> Tensor:
    r"""Squared distance to the source weights, :math:`\sum_\theta \|\theta - \theta_0\|^2` (D2: no Fisher weights)."""
    return torch.stack([(parameter - source[name]).square().sum() for name, parameter in parameters.items()]).sum()
