"""Statistics of source images, and the views that make a case look like a source image.

``casewise record --measure-source`` preprocesses source images and stores the mean quantiles of every channel and the
mean amplitude of the lowest frequencies. The file is valid for one model only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from casewise.adapt.views.transforms import quantiles
from casewise.core.errors import BadInput, Mismatch
from casewise.core.formats import json_text
from casewise.core.text import pluralize

LEVELS = 101  # quantiles 0, 1 %, ..., 100 %
REACH = 8  # frequencies 0 to 8 cycles per picture, along rows and along columns
SCHEMA = 1


@dataclass(frozen=True, eq=False)
class SourceStatistics:
    """Mean quantiles and low-frequency amplitudes of source images, by channel."""

    model: str  # fingerprint of the weights
    loader: str  # reader and preprocessing
    images: int
    quantiles: NDArray[np.float64] = field(repr=False)  # (channel, LEVELS)
    amplitudes: NDArray[np.float64] = field(repr=False)  # (channel, 2 REACH + 1, REACH + 1), per pixel

    def check(self, model: str, loader: str) -> None:
        """Refuse another model or another preprocessing."""
        wrong = [name for name, value in (("model", model), ("loader", loader)) if getattr(self, name) != value]
        if wrong:
            raise Mismatch(
                f"the source statistics were measured with another {' and '.join(wrong)}; run casewise "
                f"record --measure-source with this model"
            )

    def as_json(self) -> str:
        """Return the content of the file."""
        plain = {
            "schema": SCHEMA, "model": self.model, "loader": self.loader, "images": self.images,
            "quantiles": self.quantiles.tolist(), "amplitudes": self.amplitudes.tolist(),
        }  # fmt: skip
        return json_text(plain, indent=1) + "\n"


def source_statistics(inputs: Iterable[Tensor], *, model: str, loader: str) -> SourceStatistics:
    """Compute the statistics of prepared source images, (n, channel, *space) each; one is in memory at a time."""
    found: list[tuple[Any, Any]] = []
    for whole in inputs:
        levels = torch.stack([_levels(channel) for channel in whole.unbind(1)])
        found.append((levels.double().numpy(), _amplitude(whole).double().numpy()))
    if not found:
        raise BadInput("source statistics need at least one source image")
    measured, amplitudes = (np.mean([one[place] for one in found], axis=0) for place in (0, 1))
    return SourceStatistics(model, loader, len(found), measured, amplitudes)


def read_source_statistics(path: str | Path) -> SourceStatistics:
    """Read a file that ``casewise record --measure-source`` wrote."""
    try:
        plain = json.loads(Path(path).read_text())
        if plain["schema"] != SCHEMA:
            raise Mismatch(f"{path} has source-statistics schema {plain['schema']}, this casewise reads {SCHEMA}")
        arrays = {name: np.asarray(plain[name], np.float64) for name in ("quantiles", "amplitudes")}
        made = SourceStatistics(str(plain["model"]), str(plain["loader"]), int(plain["images"]), **arrays)
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}; make it with casewise record --measure-source") from None
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path} holds no source statistics ({error}); record --measure-source again") from error
    shapes = (made.quantiles.shape[1:], made.amplitudes.shape[1:])
    if shapes != ((LEVELS,), (2 * REACH + 1, REACH + 1)) or not all(np.isfinite(a).all() for a in arrays.values()):
        raise BadInput(f"{path} holds no source statistics of this version; run casewise record --measure-source again")
    return made


@dataclass(frozen=True)
class Histogram:
    """Histogram matching: map the quantiles of every channel to the mean quantiles of the source."""

    statistics: SourceStatistics

    def __str__(self) -> str:
        return "histogram"

    def apply(self, inputs: Tensor) -> Tensor:
        """Return the transformed inputs."""
        wanted = _for_channels(self.statistics.quantiles, inputs, "histogram")
        return torch.stack([_matched(channel, wanted[place]) for place, channel in enumerate(inputs.unbind(1))], 1)


@dataclass(frozen=True)
class Fourier:
    """Replace the amplitude of the lowest frequencies by the source's; keep phases (Yang and Soatto, CVPR 2020)."""

    statistics: SourceStatistics
    reach: int = 3  # of REACH

    def __post_init__(self) -> None:
        if not 0 <= self.reach <= REACH:
            raise BadInput(f"the reach of fourier must be from 0 to {REACH}, got {self.reach}")

    def __str__(self) -> str:
        return f"fourier({self.reach})"

    def apply(self, inputs: Tensor) -> Tensor:
        """Return the transformed inputs."""
        wanted = torch.as_tensor(_for_channels(self.statistics.amplitudes, inputs, "fourier"), dtype=torch.float32)
        rows, columns = inputs.shape[-2:]
        reach = min(self.reach, (min(rows, columns) - 1) // 2)
        spectrum = torch.fft.rfft2(inputs.float())
        lines = torch.arange(-reach, reach + 1)
        low = spectrum[..., lines, : reach + 1]
        size = wanted[:, REACH - reach : REACH + reach + 1, : reach + 1] * rows * columns
        size = size.to(inputs.device).view(1, inputs.shape[1], *[1] * (inputs.ndim - 4), *size.shape[1:])
        spectrum[..., lines, : reach + 1] = torch.polar(size.expand(low.shape).contiguous(), low.angle())
        seen: Tensor = torch.fft.irfft2(spectrum, s=(rows, columns)).to(inputs.dtype)
        return seen


def _levels(channel: Tensor) -> Tensor:
    return quantiles(channel.float(), tuple(np.linspace(0, 1, LEVELS)))


def _amplitude(whole: Tensor) -> Tensor:
    """Return the mean amplitude per pixel over slices, (channel, 2 REACH + 1, REACH + 1); 0 for missing frequencies."""
    rows, columns = whole.shape[-2:]
    spectrum = torch.fft.rfft2(whole.float()).abs() / (rows * columns)
    axes = [axis for axis in range(whole.ndim - 2) if axis != 1]
    mean = spectrum.mean(axes)
    found = torch.zeros(mean.shape[0], 2 * REACH + 1, REACH + 1)
    reach = min(REACH, (min(rows, columns) - 1) // 2)
    found[:, REACH - reach : REACH + reach + 1, : reach + 1] = mean[:, torch.arange(-reach, reach + 1), : reach + 1]
    return found


def _matched(channel: Tensor, wanted: NDArray[np.float64]) -> Tensor:
    """Piecewise linear from the channel's own quantiles to the wanted ones."""
    own = np.maximum.accumulate(_levels(channel).double().cpu().numpy())
    moved = np.interp(channel.double().cpu().numpy(), own, wanted)
    return torch.as_tensor(moved).to(channel)


def _for_channels(values: NDArray[np.float64], inputs: Tensor, name: str) -> NDArray[np.float64]:
    if len(values) != inputs.shape[1]:
        raise BadInput(f"{name}: the source had {pluralize(len(values), 'channel')}, the case has {inputs.shape[1]}")
    return values
