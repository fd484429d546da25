"""Continue the training of a frozen network on a few labelled cases, for a short schedule."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from casewise.adapt.backbones import Backbone
from casewise.adapt.backbones.merged import unmerged
from casewise.adapt.backbones.nnunet import NnUNet
from casewise.adapt.parameters import fast_norms
from casewise.adapt.snapshot import restored, seed_generators
from casewise.adapt.tuned_weights import TunedWeights
from casewise.core.errors import BadInput
from casewise.core.records import Case, Mask
from casewise.data.splits import cluster_of

if TYPE_CHECKING:
    from casewise.learn.loop import Task

NAMED = ("norm+head", "norm", "all")  # sets of parameters
OPTIMIZERS = ("adamw", "sgd")
AUGMENTATIONS = ("default", "upright", "none")

Progress = Callable[[int, float], None]
"""Called after every update with the number of updates made and the loss."""


@dataclass(frozen=True)
class Tuning:
    """Options of a training on labelled cases.

    Args:
        parameters: "norm+head" (scales and shifts of normalization layers, and the output layers), "norm", "all", or
            patterns of parameter names.
        optimizer: "adamw", or "sgd" as nnU-Net trains (Nesterov momentum 0.99, weight decay 3e-5).
        learning_rate: Learning rate of the first update; it decays to 0. Default: 3e-3 for AdamW, 3e-4 if all weights
            are tuned, 1e-2 for SGD.
        updates: Number of updates.
        batch: Patches in an update; None for the batch size of an nnU-Net's plans, else 8.
        patch: Size of a patch; None for the one of nnU-Net's plans, the network's window, or the whole image, at most
            512 pixels (96 voxels of a volume) a side. Ignored for nnU-Net models.
        augmentation: "default" (nnU-Net's own transforms; mirrors, rotations and intensities for other networks),
            "upright" (only left-right mirrors and small rotations) or "none".
        seed: Seed of all random draws.
    """

    parameters: str | tuple[str, ...] = "norm+head"
    optimizer: str = "adamw"
    learning_rate: float | None = None
    updates: int = 80
    batch: int | None = None
    patch: tuple[int, ...] | None = None
    augmentation: str = "default"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("parameters", "patch"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        for name, known in {"optimizer": OPTIMIZERS, "augmentation": AUGMENTATIONS}.items():
            if getattr(self, name) not in known:
                raise BadInput(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("updates", "batch"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise BadInput(f"{name} must be at least 1, got {number}")
        if not 0 < self.rate < math.inf:
            raise BadInput(f"learning_rate must be above 0, got {self.rate}")

    @property
    def rate(self) -> float:
        """Learning rate of the first update."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-2 if self.optimizer == "sgd" else 3e-4 if self.parameters == "all" else 3e-3


def tune(
    backbone: Backbone,
    cases: Sequence[Case],
    labels: Sequence[Mask],
    tuning: Tuning | None = None,
    *,
    on_progress: Progress | None = None,
) -> TunedWeights:
    """Continue the training of a model on labelled cases; the model itself is restored bit for bit.

    nnU-Net models are trained with nnU-Net's preprocessing, patches, augmentation and loss; every other model with
    cross-entropy and Dice (:mod:`casewise.learn.generic`). Of an ensemble of folds every network is tuned.

    Args:
        backbone: The model.
        cases: The labelled cases.
        labels: Their labels, in the numbers and on the grid of the model's masks.
        tuning: Options; default :class:`Tuning`.
        on_progress: Called after every update with the number of updates and the loss.

    Returns:
        The tuned tensors. ``trained_on`` are the clusters of the cases, or the ids of cases without a cluster.

    Raises:
        BadInput: A label cannot be used (see :func:`check_labels`).
        NothingToAdapt: ``parameters`` selects nothing.
        NotFinite: The loss or a gradient became NaN or infinite.

    Example:
        >>> from casewise.adapt.networks import phantom_cardiac
        >>> from casewise.data.phantom import cardiac_cohort
        >>> hearts = cardiac_cohort("B", 2, split="target")
        >>> cases, labels = [hearts.case(one) for one in hearts.ids], [hearts.label(one) for one in hearts.ids]
        >>> tuned = tune(phantom_cardiac(), cases, labels, Tuning(updates=1, batch=1))
        >>> len(tuned.values), tuned.fold
        (30, '')
    """
    from casewise.learn.loop import Loop

    tuning = tuning or Tuning()
    notes = check_labels(backbone, cases, labels)
    began, cpu = time.perf_counter(), time.process_time()
    network = backbone.network
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(restored(network))
        seed_generators(tuning.seed)
        task = task_of(backbone, cases, labels, tuning)
        stack.enter_context(fast_norms(network))
        loop = Loop(network, task, tuning)
        losses = [loop.update(on_progress) for _ in range(tuning.updates)]
        values = loop.values()
    facts = {
        "seconds": round(time.perf_counter() - began, 2), "cpu_seconds": round(time.process_time() - cpu, 2),
        "losses": [round(loss, 5) for loss in losses], "notes": notes,
    }  # fmt: skip
    patients = tuple(sorted({cluster_of(case) for case in cases}))
    return TunedWeights(values, backbone.fingerprint, patients, (), asdict(tuning), facts)


def task_of(backbone: Backbone, cases: Sequence[Case], labels: Sequence[Mask], tuning: Tuning) -> Task:
    """Return nnU-Net's training task for nnU-Net models, and the generic task for all others."""
    if isinstance(plain := unmerged(backbone), NnUNet):
        if plain is not backbone:
            raise BadInput("an nnU-Net cannot be tuned with merged labels; leave merge out")
        from casewise.learn.nnunet_task import NnUNetTask

        return NnUNetTask(plain, cases, labels, tuning)
    from casewise.learn.generic import GenericTask

    return GenericTask(backbone, cases, labels, tuning)


def check_labels(backbone: Backbone, cases: Sequence[Case], labels: Sequence[Mask]) -> list[str]:
    """Refuse labels that this model cannot be trained on.

    Args:
        backbone: The model.
        cases: The labelled cases.
        labels: Their labels.

    Returns:
        Sentences about single labels without foreground; they are used, and may be mistakes.

    Raises:
        BadInput: A shape or a value does not fit, or no label has any foreground.
    """
    if not cases or len(cases) != len(labels):
        raise BadInput(f"tuning needs one label for each case, got {len(cases)} cases and {len(labels)} labels")
    known, notes, wrong = known_values(backbone), [], []
    for case, label in zip(cases, labels, strict=True):
        values = {int(value) for value in np.unique(label)}
        if label.shape != case.image.shape[1:]:
            wrong.append(f"the label of case {case.id} has shape {label.shape}, its image {case.image.shape[1:]}")
        elif foreign := sorted(values - known - {backbone.ignore}):
            wrong.append(f"the label of case {case.id} holds {foreign[0]}")
        elif not values - {0, backbone.ignore}:
            notes.append(f"the label of case {case.id} has no foreground")
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise BadInput(
            f"{'; '.join(wrong[:5])}{more}. A label needs the shape of its image and may hold the labels of the model "
            f"({', '.join(map(str, sorted(known)))}); correct these labels or leave the cases out"
        )
    if len(notes) == len(cases):
        ignored = "" if backbone.ignore is None else f" ({backbone.ignore} is ignored)"
        raise BadInput(f"none of {len(cases)} labels to learn from has foreground{ignored}; check the label files")
    return notes


def known_values(backbone: Backbone) -> set[int]:
    """Return the values that a label of the model may hold, without the ignored one."""
    if isinstance(backbone, NnUNet):
        return {0, *map(int, backbone.predictor.label_manager.all_labels)}
    return {0, *backbone.labels} if backbone.labels else set(range(backbone.classes + (backbone.head == "sigmoid")))
