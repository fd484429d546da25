"""Any ``nn.Module``: slices of a volume as a batch for a 2-D network, one volume for a 3-D network.

``package.module:factory`` names a function without arguments that returns a network, or a :class:`Module` where
something must be said about intensities, padding or labels.

NIfTI volumes and pictures in and out, for every backbone that brings no reader of its own.
"""

from __future__ import annotations

import importlib
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

from casewise.adapt.backbones import Backbone, Expectation, Prepared, Reading, check_image
from casewise.adapt.backbones.checkpoints import load_weights
from casewise.adapt.logits import at_resolution, labels, logits_of
from casewise.adapt.readings import logits_pipeline
from casewise.adapt.snapshot import fingerprint
from casewise.core.errors import BadInput
from casewise.core.records import Case, Mask
from casewise.core.registry import Registry, importable_from_here
from casewise.data import nifti, pictures
from casewise.data.folders import CaseFiles


def read_files(files: CaseFiles) -> Reading:
    """Read the channels of a case: NIfTI as (channel, slices, rows, columns), pictures as (channel, rows, columns)."""
    if _is_picture(files.images[0]):
        channels = [pictures.read_picture(path) for path in files.images]
        return Reading(_case(files, np.concatenate(channels), None), None)
    volumes = [nifti.read_volume(path) for path in files.images]
    shapes = {volume.voxels.shape for volume in volumes}
    if len(shapes) > 1:
        raise BadInput(f"the channels of case {files.id} have different shapes {sorted(shapes)}; resample them")
    image = np.stack([volume.voxels for volume in volumes]).astype(np.float32)
    return Reading(_case(files, image, volumes[0].spacing_mm), volumes[0].geometry)


def _case(files: CaseFiles, image: NDArray[Any], spacing_mm: tuple[float, ...] | None) -> Case:
    return Case(files.id, image, spacing_mm, files.group, files.cluster, files.split)


def read_label_file(path: Path) -> Mask:
    """A label as (slices, rows, columns) or (rows, columns)."""
    return pictures.read_label_picture(path) if _is_picture(path) else nifti.read_label(path)


def write_mask_file(mask: Mask, reading: Reading, path: Path) -> None:
    """Write a mask next to what it was read from: NIfTI with the image's geometry, or a PNG of label numbers."""
    if reading.place is None:
        pictures.write_label_picture(path, mask)
    else:
        nifti.write_mask(path, mask.reshape(reading.place.shape[::-1]), reading.place)


def _is_picture(path: Path) -> bool:
    return path.name.lower().endswith(pictures.ENDINGS)


def zscore(image: NDArray[Any]) -> NDArray[Any]:
    """Each channel to mean 0 and standard deviation 1 over the whole case."""
    axes = tuple(range(1, image.ndim))
    spread = image.std(axis=axes, keepdims=True)
    return np.asarray((image - image.mean(axis=axes, keepdims=True)) / np.maximum(spread, 1e-8))


def imagenet(image: NDArray[Any]) -> NDArray[Any]:
    """RGB from 0..255 with the ImageNet mean and standard deviation."""
    shape = (3, *[1] * (image.ndim - 1))
    mean, spread = np.array([0.485, 0.456, 0.406]).reshape(shape), np.array([0.229, 0.224, 0.225]).reshape(shape)
    return np.asarray((image / 255.0 - mean) / spread)


def unit(image: NDArray[Any]) -> NDArray[Any]:
    """0..255 to 0..1."""
    return image / 255.0


def as_is(image: NDArray[Any]) -> NDArray[Any]:
    """Unchanged."""
    return image


INTENSITIES = {"zscore": zscore, "imagenet": imagenet, "unit": unit, "as-is": as_is}


Inferer = Callable[[nn.Module, Tensor], Tensor]
"""(network, whole inputs) -> logits of the whole: a sliding window, for instance."""

_CONVOLUTIONS: dict[type[nn.Module], int] = {nn.Conv2d: 2, nn.Conv3d: 3}


@dataclass(frozen=True, eq=False)
class Module:
    """A network, how its inputs are scaled and padded, and what its labels are called."""

    network: nn.Module
    classes: int
    dimensions: int  # 2 or 3: what the network convolves over
    name: str = "module"
    head: str = "softmax"
    intensity: str = "zscore"  # name in INTENSITIES
    multiple: int = 1  # sides are padded to a multiple of this (32 for five halvings)
    labels: Mapping[int, str] = field(default_factory=dict)
    ignore: int | None = None
    ending: str | None = None
    expects: Expectation = field(default_factory=Expectation)
    window: tuple[int, ...] | None = None  # patch that updates are made on; None for the whole image
    infer: Inferer | None = None  # how a whole image is predicted; None for one forward
    device: str = "cpu"

    def __post_init__(self) -> None:
        Registry("intensity", INTENSITIES)[self.intensity]
        if self.dimensions not in (2, 3):
            raise BadInput(f"a network convolves over 2 or 3 dimensions, got {self.dimensions}")

    @property
    def fingerprint(self) -> str:
        """sha256 of the weights."""
        return fingerprint(self.network)

    @property
    def loader(self) -> str:
        """How images become inputs."""
        return f"module({self.dimensions}d, intensity={self.intensity}, multiple={self.multiple}, window={self.window})"

    def read(self, files: CaseFiles) -> Reading:
        """Read NIfTI or pictures."""
        reading = read_files(files)
        check_image(reading.case, channels=self.expects.channels)
        return reading

    def read_label(self, path: Path) -> Mask:
        """Read a label file."""
        return read_label_file(path)

    def write(self, mask: Mask, reading: Reading, path: Path) -> None:
        """Write in the geometry of the image."""
        write_mask_file(mask, reading, path)

    def prepare(self, case: Case) -> Prepared:
        """(channel, *space) to (n, channel, *space), scaled."""
        check_image(case, channels=self.expects.channels)
        scaled = INTENSITIES[self.intensity](np.asarray(case.image, np.float32))
        image = torch.as_tensor(np.ascontiguousarray(scaled), dtype=torch.float32)
        whole = self._batch(image).to(self.device)
        if self.window is not None and self.infer is not None:
            inputs = patches(image, self.window).to(self.device)
            pipeline = logits_pipeline(self.network, whole, self.head, lambda seen: self._inferred(seen))
            return Prepared(inputs, predict=lambda: self._whole_mask(whole), pipeline=pipeline)
        padded = PaddedForward(self._logits, self.multiple)
        return Prepared(whole, forward=padded, pipeline=logits_pipeline(self.network, whole, self.head, padded))

    def _inferred(self, whole: Tensor) -> Tensor:
        assert self.infer is not None
        return self.infer(self.network, whole)

    def _batch(self, image: Tensor) -> Tensor:
        if image.ndim - 1 == self.dimensions:
            return image[None]
        if image.ndim - 1 == 3 and self.dimensions == 2:
            return image.transpose(0, 1).contiguous()
        raise BadInput(f"a {self.dimensions}-D network cannot take an image of shape {tuple(image.shape)}")

    def _logits(self, inputs: Tensor) -> Tensor:
        return at_resolution(logits_of(self.network(inputs), classes=self.classes), inputs.shape[2:])

    def _whole_mask(self, whole: Tensor) -> Mask:
        with torch.inference_mode():
            logits = self._inferred(whole)
        found = labels(logits, self.head)
        return np.asarray(found[0] if len(found) == 1 else found)


@dataclass(frozen=True, eq=False)
class PaddedForward:
    """The logits of inputs of any size; the padding that the network needs is cropped again.

    Padded within the forward, so that inputs and logits share one grid: objectives mirror and turn both.
    """

    logits: Callable[[Tensor], Tensor]
    multiple: int

    def __call__(self, inputs: Tensor) -> Tensor:
        """(n, channel, *space) -> (n, classes, *space)."""
        inside = (slice(None), slice(None), *(slice(size) for size in inputs.shape[2:]))
        return self.logits(self.pad(inputs))[inside]

    def pad(self, inputs: Tensor) -> Tensor:
        """What the network sees: 0 behind each axis up to a multiple."""
        margins = [side for size in reversed(inputs.shape[2:]) for side in (0, -size % self.multiple)]
        return functional.pad(inputs, margins)


def load_factory(spec: str, *, weights: Path | None, device: str, trust: bool) -> Backbone:
    """Import ``package.module:factory``, call it, and put weights into what it returns."""
    made = _factory(spec)()
    if not isinstance(made, (nn.Module, Module)):
        if isinstance(made, Backbone):
            return made
        raise BadInput(f"{spec} returned a {type(made).__name__}; a torch.nn.Module or a Module was expected")
    backbone = made if isinstance(made, Module) else of_network(made, name=spec)
    if weights is not None:
        load_weights(backbone.network, weights, trust=trust)
    backbone.network.to(torch.device(device)).eval()
    return replace(backbone, device=device)


def of_network(network: nn.Module, *, name: str = "module", **options: Any) -> Module:
    """A Module around a bare network: dimensions from its first convolution, classes from its last."""
    found = [layer for layer in network.modules() if isinstance(layer, tuple(_CONVOLUTIONS))]
    if not found and not {"dimensions", "classes"} <= set(options):
        raise BadInput(
            f"{type(network).__name__} has no Conv2d or Conv3d; return Module(network, classes=, dimensions=)"
        )
    if found:
        options.setdefault("dimensions", _CONVOLUTIONS.get(type(found[0]), 2))
        options.setdefault("classes", int(found[-1].out_channels))  # type: ignore[arg-type]
        options.setdefault("expects", Expectation(channels=int(found[0].in_channels)))  # type: ignore[arg-type]
    return Module(network, name=name, **options)


def _factory(spec: str) -> Callable[[], Any]:
    module_name, _, name = spec.partition(":")
    try:
        with importable_from_here():
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise BadInput(f"{module_name} cannot be imported ({error}); run casewise where the module lies") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise BadInput(f"{module_name} has no function called {name}")
    factory: Callable[[], Any] = found
    return factory


def patches(volume: Tensor, patch_size: Sequence[int]) -> Tensor:
    """Cover a preprocessed (channel, z, y, x) volume with as few patches as will do: (n, channel, *patch).

    Updates are made on these where a network sees windows, not whole images.

    A 2-D patch takes each slice for itself. Small volumes are padded with 0 on both sides, as nnU-Net does.
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
