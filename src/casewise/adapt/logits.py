"""Logits: find them in the output of a network, resize them, and compute labels, probabilities and losses.

Logits are (n, classes, *space). The channels of a sigmoid head are independent: its entropy is the sum over channels,
its largest probability the product.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from casewise.core.errors import BadInput, NotFinite, in_one_line
from casewise.core.records import Mask

_KEYS = ("logits", "out", "pred", "seg", "masks")
_SIZE = re.compile(r"sizes? of tensor|(kernel|output) size", re.IGNORECASE)  # in errors about the size of an image
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


def network_logits(network: nn.Module, inputs: Tensor, *, classes: int | None = None) -> Tensor:
    """Run a network on (n, channel, *space) and return its logits (n, classes, *space).

    Raises:
        BadInput: If the network cannot take images of this size, or returns probabilities.
    """
    try:
        output = network(inputs)
    except RuntimeError as error:
        if not _SIZE.search(str(error)):
            raise
        size = " x ".join(map(str, inputs.shape[2:]))
        raise BadInput(
            f"the network cannot take an image of {size} ({in_one_line(error)[:100]}); if each side must be a multiple "
            "of 8, for example, give Module(network, ..., multiple=8), which pads (docs/how-to/own-network.md)"
        ) from error
    logits = at_resolution(logits_of(output, classes=classes), inputs.shape[2:])
    if _are_probabilities(logits.detach()):
        raise BadInput(
            "all outputs of the network lie between 0 and 1, as probabilities do, and casewise needs logits; remove "
            "the final softmax or sigmoid from the network"
        )
    return logits


def _are_probabilities(logits: Tensor) -> bool:
    """True if all values lie between 0 and 1, and the channels sum to 1 or the values reach from 0 to 1.

    The first voxel is looked at alone before the others, because it decides for almost all logits.
    """
    for part in (logits.flatten(2)[:1, :, :1], logits):
        low, high = float(part.min()), float(part.max())
        if low < 0 or high > 1:
            return False
    return high - low > (0.9 if logits.shape[1] > 1 else 0) or bool((logits.sum(1) - 1).abs().max() < 1e-2)


def at_resolution(logits: Tensor, space: Sequence[int]) -> Tensor:
    """Resize logits (n, classes, *small) to ``space``: (bi-, tri-)linear, align_corners=False."""
    if tuple(logits.shape[2:]) == tuple(space):
        return logits
    if logits.ndim - 2 != len(space):
        raise BadInput(f"the network must return logits (n, classes, *{tuple(space)}), got {tuple(logits.shape)}")
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
