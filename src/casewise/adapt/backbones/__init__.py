"""Backbones: turn a file into the input of a network, and its logits into a mask on the grid of the file.

``load_backbone`` loads an nnU-Net model folder, a Hugging Face directory or hub id, a folder with a
MONAI ``network.json``, a MONAI bundle (code: only with trust), or ``package.module:factory`` for anything else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from casewise.adapt.logits import at_resolution, mask_of, network_logits, probabilities
from casewise.core.errors import BadInput, CasewiseError, in_one_line
from casewise.core.records import Case, Mask
from casewise.core.text import pluralize
from casewise.data.folders import CaseFiles

WHICH_NETWORK = (
    "a weights file alone does not say which network it belongs to: "
    'Model("package.module:factory", weights="unet.pth"), on the command line -m package.module:factory --weights FILE'
)

Invert = Callable[[Tensor], Tensor]
"""Maps predictions (n, classes, *space) of transformed inputs back to the geometry of the case."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The full prediction of a backbone, from a prepared case to a mask, for transformed inputs; forward passes only.

    Probabilities are (n, classes, *space) on the grid of the mask, float32, with the current weights.
    """

    whole: Tensor  # (n, channel, *space): the prepared case, before windows and padding
    read: Callable[[Tensor, Invert], Tensor]  # (transformed whole, function that maps logits back) -> probabilities
    source: Callable[[], tuple[Mask, Tensor]]  # M0 and its probabilities, from one pass
    mask: Callable[[Tensor], Mask]  # the mask of probabilities
    network: nn.Module  # the network that is run
    unmirrored: Callable[[Tensor, Invert], Tensor] | None = None  # read without mirroring; None: no difference
    rows_alone: bool = False  # True if every row of n is predicted independently, so that rows can be split


@dataclass(frozen=True, eq=False)
class OwnPrediction:
    """Predicts a mask with the pipeline of the backbone, which may crop or transpose the case first."""

    run: Callable[[], Mask]
    on_grid: bool = True  # True if the inputs of an episode have exactly the voxels of that mask

    def __call__(self) -> Mask:
        return self.run()

    @classmethod
    def instead(cls, of: Callable[[], Mask] | None, run: Callable[[], Mask]) -> OwnPrediction:
        """Return another prediction function on the grid of ``of``."""
        return cls(run, getattr(of, "on_grid", True))


@dataclass(frozen=True, eq=False)
class Prepared:
    """One case, prepared for an episode.

    Without ``forward``, the network returns logits at the resolution of the mask. Without ``predict``, the mask is the
    argmax of the logits; with it, the mask comes from the full pipeline of the backbone with the current weights
    (an :class:`OwnPrediction` if the pipeline may change the grid).
    """

    inputs: Tensor  # (n, channel, *space)
    forward: Callable[[Tensor], Tensor] | None = None
    predict: Callable[[], Mask] | None = None
    pipeline: Pipeline | None = None  # for views and members


def pipeline_of(prepared: Prepared, backbone: Backbone) -> Pipeline:
    """Return the pipeline of a prepared case.

    Raises:
        BadInput: If the backbone has its own prediction but no pipeline for views and members.
    """
    if prepared.pipeline is not None:
        return prepared.pipeline
    if prepared.forward is not None or prepared.predict is not None:
        raise BadInput(f"{backbone.name} has no pipeline for views and members; return Prepared(..., pipeline=...)")
    return logits_pipeline(backbone.network, prepared.inputs, backbone.head)


def logits_pipeline(
    network: nn.Module, whole: Tensor, head: str, logits: Callable[[Tensor], Tensor] | None = None,
    space: Sequence[int] | None = None,
) -> Pipeline:  # fmt: skip
    """Return the pipeline of a network whose resized logits are the mask.

    Args:
        network: The network.
        whole: The prepared case, (n, channel, *space).
        head: "softmax" or "sigmoid".
        logits: Function from inputs to logits at any resolution; default: the network.
        space: Grid of the mask; default: that of the inputs.
    """
    run = logits or (lambda inputs: network_logits(network, inputs))
    grid = tuple(space or whole.shape[2:])

    def read(inputs: Tensor, invert: Invert) -> Tensor:
        with torch.inference_mode():
            return probabilities(at_resolution(invert(run(inputs.clone())), grid).float(), head)

    def source() -> tuple[Mask, Tensor]:
        with torch.inference_mode():
            found = at_resolution(run(whole.clone()), grid).float()  # a copy: a network may change its inputs in place
            return mask_of(found, head), probabilities(found, head)

    def mask(shares: Tensor) -> Mask:
        return mask_of(shares if head == "softmax" else shares - 0.5, head)

    return Pipeline(whole, read, source, mask, network, rows_alone=True)


def appearance_inputs(case: Case, prepared: Prepared, source: Mask, backbone: Backbone) -> dict[str, Any]:
    """Return the arguments of :func:`casewise.judge.appearance.appearance_numbers`, the same in record and predict.

    ``inputs`` is (n, channel, *space) in float32 on the CPU: the whole case before windows and padding, if the backbone
    has a pipeline.
    """
    whole = prepared.inputs if prepared.pipeline is None else prepared.pipeline.whole
    labels = sorted(value for value in backbone.labels if value > 0)
    seen = {"image": case.image, "source": source, "labels": labels, "spacing_mm": case.spacing_mm}
    whole_array = np.asarray(whole.detach().float().cpu().numpy())
    return {"inputs": whole_array, "modality": case.modality, **seen}


@dataclass(frozen=True, eq=False)
class Reading:
    """A case that was read, with the geometry that the writer needs for its mask."""

    case: Case
    place: Any


@dataclass(frozen=True)
class Expectation:
    """Input contract: properties of the training images, as far as the model folder states them."""

    channels: int | None = None
    spacing_mm: tuple[float, ...] | None = None  # median, in the order of the case's axes
    intensity: Mapping[int, Mapping[str, float]] = field(default_factory=dict)  # by channel: percentiles, mean, std
    absolute: tuple[bool, ...] = ()  # by channel: True if normalization uses absolute values (CT)
    reorients: bool = False  # True if the reader reorients every image


@runtime_checkable
class Backbone(Protocol):
    """A network with its reader, preprocessing, prediction and writer."""

    @property
    def network(self) -> nn.Module:
        """The network that is adapted."""

    @property
    def name(self) -> str:
        """Name in reports."""

    @property
    def fingerprint(self) -> str:
        """sha256 of the source weights."""

    @property
    def loader(self) -> str:
        """Description of the preprocessing; a policy is bound to it."""

    @property
    def classes(self) -> int:
        """Number of channels of the logits."""

    @property
    def head(self) -> str:
        """ "softmax" or "sigmoid"."""

    @property
    def labels(self) -> Mapping[int, str]:
        """Names of the mask's values."""

    @property
    def ignore(self) -> int | None:
        """Value of the label that is not scored."""

    @property
    def ending(self) -> str | None:
        """The only file extension that it reads and writes; None for any."""

    @property
    def expects(self) -> Expectation:
        """The input contract."""

    def read(self, files: CaseFiles) -> Reading:
        """Read the image files of a case."""

    def read_label(self, path: Path) -> Mask:
        """Read a label in the axis order of the masks."""

    def prepare(self, case: Case) -> Prepared:
        """Turn an image into inputs, a differentiable forward pass and, if there is one, the full pipeline."""

    def write(self, mask: Mask, reading: Reading, path: Path) -> None:
        """Write a mask with the geometry of its image."""


def load_backbone(
    spec: str, *, weights: Path | None = None, folds: Sequence[int | str] | None = None,
    checkpoint: str = "checkpoint_final.pth", device: str = "cpu", step_size: float = 0.5, mirroring: bool = True,
    trust: bool = False, trust_bundle: bool = False, trust_architectures: Sequence[str] = (),
) -> Backbone:  # fmt: skip
    """Load the backbone that ``spec`` names."""
    _check_device(device)
    folder = Path(spec)
    if (folder / "plans.json").is_file() and (folder / "dataset.json").is_file():
        from casewise.adapt.backbones.nnunet import NnUNet

        try:
            return NnUNet.load(
                folder, folds=folds, checkpoint=checkpoint, device=device, step_size=step_size, mirroring=mirroring,
                trust=trust, trust_architectures=trust_architectures,
            )  # fmt: skip
        except CasewiseError:
            raise
        except Exception as error:  # nnU-Net and torch raise errors of many types
            raise BadInput(
                f"nnU-Net cannot build the network of {folder} ({in_one_line(error)}); plans.json, dataset.json and "
                "the checkpoint must be those of one trained model"
            ) from error
    if folds is not None:
        raise BadInput(f"-f (folds) names the folds of an nnU-Net, and {spec} is none; leave it out")
    if (folder / "network.json").is_file():
        from casewise.adapt.backbones.monai_bundle import load_network_folder

        return load_network_folder(folder, weights=weights, device=device, trust=trust)
    if (folder / "configs" / "metadata.json").is_file():
        from casewise.adapt.backbones.monai_bundle import load_bundle

        return load_bundle(folder, device=device, trust_bundle=trust_bundle, trust=trust)
    if (folder / "config.json").is_file() or (not folder.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", spec)):
        from casewise.adapt.backbones.huggingface import HuggingFace

        return HuggingFace.load(spec, device=device, trust=trust)
    if re.fullmatch(r"[\w.]+:\w+", spec):
        from casewise.adapt.backbones.module import load_factory

        return load_factory(spec, weights=weights, device=device, trust=trust)
    if folder.is_dir():
        raise BadInput(
            f"{spec} is not a model folder: nnU-Net has plans.json and dataset.json, Hugging Face config.json, a MONAI "
            f"network network.json, a bundle configs/metadata.json; it holds {sorted(os.listdir(folder))[:6]}"
        )
    if folder.is_file():
        raise BadInput(f"{spec} is a file; {WHICH_NETWORK}")
    raise BadInput(f"{spec!r} must be an existing folder, a hub id org/name or package.module:factory")


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device if re.fullmatch(r"cpu|mps|cuda(:[0-9]+)?", device) else "")
    except (AssertionError, RuntimeError):  # what torch raises where this machine has no such device
        own = "the device must be cpu, or a cuda, cuda:1 or mps that this machine has"
        raise BadInput(f"{own}, got {device!r:.60}") from None


def check_image(case: Case, *, channels: int | None = None) -> None:
    """Refuse images that are empty, not finite, or have another number of channels than the model."""
    if case.image.size == 0:
        raise BadInput(f"case {case.id} has no voxels; its image has shape {case.image.shape}")
    if channels is not None and case.image.shape[0] != channels:
        raise BadInput(
            f"the model takes {pluralize(channels, 'channel')}, case {case.id} has {case.image.shape[0]}: the shape of "
            f"its image is {case.image.shape}, and channels come first"
        )
    if not np.isfinite(case.image).all():
        raise BadInput(f"case {case.id} holds NaN or infinite values; repair the image")
