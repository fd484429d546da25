"""CoTTA and EATA over a stream, by name: a second statement as one loop over all images, without a reset."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.augmentations import light_view
from casewise.adapt.backbones.module import as_backbone
from casewise.core.records import Case
from casewise.core.seeds import seed_of
from casewise.run.local import LocalEngine
from casewise.run.record_folder import RecordCase, record_all

STEPS, RATE, CASES = 2, 2e-2, 4


def network():
    torch.manual_seed(5)
    layers = [nn.Conv2d(1, 6, 3, padding=1), nn.InstanceNorm2d(6, affine=True), nn.ReLU(), nn.Conv2d(6, 3, 1)]
    return nn.Sequential(*layers).eval()


def pictures():
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(1, 1, 24, 24, generator=generator) for _ in range(CASES)]


def eata(net, images, source):
    """Niu et al. 2022 as the paper of this project states it: reliable slices, and a plain anchor at the source."""
    moving = list(net[1].parameters())
    adam = torch.optim.Adam(moving, lr=RATE)
    for image in images:
        masks = []
        for _ in range(STEPS):
            logs = net(image).log_softmax(1)
            entropy = -(logs.exp() * logs).sum(1).mean()
            if float(entropy.detach()) < 0.45:
                far = sum((p - q.detach()).square().sum() for p, q in zip(moving, source[1].parameters(), strict=True))
                adam.zero_grad()
                torch.autograd.backward(entropy + far)
                adam.step()
            masks.append(net(image).argmax(1)[0].numpy())
        yield masks


def cotta(net, images, source):
    """Wang et al. 2022: one teacher and one optimizer for the whole stream; random weights return to the source."""
    teacher, moving = copy.deepcopy(net), list(net[1].parameters())
    adam = torch.optim.Adam(moving, lr=RATE)
    for number, image in enumerate(images):
        masks = []
        for step in range(1, STEPS + 1):
            draws = torch.Generator().manual_seed(seed_of(0, f"c{number}", step))
            views = [light_view(draws) for _ in range(2)]
            with torch.no_grad():
                target = torch.stack([view.invert(teacher(view.apply(image))) for view in views]).mean(0).softmax(1)
            adam.zero_grad()
            torch.autograd.backward(-10 * (target * net(image).log_softmax(1)).sum(1).mean())
            adam.step()
            draws = torch.Generator().manual_seed(seed_of("0/1", f"c{number}", step))
            with torch.no_grad():
                for slow, fast, first in zip(teacher[1].parameters(), moving, source[1].parameters(), strict=True):
                    slow.mul_(0.999).add_(0.001 * fast)
                    fast.copy_(torch.where(torch.rand(fast.shape, generator=draws) < 0.01, first, fast))
            masks.append(net(image).argmax(1)[0].numpy())
        yield masks


@pytest.mark.parametrize(("name", "loop"), [("eata", eata), ("cotta", cotta)])
def test_a_stream_by_name_makes_the_masks_of_one_loop(name, loop, tmp_path):
    net, images = network(), pictures()
    with torch.no_grad():
        net[-1].weight.mul_(10)  # sure enough for the margin of EATA
    how = Adaptation(name, RATE, steps=STEPS, reset="stream", min_area=1)
    cases = {f"c{k}": Case(f"c{k}", image[0].numpy()) for k, image in enumerate(images)}
    made = record_all(RecordCase(as_backbone(net), {"": how}, cases), LocalEngine(), tmp_path)
    moved = 0
    for (case_id, image), masks in zip(
        zip(cases, images, strict=True), loop(copy.deepcopy(net), images, net), strict=True
    ):
        found = made.trajectory(case_id).masks
        assert np.array_equal(found[0], net(image).argmax(1)[0].numpy()), "M0 is the source's"
        for own, expected in zip(found[1:], masks, strict=True):
            assert (own != expected).sum() <= 3
        moved += int((found[-1] != found[0]).sum())
    assert moved > 20
