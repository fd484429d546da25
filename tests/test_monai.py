"""A deployment stands where MONAI takes an Inferer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from casewise.core.errors import BadInput


def test_a_deployment_is_a_monai_inferer() -> None:
    import copy

    from monai.inferers import Inferer
    from monai.transforms import AsDiscrete

    import casewise
    from casewise.core.errors import Mismatch
    from casewise.data.phantom import cardiac_cohort

    deployment = casewise.Deployment(casewise.Model("casewise.adapt.networks:phantom_cardiac"), contract="off")
    hearts = cardiac_cohort("B", 1, split="target")
    case = hearts.case(hearts.ids[0])
    inferer = casewise.monai.GuardedInferer(deployment)
    assert isinstance(inferer, Inferer)
    inputs = torch.from_numpy(case.image)[None]
    made = inferer(inputs, deployment.backbone.network)
    assert made.shape == (1, deployment.backbone.classes, *case.image.shape[1:])
    expected = deployment.predict(case).mask
    assert np.array_equal(AsDiscrete(argmax=True)(made[0])[0].numpy(), expected)
    assert torch.equal(inferer(inputs), made)
    other = copy.deepcopy(deployment.backbone.network)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(Mismatch, match="not the one of the deployment"):
        inferer(inputs, other)
    with pytest.raises(BadInput, match="Deployment"):
        casewise.monai.GuardedInferer(other)  # type: ignore[arg-type]
