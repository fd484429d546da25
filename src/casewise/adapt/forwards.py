"""One way to run the network: resolution, precision, micro-batches, and a NaN that is noticed at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from casewise.adapt.logits import at_resolution, check_finite, logits_of
from casewise.adapt.normalization import group_instance_norm
from casewise.adapt.prefix import FrozenPrefix
from casewise.core.errors import BadInput

Forward = Callable[[Tensor], Tensor]

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Forwards:
    """Logits (n, classes, *space) of the network for inputs (n, channel, *space), in float32."""

    def __init__(
        self,
        network: nn.Module,
        forward: Forward | None,
        *,
        max_slices: int | None,
        autocast: str | None,
        channels_last: bool,
        compiled: bool,
        prefix: FrozenPrefix | None,
    ) -> None:
        if max_slices is not None and max_slices < 1:
            raise BadInput(f"max_slices is at least 1, got {max_slices}")
        if autocast is not None and autocast not in PRECISIONS:
            raise BadInput(f"autocast is one of {', '.join(PRECISIONS)} or None, got '{autocast}'")
        if compiled and prefix is not None:
            raise BadInput("compile and cache_frozen exclude each other: caching watches modules that compiling fuses")
        self._run: Forward = forward or _resized(torch.compile(network) if compiled else network)
        self._max_slices = max_slices
        self._autocast = autocast
        self._channels_last = channels_last
        self._prefix = prefix

    def configure(self, network: nn.Module, *, grouped: bool) -> None:
        """Memory layout and norm kernels; both are undone by the episode's snapshot."""
        if self._channels_last:
            for parameter in network.parameters():
                parameter.data = _last(parameter.data)
        if grouped:
            group_instance_norm(network)

    def chunks(self, batch: Tensor) -> list[slice]:
        """Rows of each micro-batch."""
        size = self._max_slices or len(batch)
        return [slice(first, min(first + size, len(batch))) for first in range(0, len(batch), size)]

    def __call__(self, inputs: Tensor, *, where: str, rows: slice | None = None) -> Tensor:
        """The logits; ``rows`` says that these are the case's own rows, whose frozen features may be known."""
        known = (
            self._prefix((rows.start, rows.stop)) if self._prefix is not None and rows is not None else nullcontext()
        )
        with known, self._precision(inputs.device.type):
            logits = self._run(_last(inputs) if self._channels_last else inputs)
        return check_finite(logits.float(), where)

    def forget(self) -> None:
        """Frozen features are no longer valid."""
        if self._prefix is not None:
            self._prefix.clear()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No graph. Inference mode, except where features are kept that a later graph will need."""
        with torch.inference_mode() if self._prefix is None else torch.no_grad():
            yield

    def _precision(self, device: str) -> AbstractContextManager[None]:
        return torch.autocast(device, PRECISIONS[self._autocast]) if self._autocast else nullcontext()


def _resized(network: Callable[[Tensor], object]) -> Forward:
    def forward(inputs: Tensor) -> Tensor:
        return at_resolution(logits_of(network(inputs)), inputs.shape[2:])

    return forward


def _last(tensor: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats[tensor.ndim]) if tensor.ndim in formats else tensor
