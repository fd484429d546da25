"""Check the class names in a model folder before nnU-Net imports them.

nnU-Net imports the dotted names of ``plans.json`` and calls them with arguments of the same file, so a plans file can
run code. Every name is checked against three lists first: the classes of ``dynamic_network_architectures`` and of
``torch.nn``, the classes that installed packages register (entry points of the group ``casewise.architectures``), and
the names that the user typed (``--trust package.module.Class``).
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import nn

from casewise.core.errors import BadInput, UnsafeInput

GROUP = "casewise.architectures"
_LIBRARY = "dynamic_network_architectures"
_IMPORTED = ("conv_op", "norm_op", "dropout_op", "nonlin", "pool_op", "block", "stem", "encoder", "decoder")
"""Arguments that trainers look up by name even if the plans do not list them."""


def read_model_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a model folder; an empty or broken file raises BadInput."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is not readable JSON ({error}); copy the model folder again") from error
    if not isinstance(plain, dict):
        raise BadInput(f"{path} must have a JSON object, got {type(plain).__name__}; copy the model folder again")
    return plain


def check_nnunet_names(
    plans: Mapping[str, Any], dataset: Mapping[str, Any], *, trainer: object, trusted: Collection[str] = ()
) -> None:
    """Refuse a model folder whose plans, dataset.json or checkpoint name code that is not on the lists."""
    for named, configuration in _mappings(plans.get("configurations"), "configurations of plans.json").items():
        where = f"configuration {named} of plans.json"
        _mappings(configuration, where)
        if "architecture" in configuration:
            _check_architecture(_mappings(configuration["architecture"], where), where, trusted)
        _check_own(configuration.get("UNet_class_name"), "UNet_class_name", where, "")
        for key, home, base in _OWN:
            if key in configuration:
                for name in configuration[key] if isinstance(configuration[key], list) else [configuration[key]]:
                    _check_own(name, key, where, home, base)
    _check_own(plans.get("image_reader_writer"), "image_reader_writer", "plans.json", "imageio", "BaseReaderWriter")
    _check_own(plans.get("label_manager"), "label_manager", "plans.json", "utilities.label_handling", "LabelManager")
    _check_own(plans.get("experiment_planner_used"), "experiment_planner_used", "plans.json", "")
    overwritten = dataset.get("overwrite_image_reader_writer")
    if overwritten not in (None, "None"):
        _check_own(overwritten, "overwrite_image_reader_writer", "dataset.json", "imageio", "BaseReaderWriter")
    _check_own(trainer, "trainer_name", "the checkpoint", "")


_OWN = (
    ("preprocessor_name", "preprocessing.preprocessors", "DefaultPreprocessor"),
    ("normalization_schemes", "preprocessing.normalization", "ImageNormalization"),
    ("resampling_fn_data", "preprocessing.resampling", None),
    ("resampling_fn_seg", "preprocessing.resampling", None),
    ("resampling_fn_probabilities", "preprocessing.resampling", None),
)
"""Key of a configuration, the part of nnU-Net that is searched for it, and the required base class."""


def _check_architecture(plain: Mapping[str, Any], where: str, trusted: Collection[str]) -> None:
    _check_class(plain.get("network_class_name"), f"network_class_name in {where}", trusted)
    arguments = _mappings(plain.get("arch_kwargs", {}), where)
    listed = plain.get("_kw_requires_import", ())
    if not isinstance(listed, list | tuple) or not all(isinstance(key, str) and key in arguments for key in listed):
        raise BadInput(
            f"_kw_requires_import in {where} must list names of arch_kwargs: {str(listed)[:100]}; restore it"
        )
    imported = {*_IMPORTED, *listed}
    for key, value in arguments.items():
        if isinstance(value, str) and (key in imported or "." in value):
            _check_class(value, f"{key} in {where}", trusted, parts=True)


def _check_class(name: object, where: str, trusted: Collection[str], *, parts: bool = False) -> None:
    if isinstance(name, str) and (name in trusted or name in _offered() or name in _of_library(parts)):
        return
    if parts and isinstance(name, str) and _of_torch(name):
        return
    raise UnsafeInput(
        f"{where} names {str(name)[:100]!r}, which is neither a class of {_LIBRARY}{' or torch.nn' if parts else ''} "
        f"nor offered by an installed package (entry point group {GROUP}); building it would run code that the model "
        f"folder chose; pass --trust {str(name)[:100]} if you know it and would run it"
    )


def _offered() -> set[str]:
    """Return the names that installed packages register: ``mynet = "mypackage.nets:MyNet"`` is mypackage.nets.MyNet."""
    return {point.value.replace(":", ".") for point in metadata.entry_points(group=GROUP)}


def _of_library(parts: bool) -> set[str]:
    """Return all names of networks (with ``parts``, of building blocks) of the library.

    nnU-Net still finds a class under its old address if it moved between files of the library.
    """
    try:
        home = importlib.import_module(f"{_LIBRARY}.architectures")
        blocks = importlib.import_module(f"{_LIBRARY}.building_blocks") if parts else home
    except ImportError:
        return set()
    networks = {**dict(_classes(home)), **dict(_classes(blocks))}
    moved = {
        f"{_LIBRARY}.architectures.{file}.{address.rpartition('.')[2]}"
        for address in networks
        for file in ("unet", "residual_unet", "resnet", "vgg", "primus", "abstract_arch")
    }
    return {*networks, *moved}


def _classes(package: Any) -> Iterator[tuple[str, type]]:
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        try:
            module = importlib.import_module(found.name)
        except ImportError:  # needs a package that is not installed, such as timm; its classes cannot be built
            continue
        for name, value in vars(module).items():
            if inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__.startswith(_LIBRARY):
                yield f"{found.name}.{name}", value


def _of_torch(name: str) -> bool:
    """True for a layer of torch, as ``torch.nn.Name`` or ``torch.nn.modules.file.Name``."""
    address, _, last = name.rpartition(".")
    found = getattr(nn, last, None)
    if not inspect.isclass(found) or not issubclass(found, nn.Module):
        return False
    return address == "torch.nn" or name == f"{found.__module__}.{found.__qualname__}"


def _check_own(name: object, key: str, where: str, home: str, base: str | None = None) -> None:
    """Refuse a name that nnU-Net does not define itself; nnU-Net's search returns any object of a module.

    With ``base``, the name must be a subclass of it; without, a function of that part of nnU-Net.
    """
    if name is None:
        return
    if not isinstance(name, str) or not name.isidentifier():
        raise UnsafeInput(
            f"{key} in {where} must be a plain name, got {str(name)[:100]!r}; copy the model folder again"
        )
    if not home:
        return
    from nnunetv2.utilities.find_class_by_name import recursive_find_python_class

    package = importlib.import_module(f"nnunetv2.{home}")
    found = recursive_find_python_class(package.__path__[0], name, package.__name__)
    if found is None:
        raise BadInput(
            f"{key} in {where} names {name!r}, which this nnU-Net does not have; install the package that defines it"
        )
    inside = str(getattr(found, "__module__", "")).startswith(f"nnunetv2.{home}.")
    if base is not None:
        fits = inspect.isclass(found) and base in {parent.__name__ for parent in found.__mro__}
    else:
        fits = inspect.isfunction(found) and inside and not found.__module__.endswith(".utils")
    if not fits:
        raise UnsafeInput(f"{key} in {where} names {name!r}, which is not a {base or 'function of ' + home} of nnU-Net")


def _mappings(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadInput(f"{where} must be a JSON object, got {type(value).__name__}; copy the model folder again")
    return value
