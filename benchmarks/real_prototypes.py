"""DG-TTA and VPTTA beside TENT and the consensus on real shifts, and the form of VPTTA that did not gain.

    python benchmarks/real_prototypes.py --data DATA -o OUT [fundus-0 polyps-0 ...]     after real_ladders.py

Rates are chosen on the calibration cases of the first source model of a cohort; what gains there is read once on the
development cases, through the exposure ledger. One Markdown table per shift; archives in OUT/COHORT/prototypes-SHIFT.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
from real_ladders import HOME, Shift, cases_of, shifts
from real_rows import spread
from torch import Tensor, nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.objectives.consensus import DgTta
from casewise.adapt.objectives.tent import Vptta, prompted
from casewise.archive.store import Archive, open_archive
from casewise.core.errors import BadInput
from casewise.data.folders import CaseFiles
from casewise.deployment import Deployment
from casewise.judge.controllers.depth import FixedK
from casewise.judge.ledger import unlock
from casewise.judge.outcomes import POINT, deployed, outcomes
from casewise.replay import replay
from casewise.run.local import LocalEngine
from casewise.run.record_folder import RecordCase, record_folder

STEPS = 4
HEARTS = 10  # calibration hearts, one by one from the first


@dataclass(frozen=True)
class BlendedVptta:
    """VPTTA as at the paper's first case: each layer normalizes with a blend of statistics, and aligns to it.

    ``moment`` of them are the case's own. In the paper it falls from 5/6 as cases go by; here no case knows another.
    """

    moment: float = 5 / 6
    share: float = 0.01
    learning_rate: float = 0.01

    def begin(self, subject: Adaptable) -> Update:
        """The prompt lives in a hook, which the episode takes off when the network comes back."""
        layers = [m for m in subject.network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if not layers:
            raise BadInput("VPTTA aligns BatchNorm statistics, and the network has no BatchNorm layer")
        for parameter in subject.parameters.values():
            parameter.requires_grad_(False)
        side = [max(1, round(self.share * n)) for n in subject.inputs.shape[-2:]]
        prompt = torch.ones(1, subject.inputs.shape[1], *side, requires_grad=True)
        optimizer = torch.optim.Adam([prompt], lr=subject.learning_rate, betas=(0.9, 0.99))
        losses: list[Tensor] = []
        for layer in layers:
            layer.register_forward_pre_hook(lambda layer, given: losses.append(self.misfit(layer, given[0])))
            layer.forward = self._blended(layer)  # type: ignore[method-assign]
        subject.network.register_forward_pre_hook(lambda _, given: (prompted(given[0], prompt), *given[1:]))

        def update() -> Mapping[str, float]:
            losses.clear()
            with torch.enable_grad():
                subject.logits(subject.inputs)
                loss = torch.stack(losses).mean()
                (prompt.grad,) = torch.autograd.grad(loss, [prompt])
            losses.clear()
            optimizer.step()
            subject.changed()
            return {"loss": float(loss.detach()), "prompt": float((prompt.detach() - 1).abs().max())}

        return update

    def target(self, layer: nn.Module, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance that a layer should see."""
        axes = (0, *range(2, features.ndim))
        mean, variance = features.mean(axes).detach(), features.var(axes).detach()
        assert isinstance(layer.running_mean, Tensor)
        assert isinstance(layer.running_var, Tensor)
        return torch.lerp(layer.running_mean, mean, self.moment), torch.lerp(layer.running_var, variance, self.moment)

    def misfit(self, layer: nn.Module, features: Tensor) -> Tensor:
        """Mean distance of a layer's means and deviations from their target."""
        mean, variance = self.target(layer, features)
        axes = tuple(range(2, features.ndim))
        return (mean - features.mean(axes)).abs().mean() + (variance.sqrt() - features.std(axes)).abs().mean()

    def _blended(self, layer: nn.Module) -> Callable[[Tensor], Tensor]:
        def forward(features: Tensor) -> Tensor:
            mean, variance = self.target(layer, features)
            weight, bias = layer.weight, layer.bias
            return nn.functional.batch_norm(features, mean, variance, weight, bias, eps=layer.eps)  # type: ignore

        return forward


@dataclass(frozen=True)
class Prototype:
    """An objective, the rates that are tried, and what an update costs."""

    objective: object
    rates: tuple[float, ...]
    forwards: int  # of each update, with the prediction after it
    backwards: int

    def at(self, rate: float) -> Adaptation:
        """Four updates at a rate."""
        return Adaptation(self.objective, rate, steps=STEPS)


def prototypes(shift: Shift) -> dict[str, Prototype]:
    """DG-TTA everywhere; VPTTA where there is BatchNorm."""
    photos = shift.cohort != "cardiac"
    rates = (5e-4, 2e-3, 5e-3) if photos else (5e-3,)  # what fundus and polyps chose
    found = {"dg-tta": Prototype(DgTta(photos=photos), rates, 3, 2)}
    if photos:
        found["dg-tta with views as for scans"] = Prototype(DgTta(), (5e-3,), 3, 2)
    if shift.cohort == "polyps":
        found["vptta"] = Prototype(Vptta(), (0.01, 0.05), 2, 1)
        found["vptta, blended statistics"] = Prototype(BlendedVptta(), (0.0, 0.01, 0.05), 2, 1)
    return found


def recorded(shift: Shift, name: str, how: Adaptation, split: str, out: Path) -> Archive:
    """The ladder of a prototype on a split, recorded where it is not."""
    ladder = f"{name.replace(', ', '-').replace(' ', '-')}-{how.learning_rate:g}"
    path = out / shift.cohort / f"prototypes-{shift.name}" / ladder / split
    cases = chosen(shift, split, out)
    deployment = Deployment(shift.model, (how,), ladders=(ladder,))
    work = RecordCase(deployment, {files.id: files for files in cases})
    _, results = record_folder(work, LocalEngine(), path, metric=shift.metric, dataset=shift.cohort)
    for result in results:
        if result.error:
            print(f"{shift.name} {ladder} {result.case_id} {result.error}", file=sys.stderr)
    return opened(path, split).on(ladder)


def opened(path: Path, split: str) -> Archive:
    """An archive; development labels through its ledger."""
    archive = open_archive(path)
    purpose = "benchmarks/real_prototypes.py: DG-TTA and VPTTA beside TENT and the consensus"
    return unlock(archive.locked(), purpose=purpose) if split == "development" else archive


def chosen(shift: Shift, split: str, out: Path) -> list[CaseFiles]:
    """The cases of a split; of the hearts only a few, they take minutes each."""
    cases = cases_of(out / shift.cohort / "folders" / split, shift.model.load().ending)
    return cases[:HEARTS] if shift.cohort == "cardiac" else cases


def at_step(archive: Archive, step: int) -> pd.DataFrame:
    """What deploying one step would be worth."""
    return deployed(outcomes(archive), replay(archive, FixedK(step)))


def line(name: str, cases: pd.DataFrame, cost: str) -> str:
    """Gain, interval by cluster, who is helped and hurt."""
    change = cases["change"]
    return (
        f"| {name} | {change.mean():+.4f} {spread(cases)} | {(change > 0).sum()} : {(change < 0).sum()} | "
        f"{(change < -POINT).sum()} | {len(change)} | {cost} |"
    )


def best_rate(shift: Shift, name: str, tried: Prototype, out: Path) -> float:
    """The rate with the largest mean gain on calibration cases of the cohort's first source model; 0 if none gains."""
    weights = out / "sources" / f"{shift.cohort}-0.safetensors"
    first = replace(shift, name=f"{shift.cohort}-0", model=replace(shift.model, weights=weights))
    gains = {}
    for rate in tried.rates:
        cases = at_step(recorded(first, name, tried.at(rate), "calibration", out), STEPS)
        gains[rate] = cases["change"].mean()
        print(f"<!-- {first.name} calibration {name} {rate:g}: {gains[rate]:+.4f} {spread(cases)} -->", flush=True)
    best = max(gains, key=lambda rate: gains[rate])
    return best if gains[best] > 0 else 0.0


def tell(shift: Shift, out: Path) -> None:
    """The table of one shift."""
    split = "calibration" if shift.cohort == "cardiac" else "development"
    lines, ids = [], {files.id for files in chosen(shift, split, out)}
    for name, tried in prototypes(shift).items():
        rate = tried.rates[0] if len(tried.rates) == 1 else best_rate(shift, name, tried, out)
        if not rate:  # what does not gain on calibration cases costs no look at the others
            continue
        archive = recorded(shift, name, tried.at(rate), split, out)
        for step in (1, STEPS):
            cost = f"{1 + step * tried.forwards} + {step * tried.backwards}b"
            lines.append(line(f"{name}, {rate:g}, step {step}", at_step(archive, step), cost))
    there = opened(shift.archive(out, split), split)
    for name, step in (("tent", STEPS), ("consensus", 5)):
        if name in there.ladders:
            cases = at_step(there.on(name), step)
            cost = f"{1 + step} + {step}b" if name == "tent" else f"{1 + 8 + step} + {step}b"
            lines.append(line(f"{name}, step {step}", cases[cases["case"].isin(ids)], cost))
    print(f"\n### {shift.name}, {split}\n\n| method | gain [95 %] | helped : hurt | hurt by > .01 | n | forwards |")
    print("|---|---|---|---|---|---|", *lines, sep="\n", flush=True)


def main() -> None:
    """Print the tables of the shifts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shifts", nargs="*", metavar="SHIFT", default=["fundus-0", "fundus-1", "polyps-0", "polyps-1"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="folder of the source models; default: weights beside DATA")
    parser.add_argument("-o", "--out", type=Path, default=Path("bench-real"))
    options = parser.parse_args()
    os.environ.setdefault("nnUNet_compile", "f")
    sys.path.insert(0, str(HOME.parent))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    out = options.out.resolve()
    known = shifts((options.weights or options.data.resolve().parent / "weights").resolve(), out)
    for name in options.shifts:
        tell(known[name], out)


if __name__ == "__main__":
    main()
