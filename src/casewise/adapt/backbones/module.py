"""Backbone for any ``nn.Module``: a 2-D network gets the slices of a volume as a batch, a 3-D network the volume.

``package.module:factory`` names a function without arguments that returns a network, or a :class:`Module` with
settings for intensities, padding or labels.

This file also reads and writes NIfTI volumes and images for all backbones without their own reader.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from casewise.adapt.backbones import Backbone, Expectation, Prepared, Reading, check_image, logits_pipeline
from casewise.adapt.backbones.checkpoints import load_weights
from casewise.adapt.logits import mask_of, network_logits
from casewise.adapt.snapshot import fingerprint
from casewise.core.errors import BadInput
from casewise.core.records import Case, Mask
from casewise.core.registry import Registry, from_address
from casewise.data import nifti, pictures
from casewise.data.folders import CaseFiles
from casewise.data.pairs import read_mask


def read_files(files: CaseFiles, channels: int | None = None) -> Reading:
    """Read a case: NIfTI as (channel, slices, rows, columns), pictures as (channel, rows, columns).

    A model with as many channels as the case has pictures takes one gray channel of each.
    """
    if pictures.is_picture(files.images[0]):
        read = [pictures.read_picture(path, gray=channels == len(files.images)) for path in files.images]
        return Reading(_case(files, np.concatenate(read), None), None)
    volumes = [nifti.read_volume(path) for path in files.images]
    shapes = {volume.voxels.shape for volume in volumes}
    if len(shapes) > 1:
        raise BadInput(f"the channels of case {files.id} have different shapes {sorted(shapes)}; resample them")
    image = np.stack([volume.voxels for volume in volumes]).astype(np.float32)
    return Reading(_case(files, image, volumes[0].spacing_mm), volumes[0].geometry)


def _case(files: CaseFiles, image: NDArray[Any], spacing_mm: tuple[float, ...] | None) -> Case:
    return Case(files.id, image, spacing_mm, files.group, files.cluster, files.split)


class FileBackbone:
    """Base of backbones without their own reader: NIfTI volumes and pictures."""

    network: nn.Module
    expects: Expectation

    def read(self, files: CaseFiles) -> Reading:
        """Read NIfTI or image files."""
        reading = read_files(files, self.expects.channels or next((c.in_channels for c in _convs(self.network)), None))
        check_image(reading.case, channels=self.expects.channels)
        return reading

    def read_label(self, path: Path) -> Mask:
        """Read a label as (slices, rows, columns) or (rows, columns)."""
        return read_mask(path)

    def write(self, mask: Mask, reading: Reading, path: Path) -> None:
        """Write a mask as NIfTI with the geometry of the image, or as PNG of label numbers."""
        if reading.place is None:
            pictures.write_label_picture(path, mask)
        else:
            nifti.write_mask(path, mask.reshape(reading.place.shape[::-1]), reading.place)


def zscore(image: NDArray[Any]) -> NDArray[Any]:
    """Scale each channel to mean 0 and standard deviation 1 over the whole case."""
    axes = tuple(range(1, image.ndim))
    spread = image.std(axis=axes, keepdims=True)
    return np.asarray((image - image.mean(axis=axes, keepdims=True)) / np.maximum(spread, 1e-8))


def imagenet(image: NDArray[Any]) -> NDArray[Any]:
    """Normalize RGB from 0..255 by the mean and standard deviation of ImageNet."""
    shape = (3, *[1] * (image.ndim - 1))
    mean, spread = np.array([0.485, 0.456, 0.406]).reshape(shape), np.array([0.229, 0.224, 0.225]).reshape(shape)
    return np.asarray((image / 255.0 - mean) / spread)


Scaling = Callable[[NDArray[Any]], NDArray[Any]]

INTENSITIES: dict[str, Scaling] = {
    "zscore": zscore,
    "imagenet": imagenet,
    "unit": lambda image: image / 255.0,
    "as-is": lambda image: image,
}


Inferer = Callable[[nn.Module, Tensor], Tensor]
"""(network, inputs) -> logits of the whole image, for example by a sliding window."""

CONVOLUTIONS: dict[type[nn.Module], int] = {nn.Conv2d: 2, nn.Conv3d: 3}


@dataclass(frozen=True, eq=False)
class Module(FileBackbone):
    """A network with its intensity scaling, padding and label names."""

    network: nn.Module = field(repr=False)
    classes: int
    dimensions: int  # dimensions of the convolutions: 2 or 3
    name: str = ""  # default: class of the network
    head: str = "softmax"
    intensity: str | Scaling = "zscore"  # name in INTENSITIES, or a function of the image (channel, *space)
    multiple: int = 1  # sides are padded to a multiple of this (32 for five halvings)
    labels: Mapping[int, str] = field(default_factory=dict)
    ignore: int | None = None
    ending: str | None = None
    expects: Expectation = field(default_factory=Expectation)
    window: tuple[int, ...] | None = None  # patch that updates are made on; None for the whole image
    infer: Inferer | None = None  # predicts a whole image; None: one forward pass
    device: str = "cpu"
    bare: bool = False  # made of a network alone, whose caller scales the arrays

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or type(self.network).__name__)
        if not callable(self.intensity):
            Registry("intensity", INTENSITIES)[self.intensity]
        if self.dimensions not in (2, 3):
            raise BadInput(f"dimensions must be 2 or 3, got {self.dimensions}")

    @property
    def fingerprint(self) -> str:
        """sha256 of the weights."""
        return fingerprint(self.network)

    @property
    def loader(self) -> str:
        """Description of the preprocessing."""
        own = self.intensity if isinstance(self.intensity, str) else _name_of(self.intensity)
        return f"module({self.dimensions}d, intensity={own}, multiple={self.multiple}, window={self.window})"

    def read(self, files: CaseFiles) -> Reading:
        """Read NIfTI or image files; a bare network is refused, because nothing says how files are scaled for it."""
        if self.bare:
            raise BadInput(
                "a network alone does not say how the intensities of image files are scaled; give "
                f'Module(network, classes={self.classes}, dimensions={self.dimensions}, intensity="zscore") of '
                'casewise.adapt.backbones.module, or another intensity ("unit", "imagenet", "as-is")'
            )
        return super().read(files)

    def prepare(self, case: Case) -> Prepared:
        """Scale (channel, *space) and reshape it to (n, channel, *space)."""
        check_image(case, channels=self.expects.channels)
        scaling = INTENSITIES[self.intensity] if isinstance(self.intensity, str) else self.intensity
        scaled = scaling(np.asarray(case.image, np.float32))
        whole = as_batch(scaled, self.dimensions).to(self.device)
        if self.window is not None and self.infer is not None:
            image = torch.as_tensor(np.ascontiguousarray(scaled), dtype=torch.float32)
            inputs = patches(image, self.window).to(self.device)
            pipeline = logits_pipeline(self.network, whole, self.head, self._inferred)
            return Prepared(inputs, predict=lambda: self._whole_mask(whole), pipeline=pipeline)
        padded = PaddedForward(self._logits, self.multiple)
        return Prepared(whole, forward=padded, pipeline=logits_pipeline(self.network, whole, self.head, padded))

    def _inferred(self, whole: Tensor) -> Tensor:
        assert self.infer is not None
        return self.infer(self.network, whole)

    def _logits(self, inputs: Tensor) -> Tensor:
        return network_logits(self.network, inputs, classes=self.classes)

    def _whole_mask(self, whole: Tensor) -> Mask:
        with torch.inference_mode():
            return mask_of(self._inferred(whole), self.head)


@dataclass(frozen=True, eq=False)
class PaddedForward:
    """Computes logits of inputs of any size: pads the inputs, runs the network, crops the logits.

    Inputs and logits have the same grid, so objectives can mirror and rotate both.
    """

    logits: Callable[[Tensor], Tensor]
    multiple: int

    def __call__(self, inputs: Tensor) -> Tensor:
        """(n, channel, *space) -> (n, classes, *space)."""
        inside = (slice(None), slice(None), *(slice(size) for size in inputs.shape[2:]))
        return self.logits(self.pad(inputs))[inside]

    def pad(self, inputs: Tensor) -> Tensor:
        """Pad the end of each axis with 0 up to a multiple."""
        margins = [side for size in reversed(inputs.shape[2:]) for side in (0, -size % self.multiple)]
        return functional.pad(inputs, margins)


def load_factory(spec: str, *, weights: Path | None, device: str, trust: bool) -> Backbone:
    """Import ``package.module:factory``, call it, and load weights into the network that it returns."""
    factory = from_address(spec, "model")
    if not callable(factory):
        raise BadInput(f"{spec} must be a function that returns a network, got a {type(factory).__name__}")
    made = factory()
    if not isinstance(made, (nn.Module, Module)):
        if isinstance(made, Backbone):
            return made
        raise BadInput(f"{spec} returned a {type(made).__name__}; it must return a torch.nn.Module or a Module")
    backbone = made if isinstance(made, Module) else of_network(made, name=spec)
    if weights is not None:
        load_weights(backbone.network, weights, trust=trust)
    backbone.network.to(torch.device(device)).eval()
    return replace(backbone, device=device)


def _name_of(function: Any) -> str:
    """Name of a function; of a ``functools.partial`` or another object that is called, the name of its class."""
    return str(getattr(function, "__name__", type(function).__name__))


def _convs(network: nn.Module) -> list[Any]:
    return [layer for layer in network.modules() if isinstance(layer, tuple(CONVOLUTIONS))]


def of_network(network: nn.Module, *, name: str = "", **options: Any) -> Module:
    """Wrap a bare network: dimensions from its first convolution, classes from its last."""
    found = _convs(network)
    if not found and not {"dimensions", "classes"} <= set(options):
        raise BadInput(f"{type(network).__name__} has no Conv2d or Conv3d; use Module(network, classes=, dimensions=)")
    if found:
        options.setdefault("dimensions", CONVOLUTIONS.get(type(found[0]), 2))
        options.setdefault("classes", int(found[-1].out_channels))
        options.setdefault("expects", Expectation(channels=int(found[0].in_channels)))
    return Module(network, name=name, **options)


def as_backbone(network: Backbone | nn.Module) -> Backbone:
    """Return a backbone unchanged; wrap a bare network without intensity scaling."""
    if not isinstance(network, nn.Module):
        return network
    made = of_network(network, intensity="as-is", bare=True)
    return replace(made, head="sigmoid") if made.classes == 1 else made


def as_batch(image: NDArray[Any], dimensions: int) -> Tensor:
    """(channel, *space) -> (n, channel, *space): a volume becomes slices where the network is 2-D."""
    batch = torch.as_tensor(np.ascontiguousarray(image, dtype=np.float32))
    if batch.ndim == dimensions + 1:
        return batch[None]
    if batch.ndim == 4 and dimensions == 2:
        return batch.transpose(0, 1).contiguous()
    raise BadInput(
        f"a {dimensions}-D network needs an image (channel, {'slices, ' if dimensions == 3 else ''}rows, columns), "
        f"got shape {tuple(batch.shape)}"
    )


def patches(volume: Tensor, patch_size: Sequence[int]) -> Tensor:
    """Cover a preprocessed (channel, z, y, x) volume with as few patches as possible: (n, channel, *patch).

    Objectives are updated on these patches if the network predicts windows instead of whole images. A 2-D patch covers
    one slice. Small volumes are padded with 0 on both sides, as nnU-Net does.
    """
    flat = len(patch_size) == volume.ndim - 2
    images = list(volume.unbind(1)) if flat else [volume]
    return torch.stack([patch for image in images for patch in _tiles(image, patch_size)])


def _tiles(image: Tensor, patch_size: Sequence[int]) -> Iterator[Tensor]:
    gaps = [max(0, want - have) for want, have in zip(patch_size, image.shape[1:], strict=True)]
    padding = [side for gap in reversed(gaps) for side in (gap // 2, gap - gap // 2)]
    padded = functional.pad(image, padding)
    starts = [_starts(have, want) for have, want in zip(padded.shape[1:], patch_size, strict=True)]
    for corner in itertools.product(*starts):
        window = tuple(slice(first, first + size) for first, size in zip(corner, patch_size, strict=True))
        yield padded[(slice(None), *window)].clone()


def _starts(have: int, want: int) -> list[int]:
    count = math.ceil(have / want)
    return [0] if count == 1 else [round(index * (have - want) / (count - 1)) for index in range(count)]
