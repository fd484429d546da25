"""The published forms run, change the selected parameters, and the network is restored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from casewise.adapt.objectives.cotta import Cotta
from casewise.adapt.objectives.deyo import Deyo
from casewise.adapt.objectives.grata import Grata
from casewise.adapt.objectives.memo import Memo
from casewise.adapt.objectives.sar import Sar
from casewise.adapt.proposers.live import run_episode
from casewise.adapt.snapshot import fingerprint

FORMS = {
    "memo": Memo.published(views=3),
    "cotta": Cotta.published(views=3, gate=1.0),
    "sar": Sar.published(margin=2.0, recovery="off"),
    "deyo": Deyo.published(entropy_margin=2.0, drop_margin=-1.0),
    "grata": Grata.official(),
}


@pytest.mark.parametrize("parameters", ["all-norm", "all"])
@pytest.mark.parametrize("head", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", FORMS)
def test_a_published_form_moves_and_is_given_back(name, head, parameters):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 1))
    image = torch.rand((2, 1, 16, 16), generator=torch.Generator().manual_seed(1))
    before = fingerprint(network)
    trajectory = run_episode(
        network, image, FORMS[name], steps=2, parameters=parameters, head=head, keep_parameters=True
    )
    assert fingerprint(network) == before
    first, last = trajectory.parameters[0], trajectory.parameters[2]
    moved = {parameter for parameter, value in first.items() if (value != last[parameter]).any()}
    assert moved
    assert (parameters == "all") == ("3.weight" in moved)
