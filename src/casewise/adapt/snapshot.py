"""A network on loan comes back exactly as it was found.

``restored(network)`` remembers the structure of every module (hooks, modes, buffers, replaced methods), every
``requires_grad`` and ``.grad``, the state of the random generators, and the values of the tensors that may change; on
the way out, also after an exception or a KeyboardInterrupt, it puts them back. Nothing else is copied.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from casewise.core.errors import Refused


def fingerprint(network: nn.Module) -> str:
    """sha256 over the names, types, shapes and bytes of every unique parameter and buffer."""
    digest = hashlib.sha256()
    for name, tensor in _tensors(network).items():
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(plain.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def restored(network: nn.Module, changing: Collection[str] | None = None) -> Iterator[None]:
    """Give the network back bit-identical. ``changing`` names the parameters that may move; None means any of them.

    Buffers are always saved (they are small). A parameter outside ``changing`` that moved in place is an error that
    names it: it cannot be given back.
    """
    tensors = _tensors(network)
    buffers = {name for name, _ in network.named_buffers()}
    kept = {
        name: t.detach().clone()
        for name, t in tensors.items()
        if changing is None or name in changing or name in buffers
    }
    found = {name: (t, t.data, t.requires_grad, t.grad, t._version) for name, t in tensors.items()}
    structure = [_Structure(module) for module in network.modules()]
    with _random_state():
        try:
            yield
        finally:
            for part in structure:
                part.restore()
            touched = _give_back(found, kept)
    if touched:
        raise Refused(
            f"the objective moved {', '.join(touched[:3])}, which were not selected, so they cannot be given back; "
            "select them (parameters='all') and load the network again"
        )


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def _give_back(found: dict[str, Any], kept: dict[str, Tensor]) -> list[str]:
    touched = []
    with torch.no_grad():
        for name, (tensor, data, requires_grad, grad, version) in found.items():
            moved = tensor._version != version
            tensor.data = data
            if name in kept:
                tensor.copy_(kept[name])
            elif moved:
                touched.append(name)
            if tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
            tensor.grad = grad
    return touched


class _Structure:
    """Everything in a module's ``__dict__``, dictionaries such as hooks and buffers one level deep."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.plain = dict(module.__dict__)
        self.nested = [(value, value.copy()) for value in self.plain.values() if isinstance(value, dict)]

    def restore(self) -> None:
        for value, content in self.nested:
            if list(value) != list(content) or any(value[key] is not content[key] for key in content):
                value.clear()
                value.update(content)
        self.module.__dict__.clear()
        self.module.__dict__.update(self.plain)


@contextmanager
def _random_state() -> Iterator[None]:
    """Torch (CPU and, where in use, CUDA), NumPy and Python generators as they were."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)
