"""Read weights without running code: safetensors if available, else the weights-only reader of torch.

A ``.pth`` file is a pickle, and loading a pickle can run code. It is read with ``weights_only=True`` and a short
allow-list (the NumPy scalars that nnU-Net stores with its weights). Any other pickle is refused, unless the user passes
``trust=True``, which the run writes into its audit log.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from casewise.core.durable import file_sha256, replacing
from casewise.core.errors import BadInput, CasewiseWarning, Refused, UnsafeInput, in_one_line
from casewise.core.formats import json_text, parsed_json
from casewise.core.text import pluralize

SAFE_SINCE = (2, 10)  # CVE-2026-24747 in the weights-only reader was fixed here
USABLE_SINCE = (2, 6)  # CVE-2025-32434 was fixed here
_NUMPY_NUMBERS = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "bool_")


def read_checkpoint(path: Path, *, trust: bool = False) -> dict[str, Any]:
    """Read a checkpoint; a ``.safetensors`` file of the same name is used instead of the pickle."""
    twin = path.with_suffix(".safetensors")
    if twin.is_file():
        _check_not_older(twin, path)
        return _read_safetensors(twin)
    if not path.is_file():
        raise BadInput(f"there is no checkpoint {path}; name one that exists")
    return _read_pickle(path, trust=trust)


def _read_pickle(path: Path, *, trust: bool) -> dict[str, Any]:
    if not path.stat().st_size:
        raise BadInput(f"the checkpoint {path} is empty; copy it again")
    contents = _read_trusted(path) if trust else _read_weights_only(path)
    if not isinstance(contents, dict):
        raise BadInput(f"{path.name} holds a {type(contents).__name__}; it must be a dict of weights")
    return contents


def _check_not_older(twin: Path, path: Path) -> None:
    """Refuse a converted file whose original changed later, because the older weights would be used silently.

    A file that casewise converted stores the hash of its original; other files are compared by modification time.
    """
    if path == twin or not path.is_file():
        return
    made_from = _facts(twin).get("made_from_sha256")
    if made_from is None and twin.stat().st_mtime < path.stat().st_mtime:
        raise Refused(
            f"{path.name} is newer than {twin.name}, which casewise inspect --convert did not write, and it is not "
            f"clear which one to load; move {twin.name} away to use {path.name}, or {path.name} away to use {twin.name}"
        )
    if made_from is not None and made_from != file_sha256(path):
        raise Refused(
            f"{path.name} changed after {twin.name} was made from it, and it is not clear which one to load; run "
            f"casewise inspect --convert {path} again, or remove one of the two"
        )


def _facts(path: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path.name} is not a safetensors file ({error}); copy or convert it again") from error


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    facts = _facts(path)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    try:
        aliases = parsed_json(facts.get("aliases", "{}"))
        tensors.update({name: tensors[kept] for name, kept in aliases.items()})
        if "checkpoint" not in facts:
            return dict(tensors)
        return {**parsed_json(facts["checkpoint"]), "network_weights": tensors}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        own = "made_from_sha256" in facts
        fix = "convert the checkpoint again" if own else "save it without the metadata 'aliases' and 'checkpoint'"
        raise BadInput(f"the metadata of {path.name} are damaged ({error}); {fix}") from error


def _read_weights_only(path: Path) -> Any:
    _check_torch_version()
    try:
        with torch.serialization.safe_globals(_numpy_scalars()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafeInput(
            f"{path.name} runs code when it is loaded ({_what(error)}); ask its author for safetensors, "
            f"or pass --trust checkpoint if you trust its author to run code on your machine"
        ) from error
    except Exception as error:  # a broken pickle can raise any exception
        raise BadInput(f"{path.name} is not a readable checkpoint: {in_one_line(error)}; copy it again") from error


def _what(error: Exception) -> str:
    text = str(error)
    start = text.find("GLOBAL ")
    return text[start:].split(" was not")[0] if start >= 0 else "its pickle is not plain weights"


def _check_torch_version() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < USABLE_SINCE:
        raise UnsafeInput(f"torch {torch.__version__} runs code from weights-only files (CVE-2025-32434); update it")
    if version < SAFE_SINCE:
        warnings.warn(
            f"torch {torch.__version__} has a known flaw in its weights-only reader (CVE-2026-24747); "
            f"update to {'.'.join(map(str, SAFE_SINCE))} or convert the checkpoint to safetensors",
            CasewiseWarning,
            stacklevel=2,
        )


def _numpy_scalars() -> list[Any]:
    """Return the allow-list: NumPy's scalar constructor under its old and new name, dtype, and the number types."""
    scalar = np.float32(0).__reduce__()[0]
    names = [(scalar, "numpy.core.multiarray.scalar"), (scalar, "numpy._core.multiarray.scalar")]
    dtypes = {type(np.dtype(getattr(np, name))) for name in _NUMPY_NUMBERS}
    return [*names, np.dtype, *sorted(dtypes, key=str)]


def _read_trusted(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise BadInput(f"{path.name} is not a readable checkpoint: {in_one_line(error)}; copy it again") from error


def write_safetensors(
    path: Path, weights: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None, *, made_from: Path | None = None
) -> None:
    """Write weights as safetensors, atomically; a tensor with several names is stored once.

    The metadata hold ``facts`` as JSON and the hash of the file ``made_from``.
    """
    from safetensors.torch import save_file

    unique, aliases = _without_twins(weights)
    metadata = {"aliases": json_text(aliases)}
    if made_from is not None:
        metadata["made_from_sha256"] = file_sha256(made_from)
    if facts is not None:
        metadata["checkpoint"] = json_text(facts, sort_keys=True)
    with replacing(path) as temporary:
        save_file(unique, temporary, metadata=metadata)


def _without_twins(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in weights.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
        else:
            seen[key] = name
            unique[name] = tensor.detach().clone().contiguous()
    return unique, aliases


def weights_of(contents: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state dict of a checkpoint (under any of the usual keys)."""
    for key in ("network_weights", "state_dict", "model_state_dict", "model"):
        if isinstance(contents.get(key), Mapping):
            contents = contents[key]
            break
    wrong = [name for name, value in contents.items() if not isinstance(value, Tensor)]
    if wrong or not contents:
        raise BadInput(f"a state dict must hold only tensors, found {wrong[:3]}; name the file with the bare weights")
    return dict(contents)


def load_weights(network: nn.Module, path: Path, *, trust: bool = False) -> None:
    """Load the weights of a checkpoint into a network; all names must match, at most behind one common prefix."""
    weights = weights_of(read_checkpoint(path, trust=trust))
    wanted = network.state_dict()
    first = next(iter(wanted), "")
    for prefix in [name.removesuffix(first) for name in weights if name.endswith(f".{first}")]:
        if weights.keys() == {prefix + name for name in wanted}:  # such as "model." or "net." of PyTorch Lightning
            weights = {name: weights[prefix + name] for name in wanted}
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        both = wanted.keys() & weights.keys()
        groups = {
            "missing in the file": wanted.keys() - weights.keys(),
            "unknown to the network": weights.keys() - wanted.keys(),
            "of another shape": {name for name in both if wanted[name].shape != weights[name].shape},
        }
        said = [f"{pluralize(len(one), 'weight')} {what}, such as {min(one)}" for what, one in groups.items() if one]
        raise BadInput(f"{path.name} does not match the network: {'; '.join(said)}") from error


def convert_checkpoint(path: Path, *, trust: bool = False) -> Path:
    """Write ``path`` as safetensors beside it, with the metadata that nnU-Net needs; without optimizer state."""
    target = path.with_suffix(".safetensors")
    if path == target:
        raise BadInput(f"{path.name} is safetensors already; name a .pth file")
    if not path.is_file():
        raise BadInput(f"there is no checkpoint {path}; name one that exists")
    if target.exists() and "made_from_sha256" not in _facts(target):
        raise BadInput(f"casewise inspect --convert did not write {target.name} beside {path.name}; move one away")
    contents = _read_pickle(path, trust=trust)
    facts = None
    if "network_weights" in contents:
        facts = {
            "trainer_name": contents["trainer_name"],
            "init_args": {"configuration": contents["init_args"]["configuration"]},
            "inference_allowed_mirroring_axes": contents.get("inference_allowed_mirroring_axes"),
        }
    write_safetensors(target, weights_of(contents), facts, made_from=path)
    return target
