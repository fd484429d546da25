"""Steps toward the consensus of views, and of two branches toward each other, beside second statements of one step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.objectives.consensus_distillation import Consensus
from casewise.adapt.objectives.dg_tta import DgTta, disagreement, shown_by
from casewise.adapt.proposers.live import run_episode
from casewise.adapt.views import Drawn, ViewChain, inverted, views_of
from casewise.adapt.views.transforms import Gamma, Mirror, Turn
from casewise.core.errors import BadInput
from casewise.core.seeds import seed_of


def test_one_step_is_the_textbook_step(make_unet, slices):
    views = "mirror(x),gamma(1.4)"
    network, twin = make_unet().eval(), make_unet().eval()
    how = Adaptation(Consensus(views), learning_rate=0.01, steps=1, min_area=1, keep_parameters=True)
    made = run_episode(network, slices, how)
    with torch.no_grad():
        shares = [twin(slices).softmax(1)]
        shares += [inverted(view, twin(view.apply(slices))).softmax(1) for view in views_of(views)]
        target = torch.stack(shares).mean(0)
    norms = [m for m in twin.modules() if isinstance(m, torch.nn.InstanceNorm2d)]
    optimizer = torch.optim.Adam([p for m in norms for p in (m.weight, m.bias)], lr=0.01)
    loss = -(target * twin(slices).log_softmax(1)).sum(1).mean()
    loss.backward()
    optimizer.step()
    assert made.diagnostics[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    expected = twin.encoder[1].weight.detach().numpy()
    np.testing.assert_allclose(made.parameters[1]["encoder.1.weight"], expected, rtol=1e-3, atol=1e-4)


def test_steps_bring_the_prediction_nearer_to_the_consensus(make_unet, slices):
    made = run_episode(make_unet(), slices, Adaptation(Consensus(), learning_rate=5e-3, steps=5, min_area=1))
    losses = [one["loss"] for one in made.diagnostics]
    assert losses[-1] < losses[0]


def test_only_where_the_views_agree(make_unet, slices):
    every, sure = (
        run_episode(make_unet(), slices, Adaptation(Consensus(agree=agree), steps=1, min_area=1)).diagnostics[0]
        for agree in (0.0, 0.9)
    )
    assert sure["loss"] != every["loss"]
    with pytest.raises(BadInput, match="from 0 to 1"):
        Consensus(agree=2)


def test_one_step_of_two_branches_is_the_textbook_step(make_unet, slices):
    network, twin = make_unet().eval(), make_unet().eval()
    how = Adaptation(DgTta(absent=True), learning_rate=0.01, steps=1, min_area=1, keep_parameters=True)
    made = run_episode(network, slices, how, case_id="a")
    views = Drawn(2).with_generator(torch.Generator().manual_seed(seed_of(0, "a", 1)))
    a, b = (inverted(view, twin(view.apply(slices))).softmax(1) for view in views)
    inside = (shown_by(views[0], slices) & shown_by(views[1], slices))[0, 0]
    terms = []
    for sample in range(len(slices)):
        for label in range(1, a.shape[1]):
            left, right = (one[sample, label][inside] for one in (a, b))
            terms.append(1 - 4 * (left * right).sum() / ((left + right) ** 2).sum())
    norms = [m for m in twin.modules() if isinstance(m, torch.nn.InstanceNorm2d)]
    optimizer = torch.optim.Adam([p for m in norms for p in (m.weight, m.bias)], lr=0.01)
    loss = torch.stack(terms).mean()
    loss.backward()
    optimizer.step()
    assert 0.5 < float(inside.float().mean()) < 1  # zooms and turns hide something
    assert made.diagnostics[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-3)
    expected = twin.encoder[1].weight.detach().numpy()
    np.testing.assert_allclose(made.parameters[1]["encoder.1.weight"], expected, rtol=1e-3, atol=1e-4)


def branch(*foreground):
    """Probabilities (1, 2, 1, columns) of background and foreground."""
    shares = torch.tensor(foreground)
    return torch.stack([1 - shares, shares])[None, :, None]


def test_two_branches_disagree_by_one_minus_their_soft_dice():
    loss, classes = disagreement(branch(1.0, 0.0, 0.0), branch(1.0, 1.0, 0.0))
    assert (float(loss), classes) == (pytest.approx(1 - 4 * 1 / (2**2 + 1**2)), 1)
    shown = torch.tensor([True, False, True]).reshape(1, 1, 1, 3)
    assert float(disagreement(branch(1.0, 0.0, 0.0), branch(1.0, 1.0, 0.0), shown)[0]) == pytest.approx(0, abs=1e-6)


def test_a_class_that_one_branch_does_not_find_is_no_disagreement_unless_it_is_asked_for():
    found, missed = branch(0.9, 0.0), branch(0.4, 0.0)
    assert disagreement(found, missed)[1] == 0
    assert disagreement(found, missed, absent=True)[1] == 1
    assert disagreement(found[:, 1:], found[:, 1:], head="sigmoid")[1] == 1  # a channel of its own is no background


def test_a_view_shows_what_lies_in_its_picture():
    picture = torch.zeros(2, 1, 40, 60)
    assert shown_by(ViewChain((Gamma(1.4), Mirror("xy"))), picture).all()
    zoomed = shown_by(Turn(0.0, 2.0), picture)[0, 0]
    assert zoomed[12:28, 17:43].all()  # the middle; the rest was pushed out of the picture
    assert not zoomed[:8].any()
    assert not zoomed[:, :13].any()
    assert shown_by(Turn(0.0, 2.0), torch.zeros(1, 1, 3, 40, 60)).shape == (1, 1, 1, 40, 60)


def test_branches_that_find_nothing_move_nothing(make_unet, slices):
    network = make_unet().eval()
    with torch.no_grad():
        network.head.bias[0] = 100.0  # background everywhere
    made = run_episode(network, slices, DgTta(), steps=1, learning_rate=0.5, keep_parameters=True)
    assert made.diagnostics[0] == {}
    assert all(np.array_equal(made.parameters[1][name], value) for name, value in made.parameters[0].items())
