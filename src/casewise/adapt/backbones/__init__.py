"""Backbones: how a file becomes a network's input, and how its logits become a mask on the file's own grid.

``load_backbone`` takes what a user has: an nnU-Net model folder, a Hugging Face directory or hub id, a folder with a
MONAI ``network.json``, a MONAI bundle (code: only with trust), or ``package.module:factory`` for anything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

from casewise.core.brief import counted
from casewise.core.errors import BadInput
from casewise.core.records import Case, Mask
from casewise.data.folders import CaseFiles

Invert = Callable[[Tensor], Tensor]
"""Takes maps (n, classes, *space) that were predicted on transformed inputs back to the geometry of the case."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A backbone's whole way from a case to a mask, for inputs that were transformed: forward passes only.

    Probabilities are (n, classes, *space) on the grid of the mask, float32, with the current weights.
    """

    whole: Tensor  # (n, channel, *space): the prepared case, before windows and padding
    read: Callable[[Tensor, Invert], Tensor]  # (transformed whole, how logits are taken back) -> probabilities
    source: Callable[[], tuple[Mask, Tensor]]  # M0 as the backbone predicts it, and its probabilities: one pass
    mask: Callable[[Tensor], Mask]  # the mask of probabilities
    network: nn.Module  # what runs in between
    unmirrored: Callable[[Tensor, Invert], Tensor] | None = None  # read without averaging mirror images; None: as read
    rows_alone: bool = False  # whether every row of n is predicted for itself, so that rows may be read in parts


@dataclass(frozen=True, eq=False)
class OwnPrediction:
    """A mask from a backbone's own pipeline, which may cut and turn a case before the network sees it."""

    run: Callable[[], Mask]
    on_grid: bool = True  # whether the inputs of an episode hold the voxels of that mask, one to one

    def __call__(self) -> Mask:
        return self.run()

    @classmethod
    def instead(cls, of: Callable[[], Mask] | None, run: Callable[[], Mask]) -> OwnPrediction:
        """Another way to the mask of a case, on the grid that ``of`` has."""
        return cls(run, getattr(of, "on_grid", True))


@dataclass(frozen=True, eq=False)
class Prepared:
    """One case as an episode wants it.

    Without ``forward`` the network itself gives logits at the resolution of the mask. Without ``predict`` the mask is
    the argmax of the logits; with it, the mask comes from the backbone's own full pipeline with the current weights
    (an :class:`OwnPrediction` where that pipeline may change the grid).
    """

    inputs: Tensor  # (n, channel, *space)
    forward: Callable[[Tensor], Tensor] | None = None
    predict: Callable[[], Mask] | None = None
    pipeline: Pipeline | None = None  # what views and members are read through


@dataclass(frozen=True, eq=False)
class Reading:
    """A case that was read, and what its writer needs to put a mask where the image lay."""

    case: Case
    place: Any


@dataclass(frozen=True)
class Expectation:
    """What a model saw in training, as far as its folder says: the input contract."""

    channels: int | None = None
    spacing_mm: tuple[float, ...] | None = None  # median, in the order of the case's axes
    intensity: Mapping[int, Mapping[str, float]] = field(default_factory=dict)  # by channel: percentiles, mean, std
    absolute: tuple[bool, ...] = ()  # by channel: whether the normalization relies on absolute values (CT)
    reorients: bool = False  # whether the reader turns every image to one orientation by itself


@runtime_checkable
class Backbone(Protocol):
    """A network together with its way in and its way out."""

    @property
    def network(self) -> nn.Module:
        """The network that is adapted."""
        ...

    @property
    def name(self) -> str:
        """What to call it in a report."""
        ...

    @property
    def fingerprint(self) -> str:
        """sha256 of the source weights."""
        ...

    @property
    def loader(self) -> str:
        """How images become inputs; part of a policy's binding."""
        ...

    @property
    def classes(self) -> int:
        """Channels of the logits."""
        ...

    @property
    def head(self) -> str:
        """ "softmax" or "sigmoid"."""
        ...

    @property
    def labels(self) -> Mapping[int, str]:
        """Names of the mask's values."""
        ...

    @property
    def ignore(self) -> int | None:
        """Value of the label that is not scored."""
        ...

    @property
    def ending(self) -> str | None:
        """The only file ending that it reads and writes; None for any."""
        ...

    @property
    def expects(self) -> Expectation:
        """The input contract."""
        ...

    def read(self, files: CaseFiles) -> Reading:
        """Open the image files of a case."""
        ...

    def read_label(self, path: Path) -> Mask:
        """Open a label in the axes order of the masks."""
        ...

    def prepare(self, case: Case) -> Prepared:
        """Turn an image into inputs, a differentiable forward and, where there is one, the full pipeline."""
        ...

    def write(self, mask: Mask, reading: Reading, path: Path) -> None:
        """Write a mask in the geometry of the image that was read."""
        ...


def load_backbone(
    spec: str,
    *,
    weights: Path | None = None,
    fold: Sequence[int | str] | None = None,
    checkpoint: str = "checkpoint_final.pth",
    device: str = "cpu",
    step_size: float = 0.5,
    mirroring: bool = True,
    trust: bool = False,
    trust_bundle: bool = False,
    trust_architectures: Sequence[str] = (),
) -> Backbone:
    """Load what ``spec`` names; options that a kind of backbone does not have are refused, not ignored."""
    folder = Path(spec)
    if (folder / "plans.json").is_file() and (folder / "dataset.json").is_file():
        from casewise.adapt.backbones.nnunet import NnUNet

        return NnUNet.load(
            folder,
            folds=fold,
            checkpoint=checkpoint,
            device=device,
            step_size=step_size,
            mirroring=mirroring,
            trust=trust,
            trust_architectures=trust_architectures,
        )
    if (folder / "network.json").is_file():
        from casewise.adapt.backbones.monai import load_network_folder

        return load_network_folder(folder, weights=weights, device=device, trust=trust)
    if (folder / "configs" / "metadata.json").is_file():
        from casewise.adapt.backbones.monai import load_bundle

        return load_bundle(folder, device=device, trust_bundle=trust_bundle, trust=trust)
    if (folder / "config.json").is_file() or (not folder.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", spec)):
        from casewise.adapt.backbones.huggingface import HuggingFace

        return HuggingFace.load(spec, device=device, trust=trust)
    if re.fullmatch(r"[\w.]+:\w+", spec):
        from casewise.adapt.backbones.module import load_factory

        return load_factory(spec, weights=weights, device=device, trust=trust)
    raise BadInput(_unknown(spec, folder))


def _unknown(spec: str, folder: Path) -> str:
    if folder.is_dir():
        return (
            f"{spec} is no model folder: nnU-Net has plans.json and dataset.json, Hugging Face config.json, "
            f"a MONAI network network.json, a bundle configs/metadata.json; it holds {_contents(folder)}"
        )
    return f"{spec!r} is neither a folder that exists, nor a hub id org/name, nor package.module:factory"


def _contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())[:6]


def check_image(case: Case, *, channels: int | None = None) -> None:
    """Refuse images that no network should see: NaN, infinite, empty, or with another number of channels."""
    if case.image.size == 0:
        raise BadInput(f"case {case.id} has no voxels; its image has shape {case.image.shape}")
    if channels is not None and case.image.shape[0] != channels:
        raise BadInput(f"the model takes {counted(channels, 'channel')}, case {case.id} has {case.image.shape[0]}")
    if not np.isfinite(case.image).all():
        raise BadInput(f"case {case.id} holds NaN or infinite values; repair the image")
