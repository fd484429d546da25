"""The loop of updates."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.episode import Episode
from casewise.adapt.logits import entropy
from casewise.adapt.objectives.eata import Eata
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.parameters import select
from casewise.adapt.proposers.live import all_states, run_episode
from casewise.adapt.snapshot import fingerprint
from casewise.core.errors import BadInput, NotFinite
from casewise.core.records import State

RATE = 2e-2


class Watch:
    """Counts forwards of a network, with and without a graph, and backwards through its head."""

    def __init__(self, network):
        self.graph = self.quiet = self.inference = self.backwards = 0
        network.head.register_forward_hook(self._forward)

    def _forward(self, module, inputs, output):
        if output.requires_grad:
            self.graph += 1
            output.register_hook(self._backward)
        else:
            self.quiet += 1
            self.inference += torch.is_inference_mode_enabled()

    def _backward(self, gradient):
        self.backwards += 1


@pytest.mark.parametrize("objective", [Tent(), Eata(margin=10)])
def test_k_updates_cost_k_backwards_and_k_plus_one_forwards(unet, slices, objective):
    watch = Watch(unet)
    run_episode(unet, slices, objective, steps=4, learning_rate=RATE)
    assert (watch.graph, watch.backwards) == (4, 4)
    assert (watch.quiet, watch.inference) == (1, 1)


def test_micro_batches_run_all_but_the_last_again(unet, slices):
    watch = Watch(unet)
    run_episode(unet, slices, Tent(), steps=2, max_slices=2, learning_rate=RATE)
    assert watch.backwards == watch.graph == 2 * 3
    assert watch.quiet == 2 + 2 + 3


@pytest.mark.parametrize("objective", [Tent(), Eata(margin=10)])
@pytest.mark.parametrize("max_slices", [1, 2, 5])
def test_micro_batches_take_the_same_step_as_the_whole_batch(unet, slices, objective, max_slices):
    whole = run_episode(unet, slices, objective, steps=3, keep_parameters=True)
    parts = run_episode(unet, slices, objective, steps=3, keep_parameters=True, max_slices=max_slices)
    for one, other in zip(whole.parameters, parts.parameters, strict=True):
        assert all(np.allclose(one[name], other[name], atol=1e-5) for name in one)
    assert parts.signals[1]["gradient_norm"] == pytest.approx(whole.signals[1]["gradient_norm"], rel=1e-4)


def test_masks_are_predicted_after_the_update_not_before_it(unet, slices):
    made = run_episode(unet, slices, Tent(), steps=2, learning_rate=RATE, keep_parameters=True)
    for step in range(3):
        twin = copy.deepcopy(unet).eval()
        with torch.no_grad():
            for name, parameter in select(twin).items():
                parameter.copy_(torch.as_tensor(made.parameters[step][name]))
            assert np.array_equal(twin(slices).argmax(1).numpy(), made.masks[step])
    assert not np.array_equal(made.masks[1], made.masks[0])


def test_convolutions_never_get_a_gradient(unet, slices):
    seen = []

    class Look:
        def begin(self, subject):
            update = Tent().begin(subject)

            def look():
                update()
                seen.extend(name for name, p in unet.named_parameters() if p.grad is not None or p.requires_grad)
                return {}

            return look

    run_episode(unet, slices, Look(), steps=1)
    assert set(seen) == set(select(unet))


def test_the_signals_of_step_zero(unet, slices):
    first = run_episode(unet, slices, Tent(), steps=0).signals[0]
    logits = unet.eval()(slices)
    assert (first["regions"], first["delta"], first["area"], first["entropy_on_d"]) == (0, 0, 0, 0)
    assert first["entropy"] == pytest.approx(entropy(logits).mean().item(), rel=1e-5)
    assert first["msp"] == pytest.approx(logits.softmax(1).amax(1).mean().item(), rel=1e-5)
    assert first["gradient_norm"] is None


def test_the_gradient_norm_is_that_of_the_gradient_that_took_the_step(unet, slices):
    made = run_episode(unet, slices, Tent(), steps=1, learning_rate=RATE)
    twin = copy.deepcopy(unet).eval()
    gradients = torch.autograd.grad(entropy(twin(slices)).mean(), list(select(twin).values()))
    assert made.signals[1]["gradient_norm"] == pytest.approx(
        torch.cat([g.flatten() for g in gradients]).norm().item(), rel=1e-5
    )


@pytest.mark.parametrize("foreground", [True, False])
def test_entropy_on_d_is_the_new_entropy_where_the_mask_changed(unet, slices, foreground):
    how = Adaptation(Tent(), steps=1, learning_rate=0.1, signals=("drop",), foreground=foreground)
    with Episode(unet, slices, how) as episode:
        made, entropies = all_states(episode), episode.record.entropies
    source, adapted = made.masks
    changed = (source > 0) != (adapted > 0) if foreground else source != adapted
    assert changed.any()
    assert made.signals[1]["entropy_on_d"] == pytest.approx(entropies["entropy_1"][changed].mean(), rel=1e-6)
    assert made.signals[1]["area"] == changed.sum()
    assert set(entropies) == {"entropy_0", "entropy_1"}


def test_a_step_has_its_rate_and_the_trajectory_names_its_options(unet, slices):
    made = run_episode(unet, slices, Tent(learning_rate=1e-3), steps=1, keep_parameters=True)
    moved = max(np.abs(made.parameters[1][n] - made.parameters[0][n]).max() for n in made.parameters[0])
    assert moved == pytest.approx(1e-3, rel=1e-3)  # Adam's first step is the rate itself
    assert "Tent(learning_rate=0.001), learning_rate=0.001, parameters='all-norm'" in made.made_by
    assert len(made.seconds) == 2
    assert len(made.diagnostics) == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("when", [1, 3])
def test_the_network_is_restored_after_an_error_or_an_interrupt(make_unet, slices, error, when):
    network = make_unet(nn.BatchNorm2d)
    before, modes = fingerprint(network), [m.training for m in network.modules()]

    class Breaks:
        def begin(self, subject):
            update = Tent().begin(subject)

            def step():
                if subject.step == when:
                    raise error
                return update()

            return step

    with pytest.raises(error):
        run_episode(network, slices, Breaks(), steps=4, learning_rate=RATE)
    assert fingerprint(network) == before
    assert [m.training for m in network.modules()] == modes
    assert all(p.requires_grad and p.grad is None for p in network.parameters())


def test_an_image_with_nan_is_refused_before_anything_moves(unet, slices):
    before = fingerprint(unet)
    slices[0, 0, 3, 3] = float("nan")
    with pytest.raises(NotFinite, match="at step 0 of case heart; lower the learning rate or check the image"):
        run_episode(unet, slices, Tent(), steps=1, case_id="heart")
    assert fingerprint(unet) == before
    assert unet.training


def test_an_infinite_loss_is_named(unet, slices):
    class Endless:
        def begin(self, subject):
            return lambda: {"loss": subject.backward(lambda z, x, rows: (z.sum() * float("inf"), 1))}

    with pytest.raises(NotFinite, match="the loss is"):
        run_episode(unet, slices, Endless(), steps=1)


def test_a_shrunk_state_is_predicted_from_interpolated_weights(unet, slices):
    state = State(2, 0.25)
    made = run_episode(unet, slices, Tent(), steps=3, learning_rate=0.1, keep_parameters=True, shrink=[state])
    twin = copy.deepcopy(unet).eval()
    with torch.no_grad():
        for name, parameter in select(twin).items():
            start, end = made.parameters[0][name], made.parameters[2][name]
            parameter.copy_(torch.as_tensor(start + 0.75 * (end - start)))
        assert np.array_equal(made.mask(state), twin(slices).argmax(1).numpy())
    assert made.shrunk_signals[state]["area"] > 0


def test_shrinking_does_not_disturb_the_steps_that_follow_and_costs_one_forward(unet, slices):
    plain = run_episode(unet, slices, Tent(), steps=3, learning_rate=RATE, keep_parameters=True)
    watch = Watch(unet)
    shrunk = run_episode(
        unet, slices, Tent(), steps=3, learning_rate=RATE, keep_parameters=True, shrink=[State(1, 0.5), State(2, 0.5)]
    )
    assert all(np.array_equal(plain.parameters[3][n], shrunk.parameters[3][n]) for n in plain.parameters[3])
    assert (watch.graph, watch.quiet) == (3, 1 + 2)


def test_an_earlier_step_can_be_shrunk_where_parameters_are_kept(unet, slices):
    with Episode(unet, slices, Adaptation(Tent(), learning_rate=0.1, keep_parameters=True)) as episode:
        episode.advance()
        at_once = episode.shrink(1, 0.5)
        episode.advance()
    with Episode(unet, slices, Adaptation(Tent(), learning_rate=0.1, keep_parameters=True)) as episode:
        episode.advance()
        episode.advance()
        assert np.array_equal(episode.shrink(1, 0.5), at_once)
        assert episode.shrink(1, 0.5) is episode.trajectory.mask(State(1, 0.5))
    with Episode(unet, slices, Adaptation(Tent())) as episode:
        episode.advance()
        episode.advance()
        with pytest.raises(BadInput, match="step 1 cannot be interpolated now: 2 updates"):
            episode.shrink(1, 0.5)


def test_an_episode_can_be_advanced_one_step_at_a_time(unet, slices):
    whole = run_episode(unet, slices, Tent(), steps=2, learning_rate=RATE)
    with Episode(unet, slices, Adaptation(Tent(), learning_rate=RATE)) as episode:
        assert episode.trajectory.steps == 0
        signals = episode.advance()
        assert signals == whole.signals[1]
        episode.advance(last=True)
    assert np.array_equal(episode.trajectory.masks[2], whole.masks[2])
    with pytest.raises(BadInput, match="only inside"):
        episode.advance()


def test_objectives_that_move_by_data_say_so(unet, slices):
    class Nudge:
        def begin(self, subject):
            def update():
                for parameter in subject.moving():
                    parameter.data = parameter.data + 0.1
                subject.changed()
                return {"loss": subject.backward(lambda z, x, rows: (entropy(z).sum(), z[:, 0].numel()))}

            return update

    watch = Watch(unet)
    made = run_episode(unet, slices, Nudge(), steps=1)
    assert made.diagnostics[0]["loss"] == pytest.approx(made.signals[1]["entropy"], rel=1e-4)
    assert watch.graph == 2


def test_a_stale_forward_is_never_used_again(unet, slices):
    class Moves:
        def begin(self, subject):
            def update():
                with torch.no_grad():
                    subject.moving()[0].add_(0.5)
                return {"loss": subject.backward(lambda z, x, rows: (entropy(z).sum(), z[:, 0].numel()))}

            return update

    made = run_episode(unet, slices, Moves(), steps=1)
    assert made.diagnostics[0]["loss"] == pytest.approx(made.signals[1]["entropy"], rel=1e-4)


def test_forwards_without_a_graph_are_micro_batched_too(unet, slices):
    sizes = []
    unet.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))

    def probe(episode):
        with torch.no_grad():
            return float(len(episode.logits(episode.inputs.flip(-1))))

    made = run_episode(unet, slices, Tent(), steps=1, max_slices=2, signals=[probe])
    assert made.signals[1]["probe"] == 5
    assert max(sizes) == 2


def test_deep_supervision_low_resolution_and_own_forward(unet, slices):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = unet

        def forward(self, x):
            return [nn.functional.avg_pool2d(self.inner(x), 2), nn.functional.avg_pool2d(self.inner(x), 4)]

    deep = run_episode(Deep(), slices, Tent(), steps=1, learning_rate=RATE)
    assert deep.masks[1].shape == (5, 16, 16)
    own = run_episode(unet, slices, Tent(), steps=1, learning_rate=RATE, forward=lambda x: unet(x).flip(1))
    plain = run_episode(unet, slices, Tent(), steps=1, learning_rate=RATE)
    assert np.array_equal(own.masks[0], 2 - plain.masks[0])


def test_a_pipeline_of_the_backbones_own_makes_the_masks(unet, slices):
    calls = []

    def predict():
        calls.append(1)
        return np.full((2, 9, 9), len(calls), np.uint8)

    made = run_episode(unet, slices, Tent(), steps=2, predict=predict)
    assert [mask.max() for mask in made.masks] == [1, 2, 3]
    assert made.signals[1]["entropy_on_d"] is None
    assert made.signals[1]["entropy"] is not None


def test_one_channel_is_a_sigmoid_head(make_unet, slices):
    network = make_unet(classes=1)
    made = run_episode(network, slices, Tent(), steps=1, learning_rate=RATE)
    assert np.array_equal(made.masks[0], (network.eval()(slices)[:, 0] > 0).numpy())
    assert made.signals[1]["entropy"] < made.signals[0]["entropy"]
    with pytest.raises(BadInput, match="head must be 'softmax', 'sigmoid' or None, got 'tanh'"):
        Episode(network, slices, Adaptation(Tent()), head="tanh")


def test_a_batch_of_one_loses_its_axis(unet, slices):
    assert run_episode(unet, slices[:1], Tent(), steps=0).masks[0].shape == (16, 16)
    assert run_episode(unet, slices[:1].numpy(), Tent(), steps=0).masks[0].shape == (16, 16)


def test_options_are_checked(unet, slices):
    with pytest.raises(BadInput, match=r"got \(16, 16\)"):
        Episode(unet, slices[0, 0], Adaptation(Tent()))
    with pytest.raises(BadInput, match="max_slices must be at least 1, got 0"):
        Episode(unet, slices, Adaptation(Tent(), max_slices=0))
    with pytest.raises(BadInput, match="reset must be one of case, stream, got 'never'"):
        Episode(unet, slices, Adaptation(Tent(), reset="never"))
    with pytest.raises(BadInput, match="steps must be a whole number, 0 or more, got -1"):
        run_episode(unet, slices, Tent(), steps=-1)
    for rate in (-1.0, float("nan"), float("inf")):
        with pytest.raises(BadInput, match="a learning rate must be a number, 0 or more"):
            Adaptation(Tent(), learning_rate=rate)


def test_extra_signals_by_name_and_by_function(unet, slices):
    def confidence_of_first_voxel(episode):
        with torch.no_grad():
            return float(episode.logits(episode.inputs)[0, :, 0, 0].softmax(0).max())

    def two_at_once(episode):
        return {"one": 1.0, "other": None}

    made = run_episode(unet, slices, Tent(), steps=1, signals=[confidence_of_first_voxel, two_at_once, "drop"])
    assert 0 < made.signals[0]["confidence_of_first_voxel"] <= 1
    assert (made.signals[1]["one"], made.signals[1]["other"]) == (1.0, None)
    assert made.signals[0]["drop"] is None


def test_extra_signals_do_not_change_the_steps(unet, slices):
    def greedy(episode):
        loss = episode.backward(lambda z, x, rows: (entropy(z).sum(), z[:, 0].numel()))
        torch.rand(7)
        return loss

    plain = run_episode(unet, slices, Tent(), steps=2, keep_parameters=True)
    probed = run_episode(unet, slices, Tent(), steps=2, keep_parameters=True, signals=[greedy])
    assert all(np.array_equal(plain.parameters[2][n], probed.parameters[2][n]) for n in plain.parameters[2])


def test_region_drops_are_those_of_the_gate(unet, slices):
    from casewise.measure.signals.risk import region_drops

    how = Adaptation(Tent(), steps=2, learning_rate=0.1, signals=("drop",), min_area=2)
    with Episode(unet, slices, how) as episode:
        made, entropies = all_states(episode), episode.record.entropies
    drop = entropies["entropy_0"].astype(float) - entropies["entropy_1"]
    expected = region_drops(made.masks[0], made.masks[1], drop, min_area=2)
    assert len(expected) > 1
    assert {name: made.signals[1][name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert made.signals[2]["drop"] is None


def test_seeds_depend_on_run_case_and_step(unet, slices):
    def draws(seed, case_id):
        found = []

        class Draw:
            def begin(self, subject):
                return lambda: (
                    found.append((float(torch.rand(1, generator=subject.generator(3))), float(torch.rand(1)))) or {}
                )

        run_episode(unet, slices, Draw(), steps=2, seed=seed, case_id=case_id)
        return found

    assert draws(0, "a") == draws(0, "a")
    assert len({*draws(0, "a"), *draws(1, "a"), *draws(0, "b")}) == 6
