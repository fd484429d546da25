"""Every objective against an independent computation of its formula, written from the papers' formulas in plain torch.

K = 3 updates; every adapted parameter agrees to 1e-6 after each of them. Only the *sampled numbers* of a view are
shared (a view is data); transforms, losses, filters, teachers and searches are stated again here. The learning rate is
5e-4, so 1e-6 is 1/500 of one Adam step. CoTTA is never compared in the regime where its exact gradient is zero.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import nn

from casewise.adapt.augmentations import light_view
from casewise.adapt.objectives.cotta import Cotta
from casewise.adapt.objectives.deyo import Deyo
from casewise.adapt.objectives.grata import Grata, sampled_style
from casewise.adapt.objectives.memo import Memo
from casewise.adapt.objectives.sar import Sar
from casewise.adapt.proposers.live import run_episode
from casewise.core.seeds import seed_of

torch.set_num_threads(1)  # tiny networks: threads only wait for each other

STEPS, RATE, CASE = 3, 5e-4, "toy"
NORMS = (nn.BatchNorm2d, nn.InstanceNorm2d, nn.GroupNorm, nn.InstanceNorm3d, nn.BatchNorm3d, nn.LayerNorm)


# -- toy networks -----------------------------------------------------------------------------------------------------


class ByChannel(nn.LayerNorm):
    """Over the channels of each voxel, as transformers normalize their tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Toy(nn.Module):
    """Two convolutions with a normalization each and a head."""

    def __init__(self, norm: str, classes: int) -> None:
        super().__init__()
        spatial = 3 if norm.endswith("3d") else 2
        conv = nn.Conv3d if spatial == 3 else nn.Conv2d
        self.first, self.second = conv(1, 6, 3, padding=1), conv(6, 6, 3, padding=1)
        self.norm1, self.norm2 = _norm(norm), _norm(norm)
        self.head = conv(6, classes, 1)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.leaky_relu(self.norm1(self.first(x)), 0.2)
        return torch.nn.functional.leaky_relu(self.norm2(self.second(x)), 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def _norm(kind: str) -> nn.Module:
    if kind.startswith("batch"):
        norm = (nn.BatchNorm3d if kind == "batch3d" else nn.BatchNorm2d)(6)
        norm.running_mean.normal_(std=0.1)
        norm.running_var.uniform_(0.5, 1.5)
    elif kind.startswith("group"):
        norm = nn.GroupNorm(2, 6)
    elif kind == "layer":
        norm = ByChannel(6)
    else:
        norm = (nn.InstanceNorm3d if kind == "instance3d" else nn.InstanceNorm2d)(6, affine=True)
    nn.init.uniform_(norm.weight, 0.7, 1.3)
    nn.init.normal_(norm.bias, std=0.2)
    return norm


SHARP = {"batch": 18, "batch3d": 28, "instance": 7, "layer": 20}  # so that some slices are sure and views agree


def toy(norm: str, head: str, symmetric: bool = False) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(7)
    classes = 3 if head == "softmax" else 2
    network = Toy(norm, classes).eval()
    with torch.no_grad():
        network.head.weight.mul_(SHARP.get(norm, 6))
        if symmetric:
            for conv in (network.first, network.second):
                turned = [conv.weight.rot90(turns, (-2, -1)) for turns in range(4)]
                conv.weight.copy_(sum(turned + [one.flip(-1) for one in turned]) / 8)
    image = torch.randn((1, 1, 8, 8, 12) if norm.endswith("3d") else (3, 1, 12, 16))
    return network, image


CONFIGURATIONS = [
    ("batch", "softmax"), ("instance", "softmax"), ("group", "sigmoid"), ("layer", "softmax"),
    ("instance3d", "softmax"), ("batch3d", "softmax"), ("group3d", "sigmoid"),
]  # fmt: skip


def compare(objective, second, norm: str, head: str, rate: float = RATE, symmetric: bool = False) -> None:
    network, image = toy(norm, head, symmetric)
    trajectory = run_episode(
        network, image, objective, steps=STEPS, learning_rate=rate, head=head, case_id=CASE, keep_parameters=True
    )
    twin = copy.deepcopy(network)
    stated = list(second(twin, image, head, rate))
    assert len(stated) == STEPS
    for step, expected in enumerate(stated, start=1):
        ours = trajectory.parameters[step]
        assert set(ours) == set(expected)
        for name, value in expected.items():
            assert np.abs(ours[name] - value.numpy()).max() <= 1e-6, (step, name)
    moved = max(np.abs(trajectory.parameters[STEPS][name] - trajectory.parameters[0][name]).max() for name in stated[0])
    assert moved > rate / 10  # a comparison of two things that stand still proves nothing


# -- helpers of the independent computation ---------------------------------------------------------------------------


def affine(network: nn.Module) -> dict[str, nn.Parameter]:
    found = {}
    for name, module in network.named_modules():
        if isinstance(module, NORMS):
            found |= {f"{name}.weight": module.weight, f"{name}.bias": module.bias}
    return found


def values(parameters) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in parameters.items()}


def put(parameters, new) -> None:
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(new[name])


def dice_of_fate(step: int, salt: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(f"0/{salt}" if salt else 0, CASE, step))


def adam(parameters, rate):
    """Adam from its paper: returns a function that takes gradients (and perhaps another rate) and moves."""
    first = {n: torch.zeros_like(p) for n, p in parameters.items()}
    second = {n: torch.zeros_like(p) for n, p in parameters.items()}
    count = 0

    def step(grads, eta=rate):
        nonlocal count
        count += 1
        with torch.no_grad():
            for n, p in parameters.items():
                first[n] = 0.9 * first[n] + 0.1 * grads[n]
                second[n] = 0.999 * second[n] + 0.001 * grads[n] ** 2
                m, v = first[n] / (1 - 0.9**count), second[n] / (1 - 0.999**count)
                p -= eta * m / (v.sqrt() + 1e-8)

    return step


def grads_of(loss, parameters) -> dict[str, torch.Tensor]:
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def prob(z, head):
    return torch.softmax(z, 1) if head == "softmax" else torch.sigmoid(z)


def uncertainty(p, head):
    if head == "softmax":
        return -(p * torch.log(p)).sum(1)
    return -(p * torch.log(p) + (1 - p) * torch.log(1 - p)).sum(1)


def top(classes, head):
    return math.log(classes) if head == "softmax" else classes * math.log(2)


def seen_through(view, x):
    x = x * view.brightness
    x = x + view.noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(view.seed))
    return torch.flip(x, view.flips) if view.flips else x


def taken_back(view, z):
    return torch.flip(z, view.flips) if view.flips else z


# -- MEMO: L = mean over voxels of H( mean over 4 views of p ) --------------------------------------------------------


def memo(network, x, head, rate):
    parameters = affine(network)
    move = adam(parameters, rate)
    for step in range(1, STEPS + 1):
        dice = dice_of_fate(step)
        views = [light_view(dice) for _ in range(4)]
        mean = sum(prob(taken_back(v, network(seen_through(v, x))), head) for v in views) / 4
        move(grads_of(uncertainty(mean, head).mean(), parameters))
        yield values(parameters)


@pytest.mark.parametrize(("norm", "head"), CONFIGURATIONS)
def test_memo(norm, head):
    compare(Memo(), memo, norm, head)


# -- CoTTA: student toward teacher's mean logits, teacher 0.999, restore 0.01, weight 10 ------------------------------


def cotta(network, x, head, rate, restore=0.01, decay=0.999, deploy="student"):
    parameters = affine(network)
    source, teacher, student = values(parameters), values(parameters), values(parameters)
    move = adam(parameters, rate)
    for step in range(1, STEPS + 1):
        dice = dice_of_fate(step)
        views = [light_view(dice) for _ in range(2)]
        put(parameters, teacher)
        with torch.no_grad():
            z = sum(taken_back(v, network(seen_through(v, x))) for v in views) / 2
        target = prob(z, head)
        put(parameters, student)
        p = prob(network(x), head)
        if head == "softmax":
            voxels = -(target * torch.log(p)).sum(1)
        else:
            voxels = -(target * torch.log(p) + (1 - target) * torch.log(1 - p)).sum(1)
        grads = grads_of(10 * voxels.mean(), parameters)
        assert max(g.abs().max() for g in grads.values()) > 1e-3  # not the zero-gradient regime
        move(grads)
        teacher = {n: decay * teacher[n] + (1 - decay) * p.detach() for n, p in parameters.items()}
        dice = dice_of_fate(step, salt=1)
        for n, p in parameters.items():
            back = torch.rand(p.shape, generator=dice) < restore
            p.data[back] = source[n][back]
        student = values(parameters)
        yield teacher if deploy == "teacher" else student


@pytest.mark.parametrize(("norm", "head"), CONFIGURATIONS)
def test_cotta(norm, head):
    compare(Cotta(), cotta, norm, head)


def test_cotta_with_a_forgetful_student_and_a_quick_teacher_that_is_deployed():
    def second(*arguments):
        return cotta(*arguments, restore=0.3, decay=0.5, deploy="teacher")

    compare(Cotta(restore=0.3, teacher_decay=0.5, deploy="teacher"), second, "instance", "softmax")


# -- SAR: reliable voxels, a hill of radius 0.05, the gradient from its top -------------------------------------------


def sar(network, x, head, rate, by_slice=False, threshold=None):
    parameters = affine(network)
    source = values(parameters)
    move = adam(parameters, rate)
    average = None
    for _ in range(STEPS):
        z = network(x)
        e0 = 0.4 * top(z.shape[1], head)

        def measure(z):
            h = uncertainty(prob(z, head), head)
            return h.mean((-2, -1)).flatten() if by_slice else h

        h = measure(z)
        k1 = h < e0
        assert k1.any()
        assert by_slice or not k1.all()
        g = grads_of(h[k1].mean(), parameters)
        length = torch.sqrt(sum((v**2).sum() for v in g.values()))
        here = values(parameters)
        put(parameters, {n: here[n] + 0.05 * g[n] / (length + 1e-12) for n in here})
        h2 = measure(network(x))[k1]
        loss = h2[h2 < e0].mean()
        g2 = grads_of(loss, parameters)
        put(parameters, here)
        move(g2)
        average = loss.item() if average is None else 0.9 * average + 0.1 * loss.item()
        if threshold is not None and average < threshold:
            put(parameters, source)
            move = adam(parameters, rate)
            average = None
        yield values(parameters)


@pytest.mark.parametrize(("norm", "head"), CONFIGURATIONS)
def test_sar(norm, head):
    compare(Sar(), sar, norm, head)


def test_sar_by_slice():
    def second(*arguments):
        return sar(*arguments, by_slice=True)

    compare(Sar(sample="slice", margin=0.4), second, "instance", "softmax")


def test_sar_that_recovers_once():
    network, image = toy("instance", "softmax")
    seen = run_episode(network, image, Sar(), steps=2, learning_rate=0.05, case_id=CASE).diagnostics
    first, second = seen[0]["sharp_loss"], 0.9 * seen[0]["sharp_loss"] + 0.1 * seen[1]["sharp_loss"]
    threshold = (first + second) / 2  # below the average after one update, above it after two
    assert second < first

    def stated(*arguments):
        return sar(*arguments, threshold=threshold)

    compare(Sar(recovery="relative", kappa=1.0, reference_entropy=threshold), stated, "instance", "softmax", rate=0.05)


# -- GraTa: entropy gradient, one gradient ahead, six weak views, one strong view, Adam with 1/4 (cos + 1)^2 ----------


def styled(x, dice, official=False):
    """The strong view again, in NumPy and SciPy, from the same sampled numbers."""
    how = {"retain_statistics": not official, "blur_by_channel": official, "rescale": official, "official": official}
    s = sampled_style(x, dice, **how)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(s.seed)).numpy()
    out = x.numpy().astype(np.float64).copy()
    for i in range(out.shape[0]):
        for c in range(out.shape[1]):
            plane = out[i, c] * float(s.brightness[i, c])
            factor = float(s.contrast[i, c])
            if factor != 1:
                plane = np.clip(plane.mean() + factor * (plane - plane.mean()), plane.min(), plane.max())
            gamma = float(s.gamma[i, c])
            if gamma != 1:
                plane = -plane if official else plane
                mean, spread, low, extent = plane.mean(), plane.std(ddof=1), plane.min(), np.ptp(plane)
                plane = ((plane - low) / (extent + 1e-7)) ** gamma * extent + low
                plane = -plane if official else plane
                if not official:
                    plane = (plane - plane.mean()) / (plane.std(ddof=1) + 1e-7) * spread + mean
            plane = plane + float(s.noise[i, 0]) * noise[i, c]
            sigma = float(s.blur[i, c])
            out[i, c] = ndimage.gaussian_filter(plane, sigma, mode="nearest") if sigma else plane
        if official:
            out[i] = (out[i] - out[i].min()) / (np.ptp(out[i]) + 1e-7)
    return torch.from_numpy(out).float()


def grata(network, x, head, rate, official=False):
    parameters = affine(network)
    move = adam(parameters, rate)
    for step in range(1, STEPS + 1):
        p = prob(network(x), head)
        h = uncertainty(p, head) if head == "softmax" else -(p * torch.log(p + 1e-6)).sum(1)
        aux = grads_of(h.mean(), parameters)
        here = values(parameters)
        put(parameters, {n: here[n] - aux[n] for n in here})
        with torch.no_grad():
            maps = [prob(network(x), head)]
            maps += [prob(network(x.flip(a)), head).flip(a) for a in (-1, -2)]
            maps += [prob(network(x.rot90(t, (-2, -1))), head).rot90(4 - t, (-2, -1)) for t in (1, 2, 3)]
            target = sum(maps) / 6
        z = network(styled(x, dice_of_fate(step), official))
        if head == "softmax":
            loss = -(target * torch.log_softmax(z, 1)).sum(1).mean()
        else:
            loss = nn.BCEWithLogitsLoss()(z, target)
        pse = grads_of(loss, parameters)
        put(parameters, here)
        a, b = torch.cat([aux[n].flatten() for n in aux]), torch.cat([pse[n].flatten() for n in aux])
        cos = float(a @ b / (a.norm() * b.norm() + 1e-12))
        move(pse, rate * 0.25 * (cos + 1) ** 2)
        yield values(parameters)


@pytest.mark.parametrize(("norm", "head"), CONFIGURATIONS)
def test_grata(norm, head):
    compare(Grata(), grata, norm, head, symmetric=True)  # views that disagree would bring the rate to 0


def test_grata_as_released():
    def second(*arguments):
        return grata(*arguments, official=True)

    compare(Grata.official(), second, "batch", "sigmoid", symmetric=True)


# -- DeYO: slices that are sure and lose their foreground when blocks are shuffled ------------------------------------


def cut_up(x, dice):
    out = x.clone()
    space = x.shape[2:]
    grid = [4 if s >= 4 else 1 for s in space]
    assert all(s % g == 0 for s, g in zip(space, grid, strict=True))
    sides = [s // g for s, g in zip(space, grid, strict=True)]
    places = list(np.ndindex(*grid))
    for i in range(len(x)):
        order = torch.rand(len(places), generator=dice).argsort().tolist()
        for to, source in enumerate(order):
            here = tuple(slice(p * s, (p + 1) * s) for p, s in zip(places[to], sides, strict=True))
            there = tuple(slice(p * s, (p + 1) * s) for p, s in zip(places[source], sides, strict=True))
            out[(i, slice(None), *here)] = x[(i, slice(None), *there)]
    return out


def deyo(network, x, head, rate, drop_margin, ent_margin, foreground=True):
    parameters = affine(network)
    move = adam(parameters, rate)
    for step in range(1, STEPS + 1):
        z = network(x)
        p = prob(z, head)
        scale = top(z.shape[1], head)
        with torch.no_grad():
            q = prob(network(cut_up(x, dice_of_fate(step))), head)
        if head == "softmax":
            said = p.argmax(1, keepdim=True)
            drop = (p.detach().gather(1, said) - q.gather(1, said))[:, 0]
            body = said[:, 0] > 0
        else:
            yes = p.detach() > 0.5
            drop = torch.where(yes, p.detach(), 1 - p.detach()).prod(1) - torch.where(yes, q, 1 - q).prod(1)
            body = yes.any(1)
        h = uncertainty(p, head).mean((-2, -1)).flatten()
        drop, body = drop.reshape(len(h), -1), body.reshape(len(h), -1)
        if foreground:
            plpd = torch.stack([d[b].mean() if b.any() else torch.tensor(0.0) for d, b in zip(drop, body, strict=True)])
        else:
            plpd = drop.mean(1)
        keep = (h.detach() < ent_margin * scale) & (plpd > drop_margin)
        assert keep.any()
        w = 1 / torch.exp(h.detach() - 0.4 * scale) + 1 / torch.exp(-plpd)
        move(grads_of((w[keep] * h[keep]).mean(), parameters))
        yield values(parameters)


@pytest.mark.parametrize("reduction", ["foreground", "all"])
@pytest.mark.parametrize(("norm", "head"), CONFIGURATIONS)
def test_deyo(norm, head, reduction):
    def second(*arguments):
        return deyo(*arguments, drop_margin=0.02, ent_margin=0.7, foreground=reduction == "foreground")

    compare(Deyo(drop_margin=0.02, entropy_margin=0.7, reduction=reduction), second, norm, head)


# -- micro-batches take the same step as the whole batch --------------------------------------------------------------


@pytest.mark.parametrize(
    "objective",
    [Memo(), Cotta(), Sar(), Sar(sample="slice"), Grata(), Deyo(drop_margin=0.02, entropy_margin=0.7)],
    ids=repr,
)
def test_micro_batches_take_the_same_step(objective):
    options = {"steps": 2, "learning_rate": RATE, "keep_parameters": True, "case_id": CASE}
    network, image = toy("instance", "softmax")
    whole = run_episode(network, image, objective, **options)
    parts = run_episode(network, image, objective, max_slices=1, **options)
    for name, value in whole.parameters[2].items():
        assert np.abs(value - parts.parameters[2][name]).max() < 2e-6, name
    assert whole.diagnostics[1].keys() == parts.diagnostics[1].keys()
