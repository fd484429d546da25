"""The list of objectives, and objectives from elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from casewise.adapt.episode import run_episode
from casewise.adapt.objective import Objective
from casewise.adapt.objectives import FORMS, OBJECTIVES, objective_of
from casewise.adapt.objectives.eata import Eata, EataFisher, Fisher, fisher_information
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.parameters import select
from casewise.adapt.snapshot import fingerprint
from casewise.core.errors import BadInput, UnknownName


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_is_frozen_says_what_it_is_and_has_a_formula(name):
    made = OBJECTIVES.build(name)
    assert isinstance(made, Objective)
    assert made == OBJECTIVES.build(name)
    assert repr(made).startswith(type(made).__name__ + "(")
    assert ":math:" in type(made).__doc__ or ".. math::" in type(made).__doc__
    with pytest.raises(AttributeError):
        made.learning_rate = 1


def test_names_options_and_objects():
    assert objective_of("tent") == Tent()
    assert objective_of("eata", margin=0.3) == Eata(margin=0.3)
    assert objective_of(Tent()) == Tent()
    with pytest.raises(UnknownName, match="Did you mean 'tent'"):
        objective_of("tnt")


@pytest.mark.parametrize("name", FORMS)
def test_another_form_is_there_by_name_and_differs_from_the_first(name):
    made = objective_of(name)
    assert isinstance(made, Objective)
    assert made != objective_of(name.rpartition("-")[0])


def test_an_objective_from_a_package_of_the_users(tmp_path: Path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from casewise.adapt.objectives.tent import Tent\n"
        "class Own(Tent): ...\n"
        "def made(rate=1.0): return Tent(rate)\n"
        "ready = Tent(2.0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert type(objective_of("mine:Own", learning_rate=0.1)).__name__ == "Own"
    assert objective_of("mine:made", rate=3.0) == Tent(3.0)
    assert objective_of("mine:ready") == Tent(2.0)
    with pytest.raises(BadInput, match=r"no objective at 'mine:Other'.*an address is 'package\.module:Name'"):
        objective_of("mine:Other")
    with pytest.raises(BadInput, match="no objective at 'nowhere:Name'"):
        objective_of("nowhere:Name")
    sys.modules.pop("mine")


def test_eata_leaves_everything_where_it_is_when_no_slice_is_confident(unet, slices):
    made = run_episode(unet, slices, Eata(margin=0.0), steps=2, learning_rate=0.1)
    assert [d["kept"] for d in made.diagnostics] == [0.0, 0.0]
    assert made.signals[2]["delta"] == 0
    assert made.signals[1]["gradient_norm"] is None


def test_eata_counts_the_slices_below_its_margin(unet, slices):
    entropies = run_episode(unet, slices, Tent(), steps=0, keep_entropy=True).entropies["entropy_0"].mean((1, 2))
    below, above = sorted(float(value) for value in entropies)[1:3]
    margin = (below + above) / 2  # clear of both: micro-batches may round the last bit another way
    assert above - below > 1e-4
    made = run_episode(unet, slices, Eata(margin=margin), steps=1, max_slices=2)
    assert made.diagnostics[0]["kept"] == pytest.approx(2 / 5)


def test_fisher_information_leaves_the_network_alone_and_is_a_mean_of_squares(unet, slices):
    before = fingerprint(unet)
    found = fisher_information(unet, [slices[:2], slices[2:]])
    assert fingerprint(unet) == before
    assert unet.training
    unet.eval()
    expected = 0
    for batch in (slices[:2], slices[2:]):
        logits = unet(batch)
        loss = torch.nn.functional.cross_entropy(logits, logits.argmax(1))
        expected += torch.autograd.grad(loss, unet.encoder[1].weight)[0].square() / 2
    assert torch.allclose(found.values["encoder.1.weight"], expected, rtol=1e-4)
    assert repr(found).startswith("Fisher(batches=2, sha256=")
    with pytest.raises(BadInput, match="at least one batch"):
        fisher_information(unet, [])


def test_fisher_information_pads_as_the_forward_of_a_case_does(unet, slices):
    odd = slices[..., :-1]
    found = fisher_information(unet, [odd], multiple=slices.shape[-1])
    unet.eval()
    logits = unet(torch.nn.functional.pad(odd, (0, 1)))[..., :-1]
    loss = torch.nn.functional.cross_entropy(logits, logits.argmax(1))
    expected = torch.autograd.grad(loss, unet.encoder[1].weight)[0].square()
    assert torch.allclose(found.values["encoder.1.weight"], expected, rtol=1e-4)


def test_a_heavy_fisher_anchor_holds_the_parameters(unet, slices):
    heavy = Fisher({name: torch.ones_like(p) for name, p in select(unet).items()}, 1)
    options = {"steps": 5, "learning_rate": 1e-3, "keep_parameters": True}

    def distance(**more):
        made = run_episode(unet, slices, EataFisher(margin=2.0, redundancy=2.0, **more), **options)
        return sum(((v - made.parameters[0][n]) ** 2).sum() for n, v in made.parameters[5].items())

    assert 0 < distance(fisher=heavy, anchor_weight=50.0) < distance(fisher=heavy, anchor_weight=0.0)


def test_the_redundancy_filter_turns_down_what_looks_like_what_was_kept(unet, slices):
    made = run_episode(unet, slices, EataFisher(margin=2.0), steps=2)
    assert made.diagnostics[0]["kept"] == 1.0
    assert made.diagnostics[1]["kept"] < 0.5
