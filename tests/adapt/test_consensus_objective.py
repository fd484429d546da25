"""Steps toward the consensus of views, beside a second statement of one step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.objectives.consensus_distillation import Consensus
from casewise.adapt.proposers.live import run_episode
from casewise.adapt.views import inverted, views_of
from casewise.core.errors import BadInput


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
