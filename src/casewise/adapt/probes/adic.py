"""TEGDA's ADIC: how well stochastic passes agree with the prediction, per case (the MICCAI 2025 evaluation score)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from casewise.adapt.logits import labels
from casewise.adapt.objective import Adaptable
from casewise.adapt.probes.agreement import DROPOUT_SEEDS, RATE, stochastic_logits


def adic(subject: Adaptable, *, seeds: Sequence[int] = DROPOUT_SEEDS, rate: float = RATE) -> float | None:
    """An estimate of the mean foreground Dice of the current prediction; *lower* is riskier.

    Ten passes with dropout injected before the heads, so ten forwards beyond one plain forward. None where there is no
    head to inject before, or no foreground in any pass. TEGDA's 2-D file scores the union of all classes for each of
    them; here every class is scored by itself.
    """
    passes = stochastic_logits(subject, seeds=seeds, rate=rate)
    if passes is None:
        return None
    with torch.no_grad():
        plain = labels(subject.logits(subject.inputs), subject.head)
    return dice_in_context(plain, [labels(logits, subject.head) for logits in passes])


def dice_in_context(plain: NDArray[Any], passes: Sequence[NDArray[Any]]) -> float | None:
    r"""ADIC from labels: mean over foreground classes of

    .. math:: w_c \cdot \frac1P \sum_p \mathrm{Dice}(\text{pass}_p = c, \text{plain} = c), \qquad
        w_c = \frac{\sum_x (1 - h_c(x))\,[\text{some pass says } c]}{\sum_x [\text{some pass says } c]}

    h_c: binary entropy of the share of passes that say c, min-max normalized over the case.
    """
    stack = np.stack(passes)
    classes = sorted({*np.unique(stack), *np.unique(plain)} - {0})
    scores = [_class_score(plain == c, stack == c) for c in classes]
    return float(np.mean(scores)) if scores else None


def _class_score(plain: NDArray[Any], votes: NDArray[Any]) -> float:
    somewhere = votes.any(0)
    if not somewhere.any():
        return 0.0
    weight = float((1 - _normalized_entropy(votes.mean(0)))[somewhere].mean())
    space = tuple(range(1, votes.ndim))
    sizes = votes.sum(space) + plain.sum()  # positive: some pass says c, or the prediction does
    both = (votes & plain).sum(space)
    dice = np.divide(2 * both, sizes, out=np.ones(len(votes)), where=sizes > 0)
    return weight * float(dice.mean())


def _normalized_entropy(rate: NDArray[Any]) -> NDArray[Any]:
    inside = np.clip(rate, 1e-12, 1 - 1e-12)
    entropy = -(inside * np.log2(inside) + (1 - inside) * np.log2(1 - inside))
    entropy[(rate == 0) | (rate == 1)] = 0.0
    low, high = entropy.min(), entropy.max()
    return (entropy - low) / (high - low) if high > low else np.zeros_like(entropy)
