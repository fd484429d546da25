"""AETTA's label-free error estimate, per case (Lee et al., CVPR 2024)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from casewise.adapt.objective import Adaptable
from casewise.adapt.probes.agreement import DROPOUT_SEEDS, RATE, stochastic_logits


def aetta(subject: Adaptable, *, seeds: Sequence[int] = DROPOUT_SEEDS, rate: float = RATE) -> float | None:
    """Estimated error of the current prediction; higher is riskier, None where no pass can differ.

    A voxel stands for AETTA's sample and the case for its batch. Ten passes with dropout injected before the heads
    (the official network has dropout after four of its layers), so ten forwards beyond one plain forward. No memory
    from step to step; :func:`smoothed` is the official moving average. Several sigmoids have no one distribution over
    classes, so there it is None.
    """
    passes = stochastic_logits(subject, seeds=seeds, rate=rate)
    if passes is None or (subject.head == "sigmoid" and subject.classes > 1):
        return None
    with torch.no_grad():
        plain = _distribution(subject.logits(subject.inputs)).argmax(1)
    wrong, means = [], []
    for logits in passes:
        seen = _distribution(logits)
        wrong.append(float((seen.argmax(1) != plain).double().mean()))
        means.append(seen.double().transpose(0, 1).flatten(1).mean(1))
    return estimated_error(float(np.mean(wrong)), torch.stack(means).mean(0).tolist())


def estimated_error(disagreement: float, mean_probability: Sequence[float]) -> float:
    r"""Disagreement, enlarged where predictions collapse to few classes.

    .. math:: u = \mathrm{clip}\Big(\frac{e}{(\bar H / \ln C)^3}, 0, 1 - \tfrac1C\Big), \qquad
        \bar H = -\sum_c \bar p_c \log(\bar p_c + 10^{-6})

    >>> estimated_error(0.1, [0.5, 0.5])
    0.1000...
    >>> estimated_error(0.1, [0.999, 0.001])
    0.5
    """
    classes = len(mean_probability)
    spread = -sum(p * math.log(p + 1e-6) for p in mean_probability) / math.log(classes)
    most = 1 - 1 / classes
    if disagreement == 0:
        return 0.0
    return most if spread <= 0 else min(max(disagreement / spread**3, 0.0), most)


def smoothed(first_disagreement: float, errors: Sequence[float]) -> list[float]:
    """The official moving average: begins at the first *unscaled* disagreement, then 0.6 old + 0.4 new.

    >>> smoothed(0.5, [0.5, 0.0])
    [0.5, 0.3]
    """
    average, averages = first_disagreement, []
    for error in errors:
        average = 0.6 * average + 0.4 * error
        averages.append(average)
    return averages


def _distribution(logits: Tensor) -> Tensor:
    """Softmax, where one sigmoid channel is two classes."""
    return (torch.cat([torch.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits).softmax(1)
