"""A prompt of the input toward the source's BatchNorm statistics, beside a second statement of its steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.modulation import Modulated
from casewise.adapt.objectives.vptta import Vptta, misfit, prompted
from casewise.adapt.proposers.live import run_episode
from casewise.core.errors import BadInput, NothingToAdapt
from casewise.core.records import State
from casewise.measure.signals.risk import RiskStatistics

BATCH = nn.BatchNorm2d


def test_three_steps_are_the_textbook_steps(make_unet, slices):
    network, twin = make_unet(BATCH).eval(), make_unet(BATCH).eval()
    how = Adaptation(Vptta(share=0.2), learning_rate=0.01, steps=3, min_area=1, keep_parameters=True)
    made = run_episode(network, slices, how)
    prompt = torch.ones(1, 1, 3, 3, requires_grad=True)
    optimizer = torch.optim.Adam([prompt], lr=0.01, betas=(0.9, 0.99))
    for step in range(1, 4):
        factor = torch.ones(1, 1, 16, 16)
        factor[..., 7:10, 7:10] = prompt  # the constant lies at 8, 8 of a shifted spectrum of 16 x 16
        shifted = torch.fft.fftshift(torch.fft.fft2(slices), dim=(-2, -1))
        seen = torch.fft.ifft2(torch.fft.ifftshift(shifted * factor, dim=(-2, -1))).real
        loss = torch.stack(distances(twin, seen)).mean()
        assert made.diagnostics[step - 1]["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
        optimizer.zero_grad()
        loss.backward()
        assert made.signals[step]["gradient_norm"] == pytest.approx(float(prompt.grad.norm()), rel=1e-2)
        optimizer.step()
        np.testing.assert_allclose(made.parameters[step]["prompt"], prompt.detach().numpy(), atol=1e-3)


def distances(network, image):
    """For every BatchNorm layer and sample: mean distance over channels of means, plus that of deviations."""
    found = []

    def look(layer, given):
        for sample in given[0]:
            means, deviations = sample.mean((1, 2)), sample.var((1, 2)) ** 0.5
            found.append((means - layer.running_mean).abs().mean() + (deviations - layer.running_var**0.5).abs().mean())

    hooks = [m.register_forward_pre_hook(look) for m in network.modules() if isinstance(m, BATCH)]
    network(image)
    for hook in hooks:
        hook.remove()
    return found


def test_steps_bring_the_statistics_nearer_and_the_network_stays(make_unet, slices):
    network = make_unet(BATCH)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    made = run_episode(network, slices + 3, Vptta(), steps=6, learning_rate=0.05, keep_parameters=True)
    assert made.diagnostics[-1]["loss"] < made.diagnostics[0]["loss"]
    assert set(made.parameters[6]) == {"prompt"}
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_a_prompt_of_ones_changes_no_bit_and_another_only_low_frequencies():
    image = torch.randn(2, 3, 12, 10, generator=torch.Generator().manual_seed(0))
    assert torch.equal(prompted(image, torch.ones(1, 3, 3, 3)), image)
    doubled = prompted(image, torch.full((1, 3, 1, 1), 2.0))  # the constant of each channel
    torch.testing.assert_close(doubled, image + image.mean((2, 3), keepdim=True))
    assert prompted(torch.ones(1, 1, 4, 4, 4), torch.full((1, 1, 1, 1, 1), 3.0)).mean() == pytest.approx(3)


def test_a_layer_that_sees_one_voxel_has_a_mean_and_no_deviation():
    layer = nn.BatchNorm2d(2)
    assert misfit(layer, torch.tensor([[[[3.0]], [[-1.0]]]])).tolist() == [2.0]


def test_a_shrunk_state_is_predicted_through_half_the_prompt(make_unet, slices):
    how = Adaptation(Vptta(), learning_rate=0.3, steps=2, min_area=1, shrink=(State(2, 0.5),), keep_parameters=True)
    image, network = slices * 2 + 1, make_unet(BATCH)
    made = run_episode(network, image, how)
    halfway = (1 + torch.from_numpy(made.parameters[2]["prompt"])) / 2
    logits = network.eval()(prompted(image, halfway)).detach()
    sure = (logits.topk(2, dim=1).values.diff(dim=1)[:, 0].abs() > 1e-3).numpy()
    assert sure.mean() > 0.9
    assert np.array_equal(made.shrunk[State(2, 0.5)][sure], logits.argmax(1).numpy()[sure])
    assert not np.array_equal(made.shrunk[State(2, 0.5)], made.masks[2])


def test_micro_batches_change_memory_and_not_the_step(make_unet, slices):
    how = Adaptation(Vptta(), learning_rate=0.05, steps=2, min_area=1, keep_parameters=True)
    whole, parts = (run_episode(make_unet(BATCH), slices, how, max_slices=size) for size in (None, 2))
    assert parts.diagnostics[1]["loss"] == pytest.approx(whole.diagnostics[1]["loss"], rel=1e-4)
    np.testing.assert_allclose(parts.parameters[2]["prompt"], whole.parameters[2]["prompt"], atol=1e-3)


def test_an_update_costs_one_forward_of_its_own(make_unet, slices):
    network, seen = make_unet(BATCH), []
    network.register_forward_hook(lambda *_: seen.append(1))
    run_episode(network, slices, Vptta(), steps=3)
    assert len(seen) == 1 + 3 * 2


def test_what_it_cannot_do_is_refused(make_unet, slices):
    with pytest.raises(NothingToAdapt, match="running statistics of BatchNorm"):
        run_episode(make_unet(), slices, Vptta(), steps=1)
    with pytest.raises(BadInput, match="use it without a modulation"):
        Modulated(Vptta(), "param-subset", RiskStatistics(0.0, 1.0, 0.0, 1.0))
    with pytest.raises(BadInput, match="above 0 and at most 1, got 2"):
        Vptta(share=2)
