"""Speed and memory of an episode, in CPU time on one thread, against the two ways it is usually done.

    python benchmarks/speed_adapt.py            # the whole table, under three minutes on an idle machine
    python benchmarks/speed_adapt.py --quick    # small, for a look

One case of 12 slices at 256 x 256, K = 4, a 2-D U-Net like nnU-Net's (affine InstanceNorm). Contestants run interleaved
and ratios are medians of the rounds' own ratios, so that a busy machine slows all of them alike. Every round is run
twice, in processes of their own: with the allocator as it is, and with one that keeps freed memory as casewise's
commands do (``casewise.run.local``). Options and costs per step are measured on 3 of the 12 slices: everything in
them is proportional to the slices.
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

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.episode import Episode
from casewise.adapt.logits import entropy
from casewise.adapt.networks import PlainUNet
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.parameters import select
from casewise.adapt.probes import probes_of
from casewise.adapt.proposers.live import run_episode
from casewise.measure.signals import SIGNALS
from casewise.measure.signals.fragmentation import fragmentation
from casewise.run.local import keep_freed_memory

RATE = 5e-4
DECODER = "decoder-norm"
DEFAULT, KEEPING = "default allocator", "freed memory kept"
FEW = 3  # slices for what is not the headline
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


def one_round(contestants: dict[str, Callable[[], Masks]]) -> tuple[dict[str, float], dict[str, Masks]]:
    """CPU seconds and the masks of each, one after the other."""
    done = {name: cpu_seconds(work) for name, work in contestants.items()}
    return {name: seconds for name, (seconds, _) in done.items()}, {name: masks for name, (_, masks) in done.items()}


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


def race(slices: int, side: int, steps: int) -> dict[str, Any]:
    """One round of the headline: CPU seconds by contestant, and the voxels in which it differs from the naive loop."""
    network, image = the_case(slices, side)
    ours(network, image[:1], 1)  # the first optimizer of a process imports half of torch
    times, masks = one_round(
        {
            "naive": lambda: naive(network, image, steps),
            "published TENT": lambda: published(network, image, steps),
            "casewise": lambda: ours(network, image, steps),
        }
    )
    return {"seconds": times, "differ": {name: differences(made, masks["naive"]) for name, made in masks.items()}}


def options(side: int, steps: int) -> dict[str, Any]:
    """The same for the options of an episode, beside the episode without them."""
    network, image = the_case(FEW, side)
    ours(network, image[:1], 1)
    times, masks = one_round(
        {
            "casewise": lambda: ours(network, image, steps),
            "max_slices=1": lambda: ours(network, image, steps, max_slices=1),
            DECODER: lambda: ours(network, image, steps, parameters="decoder-norm"),
        }
    )
    differ = {name: differences(made, masks["casewise"]) for name, made in masks.items()}
    return {"seconds": times, "differ": differ}


def differences(one: Masks, other: Masks) -> int:
    return int(sum((a != b).sum() for a, b in zip(one, other, strict=True)))


def probe(name: str) -> Callable[[Episode], Any]:
    return lambda episode: probes_of([name])[name](episode)


def gradient_norm(episode: Episode) -> Any:
    return episode.backward(lambda logits, inputs, rows: (entropy(logits).sum(), logits[:, 0].numel()))


PARTS: dict[str, Callable[[Episode], Any]] = {
    "update and prediction": lambda episode: episode.advance(),
    "fragmentation": lambda episode: fragmentation(episode.record.masks[0], episode.record.masks[-1]),
    "gradient norm": gradient_norm,
    "GraTa cosine": probe("grata_cosine"),
    "8-pass agreement": probe("augmentation_disagreement"),
    "8-pass dropout": probe("dropout_disagreement"),
}
"""What is measured after the first prediction."""

COSTS: dict[str, tuple[int, int]] = {
    "update and prediction": (1, 1),
    "fragmentation": (0, 0),
    "gradient norm": (0, 1),
    **{
        part: (SIGNALS[name].forwards, SIGNALS[name].backwards)
        for part, name in {
            "GraTa cosine": "grata_cosine",
            "8-pass agreement": "augmentation_disagreement",
            "8-pass dropout": "dropout_disagreement",
        }.items()
    },
}
"""(forwards, backwards) of each part; those of signals are counted in tests/adapt/test_signal_costs.py."""


def costs(side: int) -> dict[str, float]:
    """CPU milliseconds of each part at step 1."""
    network, image = the_case(FEW, side)
    ours(network, image[:1], 1)
    with Episode(network, image, Adaptation(Tent(), learning_rate=1e-2)) as episode:
        return {name: 1000 * cpu_seconds(lambda: work(episode))[0] for name, work in PARTS.items()}  # noqa: B023


def apart(task: str, *arguments: Any, allocator: str = KEEPING) -> Any:
    """Run one of TASKS in a process of its own, with one of the two allocators."""
    command = [sys.executable, __file__, "--task", json.dumps([task, allocator, *arguments])]
    plain = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    if task == "memory":
        plain["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed tensors go back to the system at once
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=plain).stdout)


def peak_megabytes(slices: int, side: int, max_slices: int | None, part: str) -> float:
    """Peak memory of one part beyond what a prediction without a graph left behind (Linux)."""
    network, image = the_case(slices, side)
    run_episode(network, image[:1, :, :32, :32], Tent(), steps=1)  # imports
    with Episode(network, image, Adaptation(Tent(), max_slices=max_slices)) as episode:
        episode.changed()  # drop the graph that M0 kept: each part pays for its own
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
        before = _megabytes("VmRSS")
        PARTS[part](episode)
        return _megabytes("VmHWM") - before


def _megabytes(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def print_race(slices: int, side: int, steps: int, rounds: int) -> None:
    print(f"{slices} slices at {side} x {side}, K = {steps}, one thread; medians of {rounds} rounds each\n")
    print(f"{'':19} {'':18} {'CPU s':>7} {'x naive':>8} {'x TENT':>7}   voxels that differ")
    done: dict[str, list[dict[str, Any]]] = {DEFAULT: [], KEEPING: []}
    for _ in range(rounds):
        for allocator, found in done.items():
            found.append(apart("race", slices, side, steps, allocator=allocator))
    for allocator, found in done.items():
        for name in found[0]["seconds"]:
            times = [one["seconds"] for one in found]
            middle = statistics.median(one[name] for one in times)
            ratios = [statistics.median(one[base] / one[name] for one in times) for base in ("naive", "published TENT")]
            differ = f"{max(one['differ'][name] for one in found)} of {slices * side**2 * (steps + 1)}"
            print(f"{allocator:19} {name:18} {middle:7.2f} {ratios[0]:8.2f} {ratios[1]:7.2f}   {differ}")
        spread = sorted(one["seconds"]["published TENT"] / one["seconds"]["casewise"] for one in found)
        print(f"{'':19} x TENT of each round: {' '.join(f'{ratio:.2f}' for ratio in spread)}")
    print()


def print_options(side: int, steps: int) -> None:
    found = apart("options", side, steps)
    print(f"{f'{FEW} slices, K = {steps}, {KEEPING}':38} {'CPU s':>7} {'x plain':>8}   voxels that differ")
    for name, seconds in found["seconds"].items():
        print(f"{name:38} {seconds:7.2f} {found['seconds']['casewise'] / seconds:8.2f}   {found['differ'][name]}")
    print("(decoder-norm is another adaptation; its cached run is compared with its own uncached run)\n")


def print_costs(slices: int, side: int) -> None:
    """The paper's tab:app-compute, for this machine."""
    table = apart("costs", side)
    head = f"per step, {FEW} slices"
    print(f"{head:38} {'CPU ms':>9} {'of update':>9} {'forwards':>9} {'backwards':>9} {'peak MB':>8}")
    for name, milliseconds in table.items():
        share = milliseconds / table["update and prediction"]
        peak = apart("memory", FEW, side, None, name)
        print(f"{name:38} {milliseconds:9.1f} {share:9.2%} {COSTS[name][0]:>9} {COSTS[name][1]:>9} {peak:8.0f}")
    for few in (None, max(1, slices // 4)):
        peak = apart("memory", slices, side, few, "update and prediction")
        print(f"{f'update, {slices} slices, max_slices={few}':38} {'':>39} {peak:8.0f}")
    print("(peak MB: beyond a prediction without a graph; gradient norm and update pay for the graph they need)")


TASKS: dict[str, Callable[..., Any]] = {"race": race, "options": options, "costs": costs, "memory": peak_megabytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=2, help="of each allocator")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.task:
        torch.set_num_threads(1)
        task, allocator, *arguments = json.loads(chosen.task)
        if allocator == KEEPING and task != "memory":
            keep_freed_memory()
        print(json.dumps(TASKS[task](*arguments)))
        return
    slices, side, steps = (4, 128, 4) if chosen.quick else (12, 256, 4)
    print_race(slices, side, steps, chosen.rounds)
    print_options(side, steps)
    print_costs(slices, side)


if __name__ == "__main__":
    main()
