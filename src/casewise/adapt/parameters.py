"""Select the parameters that updates change, and the statistics that BatchNorm layers use.

Parameters are selected by a word (``all-norm``, ``decoder-norm``, ``encoder-norm``, ``all``) or by names and patterns
such as ``"encoder.stages.0.*"``, several with commas. Normalization layers are found by type, not by name.

BatchNorm has two modes. ``source``: the running statistics of training, so that M0 and M_k differ by the update alone.
``batch``: mean and variance of the case, with gradients through them (the published TENT). Other layers normalize each
sample.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from casewise.core.errors import NothingToAdapt

Selection = str | Sequence[str]

_NORMS: tuple[type[nn.Module], ...] = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_NORM_NAME = re.compile(r"(Batch|Instance|Group|Layer|RMS)Norm")
_DECODER = re.compile(
    r"(decod\w*|up\d*|ups|up_\w+|upcat\w*|upsampl\w*|\w*_?heads?|classifier|seg_?layers?|out|outc|output\w*|final\w*)",
    re.IGNORECASE,
)


def norm_layers(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Normalization layers by name: PyTorch's own, and others whose class is called so, such as ``LayerNorm2d``."""
    for name, module in network.named_modules():
        if isinstance(module, _NORMS) or (_NORM_NAME.search(type(module).__name__) and not list(module.children())):
            yield name, module


def in_decoder(name: str) -> bool:
    """True if a part of a module's path is called decoder, up path or head."""
    return any(_DECODER.fullmatch(part) for part in name.split("."))


def select(network: nn.Module, selection: Selection = "all-norm") -> dict[str, nn.Parameter]:
    """Return the selected parameters by name, each once; raise NothingToAdapt if there are none."""
    named = dict(network.named_parameters())
    if selection == "all":
        chosen = set(named)
    elif selection in ("all-norm", "decoder-norm", "encoder-norm"):
        chosen = _norm_parameters(network, str(selection))
    else:
        chosen = _matching(named, selection)
    found = {name: parameter for name, parameter in named.items() if name in chosen}
    if not found:
        raise NothingToAdapt(_what_was_seen(network, selection))
    return found


def _norm_parameters(network: nn.Module, selection: str) -> set[str]:
    layers = list(norm_layers(network))
    if selection != "all-norm":
        if not any(in_decoder(name) for name, _ in network.named_modules()):
            raise NothingToAdapt(
                f"no module of {type(network).__name__} is called a decoder, an up path or a head, so '{selection}' "
                "cannot be found by name; pass patterns of parameter names"
            )
        layers = [(name, layer) for name, layer in layers if in_decoder(name) == (selection == "decoder-norm")]
    ids = {id(parameter) for _, layer in layers for parameter in layer.parameters(recurse=False)}
    return {name for name, parameter in network.named_parameters() if id(parameter) in ids}


def _matching(named: dict[str, nn.Parameter], selection: Selection) -> set[str]:
    patterns = [part.strip() for part in selection.split(",")] if isinstance(selection, str) else list(selection)
    return {name for name in named if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}


def _what_was_seen(network: nn.Module, selection: Selection) -> str:
    seen = [f"{name or 'the network itself'} ({_kind(layer)})" for name, layer in norm_layers(network)]
    listed = ", ".join(seen[:12]) + (f" and {len(seen) - 12} more" if len(seen) > 12 else "")
    named = selection if isinstance(selection, str) else ", ".join(selection)
    return (
        f"'{named}' selects no parameter of {type(network).__name__}; normalization layers seen: {listed or 'none'}; "
        "pass parameters='all', names or patterns"
    )


def _kind(layer: nn.Module) -> str:
    affine = any(True for _ in layer.parameters(recurse=False))
    return type(layer).__name__ + ("" if affine else ", affine=False: it has no scale and shift")


def depends_on_batch(network: nn.Module, mode: str) -> bool:
    """True if the output of a sample depends on the rest of its batch; then micro-batches change the update."""
    layers = [layer for layer in network.modules() if isinstance(layer, _BatchNorm)]
    return any(mode != "source" or layer.running_mean is None for layer in layers)


def use_batch_statistics(network: nn.Module) -> None:
    """Let every BatchNorm layer use mean and variance of the batch, and keep its running ones."""
    for layer in _with_statistics(network):
        layer.forward = _batch(layer)  # type: ignore[method-assign, assignment]


def _with_statistics(network: nn.Module) -> list[_BatchNorm]:
    return [m for m in network.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


@contextmanager
def fast_norms(network: nn.Module) -> Iterator[None]:
    """Return a context in which InstanceNorm runs as GroupNorm with one channel per group: equal up to rounding.

    On CPU that takes 8 to 18 % off a forward. A layer whose forward is not torch's own, that uses running statistics,
    or that sees another memory format or device runs as it is.
    """
    layers = [m for m in network.modules() if isinstance(m, _InstanceNorm) and not m.track_running_stats]
    plain = [m for m in layers if type(m).forward is _InstanceNorm.forward and "forward" not in m.__dict__]
    try:
        for layer in plain:
            layer.__dict__["forward"] = _grouped_where_faster(layer)
        yield
    finally:
        for layer in plain:
            layer.__dict__.pop("forward", None)


def _grouped_where_faster(layer: _InstanceNorm) -> Callable[[Tensor], Tensor]:
    own = layer.forward

    def forward(inputs: Tensor) -> Tensor:
        batched = inputs.ndim != layer._get_no_batch_dim()  # type: ignore[no-untyped-call]
        if not (batched and inputs.device.type == "cpu" and inputs.is_contiguous()):
            return own(inputs)
        return functional.group_norm(inputs, inputs.shape[1], layer.weight, layer.bias, layer.eps)

    return forward


def _batch(layer: _BatchNorm) -> Callable[[Tensor], Tensor]:
    def forward(inputs: Tensor) -> Tensor:
        return functional.batch_norm(inputs, None, None, layer.weight, layer.bias, training=True, eps=layer.eps)

    return forward
