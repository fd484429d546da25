"""The cost of one update of tuning, in CPU time on one thread, as a ratio to plain PyTorch on the same batch.

    python benchmarks/speed_learning.py

A batch of 8 slices, a 2-D U-Net like nnU-Net's (``--features``, ``--size``). Contestants run interleaved; a ratio is
the median of the rounds' own ratios. Promises: an update of "norm+head" costs at most 1.1 times a plain step (forward,
backward of the same parameters, AdamW) with the same loss, and less than a plain step of full training.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from casewise.adapt.backbones.module import of_network
from casewise.adapt.networks import PlainUNet
from casewise.adapt.parameters import fast_norms
from casewise.core.records import Case
from casewise.learn.generic import GenericTask
from casewise.learn.loop import CLIP, Loop, segmentation_loss
from casewise.learn.tuning import Tuning
from casewise.run.local import keep_freed_memory

LIMIT = 1.1


def main() -> None:
    """Print the ratios; exit code 1 where one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--features", default="16,32,64,96,128")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    stages = tuple(int(width) for width in options.features.split(","))
    inputs, target = batch(options.size)
    ours = contestant(stages, Tuning(), inputs, target)
    plain = plain_step(stages, "norm+head", inputs, target)
    full = plain_step(stages, "all", inputs, target)
    rows = compared({"update": ours, "plain": plain, "full": full}, options.rounds)
    ratios = {
        "an update of norm+head to a plain step of norm+head": (rows["update"], rows["plain"], LIMIT),
        "an update of norm+head to a plain step of all weights": (rows["update"], rows["full"], 1.0),
    }
    missed = False
    for what, (one, other, limit) in ratios.items():
        ratio = statistics.median(a / b for a, b in zip(one, other, strict=True))
        missed = missed or ratio > limit
        print(f"{ratio:6.2f}  {what} (at most {limit:g}; {1e3 * statistics.median(one):.0f} ms)")
    raise SystemExit(int(missed))


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise and labels."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 1, size, size, generator=generator), torch.randint(0, 4, (8, size, size), generator=generator)


def contestant(
    stages: tuple[int, ...], tuning: Tuning, inputs: torch.Tensor, target: torch.Tensor
) -> Callable[[], object]:
    """One update of ours on the batch."""
    backbone = of_network(PlainUNet(features=stages), multiple=2 ** (len(stages) - 1), intensity="as-is")
    size = inputs.shape[-1]
    case = Case("one", np.zeros((1, size, size), np.float32))
    loop = Loop(backbone.network, GenericTask(backbone, [case], [np.ones((size, size), np.uint8)], tuning), tuning)

    def update() -> object:
        with fast_norms(backbone.network):
            return loop.step(inputs, target)

    return update


def plain_step(
    stages: tuple[int, ...], parameters: str, inputs: torch.Tensor, target: torch.Tensor
) -> Callable[[], object]:
    """What somebody would write without casewise."""
    network = PlainUNet(features=stages)
    for name, parameter in network.named_parameters():
        layer = network.get_submodule(name.rpartition(".")[0])
        parameter.requires_grad_(
            parameters == "all" or isinstance(layer, nn.InstanceNorm2d) or name.startswith("head.")
        )
    moving = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(moving, lr=3e-3)

    def step() -> object:
        optimizer.zero_grad(set_to_none=True)
        loss = segmentation_loss(network(inputs), target, "softmax")
        loss.backward()
        nn.utils.clip_grad_norm_(moving, CLIP)
        optimizer.step()
        return float(loss.detach())

    return step


def compared(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each contestant in each round, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for counted in range(rounds + 1):
        for name, run in contestants.items():
            began = time.process_time()
            run()
            if counted:
                seconds[name].append(time.process_time() - began)
    return seconds


if __name__ == "__main__":
    main()
