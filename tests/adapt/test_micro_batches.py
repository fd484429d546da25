"""max_slices bounds every forward, those of objectives and signals too, and does not change what comes out."""

from __future__ import annotations

import numpy as np
import pytest

from casewise.adapt.objectives.cotta import Cotta
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.proposers.live import run_episode

AT_ONCE = 2
RUNS = {
    "cotta behind a gate": (Cotta(gate=0.92), ()),
    "agreement": (Tent(), ("augmentation_disagreement", "dropout_disagreement")),
    "cosine": (Tent(), ("grata_cosine",)),
    "monitors": (Tent(), ("dropout_disagreement",)),
}


@pytest.mark.parametrize(("objective", "signals"), RUNS.values(), ids=RUNS)
def test_no_forward_is_larger_and_the_result_is_the_same(objective, signals, unet, slices):
    sizes = []
    handle = unet.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    options = {"steps": 2, "signals": signals, "keep_parameters": True, "learning_rate": 1e-3}
    bounded = run_episode(unet, slices, objective, max_slices=AT_ONCE, **options)
    handle.remove()
    assert max(sizes) == AT_ONCE
    whole = run_episode(unet, slices, objective, **options)
    for name, values in whole.parameters[2].items():
        np.testing.assert_allclose(bounded.parameters[2][name], values, atol=2e-6)
    for step in range(3):
        for name in signals:
            assert bounded.signals[step][name] == pytest.approx(whole.signals[step][name], abs=2e-3)
