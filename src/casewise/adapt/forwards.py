"""Run the network on a case: resolution, precision, micro-batches, and forward passes that are used twice.

The forward pass that predicts a mask keeps its graph, and the next update uses it if no parameter moved in between.
With micro-batches only the last one keeps its graph, so that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.logits import check_finite, confidence, labels, network_logits
from casewise.adapt.recording import Prediction
from casewise.adapt.snapshot import swapped
from casewise.core.errors import BadInput
from casewise.core.records import Mask

Forward = Callable[[Tensor], Tensor]

HEADS = ("softmax", "sigmoid")


class Forwards:
    """Computes logits (n, classes, *space) in float32 from inputs (n, channel, *space), and the mask of the case."""

    def __init__(
        self, network: nn.Module, inputs: Tensor, moving: Mapping[str, Tensor], how: Adaptation, *,
        forward: Forward | None = None, predict: Callable[[], Mask] | None = None, head: str | None = None,
        before_forward: Callable[[], None] | None = None,  # may raise to stop the case, e.g. when its time is up
    ) -> None:  # fmt: skip
        if head is not None and head not in HEADS:
            raise BadInput(f"head must be 'softmax', 'sigmoid' or None, got '{head}'")
        self.inputs, self.head, self.classes = inputs, head or "", 0
        self._moving = moving
        self._run: Forward = forward or (lambda given: network_logits(network, given))
        self.padded: Forward = getattr(forward, "pad", lambda given: given)  # inputs as the network itself sees them
        self._own_predict = predict
        self._on_grid: bool = getattr(predict, "on_grid", True)  # True: the mask has the voxels of the inputs
        self._before = before_forward or (lambda: None)
        self._max_slices = how.max_slices
        self._kept: tuple[Tensor, list[int]] | None = None

    def chunks(self, batch: Tensor) -> list[slice]:
        """Rows of each micro-batch."""
        size = self._max_slices or len(batch)
        return [slice(first, min(first + size, len(batch))) for first in range(0, len(batch), size)]

    def logits(self, inputs: Tensor, *, where: str) -> Tensor:
        """Return the logits of inputs."""
        self._before()
        return check_finite(self._run(inputs.clone()).float(), where)

    def prediction(self, *, where: str, keep_graph: bool) -> Prediction:
        """Predict with the current weights; the last micro-batch keeps its graph for the next update."""
        self.drop_graph()
        masks, entropies, surest = [], [], 0.0
        chunks = self.chunks(self.inputs)
        for rows in chunks:
            keep = keep_graph and rows == chunks[-1]
            with nullcontext() if keep else torch.inference_mode():
                logits = self.logits(self.inputs[rows], where=where)
            if keep:
                self._kept = logits, self._stamp()
            self.classes = logits.shape[1]
            self.head = self.head or HEADS[self.classes == 1]
            voxels, probability = confidence(logits.detach(), self.head)
            masks.append(labels(logits.detach(), self.head))
            entropies.append(voxels.cpu().numpy())
            surest += float(probability.mean()) * len(probability) / len(self.inputs)
        mask = _joined(masks) if self._own_predict is None else self._piped()
        return Prediction(mask, _on_grid(mask, _joined(entropies), self._on_grid), surest)

    def mask(self, *, where: str) -> Mask:
        """Return the mask of the current weights: no graph, no signals, the least memory."""
        if self._own_predict is not None:
            return self._piped()
        masks = []
        for rows in self.chunks(self.inputs):
            with torch.inference_mode():
                logits = self.logits(self.inputs[rows], where=where)
            masks.append(labels(logits, self.head or HEADS[logits.shape[1] == 1]))
        return _joined(masks)

    def _piped(self) -> Mask:
        assert self._own_predict is not None
        self._before()
        return self._own_predict()

    @contextmanager
    def holding(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Return a context in which the network has other weights; they are swapped, so the kept graph stays valid."""
        kept = self._kept
        try:
            with swapped(self._moving, values):
                yield
        finally:
            self._kept = kept

    def with_graph(self, batch: Tensor, *, where: str) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (rows, inputs, logits) of each micro-batch; for the case itself, the forward of its mask is reused."""
        own = batch is self.inputs
        chunks = self.chunks(batch)
        kept, self._kept = self._kept, None
        if own and kept is not None and kept[1] == self._stamp():
            rows = chunks.pop()
            yield rows, batch[rows], kept[0]
            del kept
        for rows in chunks:
            yield rows, batch[rows], self.logits(batch[rows], where=where)

    def drop_graph(self) -> None:
        """Drop the kept forward pass, because the weights changed."""
        self._kept = None

    def _stamp(self) -> list[int]:
        """Return the version of every tensor that may move; an in-place change raises it and makes the graph stale."""
        return [tensor._version for tensor in self._moving.values()]


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Join chunks of (n, *space); a batch axis of one is dropped."""
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return whole[0] if len(whole) == 1 else whole


def _on_grid(mask: Mask, voxels: NDArray[Any], same: bool) -> NDArray[Any]:
    """Give values the shape of the mask, if the backbone's pipeline (nnU-Net's) kept the axis of a single slice.

    Values on another grid get one axis more than the mask, so that the shapes cannot be equal by chance.
    """
    if not same:
        return voxels[(None,) * max(0, mask.ndim + 1 - voxels.ndim)]
    return voxels[None] if mask.shape == (1, *voxels.shape) else voxels
