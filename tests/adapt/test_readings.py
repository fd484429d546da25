"""Views through a whole network: M0 untouched, the consensus the mean, bad views left out, the network restored."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from worlds.readings import readings_of

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Expectation, Prepared, logits_pipeline
from casewise.adapt.backbones.module import of_network
from casewise.adapt.forward_episode import SharedSource
from casewise.adapt.networks import phantom_cardiac
from casewise.adapt.proposers import PreparedCase, members, named_proposal, proposer_of
from casewise.adapt.proposers import views as view_proposer
from casewise.adapt.snapshot import fingerprint
from casewise.adapt.views import drawn, inverted, views_of
from casewise.core.errors import BadInput, Mismatch
from casewise.core.records import Case, State


@pytest.fixture
def backbone(make_unet):
    return of_network(make_unet(lambda n: nn.BatchNorm2d(n)), multiple=4)


@pytest.fixture
def case():
    return Case("one", np.random.default_rng(3).normal(size=(1, 3, 14, 18)).astype(np.float32))


def of_views(views, **more):
    kind = "running" if more.pop("running", False) else "views"
    return Adaptation(f"{kind}:{views}", **more)


def read(backbone, case, views, **more):
    return readings_of(backbone, backbone.prepare(case), case, of_views(views, min_area=1, **more))


def test_m0_is_the_backbones_own_mask_and_every_view_has_its_rung(backbone, case):
    made = read(backbone, case, "mirror(x),gamma(1.4)")
    backbone.network.eval()
    logits = backbone.prepare(case).forward(backbone.prepare(case).inputs)
    assert np.array_equal(made.masks[0], logits.argmax(1).numpy())
    assert made.rungs == ("mirror(x)", "gamma(1.4)", "mean")
    assert made.steps == 3
    assert made.signals[0]["delta"] == 0
    assert made.mask(State(3)) is made.masks[3]


def test_a_mirrored_reading_is_the_mirrored_prediction_of_the_mirror_image(backbone, case):
    made = read(backbone, case, "mirror(x)")
    mirrored = Case("one", np.ascontiguousarray(case.image[..., ::-1]))
    backbone.network.eval()
    ready = backbone.prepare(mirrored)
    pads = backbone.prepare(case).pipeline
    expected = pads.read(pads.whole.flip(-1), lambda maps: maps.flip(-1))
    assert np.array_equal(made.masks[1], expected.argmax(1).numpy())
    assert ready.pipeline.whole.shape == pads.whole.shape


@pytest.mark.parametrize("kind", ["mean", "vote", "medoid"])
def test_each_kind_of_consensus_follows_its_formula(backbone, case, kind):
    made = read(backbone, case, "mirror(x),gamma(1.4),blur", consensus=kind)
    masks, last = made.masks[:-1], made.masks[-1]
    assert made.rungs[-1] == kind
    pipeline = backbone.prepare(case).pipeline
    backbone.network.eval()
    shares = [pipeline.source()[1]] + [
        pipeline.read(view.apply(pipeline.whole), lambda maps, view=view: inverted(view, maps))
        for view in views_of("mirror(x),gamma(1.4),blur")
    ]
    mean = torch.stack(shares).mean(0)
    if kind == "mean":
        assert np.array_equal(last, mean.argmax(1).numpy())
    elif kind == "medoid":
        assert any(np.array_equal(last, mask) for mask in masks)
    else:
        assert set(np.unique(last)) <= {0, 1, 2}
        agreed = np.all([mask == masks[0] for mask in masks], axis=0)
        assert np.array_equal(last[agreed], masks[0][agreed])


def test_the_network_is_restored_bit_by_bit_in_the_mode_that_it_was_in(backbone, case):
    before = fingerprint(backbone.network)
    assert backbone.network.training
    read(backbone, case, "mirror(x),random(2)")
    assert fingerprint(backbone.network) == before
    assert all(module.training for module in backbone.network.modules())
    assert not any("forward" in module.__dict__ for module in backbone.network.modules())


def test_results_do_not_depend_on_other_cases_or_their_order(backbone, case):
    other = Case("two", case.image[:, ::-1] * 2)
    first = read(backbone, case, "random(3)")
    read(backbone, other, "random(3)")
    again = read(backbone, case, "random(3)")
    assert all(np.array_equal(a, b) for a, b in zip(first.masks, again.masks, strict=True))
    assert first.signals == again.signals


def test_slices_in_parts_give_the_same_masks(backbone, case):
    whole, parts = (read(backbone, case, "mirror(x),gamma(1.4)", max_slices=size) for size in (None, 1))
    assert all(np.array_equal(a, b) for a, b in zip(whole.masks, parts.masks, strict=True))


def test_m0_is_predicted_once_for_several_ladders(backbone, case):
    calls = []
    handle = backbone.network.register_forward_hook(lambda _, inputs, __: calls.append(len(inputs[0]) // 3))
    ready = backbone.prepare(case)
    source = SharedSource(ready.pipeline)
    made = [
        readings_of(backbone, ready, case, of_views(name), source) for name in ("mirror(x)", "gamma(1.4),mirror(y)")
    ]
    handle.remove()
    assert calls == [1, 1, 1, 1]  # M0, then the views of each ladder
    assert np.array_equal(made[0].masks[0], made[1].masks[0])


def test_a_view_that_gives_nan_or_a_constant_is_left_out_and_reported(backbone, case, monkeypatch):
    module = types.ModuleType("my_views")
    module.broken = lambda x: x * float("nan")
    module.flat = lambda x: x * 0
    module.brighter = lambda x: x + 1
    monkeypatch.setitem(sys.modules, "my_views", module)
    made = read(backbone, case, "my_views:broken,my_views:flat,my_views:brighter")
    alone = read(backbone, case, "my_views:brighter")
    assert [signals.get("left_out") for signals in made.signals[1:4]] == [1.0, 1.0, 0.0]
    assert np.array_equal(made.masks[1], made.masks[0])
    assert np.array_equal(made.masks[-1], alone.masks[-1])
    nothing = read(backbone, case, "my_views:broken")
    assert np.array_equal(nothing.masks[-1], nothing.masks[0])


def test_a_view_of_your_own_may_say_how_it_is_inverted(backbone, case, monkeypatch):
    def swap(x):
        return x.flip(-1)

    swap.invert = lambda maps: maps.flip(-1)
    module = types.ModuleType("my_views")
    module.swap, module.wrong = swap, lambda x: x[0, 0]
    monkeypatch.setitem(sys.modules, "my_views", module)
    made = read(backbone, case, "my_views:swap,mirror(x),my_views:wrong")
    assert np.array_equal(made.masks[1], made.masks[2])
    assert made.signals[3]["left_out"] == 1.0


def test_a_running_consensus_ends_where_the_plain_one_does(backbone, case):
    plain = read(backbone, case, "mirror(x),gamma(1.4),blur")
    running = read(backbone, case, "mirror(x),gamma(1.4),blur", running=True)
    assert running.rungs == ("mirror(x)", "gamma(1.4)", "blur(0.7)")
    assert np.array_equal(running.masks[-1], plain.masks[-1])
    assert all(0 <= signals["settled"] <= 1 for signals in running.signals[1:])


def test_a_sigmoid_head_is_read_and_averaged(make_unet, case):
    backbone = of_network(make_unet(classes=1), multiple=4, head="sigmoid", classes=1)
    made = read(backbone, case, "mirror(x),gamma(1.4)")
    pipeline = backbone.prepare(case).pipeline
    backbone.network.eval()
    shares = [pipeline.source()[1]] + [
        pipeline.read(view.apply(pipeline.whole), lambda maps, view=view: inverted(view, maps))
        for view in views_of("mirror(x),gamma(1.4)")
    ]
    assert np.array_equal(made.masks[-1], (torch.stack(shares).mean(0) > 0.5)[:, 0].numpy())
    assert made.signals[1]["msp"] >= 0.5


def test_a_3d_network_is_read(case):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True), nn.Conv3d(4, 3, 1))
    made = read(of_network(network), case, "mirror(xyz),rotate90(1),scale(0.75),turn(5,1.05)")
    assert made.masks[-1].shape == (3, 14, 18)
    assert not any(signals.get("left_out") for signals in made.signals[1:])


def test_absolute_intensities_refuse_views_that_renormalize(make_unet):
    from casewise.adapt.backbones import Expectation

    backbone = of_network(make_unet(), expects=Expectation(channels=1, absolute=(True,)))
    with pytest.raises(BadInput, match=r"reads absolute intensities, and gamma\(1.4\).*views:ct"):
        proposer_of(of_views("mri")).on(backbone)
    assert len(proposer_of(of_views("ct")).on(backbone)) == 6


def test_a_bare_network_is_guarded_by_a_consensus_and_replayed_alike(make_unet, tmp_path):
    from casewise.archive.store import create_archive
    from casewise.guard import guard
    from casewise.judge.controllers import CONTROLLERS
    from casewise.replay import replay

    image = np.random.default_rng(3).normal(size=(1, 3, 16, 16)).astype(np.float32)
    network, how = make_unet(), of_views("mirror(x),gamma(1.4)", min_area=1)
    controller = CONTROLLERS.build("consensus", consensus="3", steps=3)
    found = guard(Case("one", image), network, controller, how)
    assert found.decision.state == State(3)
    assert found.decision.executed == 3
    archive = create_archive(tmp_path, binding=how.binding(network), steps=how.horizon(network), ladder="views")
    archive.add(Case("one", image), found.trajectory)
    (again,) = replay(archive, controller)
    assert (again.state, again.state_hash) == (State(3, ladder="views"), found.decision.state_hash)


def test_names_of_proposals():
    assert named_proposal("tent") == ("tent", "tent")
    assert named_proposal("views:gamma(1.4),mirror(x)")[0] == "views-gamma-1.4-mirror-x"
    with pytest.raises(BadInput, match="the name of a ladder"):
        named_proposal("Best=views:mri")


def test_binding_says_what_is_read(backbone):
    bound = of_views("light,random(2)", seed=3).binding(backbone)
    assert bound.objective == "views"
    assert bound.options["views"][-2:] == ["gamma(1.4)+mirror(x)", "random(2)"]
    assert (bound.options["consensus"], bound.options["seed"]) == ("mean", 3)
    assert of_views("light").binding(backbone) != of_views("light", consensus="vote").binding(backbone)


# ---- members that cannot be used ----


def member_of(monkeypatch, other):
    monkeypatch.setattr(members, "_loaded", lambda word, device, tiling: other)
    return Adaptation("members:other", min_area=1)


def spaced(backbone, *spacing_mm):
    return replace(backbone, expects=Expectation(channels=1, spacing_mm=spacing_mm or None))


@pytest.mark.parametrize("theirs", [(1.5, 1.5, 5.0), (30.0, 1.5, 1.5), (1.5, 1.5)])
def test_a_member_that_was_trained_at_another_spacing_is_refused_by_name(backbone, monkeypatch, theirs):
    how = member_of(monkeypatch, spaced(backbone, *theirs))
    with pytest.raises(Mismatch, match=r"member other was trained at \(.*\) mm, the model at \(5"):
        how.binding(spaced(backbone, 5.0, 1.5, 1.5))


@pytest.mark.parametrize("theirs", [(7.0, 1.2, 1.2), ()])
def test_a_member_whose_spacing_is_near_or_unknown_is_taken(backbone, monkeypatch, theirs):
    how = member_of(monkeypatch, spaced(backbone, *theirs))
    assert list(how.binding(spaced(backbone, 5.0, 1.5, 1.5)).options["members"]) == ["other"]


def test_a_member_that_answers_on_another_grid_is_refused_by_name(backbone, case, monkeypatch):
    ready = backbone.prepare(case)

    class Halves(type(backbone)):
        def prepare(self, one):
            inputs = backbone.prepare(one).inputs
            return Prepared(inputs, pipeline=logits_pipeline(self.network, inputs, self.head, space=(7, 9)))

    other = Halves(**{name: getattr(backbone, name) for name in backbone.__dataclass_fields__})
    how = member_of(monkeypatch, other)
    with pytest.raises(
        Mismatch, match=r"other gave probabilities of shape \(3, \d, 7, 9\) for case one, M0's have shape \(3, "
    ):
        readings_of(backbone, ready, case, how)


@pytest.fixture
def normed(make_unet):
    return of_network(make_unet(lambda n: nn.InstanceNorm2d(n, affine=True)), multiple=4)


def shares_of(backbone, case, views, **more):
    """(probabilities under every view, rows of each forward)."""
    backbone.network.eval()
    pipeline, made = backbone.prepare(case).pipeline, drawn(views_of(views), case.id, 0)
    rows = []
    handle = backbone.network.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    found = [view_proposer.read_view(pipeline, view, more.get("max_slices")) for view in made]
    handle.remove()
    return found, rows


MANY = "mirror(x),gamma(1.4),scale(1.25),rotate90(2),random(5),blur"


def by_hand(backbone, case, views):
    """Independent computation: one view after the other, the network as it is."""
    backbone.network.eval()
    pipeline = backbone.prepare(case).pipeline
    return [
        pipeline.read(view.apply(pipeline.whole), lambda maps, view=view: inverted(view, maps))
        for view in drawn(views_of(views), case.id, 0)
    ]


def test_a_trained_network_reads_the_same_to_five_digits():
    backbone = phantom_cardiac()
    case = Case("one", 100 * np.random.default_rng(3).normal(3, 1, (1, 2, 32, 40)).astype(np.float32))
    for one, plain in zip(shares_of(backbone, case, MANY)[0], by_hand(backbone, case, MANY), strict=True):
        torch.testing.assert_close(one, plain, atol=1e-5, rtol=0)


def test_slices_are_read_in_parts(normed, case):
    assert shares_of(normed, case, "gamma(1.1),gamma(1.2)", max_slices=2)[1] == [2, 1, 2, 1]


def test_a_run_that_stops_early_has_the_numbers_of_a_full_run(normed, case):
    how, ready = of_views("random(4)", min_area=1), normed.prepare(case)
    whole = readings_of(normed, ready, case, how)
    with proposer_of(how).propose(PreparedCase(case, ready), normed) as episode:
        episode.advance()
        assert tuple(episode.record.signals) == whole.signals[:2]
        assert np.array_equal(episode.record.masks[1], whole.masks[1])


def test_a_bad_view_in_a_batch_does_not_affect_the_others(normed, case, monkeypatch):
    module = types.ModuleType("my_bad_views")
    module.broken = lambda x: x * float("nan")
    module.flat = lambda x: x * 0
    module.askew = lambda x: x + 1
    module.askew.invert = lambda maps: maps[..., 1:]
    monkeypatch.setitem(sys.modules, "my_bad_views", module)
    made = read(
        normed, case, "gamma(1.2),my_bad_views:broken,gamma(1.4),my_bad_views:flat,my_bad_views:askew,mirror(x)"
    )
    good = read(normed, case, "gamma(1.2),gamma(1.4),mirror(x)")
    assert [signals.get("left_out") for signals in made.signals] == [None, 0, 1, 0, 1, 0, 0, None]
    for here, there in ((1, 1), (3, 2), (6, 3)):
        assert made.signals[here]["entropy"] == pytest.approx(good.signals[there]["entropy"], abs=1e-5)


def state(network):
    return {
        name: (tensor.data_ptr(), tensor.stride(), tensor._version, tensor.detach().clone())
        for name, tensor in network.state_dict(keep_vars=True).items()
    }


@pytest.mark.parametrize("views", ["gamma(1.2),gamma(1.4)", "scale(1.25)"])
def test_strides_and_methods_come_back_also_after_a_crash_in_the_middle(normed, case, views):
    network = normed.network.to(memory_format=torch.channels_last)
    before, ready = state(network), normed.prepare(case)
    seen = []

    def crash(module, inputs, output):
        seen.append("forward" in module.__dict__)
        if len(seen) == 2:  # the first reading after M0, with the norms replaced
            raise RuntimeError("power is gone")

    layer = next(module for module in network.modules() if isinstance(module, nn.InstanceNorm2d))
    handle = layer.register_forward_hook(crash)
    with pytest.raises(RuntimeError, match="power is gone"):
        readings_of(normed, ready, case, of_views(views))
    handle.remove()
    assert seen == [False, True]
    for name, (place, strides, _, values) in state(network).items():
        assert (place, strides) == before[name][:2]
        assert torch.equal(values, before[name][3])
    assert not any("forward" in module.__dict__ for module in network.modules())
