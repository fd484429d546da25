"""MONAI networks and bundles: SwinUNETR, UNet, SegResNet and BasicUNet with the sliding window of MONAI.

A network is described by ``network.json`` beside its weights; nothing in it is executed::

    {"network": "SegResNet", "arguments": {"spatial_dims": 3, "in_channels": 1, "out_channels": 3},
     "window": [96, 96, 96], "overlap": 0.25, "intensity": "zscore", "labels": {"1": "liver"}}

A bundle is code (a ``$`` in its configuration is a Python expression) and is loaded only when the user trusts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from casewise.adapt.backbones import Expectation
from casewise.adapt.backbones.checkpoints import load_weights
from casewise.adapt.backbones.module import Inferer, Module
from casewise.core.errors import BadInput, MissingExtra, UnsafeInput
from casewise.core.json_records import read_json
from casewise.core.registry import Registry

NETWORKS = Registry("MONAI network", {name: name for name in ("SwinUNETR", "UNet", "SegResNet", "BasicUNet", "UNETR")})
WEIGHTS = ("model.safetensors", "model.pth", "model.pt")
WINDOWS_AT_ONCE = 4
SAFE_SINCE = (1, 5, 2)  # CVE-2025-58756, GHSA-89gg-p5r5-q6r4 and CVE-2026-21851 are fixed here


def load_network_folder(folder: Path, *, weights: Path | None, device: str, trust: bool) -> Module:
    """Build the network that ``network.json`` names and load its weights."""
    plain = read_json(folder / "network.json")
    for key in ("network", "arguments", "window"):
        if key not in plain:
            raise BadInput(f"{folder / 'network.json'} needs {key}; see docs/how-to/monai.md")
    made = getattr(_monai().networks.nets, NETWORKS[plain["network"]])
    try:
        network: nn.Module = made(**plain["arguments"])
    except (TypeError, ValueError) as error:
        raise BadInput(f"{folder / 'network.json'}: arguments do not build a {plain['network']}: {error}") from error
    load_weights(network, weights or _weights_in(folder), trust=trust)
    return _module(
        network, name=f"MONAI {plain['network']} of {folder.name}", channels=int(plain["arguments"]["in_channels"]),
        classes=int(plain["arguments"]["out_channels"]), window=plain["window"],
        overlap=float(plain.get("overlap", 0.25)), intensity=plain.get("intensity", "zscore"),
        labels={int(value): name for value, name in plain.get("labels", {}).items()}, device=device,
    )  # fmt: skip


def load_bundle(folder: Path, *, device: str, trust_bundle: bool, trust: bool) -> Module:
    """Take network, weights, window and class names from a bundle; its transforms are not run.

    Images are expected on the grid and in the value range that the preprocessing of the bundle would give.
    """
    if not trust_bundle:
        raise UnsafeInput(f"{folder.name} is a MONAI bundle and may run code; if you trust its author: --trust bundle")
    parser = _monai().bundle.ConfigParser()
    parser.read_config(str(folder / "configs" / "inference.json"))
    parser.read_meta(str(folder / "configs" / "metadata.json"))
    parser["bundle_root"] = str(folder)
    network: nn.Module = parser.get_parsed_content("network_def")
    load_weights(network, _weights_in(folder / "models"), trust=trust)
    data = read_json(folder / "configs" / "metadata.json")["network_data_format"]
    image, output = data["inputs"]["image"], data["outputs"]["pred"]
    inferer = parser.get("inferer", {})
    window = inferer.get("roi_size") if isinstance(inferer, Mapping) else None
    return _module(
        network, name=f"MONAI bundle {folder.name}", channels=int(image["num_channels"]),
        classes=int(output["num_channels"]), window=window if isinstance(window, list) else image["spatial_shape"],
        overlap=0.25, intensity="as-is",
        labels={int(value): str(name) for value, name in output.get("channel_def", {}).items()}, device=device,
    )  # fmt: skip


def _module(
    network: nn.Module, *, channels: int, window: Sequence[int], overlap: float, device: str, **more: Any
) -> Module:
    if not all(isinstance(side, int) and side > 0 for side in window):
        raise BadInput(f"window must be a list of whole numbers, got {list(window)}; write it into network.json")
    network.to(torch.device(device)).eval()
    return Module(
        network, dimensions=len(window), expects=Expectation(channels=channels), window=tuple(window),
        infer=sliding_window(window, overlap=overlap), device=device, **more,
    )  # fmt: skip


def sliding_window(window: Sequence[int], *, overlap: float = 0.25) -> Inferer:
    """Return an inferer that uses MONAI's sliding window with Gaussian weights."""

    def infer(network: nn.Module, whole: Tensor) -> Tensor:
        logits: Tensor = _monai().inferers.sliding_window_inference(
            whole, tuple(window), WINDOWS_AT_ONCE, network, overlap=overlap, mode="gaussian"
        )
        return logits

    return infer


def _weights_in(folder: Path) -> Path:
    found = [folder / name for name in WEIGHTS if (folder / name).is_file()]
    if not found:
        raise BadInput(f"{folder} holds none of {', '.join(WEIGHTS)}; name the file with --weights")
    return found[0]


def _monai() -> Any:
    try:
        import monai
        import monai.bundle
        import monai.inferers
        import monai.networks.nets
    except ImportError as error:
        raise MissingExtra(f"MONAI is not installed ({error}); pip install 'casewise[monai]'") from error
    version = tuple(int(part) for part in monai.__version__.split("+")[0].split(".")[:3] if part.isdigit())
    if version < SAFE_SINCE:
        raise UnsafeInput(f"MONAI {monai.__version__} has known code-execution flaws; update to 1.5.2 or later")
    return monai
