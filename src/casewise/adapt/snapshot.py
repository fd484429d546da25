"""Restore a network bit by bit after an episode, whatever the objective did to it.

``restored(network)`` copies every parameter and buffer, tensors in plain attributes and lists, the structure of every
module (hooks, modes, replaced methods), ``requires_grad``, ``.grad`` and hooks of every parameter, and the state of the
random generators. At the end, also after an exception or a KeyboardInterrupt, it restores all of them. Values are
compared bit by bit, so a change through ``.data`` or a NumPy view, which torch does not count, is found too.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

from casewise.core.errors import BadInput, MovedUnselected, in_one_line


def fingerprint(network: nn.Module) -> str:
    """sha256 over the names, types, shapes and bytes of every unique parameter and buffer."""
    digest = hashlib.sha256()
    tensors = tensors_of(network)
    check_loadable({name: tensor for name, tensor in tensors.items() if nn.parameter.is_lazy(tensor)})
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(plain.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Predict in evaluation mode, so that no running statistic moves, and give every layer its own mode back."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def restored(network: nn.Module, changing: Collection[str] | None = None) -> Iterator[None]:
    """Restore the network bit by bit at the end of the block.

    Args:
        network: The network.
        changing: Names of the parameters that may move; None means that anything may change. Buffers, training modes
            and hooks may always change.

    Raises:
        MovedUnselected: If another parameter moved, a parameter or a layer was replaced by another object, or a setting
            of a layer (such as ``eps`` of a normalization) changed. Everything is restored first; the predictions are
            not valid.
    """
    tensors = tensors_of(network)
    check_loadable(tensors)
    allowed = {*tensors} if changing is None else {*changing, *(name for name, _ in network.named_buffers())}
    found = {name: _Held(tensor) for name, tensor in tensors.items()}
    structure = structure_of(network)
    replaced: list[str] = []
    try:
        with _process_state(network):
            yield
    except SystemExit as error:  # sys.exit in published code ends its case, not the run
        raise RuntimeError(in_one_line(error)) from error
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for part in structure:
                replaced += part.restore()
            moved = [name for name, held in found.items() if held.restore()]
    touched = [*(name for name in moved if name not in allowed), *(replaced if changing is not None else ())]
    if touched:
        raise MovedUnselected(
            f"the objective changed {', '.join(touched[:3])}, which were not selected; they were restored, but the "
            "predictions are not valid; select them (parameters='all'), or change only selected parameters, in place"
        )


def check_loadable(tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that cannot be adapted: those of lazy layers, and those made in inference mode."""
    lazy = [name for name, tensor in tensors.items() if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise BadInput(f"{', '.join(lazy[:3])} belong to lazy layers without a shape; run the network once on an image")
    frozen = [name for name, tensor in tensors.items() if tensor.is_inference()]
    if frozen:
        raise BadInput(
            f"{', '.join(frozen[:3])} were made inside torch.inference_mode(), so that no gradient can reach them; "
            "load the network outside of it"
        )


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by name, each once."""
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def structure_of(network: nn.Module) -> list[_Structure]:
    """Return the settings, modes, methods and layers of every module, without the values of its tensors."""
    known = {id(tensor) for tensor in tensors_of(network).values()}
    return [_Structure(name, module, known) for name, module in network.named_modules()]


@contextmanager
def structured(network: nn.Module, structure: Iterable[_Structure]) -> Iterator[None]:
    """Return a context in which the modules have an earlier structure; the present one comes back afterwards."""
    now = structure_of(network)
    try:
        for part in structure:
            part.restore()
        yield
    finally:
        for part in now:
            part.restore()


@contextmanager
def swapped(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Return a context in which these tensors have other values; the old ones come back, also after an error.

    The memory is exchanged, not overwritten, so the backward pass of an earlier forward pass stays valid.
    """
    own = {name: tensors[name].data for name in values}
    try:
        for name, value in values.items():
            tensors[name].data = value.to(own[name])
        yield
    finally:
        for name, data in own.items():
            tensors[name].data = data


class _Held:
    """A parameter or buffer: its memory, a copy of its values, its gradient, hooks and attributes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.data, self.values = tensor, tensor.data, tensor.detach().clone()
        self.requires_grad, self.grad = tensor.requires_grad, tensor.grad
        self.gradient = None if tensor.grad is None else tensor.grad.detach().clone()
        self.hooks = {name: (value := getattr(tensor, name), value and value.copy()) for name in _HOOKS}
        self.attributes = dict(tensor.__dict__)

    def restore(self) -> bool:
        """Put everything back; return True if the values had changed."""
        tensor = self.tensor
        moved = tensor.data.shape != self.values.shape or not _same_bits(tensor.data, self.values)
        elsewhere = tensor.data_ptr() != self.data.data_ptr()
        tensor.data = self.data
        if moved or (elsewhere and not _same_bits(tensor.data, self.values)):
            _put(tensor, self.values)
        if tensor.is_leaf:
            tensor.requires_grad_(self.requires_grad)
        if self.grad is not None and self.gradient is not None:
            self.grad.copy_(self.gradient)
        tensor.grad = self.grad
        for name, (value, content) in self.hooks.items():
            if value is not None and content is not None:
                _refill(value, content)
            added = getattr(tensor, name)
            if added is not value:
                added.clear()  # torch calls the hooks in this object even if the attribute was replaced
                setattr(tensor, name, value)
        _refill(tensor.__dict__, self.attributes)
        return moved


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """True if two tensors of one shape hold the same bits: NaN equals NaN, 0 differs from -0."""
    if one.dtype != other.dtype or one.device != other.device or one.layout != torch.strided:
        return False
    if one.stride() != other.stride() or one.is_complex():
        return bool(torch.equal(one, other))
    kind = _WHOLE[one.element_size()]
    return bool(torch.equal(one.view(kind), other.view(kind)))


def _put(tensor: Tensor, values: Tensor) -> None:
    """Copy values into the memory of a tensor; replace the memory where it can no longer be written."""
    try:
        tensor.copy_(values)
    except RuntimeError:
        tensor.data = values.clone()


class _Structure:
    """Everything in a module's ``__dict__``: dictionaries such as hooks and buffers, tensors in plain attributes."""

    def __init__(self, name: str, module: nn.Module, known: Collection[int]) -> None:
        self.name, self.module, self.kind = name, module, type(module)
        self.plain = dict(module.__dict__)
        self.nested = [(value, value.copy()) for value in self.plain.values() if isinstance(value, dict)]
        own = [value for name, value in self.plain.items() if name not in _OWN]
        self.loose = [(held, _copied(held)) for value in own for held in _inside(value, known)]

    def restore(self) -> list[str]:
        """Put everything back.

        Returns:
            Parts that were replaced or set and that change the output of the module: parameters, layers, settings.
        """
        changed = self._changed()
        for value, content in self.nested:
            _refill(value, content)
        self.module.__class__ = self.kind
        _refill(self.module.__dict__, self.plain)
        for held, content in self.loose:
            if isinstance(held, Tensor):
                if not _same_bits(held.data, content):
                    _put(held, content)
            elif isinstance(held, np.ndarray):
                np.copyto(held, content)
            elif isinstance(held, dict | set):
                _refill(held, content)
            else:
                held[:] = content
        return changed

    def _changed(self) -> list[str]:
        before = {id(value): content for value, content in self.nested}
        names = ["class"] if type(self.module) is not self.kind else []
        for kind in ("_parameters", "_modules"):
            there, now = before[id(self.plain[kind])], self.module.__dict__.get(kind, {})
            names += [key for key in {**there, **now} if there.get(key) is not now.get(key)]
        for key, value in self.plain.items():
            if key not in _MODES and isinstance(value, _SETTINGS):
                now = self.module.__dict__.get(key, _GONE)
                if type(now) is not type(value) or now != value:
                    names.append(key)
        return [f"{self.name}.{key}" if self.name else key for key in names]


_SETTINGS = (bool, int, float, str, tuple)
_MODES = frozenset({"training", "momentum", "track_running_stats", "_is_full_backward_hook"})
"""Settings that methods switch while they adapt; none of them changes a prediction in evaluation mode by itself."""
_GONE = object()
_OWN = frozenset(nn.Module().__dict__)  # modules, parameters, buffers and hooks are restored elsewhere


def _copied(held: Any) -> Any:
    return held.detach().clone() if isinstance(held, Tensor) else held.copy()


def _inside(value: Any, known: Collection[int], depth: int = 4) -> Iterator[Any]:
    """Yield tensors and arrays in plain attributes, the containers that hold them, and attributes of objects."""
    if isinstance(value, Tensor | np.ndarray):
        if id(value) not in known:
            yield value
    elif isinstance(value, list | dict | set | tuple) and depth:
        if not isinstance(value, tuple):
            yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _inside(item, known, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        package = type(value).__module__.partition(".")[0]
        if package in ("types", "argparse") or package not in sys.stdlib_module_names:  # no function, lock or logger
            yield from _inside(vars(value), known, depth - 1)


def seed_generators(seed: int) -> None:
    """Seed the random generators of torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _refill(held: Any, content: Any) -> None:
    if list(held) != list(content) or (
        not isinstance(held, set) and any(held[key] is not content[key] for key in held)
    ):
        held.clear()
        held.update(content)


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return os.curdir


def _keep_tiny_numbers(kept: bool) -> None:
    torch.set_flush_denormal(not kept)


def _leave(entered: Callable[[], int], leave: Callable[[], object], before: int) -> None:
    while entered() > before:
        leave()


_OPERATORS, _FUNCTIONS = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack  # modes of torch
_FLAGS = {torch.backends.mkldnn: ("enabled",), torch.backends.cudnn: ("enabled", "benchmark", "deterministic")}
_SETTINGS_OF_PROCESS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (_OPERATORS, partial(_leave, _OPERATORS, _python_dispatch._pop_mode)),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (_FUNCTIONS, partial(_leave, _FUNCTIONS, torch.overrides._pop_mode)),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    *((partial(getattr, of, name), partial(setattr, of, name)) for of, names in _FLAGS.items() for name in names),
    (np.geterr, lambda found: np.seterr(**found)),
    (_working_folder, os.chdir),
    (os.environ.copy, partial(_refill, os.environ)),
    (lambda: bool(torch.tensor(1e-40, dtype=torch.float32, device="cpu") * 1), _keep_tiny_numbers),
    *(
        (hooks.copy, partial(_refill, hooks))
        for hooks in vars(nn.modules.module).values()
        if type(hooks) is OrderedDict
    ),
)
"""How to read and to set what an objective may change for the whole process; hooks of all modules are among it."""


@contextmanager
def _process_state(network: nn.Module) -> Iterator[None]:
    """Return a context that restores settings, random generators, and functions of torch and of the layers' classes."""
    settings = [(read, write, read()) for read, write in _SETTINGS_OF_PROCESS]
    kinds = {kind for module in network.modules() for kind in type(module).__mro__}
    code = [(of, dict(vars(of))) for of in (torch, nn.functional, torch.Tensor, *kinds)]
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        for of, names in code:
            for name, value in names.items():
                if callable(value) and vars(of).get(name) is not value:
                    setattr(of, name, value)
            for name in [one for one in vars(of) if one not in names and isinstance(of, type)]:
                delattr(of, name)
        for read, write, value in settings:
            if read() != value:
                write(value)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)
