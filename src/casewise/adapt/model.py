"""Name the model to load: a model folder, a hub id, a factory, or a network that is in memory already."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from casewise.adapt.backbones import WHICH_NETWORK, Backbone, load_backbone
from casewise.adapt.backbones.merged import merged
from casewise.core.errors import BadInput


@dataclass(frozen=True)
class Model:
    """A model that is not loaded yet. Hashable and picklable, so that every worker process loads its own.

    Args:
        spec: Model folder (nnU-Net, Hugging Face, MONAI), hub id, or ``package.module:factory``.
        weights: Weights file for a factory or a MONAI ``network.json``.
        folds: Folds of an nnU-Net; default: all existing ones.
        checkpoint: Name of the checkpoint of an nnU-Net.
        device: ``"cpu"``, ``"cuda"`` or ``"mps"``.
        step_size: Step of nnU-Net's sliding window.
        mirroring: Average mirrored images, as nnU-Net does by default.
        trust: Let a pickled checkpoint run its code.
        trust_bundle: Let a MONAI bundle run its code.
        trust_architectures: Classes that a model folder may name.
        merge: Classes to merge or rename, such as ``"disc=rim+cup"``.

    Example:
        >>> Model("casewise.adapt.networks:phantom_cardiac").device
        'cpu'
    """

    spec: str = ""
    weights: Path | None = None
    folds: tuple[int | str, ...] | None = None
    checkpoint: str = "checkpoint_final.pth"
    device: str = "cpu"
    step_size: float = 0.5
    mirroring: bool = True
    trust: bool = False
    trust_bundle: bool = False
    trust_architectures: tuple[str, ...] = ()
    merge: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.spec, Path):
            object.__setattr__(self, "spec", str(self.spec))
        if isinstance(self.weights, str):
            object.__setattr__(self, "weights", Path(self.weights))
        if self.spec == "":
            raise BadInput(f"a Model needs a folder, a hub id or package.module:factory; {WHICH_NETWORK}")
        if not isinstance(self.spec, str):
            raise BadInput(
                f"a Model must name a folder, a hub id or package.module:factory, got {type(self.spec).__name__}; pass "
                "a network itself to guard, fit or Deployment"
            )

    def load(self) -> Backbone:
        """Load the model; the same object each time in one process."""
        return _loaded(self)


@functools.lru_cache(maxsize=1)
def _loaded(model: Model) -> Backbone:
    options = {one.name: getattr(model, one.name) for one in fields(model) if one.name not in ("spec", "merge")}
    return merged(load_backbone(model.spec, **options), model.merge)


def loaded(model: Model | Backbone) -> Backbone:
    """Return the backbone of a model: the same object each time in one process."""
    return _loaded(model) if isinstance(model, Model) else model


def forget_loaded() -> None:
    """Forget the loaded model, so that the next call of :meth:`Model.load` loads it again."""
    _loaded.cache_clear()


def as_model(model: Any) -> Model | Backbone:
    """Return a model that can be deployed.

    Args:
        model: A :class:`Model`, a backbone, an ``nn.Module`` that returns logits, a folder, or a hub id.

    Raises:
        BadInput: If it is something else.
    """
    if isinstance(model, Model):
        return model
    if isinstance(model, (str, Path)):
        return Model(str(model))
    if isinstance(model, nn.Module):
        from casewise.adapt.backbones.module import as_backbone

        return as_backbone(model)
    if isinstance(model, Backbone):
        return model
    got = f"{model.__name__}; call it to get the network" if callable(model) else type(model).__name__
    raise BadInput(f"a model must be an nn.Module, folder, hub id, casewise.Model or backbone, got {got}")


def device_of(asked: str | None) -> str:
    """Return the given device; without one, the GPU if there is one, else the CPU."""
    import torch

    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def nnunet_folder(dataset: str, configuration: str, plans: str, trainer: str, environment: Mapping[str, str]) -> Path:
    """Find ``nnUNet_results/DatasetXXX_Name/TRAINER__PLANS__CONFIG`` from nnU-Net's own flags."""
    root = environment.get("nnUNet_results")
    if not root:
        raise BadInput("-d needs the environment variable nnUNet_results; set it, or give the model folder with -m")
    pattern = f"Dataset{int(dataset):03d}_*" if dataset.isdigit() else dataset
    found = sorted(Path(root).glob(f"{pattern}/{trainer}__{plans}__{configuration}"))
    if len(found) != 1:
        raise BadInput(f"{pattern}/{trainer}__{plans}__{configuration} names {len(found)} folders in {root}; use -m")
    return found[0]
