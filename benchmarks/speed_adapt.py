"""Speed and memory of an episode, in CPU time on one thread, against the two ways it is usually done.

    python benchmarks/speed_adapt.py            # the whole table, a few minutes
    python benchmarks/speed_adapt.py --quick    # small, for a look

One case of 12 slices at 256 x 256, K = 4, a 2-D U-Net like nnU-Net's (affine InstanceNorm). Contestants run interleaved
and the median of the rounds is printed, so that a busy machine slows all of them alike. The script starts itself again
with an allocator that keeps freed memory: otherwise a third of everybody's time is spent in the kernel, clearing pages.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from casewise.adapt.episode import Episode, run_episode
from casewise.adapt.losses import entropy
from casewise.adapt.networks import PlainUNet
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.parameters import select
from casewise.adapt.probes import probes_of
from casewise.measure.signals.fragmentation import fragmentation

RATE = 5e-4
DECODER, CACHED = "decoder-norm", "decoder-norm, cache_frozen"
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
Masks = list[np.ndarray[Any, Any]]


def naive(network: nn.Module, image: Tensor, steps: int) -> Masks:
    """Deepcopy per case, gradients for all weights, a separate forward for every prediction."""
    model = copy.deepcopy(network).eval()
    optimizer = torch.optim.Adam(select(model).values(), lr=RATE)
    masks = [_argmax(model, image)]
    for _ in range(steps):
        model.zero_grad()
        entropy(model(image)).mean().backward()
        optimizer.step()
        masks.append(_argmax(model, image))
    return masks


class PublishedTent(nn.Module):
    """The shape of the published wrapper, in our own words: only norm parameters have gradients, reset by state dict.

    Its forward returns the logits from before the update, so a prediction must follow each step.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        affine = list(select(model).values())
        for parameter in affine:
            parameter.requires_grad_(True)
        self.optimizer = torch.optim.Adam(affine, lr=RATE)
        self.found = copy.deepcopy(model.state_dict()), copy.deepcopy(self.optimizer.state_dict())

    def reset(self) -> None:
        self.model.load_state_dict(self.found[0])
        self.optimizer.load_state_dict(self.found[1])

    def forward_and_adapt(self, image: Tensor) -> Tensor:
        logits: Tensor = self.model(image)
        entropy(logits).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return logits.detach()


def published(network: nn.Module, image: Tensor, steps: int) -> Masks:
    """The published wrapper followed by a prediction after each step."""
    wrapper = PublishedTent(copy.deepcopy(network))
    wrapper.reset()
    masks = [_argmax(wrapper.model, image)]
    for _ in range(steps):
        wrapper.forward_and_adapt(image)
        masks.append(_argmax(wrapper.model, image))
    return masks


def ours(network: nn.Module, image: Tensor, steps: int, **options: Any) -> Masks:
    """The episode, with every signal that it always records."""
    return list(run_episode(network, image, Tent(), steps=steps, learning_rate=RATE, **options).masks)


def _argmax(model: nn.Module, image: Tensor) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        return model(image).argmax(1).to(torch.uint8).numpy()


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def interleaved(contestants: dict[str, Callable[[], Masks]], rounds: int) -> tuple[dict[str, float], dict[str, Masks]]:
    """Median CPU seconds and the masks of each, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    masks: dict[str, Masks] = {}
    for _ in range(rounds):
        for name, work in contestants.items():
            seconds, masks[name] = cpu_seconds(work)
            times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}, masks


def the_case(slices: int, side: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    network = PlainUNet(channels=1, classes=4, features=(16, 32, 64, 96))
    coarse = torch.randn(slices, 1, side // 16, side // 16)
    image = nn.functional.interpolate(coarse, size=(side, side), mode="bilinear") + 0.3 * torch.randn(
        slices, 1, side, side
    )
    with torch.no_grad():
        network.head.weight.mul_(8)
    return network, image


def speed(slices: int, side: int, steps: int, rounds: int) -> dict[str, Any]:
    network, image = the_case(slices, side)
    decoder = {"parameters": "decoder-norm"}
    contestants: dict[str, Callable[[], Masks]] = {
        "naive": lambda: naive(network, image, steps),
        "published TENT": lambda: published(network, image, steps),
        "casewise": lambda: ours(network, image, steps),
    }
    options: dict[str, Callable[[], Masks]] = {
        "max_slices=3": lambda: ours(network, image, steps, max_slices=3),
        "max_slices=1": lambda: ours(network, image, steps, max_slices=1),
        "group_instance_norm": lambda: ours(network, image, steps, group_instance_norm=True),
        DECODER: lambda: ours(network, image, steps, **decoder),
        CACHED: lambda: ours(network, image, steps, cache_frozen=True, **decoder),
    }
    ours(network, image[:1], 1)  # the first optimizer of a process imports half of torch
    times, masks = interleaved(contestants, rounds)
    for found, more in zip((times, masks), interleaved(options, 1), strict=True):
        found.update(more)  # type: ignore[arg-type]
    flipped = {name: differences(made, masks["naive"]) for name, made in masks.items()}
    flipped[CACHED] = differences(masks[CACHED], masks[DECODER])
    return {"seconds": times, "voxels that differ": flipped, "voxels": int(image.numel()) * steps}


def differences(one: Masks, other: Masks) -> int:
    return int(sum((a != b).sum() for a, b in zip(one, other, strict=True)))


def probe(name: str) -> Callable[[Episode], Any]:
    return lambda episode: probes_of([name])[name](episode)


def gradient_norm(episode: Episode) -> Any:
    return episode.backward(lambda logits, inputs, rows: (entropy(logits).sum(), logits[:, 0].numel()))


# What is measured after the first prediction: (forwards, backwards, the work).
PARTS: dict[str, tuple[int, int, Callable[[Episode], Any]]] = {
    "update and prediction": (1, 1, lambda episode: episode.advance()),
    "fragmentation": (0, 0, lambda episode: fragmentation(episode.masks[0], episode.masks[-1])),
    "gradient norm": (0, 1, gradient_norm),
    "GraTa cosine": (8, 2, probe("grata_cosine")),
    "8-pass agreement": (8, 0, probe("augmentation_disagreement")),
    "8-pass dropout": (8, 0, probe("dropout_disagreement")),
    "AETTA": (11, 0, probe("aetta")),
    "ADIC": (11, 0, probe("adic")),
}


def costs(slices: int, side: int, rounds: int) -> dict[str, float]:
    """CPU milliseconds of each part at step 1, medians."""
    network, image = the_case(slices, side)
    found: dict[str, list[float]] = {name: [] for name in PARTS}
    for _ in range(rounds):
        with Episode(network, image, Tent(), learning_rate=1e-2) as episode:
            for name, (_, _, work) in PARTS.items():
                found[name].append(1000 * cpu_seconds(lambda: work(episode))[0])  # noqa: B023
    return {name: statistics.median(values) for name, values in found.items()}


def peak_megabytes(slices: int, side: int, max_slices: int | None, part: str) -> float:
    """Peak memory of one part beyond what a prediction without a graph left behind, in a process of its own (Linux)."""
    command = [sys.executable, __file__, "--memory", json.dumps([slices, side, max_slices, part])]
    plain = {key: value for key, value in os.environ.items() if key not in KEEPING}
    environment = {**plain, "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed tensors go back to the system at once
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def _measure_memory(slices: int, side: int, max_slices: int | None, part: str) -> float:
    network, image = the_case(slices, side)
    run_episode(network, image[:1, :, :32, :32], Tent(), steps=1)  # imports
    with Episode(network, image, Tent(), max_slices=max_slices) as episode:
        episode.changed()  # drop the graph that M0 kept: each part pays for its own
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
        before = _megabytes("VmRSS")
        PARTS[part][2](episode)
        return _megabytes("VmHWM") - before


def _megabytes(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def print_speed(slices: int, side: int, steps: int, rounds: int) -> None:
    result = speed(slices, side, steps, rounds)
    times, flipped = result["seconds"], result["voxels that differ"]
    print(f"{slices} slices at {side} x {side}, K = {steps}, one thread, median CPU seconds of {rounds} rounds\n")
    print(f"{'':38} {'CPU s':>7} {'x naive':>8} {'x TENT':>7} {'voxels that differ':>19}")
    for name, seconds in times.items():
        ratios = f"{times['naive'] / seconds:8.2f} {times['published TENT'] / seconds:7.2f}"
        print(f"{name:38} {seconds:7.2f} {ratios} {flipped[name]:>10} of {result['voxels']}")
    print("(decoder-norm is another adaptation; its cached run is compared with its own uncached run)\n")


def print_costs(slices: int, side: int, rounds: int) -> None:
    """The paper's tab:app-compute, for this machine."""
    table = costs(slices, side, rounds)
    print(f"{'per step':38} {'CPU ms':>9} {'of update':>9} {'forwards':>9} {'backwards':>9} {'peak MB':>8}")
    for name, milliseconds in table.items():
        share = milliseconds / table["update and prediction"]
        peak = peak_megabytes(slices, side, None, name)
        print(f"{name:38} {milliseconds:9.1f} {share:9.2%} {PARTS[name][0]:>9} {PARTS[name][1]:>9} {peak:8.0f}")
    few = max(1, slices // 4)
    peak = peak_megabytes(slices, side, few, "update and prediction")
    print(f"{f'update and prediction, max_slices={few}':38} {'':>39} {peak:8.0f}")
    print("(peak MB: beyond a prediction without a graph; gradient norm and update pay for the graph they need)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.memory:
        print(_measure_memory(*json.loads(chosen.memory)))
        return
    if any(key not in os.environ for key in KEEPING):
        os.execve(sys.executable, [sys.executable, "-u", *sys.argv], {**os.environ, **KEEPING})
    slices, side, steps = (4, 128, 4) if chosen.quick else (12, 256, 4)
    print_speed(slices, side, steps, chosen.rounds)
    print_costs(slices, side, chosen.rounds)


if __name__ == "__main__":
    main()
