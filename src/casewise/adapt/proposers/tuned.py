"""The tuned proposer: weights M0 + a (tuned - M0) for a = 1/4, 1/2, 3/4 and 1, then the average with M0.

``tuned`` is the whole ladder, ``tuned:1,average`` names its states; ``tuned+views:mri`` predicts views with the tuned
weights (a = 1). ``Adaptation.tuned`` is the folder with the weights, which ``casewise.learn`` wrote. All candidates go
through the same pipeline as M0, with its mirroring. A new case gets the mean weights of the folds, or with ``ensemble``
the mean of their predictions; with ``crossfit`` a labelled case gets the fold that left its patient out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone, Pipeline, pipeline_of
from casewise.adapt.backbones.module import as_backbone
from casewise.adapt.consensus import Mean
from casewise.adapt.forward_episode import ForwardEpisode, ForwardPass
from casewise.adapt.proposers import PreparedCase, bind
from casewise.adapt.proposers.views import Views, read_view
from casewise.adapt.tuned_weights import TunedFolder, TunedWeights, read_tuned_folder, temporary_weights
from casewise.adapt.views import Identity
from casewise.core.errors import BadInput, NotFinite
from casewise.core.records import Binding, Case, Mask, State, Trajectory

AVERAGE = "average"
STATES = ("1/4", "1/2", "3/4", "1", AVERAGE)


@dataclass(frozen=True)
class Tuned:
    """The ladder of tuned weights.

    Args:
        how: Its ``tuned`` names the folder with the weights.
        asked: Shares a, rising, with commas; "average" last. Empty for all of :data:`STATES`.
    """

    how: Adaptation
    asked: str = ""
    name: ClassVar[str] = "tuned"

    def __post_init__(self) -> None:
        _check_named(self.how)
        last = self.names[-1] if self.names else ""
        if not self.shares or any(not 0 < a <= 1 for a in self.shares) or list(self.shares) != sorted(set(self.shares)):
            raise BadInput(f"tuned weights need rising shares up to 1, such as tuned:1/2,1, got {self.asked!r}")
        if last == AVERAGE and self.shares[-1] != 1:
            raise BadInput(f"average needs the state 1 before it, as in tuned:1,average, got {self.asked!r}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the states."""
        return tuple(word.strip() for word in self.asked.split(",")) if self.asked else STATES

    @property
    def shares(self) -> tuple[float, ...]:
        """The share a of every state before the average."""
        try:
            return tuple(float(Fraction(name)) for name in self._plain)
        except (ValueError, ZeroDivisionError) as error:
            raise BadInput(
                f"a state of tuned weights must be a share such as 1/2, or average as the last one, got {error}"
            ) from error

    @property
    def _plain(self) -> tuple[str, ...]:
        return self.names[:-1] if self.names[-1] == AVERAGE else self.names

    def states(self, network: Backbone | nn.Module) -> int:
        """Return the number of states after M0."""
        return len(self.names)

    def binding(self, network: Backbone | nn.Module) -> Binding:
        """Bind a policy to these weights and states."""
        return bind(self, self.how, network, {"states": list(self.names), **_weights_of(self.how, network)})

    def propose(self, case: PreparedCase, network: Backbone | nn.Module) -> TunedEpisode:
        """Lend the network to one case; it has other weights during a forward pass only."""
        backbone = as_backbone(network)
        how = replace(self.how, consensus="mean", steps=len(self.names))
        read = _Reader(backbone, pipeline_of(case.prepared, backbone), case.case, how)
        passes = [
            ForwardPass(name, partial(read, share), float(share == 1))  # the average is that of M0 and share 1 alone
            for name, share in zip(self._plain, self.shares, strict=True)
        ]
        return TunedEpisode(backbone, passes, how, case, read, self.shares)


@dataclass(frozen=True)
class TunedViews:
    """Views that are predicted with the tuned weights, and the mean of them all; M0 has no part in that mean.

    Args:
        how: Its ``tuned`` names the folder with the weights.
        views: As in ``views:...``.
    """

    how: Adaptation
    views: str
    name: ClassVar[str] = "tuned+views"

    def __post_init__(self) -> None:
        _check_named(self.how)
        if self.how.ensemble or self.how.consensus != "mean":
            raise BadInput(
                "views of tuned weights are predicted with one set of weights and averaged; leave ensemble and "
                f"consensus {self.how.consensus!r} out"
            )
        self._plain  # noqa: B018  # refuses views that do not exist

    @property
    def _plain(self) -> Views:
        return Views(self.how, self.views)

    def states(self, network: Backbone | nn.Module) -> int:
        """Return the number of states after M0: the tuned weights without a view, one per view, and their mean."""
        return self._plain.states(network) + 1

    def binding(self, network: Backbone | nn.Module) -> Binding:
        """Bind a policy to these weights and views."""
        return bind(self, self.how, network, {**self._plain.options(network), **_weights_of(self.how, network)})

    def propose(self, case: PreparedCase, network: Backbone | nn.Module) -> TunedEpisode:
        """Lend the network to one case; it has other weights during a forward pass only."""
        backbone, plain = as_backbone(network), self._plain
        read = _Reader(backbone, pipeline_of(case.prepared, backbone), case.case, self.how)
        views, pipeline = plain.drawn(backbone, case.case), plain.pipeline(case.prepared, backbone)
        passes = [ForwardPass("tuned", partial(read, 1.0), float(plain.source_weight(backbone)))]
        passes += [
            ForwardPass(str(view), partial(read.through, partial(read_view, pipeline, view, self.how.max_slices)))
            for view in views
        ]
        how = replace(self.how, steps=len(passes) + 1)
        return TunedEpisode(backbone, passes, how, case, read, (), source_weight=0.0)


class _Reader:
    """Probabilities of one case with tuned weights."""

    def __init__(self, backbone: Backbone, pipeline: Pipeline, case: Case, how: Adaptation) -> None:
        folder, patient = read_tuned_folder(str(how.tuned)), case.cluster or case.id
        for one in folder.folds:
            one.check(backbone.fingerprint)
        self.network, self.pipeline = backbone.network, pipeline
        self.reason = folder.failed.get(patient, "") if how.crossfit else ""
        self.weights: tuple[TunedWeights, ...] = _weights(folder, patient, how)
        self._plain = partial(read_view, pipeline, Identity(), how.max_slices)

    def __call__(self, share: float) -> Tensor:
        """Return the mean over the sets of weights of the prediction with M0 + share (tuned - M0)."""
        return self.through(self._plain, share)

    def through(self, read: Callable[[], Tensor], share: float = 1.0) -> Tensor:
        """Return the mean prediction of a forward pass with each set of tuned weights."""
        if not self.weights:
            raise NotFinite(f"the fold without this patient could not be trained: {self.reason}")
        mean = Mean()
        for one in self.weights:
            with temporary_weights(self.network, one, share):
                mean.add(read())
        return mean.value


class TunedEpisode(ForwardEpisode):
    """Forward passes with tuned weights; a state can be shrunk, because weights between it and M0 exist."""

    shrinks = True

    def __init__(
        self, backbone: Backbone, passes: list[ForwardPass], how: Adaptation, case: PreparedCase, read: _Reader,
        shares: tuple[float, ...], **more: Any
    ) -> None:  # fmt: skip
        super().__init__(case, backbone, read.pipeline, passes, how, **more)
        self._read, self._shares = read, shares

    @property
    def rungs(self) -> tuple[str, ...]:
        """Names of the states after M0."""
        return (*(one.name for one in self.passes), AVERAGE if self._shares else self.consensus)

    def shrink(self, step: int, alpha: float) -> Mask:
        """The mask of M0 + (1 - alpha) a (tuned - M0), a being the share of the step.

        The average is shrunk by averaging M0's prediction with that of M0 + (1 - alpha) (tuned - M0).

        Args:
            step: A step that was made.
            alpha: Share of the way back to M0.

        Returns:
            The mask; no forward where another step has these weights.

        Raises:
            BadInput: The step was not made, or is a view.
        """
        state = State(step, alpha)
        if not 0 < step <= min(self.step, len(self._shares) + 1) or not self._shares:
            raise BadInput(f"step {step} of case {self.case_id} cannot be interpolated toward M0; deploy it unchanged")
        if state not in self.record.shrunk:
            averaged = step > len(self._shares)
            share = (1 - alpha) * (1.0 if averaged else self._shares[step - 1])
            known = [k for k, a in enumerate(self._shares, 1) if math.isclose(a, share) and k <= self.step]
            if known and not averaged:
                self.record.shrunk[state] = self.record.masks[known[0]]
                self.record.shrunk_signals[state] = self.record.signals[known[0]]
            else:
                self._predict(state, share, averaged)
        return self.record.shrunk[state]

    def _predict(self, state: State, share: float, averaged: bool) -> None:
        shares = self._read(share)
        if averaged:
            shares = torch.lerp(self._source()[1], shares, 0.5)
        mask = self.pipeline.mask(shares)
        self.record.shrunk[state] = mask
        self.record.shrunk_signals[state] = self.record.measured(self._seen(mask, shares))

    @property
    def trajectory(self) -> Trajectory:
        """Everything so far, with the fold that made it and the patients that trained its weights."""
        patients = sorted({patient for one in self._read.weights for patient in one.trained_on})
        fold = "+".join(one.fold for one in self._read.weights)
        return replace(super().trajectory, fold=fold, trained_on=tuple(patients))


def _weights(folder: TunedFolder, patient: str, how: Adaptation) -> tuple[TunedWeights, ...]:
    if how.crossfit:
        found = folder.without(patient)
        return () if found is None else (found,)
    return folder.folds if how.ensemble else (folder.mean,)


def _check_named(how: Adaptation) -> None:
    if how.tuned is None:
        raise BadInput(f"{how.objective} needs weights that were tuned; name their folder: tuned=FOLDER (casewise fit)")


def _weights_of(how: Adaptation, network: Backbone | nn.Module) -> dict[str, Any]:
    """Return the hash of the tuned weights, for a binding; weights of another model are refused."""
    folder = read_tuned_folder(str(how.tuned))
    for one in folder.folds:
        one.check(as_backbone(network).fingerprint)
    return {"tuned": folder.sha256[:16], "ensemble": how.ensemble}
