"""Agreement of perturbed predictions with the plain one: light augmentations (C10) and injected dropout (C11).

Signals are 1 - agreement, so that higher means riskier. They read only: 8 forwards each beyond one plain forward, no
backward, and one forward more at step 0 for the self-test of the augmentations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from casewise.adapt.augmentations import IDENTITY, View, light_views
from casewise.adapt.logits import labels
from casewise.adapt.objective import Adaptable
from casewise.adapt.probes.dropout import RATE, stochastic_logits
from casewise.core.errors import BadInput

SEEDS = range(1000, 1008)  # A7


def augmentation_agreement(subject: Adaptable, *, views: Sequence[View] | None = None) -> float:
    r"""Mean share of voxels whose label stays the same under a light view, geometry inverted on the logits.

    .. math:: A = \frac1V \sum_v \frac{|\{x : \hat y_v(x) = \hat y(x)\}|}{|\Omega|}

    Views: 8, seeds 1000 to 1007, flips of both in-plane axes with p = 0.5, brightness U[0.9, 1.1], noise with
    sigma U[0, 0.05] on z-scored intensities. Support: all voxels.
    """
    plain = _labels(subject, IDENTITY)
    if subject.step == 0:
        _check_identity(_labels(subject, IDENTITY), plain)
    chosen = light_views(SEEDS) if views is None else views
    return float(np.mean([_share_equal(_labels(subject, view), plain) for view in chosen]))


def augmentation_disagreement(subject: Adaptable) -> float:
    """1 - augmentation agreement (C10)."""
    return 1.0 - augmentation_agreement(subject)


def dropout_agreement(subject: Adaptable, *, seeds: Sequence[int] = SEEDS, rate: float = RATE) -> float | None:
    """Mean share of voxels whose label stays the same when channels before the heads drop out; None without heads.

    The network was never trained under this dropout, so the perturbation is out of its distribution; the paper reports
    it as a secondary signal for that reason.
    """
    passes = stochastic_logits(subject, seeds=seeds, rate=rate)
    if passes is None:
        return None
    plain = _labels(subject, IDENTITY)
    return float(np.mean([_share_equal(labels(logits, subject.head), plain) for logits in passes]))


def dropout_disagreement(subject: Adaptable) -> float | None:
    """1 - dropout agreement (C11); None where it is not computable, never a stand-in number."""
    agreement = dropout_agreement(subject)
    return None if agreement is None else 1.0 - agreement


@torch.no_grad()
def _labels(subject: Adaptable, view: View) -> NDArray[Any]:
    return labels(view.invert(subject.logits(view.apply(subject.inputs))), subject.head)


def _share_equal(seen: NDArray[Any], plain: NDArray[Any]) -> float:
    return float((seen == plain).mean())


def _check_identity(again: NDArray[Any], plain: NDArray[Any]) -> None:
    """The self-test: an identity view agrees exactly, or nothing is logged (C10)."""
    share = _share_equal(again, plain)
    if share != 1.0:
        raise BadInput(
            f"the same input must give the same labels before agreement means anything, but only {share:.6f} of voxels "
            "agree; the network is random in eval mode: switch that off"
        )
