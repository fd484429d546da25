"""Whatever a network returns, as logits at the resolution of the mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from casewise.core.errors import BadInput, NotFinite

_KEYS = ("logits", "out", "pred", "seg", "masks")
_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


def logits_of(output: Any, *, classes: int | None = None) -> Tensor:
    """The logits in a tensor, a tuple or list (deep supervision: the finest), a dict, or an object with ``.logits``.

    Where the tensors of a tuple differ in channels, the logits are those with ``classes`` channels; where that does not
    say it, the tuple is refused: the finest of them may be a map of features.
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
    """Low-resolution logits (n, classes, *small) resized to ``space``: (bi-, tri-)linear, align_corners=False."""
    if tuple(logits.shape[2:]) == tuple(space):
        return logits
    if logits.ndim - 2 != len(space):
        raise BadInput(
            f"logits of shape {tuple(logits.shape)} do not fit a mask of shape {tuple(space)}; pass forward="
        )
    return functional.interpolate(logits, size=tuple(space), mode=_MODES[len(space)], align_corners=False)


def check_finite(logits: Tensor, where: str) -> Tensor:
    """The logits, or NotFinite. The sum is the cheap test: it is finite only where every term is."""
    if not torch.isfinite(logits.detach().sum()) and not torch.isfinite(logits).all():
        bad = int((~torch.isfinite(logits)).sum())
        raise NotFinite(
            f"{bad} of {logits.numel()} logits are NaN or infinite {where}; lower the learning rate or look at the "
            "image; the network was given back untouched"
        )
    return logits


def labels(logits: Tensor, head: str) -> NDArray[Any]:
    """Labels (n, *space) from logits (n, classes, *space).

    Softmax: argmax. Sigmoid: 0 where no channel is above 0, else 1 + the last channel that is (regions listed from the
    outermost to the innermost, as nnU-Net orders them).
    """
    if head == "softmax":
        chosen = logits.max(1).indices  # argmax, ties to the first; on CPU many times faster than argmax itself
    else:
        numbers = torch.arange(1, logits.shape[1] + 1, device=logits.device).view(1, -1, *[1] * (logits.ndim - 2))
        chosen = ((logits > 0) * numbers).amax(1)
    kind = torch.uint8 if logits.shape[1] < 256 else torch.int16
    return np.asarray(chosen.to(kind).cpu().numpy())
