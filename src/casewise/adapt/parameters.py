"""Which parameters may move: the scales and shifts of normalization layers, or what is named.

``all-norm``, ``decoder-norm``, ``encoder-norm``; ``all`` for every parameter; else parameter names or patterns such as
``"encoder.stages.0.*"``, several with commas. Layers are found by type, not by name.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence

from torch import Tensor, nn
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
    """Whether a module's path passes through something called a decoder, an up path or a head."""
    return any(_DECODER.fullmatch(part) for part in name.split("."))


def select(network: nn.Module, selection: Selection = "all-norm") -> dict[str, nn.Parameter]:
    """The parameters that may move, by name, each once; NothingToAdapt where there are none."""
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


def statistics(network: nn.Module) -> dict[str, Tensor]:
    """Running means and variances of BatchNorm layers, by name; NothingToAdapt where no layer keeps any."""
    found = {
        f"{name}.{key}" if name else key: buffer
        for name, layer in norm_layers(network)
        if isinstance(layer, _BatchNorm)
        for key, buffer in layer.named_buffers(recurse=False)
        if key.startswith("running_")
    }
    if not found:
        raise NothingToAdapt(_what_was_seen(network, "running statistics of BatchNorm"))
    return found


def movable(network: nn.Module, selection: Selection, moves: str) -> dict[str, Tensor]:
    """Every tensor that an objective of this kind may move, by name (``moves`` in adapt/objective.py)."""
    if moves == "statistics":
        return statistics(network)
    if moves == "anything":
        return {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return dict(select(network, selection))


def _norm_parameters(network: nn.Module, selection: str) -> set[str]:
    layers = list(norm_layers(network))
    if selection != "all-norm":
        if not any(in_decoder(name) for name, _ in network.named_modules()):
            raise NothingToAdapt(
                f"no module of {type(network).__name__} is called a decoder, an up path or a head, so '{selection}' "
                "cannot be told from its names; pass patterns of parameter names instead"
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
    return (
        f"'{selection}' selects no parameter of {type(network).__name__}; normalization layers seen: "
        f"{listed or 'none'}; pass parameters='all', names or patterns"
    )


def _kind(layer: nn.Module) -> str:
    affine = any(True for _ in layer.parameters(recurse=False))
    return type(layer).__name__ + ("" if affine else ", affine=False: it has no scale and shift")
