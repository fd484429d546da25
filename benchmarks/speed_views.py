"""What views cost, in CPU time on one thread: ratios to M0's own forward, and to a recorded TENT episode.

    python benchmarks/speed_views.py

One case of 12 slices at 192 x 192, a 2-D U-Net like nnU-Net's with half its features (``--features`` takes others; what
is done beside the forwards does not grow with them). Every voxel is noise, the worst for all that looks at edits.
Contestants run interleaved; a ratio is the median of the rounds' own ratios. M0, the identity, is the first of V views.
Promises: a consensus of V views costs at most 1.05 V forwards, 12 views cost no more than TENT with K = 4, three
ladders in one pass at most 5 % more than what they cost one by one without a second M0, and at most two volumes of
probabilities are held, however many views there are. The same 12 views and TENT also run through an nnU-Net (untrained,
2-D, ``--nnunet-features``) as its users run it, M0 with mirroring and views without, and with ``--disable_tta``; with
``--mirrored-views`` every view is four forwards like M0 while an update stays one, so that has no limit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone, load_backbone, pipeline_of
from casewise.adapt.backbones.module import of_network
from casewise.adapt.consensus import Mean
from casewise.adapt.networks import PlainUNet
from casewise.adapt.proposers.live import record_case, run_episode
from casewise.core.records import Case, State
from casewise.run.local import keep_freed_memory

FEW, MANY = "views:gamma(1.2),gamma(1.4),mirror(x)", "views:random(11)"  # and M0: 4 and 12 views
SHRINK = (State(2, 0.5),)  # as ``casewise record`` records an episode unless told otherwise


def seconds(run: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    run()
    return time.process_time() - began


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slices", type=int, default=12)
    parser.add_argument(
        "--nnunet-features", default="32,64,128,256", help="of the miniature nnU-Net; none: leave it out"
    )
    parser.add_argument("--features", default="16,32,64,96", help="of the stages; nnU-Net's own: 32,64,128,256,512,512")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stages = tuple(int(width) for width in options.features.split(","))
    backbone = of_network(PlainUNet(features=stages), multiple=2 ** (len(stages) - 1))
    case = Case("one", np.random.default_rng(0).normal(size=(1, options.slices, 192, 192)).astype(np.float32))
    ready = backbone.prepare(case)
    pipeline = pipeline_of(ready, backbone)
    tent = Adaptation("tent", steps=4, shrink=SHRINK)

    def plain() -> object:
        with torch.inference_mode():
            return backbone.network(pipeline.whole)

    def ladder(spec: str) -> object:
        return record_case(case, backbone, {"": Adaptation(spec)}, ready)

    def together() -> object:
        return record_case(case, backbone, {"few": Adaptation(FEW), "many": Adaptation(MANY), "tent": tent}, ready)

    backbone.network.eval()
    plain()
    contestants: dict[str, Callable[[], object]] = {
        "M0, a bare forward": plain,
        "4 views and their mean": lambda: ladder(FEW),
        "12 views and their mean": lambda: ladder(MANY),
        "TENT, K = 4, recorded": lambda: run_episode(
            backbone.network, ready.inputs, tent, case_id="one", forward=ready.forward, head=backbone.head
        ),
        "all three ladders in one pass": together,
    }
    rounds = [{name: seconds(run) for name, run in contestants.items()} for _ in range(options.rounds)]
    print("| | CPU seconds | forwards of M0 |\n|---|---|---|")
    for name in contestants:
        ratio = statistics.median(one[name] / one["M0, a bare forward"] for one in rounds)
        print(f"| {name} | {statistics.median(one[name] for one in rounds):.2f} | {ratio:.2f} |")
    few, many, episode, every = list(contestants)[1:]
    one_forward = "M0, a bare forward"
    rows: list[Ratios] = [
        (f"{name}, per forward", one_forward, [one[name] / (count * one[one_forward]) for one in rounds], 1.05)
        for name, count in ((few, 4), (many, 12))
    ]
    rows.append((many, episode, [one[many] / one[episode] for one in rounds], 1.0))
    sums = [one[few] + one[many] + one[episode] - one[one_forward] for one in rounds]
    spent = [one[every] / total for one, total in zip(rounds, sums, strict=True)]
    rows.append((every, "their sum with one M0 for the readings", spent, 1.05))
    rows.append(("volumes that a mean of 12 holds", "beside the newest", [held_volumes()], 1.0))
    if options.nnunet_features != "none":
        rows += through_nnunet([int(width) for width in options.nnunet_features.split(",")], options.rounds)
    print("\n| ours | peer | ours / peer | limit |\n|---|---|---|---|")
    for ours, peer, ratios, limit in rows:
        print(
            f"| {ours} | {peer} | {statistics.median(ratios):.3f} | {'none' if limit is None else format(limit, 'g')} |"
        )


Ratios = tuple[str, str, list[float], float | None]


def through_nnunet(features: list[int], rounds: int) -> Iterator[Ratios]:
    """Twelve views against TENT with K = 4, both through the whole pipeline of an nnU-Net."""
    os.environ.setdefault("nnUNet_compile", "f")
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from miniature_nnunet import scan, write_model

    image = scan(0, shape=(6, 128, 128))[0][None]
    case = Case("heart", image, (2.0, 1.0, 1.0))
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_model(Path(folder), steps=0, features=features, patch=128))
        mirrored, plain = (load_backbone(model, mirroring=on) for on in (True, False))

    def tent(backbone: Backbone) -> float:
        ready, how = backbone.prepare(case), Adaptation("tent", steps=4, shrink=SHRINK)
        return seconds(lambda: run_episode(
            backbone.network, ready.inputs, how, forward=ready.forward, predict=ready.predict, head=backbone.head
        ))  # fmt: skip

    def views(backbone: Backbone, how: Adaptation) -> float:
        return seconds(lambda: record_case(case, backbone, {"": how}))

    found: dict[str, list[float]] = {"as it comes": [], "off": [], "mirrored": []}
    for _ in range(rounds):
        episode = tent(mirrored)
        found["as it comes"].append(views(mirrored, Adaptation(MANY)) / episode)
        found["off"].append(views(plain, Adaptation(MANY)) / tent(plain))
        found["mirrored"].append(views(mirrored, Adaptation(MANY, mirrored_views=True)) / episode)
    episode_of = "TENT, K = 4, recorded through an nnU-Net with mirroring"
    yield "12 views of an nnU-Net as it comes", episode_of, found["as it comes"], 1.0
    yield "12 views of an nnU-Net, --disable_tta", "TENT, K = 4, --disable_tta", found["off"], 1.0
    yield "12 views of an nnU-Net, --mirrored-views", episode_of, found["mirrored"], None


def held_volumes(readings: int = 12, size: int = 1 << 20) -> float:
    """Memory of a growing mean in volumes of probabilities; NumPy's allocations are traced, so tensors share them."""
    tracemalloc.start()
    mean = Mean()
    peak = 0
    for _ in range(readings):
        mean.add(torch.from_numpy(np.ones((1, 1, size), np.float32)))
        peak = max(peak, tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    return peak / (4 * size)


if __name__ == "__main__":
    main()
