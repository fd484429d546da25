"""Label-free criteria of a live episode that cost forwards of their own.

TEGDA's ADIC: how well stochastic passes agree with the prediction, per case (the MICCAI 2025 evaluation score).

AETTA's label-free error estimate, per case (Lee et al., CVPR 2024).

Region scores of a live episode (L1, L2).

Agreement of perturbed predictions with the plain one: light augmentations (C10) and injected dropout (C11).

Signals are 1 - agreement, so that higher means riskier. They read only: 8 forwards each beyond one plain forward, no
backward, and one forward more at step 0 for the self-test of the augmentations.

Dropout is injected before the segmentation heads by forward pre-hooks, so the state dict stays as it is. On a network
without dropout, plain Monte Carlo dropout repeats one answer and its agreement is the constant 1: that is "not
computable", never 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from casewise.adapt.logits import labels
from casewise.adapt.objective import Adaptable
from casewise.core.records import Signals
from casewise.measure.signals.risk import region_drops

if TYPE_CHECKING:
    from casewise.adapt.episode import Episode

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from casewise.adapt.augmentations import IDENTITY, View, light_views
from casewise.core.errors import BadInput

RATE = 0.1
DROPOUT_SEEDS = range(1000, 1010)  # of stochastic passes, as in AETTA and ADIC


def segmentation_heads(network: nn.Module, classes: int) -> list[nn.Module]:
    """Layers that end in one channel for each class: the pointwise ones, or all where none is pointwise."""
    ends = [module for module in network.modules() if _width(module) == classes]
    pointwise = [module for module in ends if set(getattr(module, "kernel_size", (1,))) == {1}]
    return pointwise or ends


def _width(module: nn.Module) -> int | None:
    width = getattr(module, "out_channels", getattr(module, "out_features", None))
    return width if isinstance(width, int) and isinstance(getattr(module, "weight", None), Tensor) else None


@contextmanager
def dropped(heads: Sequence[nn.Module], generator: torch.Generator, *, rate: float = RATE) -> Iterator[None]:
    """Whole channels that go into these layers vanish with probability ``rate``; the others grow by 1 / (1 - rate)."""

    def drop(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        features: Tensor = inputs[0]
        channels_last = hasattr(module, "out_features")
        kept = torch.rand(_by_channel(features, channels_last), generator=generator) >= rate
        return (features * kept.to(features) / (1 - rate), *inputs[1:])

    handles = [head.register_forward_pre_hook(drop) for head in heads]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _by_channel(features: Tensor, channels_last: bool) -> tuple[int, ...]:
    """(n, channel, 1, ...) or, where channels are the last axis, (n, 1, ..., channel)."""
    ones = [1] * (features.ndim - 2)
    samples, channels = features.shape[0], features.shape[-1 if channels_last else 1]
    return (samples, *ones, channels) if channels_last else (samples, channels, *ones)


def stochastic_logits(
    subject: Adaptable,
    *,
    seeds: Sequence[int] = DROPOUT_SEEDS,
    rate: float = RATE,
    heads: Sequence[nn.Module] | None = None,
) -> Iterator[Tensor] | None:
    """Logits of one pass for each seed, or None where the network has no head that could be found."""
    found = list(heads) if heads is not None else segmentation_heads(subject.network, subject.classes)
    return _passes(subject, found, seeds, rate) if found else None


def _passes(subject: Adaptable, heads: Sequence[nn.Module], seeds: Sequence[int], rate: float) -> Iterator[Tensor]:
    for seed in seeds:
        with torch.no_grad(), dropped(heads, torch.Generator().manual_seed(seed), rate=rate):
            logits = subject.logits(subject.inputs)
        yield logits


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


def drop(episode: Episode) -> Signals:
    """How much surer the network became in each region of the step-1 edit; None where logits lie on another grid."""
    record = episode.record
    first, now = record.entropies["entropy_0"], record.entropies[f"entropy_{episode.step}"]
    if episode.step != 1 or now.shape != record.masks[1].shape:
        return {"drop": None}
    return region_drops(record.masks[0], record.masks[1], first - now, min_area=record.min_area)
