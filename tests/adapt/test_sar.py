from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.objectives.sar import Recovery, Sar
from casewise.adapt.proposers.live import run_episode
from casewise.core.errors import BadInput

# Mean entropies of M0 in nats, as the paper prints them for its two backbones (S9).
CARDIAC, PROSTATE = 0.0008, 0.0029


def network(sharpness: float) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.InstanceNorm2d(6, affine=True), nn.Conv2d(6, 2, 1))
    with torch.no_grad():
        model[-1].weight *= sharpness
    return model


def ladder(objective: Sar, sharpness: float = 50.0, **options):
    image = torch.randn((2, 1, 16, 16), generator=torch.Generator().manual_seed(1))
    return run_episode(network(sharpness), image, objective, steps=3, keep_parameters=True, **options)


def moved(trajectory) -> float:
    return max(np.abs(trajectory.parameters[-1][n] - v).max() for n, v in trajectory.parameters[0].items())


def fired(recovery: Recovery, losses: list[float]) -> int:
    """How often a trace of losses makes it fire (S9)."""
    return sum(recovery.fires(loss) for loss in losses)


@pytest.mark.parametrize(("classes", "nats"), [(2, 0.0201), (4, 0.0401), (19, 0.0853), (1000, 0.2)])
def test_the_threshold_by_ln_c(classes, nats):
    assert Sar(recovery="ln-c").recovery_threshold(classes) == pytest.approx(nats, abs=5e-5)


def test_thresholds_of_the_other_rules():
    assert Sar().recovery_threshold(2) is None
    assert Sar(recovery="published").recovery_threshold(2) == 0.2
    assert Sar(recovery="relative", reference_entropy=PROSTATE).recovery_threshold(2) == pytest.approx(0.1 * PROSTATE)


@pytest.mark.parametrize(("classes", "scale"), [(4, CARDIAC), (2, PROSTATE)])
def test_rescaling_by_ln_c_still_resets_at_every_step_of_a_confident_model_and_the_relative_rule_never(classes, scale):
    """S9: traces of loss that fall from M0's entropy by a tenth a step, as entropy minimization does."""
    trace = [scale * 0.9**step for step in range(8)]
    resets = {}
    for recovery in ("off", "published", "ln-c", "relative"):
        threshold = Sar(recovery=recovery, reference_entropy=scale).recovery_threshold(classes)
        resets[recovery] = fired(Recovery(threshold, forgets=recovery != "published"), trace)
    assert resets == {"off": 0, "published": 8, "ln-c": 8, "relative": 0}


def test_the_relative_rule_notices_a_collapse():
    threshold = Sar(recovery="relative", reference_entropy=PROSTATE).recovery_threshold(2)
    collapse = [PROSTATE] + [PROSTATE * 1e-3] * 40
    assert fired(Recovery(threshold), collapse) >= 1


def test_the_official_order_of_events_resets_again_until_the_average_has_climbed():
    """SAR issue 4: the cleared average is overwritten by the old one."""
    trace = [0.1] + [0.25] * 9
    assert fired(Recovery(0.2, forgets=True), trace) == 1
    assert fired(Recovery(0.2, forgets=False), trace) == 10 - sum(0.25 - 0.15 * 0.9**k >= 0.2 for k in range(10))
    assert fired(Recovery(0.2, forgets=False), trace) > 5


def test_published_recovery_resets_a_confident_episode_at_every_step():
    trajectory = ladder(Sar(recovery="published"))
    assert [step["reset"] for step in trajectory.diagnostics] == [1.0, 1.0, 1.0]
    assert moved(trajectory) == 0
    assert all(np.array_equal(mask, trajectory.masks[0]) for mask in trajectory.masks)


def test_without_recovery_the_same_episode_moves():
    trajectory = ladder(Sar())
    assert [step["reset"] for step in trajectory.diagnostics] == [0.0, 0.0, 0.0]
    assert moved(trajectory) > 5e-4


@pytest.mark.parametrize("sample", ["voxel", "slice"])
def test_nothing_reliable_means_no_step(sample):
    trajectory = ladder(Sar(sample=sample, margin=1e-9), sharpness=0.1)
    assert moved(trajectory) == 0
    assert trajectory.diagnostics[0] == {"kept": 0.0}
    assert trajectory.signals[1]["gradient_norm"] is None


def test_slices_are_kept_or_left_as_a_whole():
    assert ladder(Sar(sample="slice", margin=0.9)).diagnostics[0]["kept"] == 1.0
    assert 0 < ladder(Sar(margin=0.1), sharpness=5.0).diagnostics[0]["kept"] < 1


def test_the_relative_rule_needs_its_reference():
    with pytest.raises(BadInput, match="needs reference_entropy=, the median entropy of M0 on the calibration cases"):
        Sar(recovery="relative")


def test_what_makes_no_sense_is_refused():
    with pytest.raises(BadInput, match="recovery must be one of off, published, ln-c, relative, got 'on'"):
        Sar(recovery="on")
    with pytest.raises(BadInput, match="'voxel' or 'slice', got 'pixel'"):
        Sar(sample="pixel")
