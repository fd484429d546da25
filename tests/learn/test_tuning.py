"""Tuning learns, moves only what was selected, gives the network back, and refuses labels that cannot teach."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from worlds.discs import Tiny, cohort

from casewise.adapt.backbones.merged import merged
from casewise.adapt.backbones.module import Module
from casewise.adapt.snapshot import fingerprint
from casewise.adapt.tuned_weights import temporary_weights
from casewise.core.errors import BadInput, NotFinite, NothingToAdapt
from casewise.core.records import Case
from casewise.learn.generic import GenericTask, merged_logits, resampled
from casewise.learn.loop import Loop, segmentation_loss
from casewise.learn.tuning import Tuning, tune

FAST = Tuning(updates=25, batch=4, learning_rate=3e-2)


def dice(backbone, case, label):
    mask = backbone.prepare(case).pipeline.source()[0]
    return 2 * ((mask == 1) & (label == 1)).sum() / ((mask == 1).sum() + (label == 1).sum() + 1e-9)


@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize(("dimensions", "head"), [(2, "softmax"), (2, "sigmoid"), (3, "softmax")])
def test_tuning_learns_from_labels(tiny, norm, dimensions, head):
    backbone = tiny(norm=norm, dimensions=dimensions, head=head)
    cases, labels, _ = cohort(3, dimensions=dimensions)
    before = fingerprint(backbone.network)
    tuned = tune(backbone, cases[:2], labels[:2], FAST)
    assert fingerprint(backbone.network) == before == tuned.model
    source = dice(backbone, cases[2], labels[2])
    with temporary_weights(backbone.network, tuned):
        assert dice(backbone, cases[2], labels[2]) > max(0.7, source + 0.05)
    assert dice(backbone, cases[2], labels[2]) == source
    assert tuned.trained_on == ("p0", "p1")


@pytest.mark.parametrize(
    ("parameters", "moved"),
    [
        ("norm", {"encoder.1", "decoder.1"}),
        ("norm+head", {"encoder.1", "decoder.1", "head"}),
        ("all", {"encoder.0", "encoder.1", "decoder.0", "decoder.1", "head"}),
        (("head.bias",), {"head"}),
    ],
)
def test_only_what_is_selected_is_stored(tiny, parameters, moved):
    cases, labels, _ = cohort(1)
    tuned = tune(tiny(), cases, labels, replace(FAST, updates=1, parameters=parameters))
    assert {name.rpartition(".")[0] for name in tuned.values} == moved
    assert all(value.dtype == torch.float32 for value in tuned.values.values())


def test_nothing_below_the_first_selected_layer_has_a_gradient(tiny):
    backbone, (cases, labels, _) = tiny(), cohort(1)
    tuning = replace(FAST, parameters=("decoder.1.*",))
    loop = Loop(backbone.network, GenericTask(backbone, cases, labels, tuning), tuning)
    seen = []
    backbone.network.encoder.register_forward_hook(lambda m, i, output: seen.append(output.requires_grad))
    backbone.network.head.register_forward_hook(lambda m, i, output: seen.append(output.requires_grad))
    loop.update()
    assert seen == [False, True]
    assert [name for name, one in backbone.network.named_parameters() if one.grad is not None] == [
        "decoder.1.weight", "decoder.1.bias",
    ]  # fmt: skip


def test_a_seed_says_everything(tiny):
    cases, labels, _ = cohort(2)
    one, other, third = (tune(tiny(), cases, labels, replace(FAST, updates=3, seed=seed)).values for seed in (1, 1, 2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(not torch.equal(one[name], third[name]) for name in one)


def test_random_generators_of_the_caller_are_left_alone(tiny):
    cases, labels, _ = cohort(1)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    tune(tiny(), cases, labels, replace(FAST, updates=1))
    assert torch.equal(torch.rand(1), expected)


def test_running_statistics_stay(tiny):
    cases, labels, _ = cohort(1)
    kept = tune(tiny(norm="batch"), cases, labels, replace(FAST, updates=2))
    assert not [name for name in kept.values if "running" in name]


def test_a_model_without_norms_is_refused_and_all_is_suggested(tiny):
    cases, labels, _ = cohort(1)
    for parameters in ("norm", "norm+head"):
        with pytest.raises(NothingToAdapt, match="parameters='all'"):
            tune(tiny(norm="none"), cases, labels, replace(FAST, parameters=parameters))
    assert len(tune(tiny(norm="none"), cases, labels, replace(FAST, updates=1, parameters="all")).values) == 6


def test_labels_that_cannot_teach_are_refused(tiny):
    backbone, (cases, labels, _) = tiny(), cohort(2)
    with pytest.raises(BadInput, match=r"p0_0 has shape .*p1_0 holds 7"):  # all of them in one message
        tune(backbone, cases, [labels[0][:-1], labels[1] * 7], FAST)
    with pytest.raises(BadInput, match="none of 2 labels to learn from has foreground"):
        tune(backbone, cases, [label * 0 for label in labels], FAST)
    with pytest.raises(BadInput, match=r"shape \(4, 4\)"):
        tune(backbone, cases, [labels[0], labels[1][:4, :4]], FAST)
    one = tune(backbone, cases, [labels[0], labels[1] * 0], replace(FAST, updates=1))
    assert one.facts["notes"] == ["the label of case p1_0 has no foreground"]


def test_a_loss_that_is_not_finite_stops_and_restores_the_network(tiny):
    backbone, (cases, labels, _) = tiny(), cohort(1)
    before = fingerprint(backbone.network)
    with pytest.raises(NotFinite, match="lower the learning rate"):
        tune(backbone, cases, labels, replace(FAST, learning_rate=1e30))
    assert fingerprint(backbone.network) == before


def test_weights_that_the_last_update_broke_are_refused(tiny):
    backbone, (cases, labels, _) = tiny(), cohort(1)
    loop = Loop(backbone.network, GenericTask(backbone, cases, labels, FAST), FAST)
    loop.update()
    with torch.no_grad():
        backbone.network.head.bias[0] = float("inf")
    with pytest.raises(NotFinite, match=r"head\.bias"):
        loop.values()


def test_voxels_that_are_ignored_have_no_gradient():
    logits = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.randint(0, 3, (1, 4, 4), generator=torch.Generator().manual_seed(1))
    target[0, :2] = -1
    for head in ("softmax", "sigmoid"):
        (gradient,) = torch.autograd.grad(segmentation_loss(logits, target, head), logits)
        assert not gradient[:, :, :2].any()
        assert gradient[:, :, 2:].any()


def test_a_perfect_prediction_costs_nothing_and_nested_regions_are_read_as_masks_are():
    target = torch.tensor([[[0, 1], [2, 2]]])
    sure = 40.0 * (torch.nn.functional.one_hot(target, 3).movedim(-1, 1) - 0.5)
    assert float(segmentation_loss(sure, target, "softmax")) < 1e-4
    nested = 40.0 * (torch.stack([target > 0, target > 1], 1).float() - 0.5)
    assert float(segmentation_loss(nested, target, "sigmoid")) < 1e-4


def test_merged_classes_are_sums_of_probabilities(tiny):
    logits = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    shares = merged_logits(logits, np.array([0, 1, 1])).softmax(1)
    plain = logits.softmax(1)
    assert torch.allclose(shares[:, 1], plain[:, 1] + plain[:, 2], atol=1e-6)
    three = replace(tiny(), network=Tiny(outputs=3), classes=3, labels={0: "background", 1: "rim", 2: "cup"})
    cases, labels, _ = cohort(2)
    tuned = tune(merged(three, ["disc=rim+cup"]), cases, labels, FAST)
    assert tuned.facts["losses"][-1] < tuned.facts["losses"][0]


def test_a_patch_without_augmentation_is_the_image():
    image, label = torch.rand(1, 5, 7), torch.arange(35).reshape(5, 7)
    same = resampled(image, label, (5, 7), torch.eye(2), torch.tensor([2.0, 3.0]))
    assert torch.allclose(same[0], image, atol=1e-5)
    assert torch.equal(same[1], label)
    wider = resampled(image, label, (7, 7), torch.eye(2), torch.tensor([2.0, 3.0]))
    assert (wider[1][[0, -1]] == -1).all(), "outside of the image nothing is known"
    mirrored = resampled(image, label, (5, 7), torch.diag(torch.tensor([1.0, -1.0])), torch.tensor([2.0, 3.0]))
    assert torch.equal(mirrored[1], label.flip(-1))


def test_slices_of_volumes_and_pictures_of_different_sizes_share_a_batch(tiny):
    volume = Case("v", np.random.default_rng(0).normal(size=(1, 3, 12, 10)).astype(np.float32))
    label = np.zeros((3, 12, 10), np.uint8)
    label[1, 3:6, 3:6] = 1
    label[2] = 255
    picture = Case("q", np.random.default_rng(1).normal(size=(1, 9, 14)).astype(np.float32))
    task = GenericTask(tiny(), [volume, picture], [label, np.ones((9, 14), np.uint8)], Tuning(batch=5))
    images, target = task.draw()
    assert images.shape == (5, 1, 12, 14)
    assert target.shape == (5, 12, 14)
    assert set(target.unique().tolist()) <= {-1, 0, 1}


def test_a_patch_of_a_large_picture_is_limited(tiny):
    case, label = Case("wide", np.zeros((1, 20, 1300), np.float32)), np.ones((20, 1300), np.uint8)
    images, _ = GenericTask(tiny(), [case], [label], Tuning(batch=2)).draw()
    assert images.shape == (2, 1, 20, 512)
    assert GenericTask(tiny(), [case], [label], Tuning(patch=(16, 900))).patch == (16, 900)


def test_a_third_of_the_patches_is_centered_on_foreground(tiny):
    label = np.zeros((40, 40), np.uint8)
    label[30, 5] = 1
    case = Case("c", np.zeros((1, 40, 40), np.float32))
    task = GenericTask(tiny(), [case], [label], Tuning(batch=9, patch=(5, 5), augmentation="none"))
    _, target = task.draw()
    assert [bool((one == 1).any()) for one in target[-3:]] == [True] * 3
    assert all(int(one[2, 2]) == 1 for one in target[-3:])


def test_low_resolution_logits_and_tuples_are_understood(tiny):
    class Coarse(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Tiny()

        def forward(self, x):
            return {"logits": self.inner(x)[..., ::2, ::2]}

    cases, labels, _ = cohort(1)
    tuned = tune(Module(Coarse(), classes=2, dimensions=2), cases, labels, replace(FAST, updates=2))
    assert "inner.head.weight" in tuned.values


def test_sgd_makes_the_update_of_nnunets_trainer(tiny):
    cases, labels, _ = cohort(1)
    how = Tuning(optimizer="sgd", learning_rate=0.01, updates=1, batch=1, augmentation="none")
    backbone = tiny()
    before = {name: value.detach().clone() for name, value in backbone.network.named_parameters()}
    one = tune(backbone, cases, labels, how)
    two = tune(backbone, cases, labels, replace(how, learning_rate=0.02))
    for name, value in one.values.items():  # the first step of SGD is proportional to the rate, that of AdamW is not
        torch.testing.assert_close(2 * (value - before[name]), two.values[name] - before[name], rtol=1e-3, atol=1e-7)


def test_the_rate_follows_what_is_tuned():
    assert [Tuning(name).rate for name in ("norm+head", "norm", "all")] == [3e-3, 3e-3, 3e-4]
    assert (Tuning("all", optimizer="sgd").rate, Tuning("all", learning_rate=1.0).rate) == (1e-2, 1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimizer": "sgdx"}, {"augmentation": "strong"}, {"updates": 0}, {"batch": 0}, {"learning_rate": 0.0},
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(BadInput):
        Tuning(**wrong)
