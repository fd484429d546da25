"""A case's image as a batch for a bare network: slices of a volume for a 2-D network, one window for a 3-D one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from casewise.core.errors import BadInput

_CONVOLUTIONS = {nn.Conv2d: 2, nn.Conv3d: 3, nn.ConvTranspose2d: 2, nn.ConvTranspose3d: 3}


def as_batch(image: NDArray[Any], network: nn.Module) -> Tensor:
    """(channel, *space) -> (n, channel, *space): a volume becomes slices where the network's convolutions are 2-D."""
    axes = next((_CONVOLUTIONS[type(m)] for m in network.modules() if type(m) in _CONVOLUTIONS), image.ndim - 1)
    batch = torch.as_tensor(np.ascontiguousarray(image, dtype=np.float32))
    if batch.ndim == axes + 1:
        return batch.unsqueeze(0)
    if batch.ndim == 4 and axes == 2:
        return batch.transpose(0, 1).contiguous()
    raise BadInput(
        f"a {axes}-D network takes an image (channel, {'slices, ' if axes == 3 else ''}rows, columns), "
        f"got shape {tuple(batch.shape)}"
    )
