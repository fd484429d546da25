from __future__ import annotations

import numpy as np
import pytest
import torch

from casewise.adapt.networks import PlainUNet
from casewise.adapt.objectives.cotta import Cotta
from casewise.adapt.proposers.live import run_episode
from casewise.core.errors import BadInput


def ladder(objective: Cotta, **options):
    torch.manual_seed(0)
    network, image = PlainUNet(features=(4, 8), classes=3), torch.randn(2, 1, 16, 16)
    return run_episode(network, image, objective, steps=3, keep_parameters=True, **options)


def distance(trajectory, step: int) -> float:
    return max(np.abs(trajectory.parameters[step][n] - v).max() for n, v in trajectory.parameters[0].items())


def test_restoring_everything_stays_at_the_source():
    trajectory = ladder(Cotta(restore=1.0), learning_rate=0.1)
    assert distance(trajectory, 3) == 0
    assert all(step["restored"] == 1.0 for step in trajectory.diagnostics)


def test_about_one_element_in_a_hundred_returns():
    shares = [step["restored"] for seed in range(5) for step in ladder(Cotta(), seed=seed).diagnostics]
    assert 0 < np.mean(shares) < 0.04
    assert len(set(shares)) > 1


def test_an_unmoving_teacher_that_is_deployed_is_the_source():
    assert distance(ladder(Cotta(teacher_decay=1.0, deploy="teacher")), 3) == 0


def test_a_deployed_teacher_moves_less_than_its_student():
    student, teacher = ladder(Cotta()), ladder(Cotta(deploy="teacher"))
    assert 0 < distance(teacher, 3) < distance(student, 3) / 50


def test_without_views_the_first_gradient_is_rounding_noise():
    """Trap 5: teacher and student agree, so the exact gradient is 0; SGD stands still where Adam would not."""
    gated = Cotta(gate=0.0, weight=1.0)
    assert gated.gate == 0.0
    noise = ladder(gated).signals[1]["gradient_norm"]
    assert noise < 1e-6 < ladder(Cotta(weight=1.0)).signals[1]["gradient_norm"]
    still = ladder(Cotta(gate=0.0, weight=1.0, optimizer="sgd", restore=0.0), learning_rate=1e-3)
    assert distance(still, 1) < 1e-8


def test_the_gate_opens_for_an_unsure_source():
    assert ladder(Cotta(gate=1.0)).signals[1]["gradient_norm"] == ladder(Cotta()).signals[1]["gradient_norm"]


def test_cases_draw_their_own_views():
    one, other = ladder(Cotta(), case_id="one"), ladder(Cotta(), case_id="other")
    assert one.diagnostics[0]["loss"] != other.diagnostics[0]["loss"]
    assert one.diagnostics[0]["loss"] == ladder(Cotta(), case_id="one").diagnostics[0]["loss"]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(BadInput, match="'student' or 'teacher', got 'anchor'"):
        Cotta(deploy="anchor")
    with pytest.raises(BadInput, match=r"restore must be in \[0, 1\], got 2, 0.999 and 1.5"):
        Cotta(restore=1.5)


def test_the_published_form_takes_options():
    assert Cotta.published().gate == 0.92
    assert Cotta.published(gate=0.72).gate == 0.72
