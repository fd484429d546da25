"""Run the network on a case: resolution, precision, micro-batches, and forward passes that are used twice.

- The forward pass that predicts a mask keeps its graph, and the next update uses it if no parameter moved in between.
  With micro-batches only the last one keeps its graph, so that memory stays bounded.
- :class:`FrozenPrefix` computes the layers before everything that moves once per case, such as the encoder if only the
  decoder adapts. The result is exact and about three times faster for ``decoder-norm``. The stored features cost
  memory, so this is an option.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.logits import at_resolution, check_finite, confidence, labels, logits_of
from casewise.adapt.recording import Prediction
from casewise.core.errors import BadInput
from casewise.core.records import Mask

Outputs = dict[nn.Module, list[Any]]


class FrozenPrefix:
    """Stores the outputs of frozen modules at the front of a network, for each batch under a key of the caller.

    The first forward pass under a key is observed: a module without moving parameters that runs before every module
    with moving parameters returns the same output for the same input. Later passes use the stored output.
    """

    def __init__(self, network: nn.Module, moving: Collection[Tensor]) -> None:
        ids = {id(tensor) for tensor in moving}
        modules = list(network.modules())
        self._owners = {m for m in modules if any(id(t) in ids for t in _own(m))}
        self._frozen = {m for m in modules if not any(part in self._owners for part in m.modules())}
        self._modules = modules
        self._known: dict[Hashable, Outputs] = {}

    def clear(self) -> None:
        """Forget everything; needed if the network changed in another way than by its moving parameters."""
        self._known.clear()

    @contextmanager
    def __call__(self, key: Hashable) -> Iterator[None]:
        """Return a context for one forward pass on the inputs ``key``, which uses or fills the store."""
        known = self._known.get(key)
        if known is not None and all(_intact(output) for outputs in known.values() for output in outputs):
            with _replayed(known):
                yield
        else:
            with self._watched() as found:
                yield
            self._known[key] = found

    @contextmanager
    def _watched(self) -> Iterator[Outputs]:
        found: Outputs = {}
        inside: list[nn.Module] = []
        silent = set(self._owners)  # owners that never run: their parameters are used in ways that cannot be watched
        touched = False

        def enter(module: nn.Module, *_: Any) -> None:
            nonlocal touched
            silent.discard(module)
            touched = touched or module in self._owners
            if module in self._frozen and not touched and not inside:
                inside.append(module)

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            if inside and inside[-1] is module:
                inside.pop()
                found.setdefault(module, []).append(_with_versions(output))

        hooks = [m.register_forward_pre_hook(enter) for m in self._modules]
        hooks += [m.register_forward_hook(leave) for m in self._modules]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()
            if silent:
                found.clear()


@contextmanager
def _replayed(known: Outputs) -> Iterator[None]:
    """Return a context in which each module returns its stored outputs, call by call."""
    for module, outputs in known.items():
        rest = iter([output for output, _ in outputs])
        module.forward = lambda *_, rest=rest, **__: next(rest)
    try:
        yield
    finally:
        for module in known:
            del module.forward


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _leaves(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [leaf for item in output for leaf in _leaves(item)] if isinstance(output, list | tuple) else []


def _with_versions(output: Any) -> tuple[Any, list[int]]:
    return output, [leaf._version for leaf in _leaves(output)]


def _intact(kept: tuple[Any, list[int]]) -> bool:
    """True if nothing changed the output in place after it was stored."""
    output, versions = kept
    return [leaf._version for leaf in _leaves(output)] == versions


Forward = Callable[[Tensor], Tensor]

HEADS = ("softmax", "sigmoid")


class Forwards:
    """Computes logits (n, classes, *space) in float32 from inputs (n, channel, *space), and the mask of the case."""

    def __init__(
        self,
        network: nn.Module,
        inputs: Tensor,
        moving: Mapping[str, Tensor],
        how: Adaptation,
        *,
        forward: Forward | None = None,
        predict: Callable[[], Mask] | None = None,
        head: str | None = None,
        before_forward: Callable[[], None] | None = None,  # may raise to stop the case, e.g. when its time is up
    ) -> None:
        if head is not None and head not in HEADS:
            raise BadInput(f"head is 'softmax', 'sigmoid' or None, got '{head}'")
        self.inputs, self.head, self.classes = inputs, head or "", 0
        self._moving = moving
        self._run: Forward = forward or (lambda given: at_resolution(logits_of(network(given)), given.shape[2:]))
        self.padded: Forward = getattr(forward, "pad", lambda given: given)  # inputs as the network itself sees them
        self._own_predict = predict
        self._on_grid: bool = getattr(predict, "on_grid", True)  # whether its mask has the voxels of the inputs
        self._before = before_forward or (lambda: None)
        self._max_slices = how.max_slices
        self._prefix = FrozenPrefix(network, moving.values()) if how.cache_frozen else None
        self._kept: tuple[Tensor, list[int]] | None = None

    def chunks(self, batch: Tensor) -> list[slice]:
        """Rows of each micro-batch."""
        size = self._max_slices or len(batch)
        return [slice(first, min(first + size, len(batch))) for first in range(0, len(batch), size)]

    def logits(self, inputs: Tensor, *, where: str, rows: slice | None = None) -> Tensor:
        """Return the logits of inputs; ``rows`` are their rows in the case, whose frozen features may be stored."""
        self._before()
        known = nullcontext() if self._prefix is None or rows is None else self._prefix((rows.start, rows.stop))
        with known:
            logits = self._run(inputs)
        return check_finite(logits.float(), where)

    def prediction(self, *, where: str, keep_graph: bool) -> Prediction:
        """Predict with the current weights; the last micro-batch keeps its graph for the next update."""
        self.drop_graph()
        masks, entropies, surest = [], [], 0.0
        chunks = self.chunks(self.inputs)
        for rows in chunks:
            keep = keep_graph and rows == chunks[-1]
            with nullcontext() if keep else self._quiet():
                logits = self.logits(self.inputs[rows], where=where, rows=rows)
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
            with self._quiet():
                logits = self.logits(self.inputs[rows], where=where, rows=rows)
            masks.append(labels(logits, self.head or HEADS[logits.shape[1] == 1]))
        return _joined(masks)

    def _piped(self) -> Mask:
        assert self._own_predict is not None
        self._before()
        return self._own_predict()

    @contextmanager
    def holding(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Return a context in which the network has other weights; they are swapped, so the kept graph stays valid."""
        kept, current = self._kept, {name: tensor.data for name, tensor in self._moving.items()}
        try:
            for name, tensor in self._moving.items():
                tensor.data = values[name]
            yield
        finally:
            for name, tensor in self._moving.items():
                tensor.data = current[name]
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
            yield rows, batch[rows], self.logits(batch[rows], where=where, rows=rows if own else None)

    def drop_graph(self) -> None:
        """Drop the kept forward pass, because the weights changed."""
        self._kept = None

    def forget(self) -> None:
        """Drop the kept forward pass and the frozen features."""
        self.drop_graph()
        if self._prefix is not None:
            self._prefix.clear()

    def _stamp(self) -> list[int]:
        """Return the version of every tensor that may move; an in-place change raises it and makes the graph stale."""
        return [tensor._version for tensor in self._moving.values()]

    def _quiet(self) -> AbstractContextManager[Any]:
        """Return a context without a graph: inference mode, unless stored features are needed by a later graph."""
        return torch.inference_mode() if self._prefix is None else torch.no_grad()


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
