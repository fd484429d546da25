"""An episode without updates: M0, then one forward pass after the other, then the consensus of all of them.

It has the interface of the gradient loop (:class:`~casewise.adapt.episode.Episode`), so a judge can use either. A
state is the mask of a forward pass: of a view, of another model, or of tuned weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone, OwnPrediction, Pipeline
from casewise.adapt.consensus import Mean, medoid, vote
from casewise.adapt.proposers import PreparedCase
from casewise.adapt.recording import Prediction, Recording
from casewise.adapt.snapshot import restored
from casewise.core.errors import BadInput, Mismatch, NotFinite
from casewise.core.records import Mask, Signals, Trajectory
from casewise.measure.signals.agreement import agreement


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One forward pass: its name, a function that returns probabilities (n, classes, *space), its weight in a mean."""

    name: str
    run: Callable[[], Tensor]
    weight: float = 1.0


class ForwardEpisode:
    """Forward passes of a frozen network on one case; ``advance`` makes the next one, and the consensus at the end.

    With ``running`` a state is the consensus of all passes so far, so that a stop rule can end the case as soon as the
    mask no longer changes. A pass that cannot be used (NaN, constant image) is left out and reported; its state repeats
    M0. The network is restored bit by bit.

    Args:
        case: The prepared case, with M0 where it was predicted already.
        backbone: The model.
        pipeline: The way from the prepared case to probabilities and masks.
        passes: The forward passes, in order.
        how: Options; ``how.steps`` is the number of states after M0.
        running: Every state is the consensus so far.
        source_weight: Weight of M0 in a mean: the number of passes that it averages itself.
        changing: Names of the parameters that may move meanwhile; None for all.
    """

    shrinks: ClassVar[bool] = False

    def __init__(
        self, case: PreparedCase, backbone: Backbone, pipeline: Pipeline, passes: Sequence[ForwardPass],
        how: Adaptation, *, running: bool = False, source_weight: float = 1.0, changing: Collection[str] | None = (),
    ) -> None:  # fmt: skip
        self.network, self.pipeline, self.passes = backbone.network, pipeline, tuple(passes)
        self.case_id, self.head = case.case.id, backbone.head
        self.how, self.consensus, self.running = how, how.consensus, running
        self._changing = changing
        self.record = Recording(how.min_area, how.foreground)
        self.left_out: dict[str, str] = {}
        self._source, self._source_weight = case.source or pipeline.source, source_weight
        self._look = case.before_forward or (lambda: None)
        self._mean = Mean()
        self._loan: ExitStack | None = None

    @property
    def rungs(self) -> tuple[str, ...]:
        """Names of the states after M0."""
        names = tuple(one.name for one in self.passes)
        return names if self.running else (*names, self.consensus)

    # ---- enter and exit ----

    def __enter__(self) -> ForwardEpisode:
        with ExitStack() as stack:
            stack.enter_context(restored(self.network, self._changing))
            self.network.eval()
            self._look()
            began = time.perf_counter()
            mask, shares = self._source()
            if not torch.isfinite(shares.sum()):  # finite only where every term is, and cheap
                raise NotFinite(f"the probabilities of M0 of case {self.case_id} are not finite; check the image")
            self._shape = shares.shape
            self._keep(mask, shares, began, None)
            self._take(shares, self._source_weight)
            self._loan = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        loan, self._loan = self._loan, None
        self._mean = Mean()
        if loan is not None:
            loan.__exit__(*error)

    # ---- one step ----

    @property
    def step(self) -> int:
        """Number of states made so far, M0 excluded."""
        return len(self.record.masks) - 1

    updates = step

    def advance(self, *, last: bool = False) -> Signals:
        """Make the next forward pass, or the consensus after the last one, and return its signals."""
        if self._loan is None:
            raise BadInput("advance() works only inside 'with proposer.propose(...) as states:'")
        began = time.perf_counter()
        if self.step == len(self.passes):
            if self.running:
                raise BadInput(
                    f"case {self.case_id} has {len(self.passes)} candidates, the controller asked for one more"
                )
            return self._form_consensus(began)
        self._look()
        one = self.passes[self.step]
        try:
            shares = one.run()
            if not torch.isfinite(shares.sum()):  # finite only where every term is, and cheap
                raise NotFinite(f"its probabilities are not finite for case {self.case_id}")
            if shares.shape != self._shape:
                raise Mismatch(
                    f"{one.name} gave probabilities of shape {tuple(shares.shape)} for case {self.case_id}, M0's have "
                    f"shape {tuple(self._shape)}; leave it out"
                )
            mask = self.pipeline.mask(shares)
        except (BadInput, NotFinite) as error:
            return self._leave_out(one, str(error), began)
        if not self.running:
            signals = self._keep(mask, shares, began, {"left_out": 0.0})
            self._take(shares, one.weight)
            return signals
        before = self.record.masks[-1]
        self._take(shares, one.weight)
        mean = self._mean.value
        settled = self.pipeline.mask(mean)
        return self._keep(settled, mean, began, {"left_out": 0.0, "settled": agreement(before, settled)})

    def _leave_out(self, one: ForwardPass, reason: str, began: float) -> Signals:
        """Repeat M0 (of a running consensus: the mask so far) instead of a pass that cannot be used."""
        self.left_out[one.name] = reason
        place = self.step if self.running else 0
        settled = {"settled": 1.0} if self.running else {}
        signals = {**self.record.signals[place], "left_out": 1.0, **settled}
        return self.record.add(self.record.masks[place], signals, began, {"left_out": 1.0})

    def _take(self, shares: Tensor, weight: float) -> None:
        """Count a forward pass for the mean."""
        if self.consensus == "mean":
            self._mean.add(shares, weight)

    def _keep(self, mask: Mask, shares: Tensor, began: float, more: Mapping[str, float] | None) -> Signals:
        """Record a mask with its probabilities; ``more`` are further signals, None for M0."""
        signals = {**self.record.measured(self._seen(mask, shares)), **(more or {})}
        return self.record.add(mask, signals, began, more)

    def _seen(self, mask: Mask, shares: Tensor) -> Prediction:
        entropy = _entropy(shares, self.head)
        surest = shares.amax(1) if self.head == "softmax" else torch.maximum(shares, 1 - shares).prod(1)
        return Prediction(mask, entropy.reshape(mask.shape), float(surest.mean()))

    # ---- the consensus ----

    def _form_consensus(self, began: float) -> Signals:
        used = [0, *(k + 1 for k, one in enumerate(self.passes) if one.name not in self.left_out)]
        masks, count = [self.record.masks[place] for place in used], {"readings": float(len(used))}
        if len(used) == 1:  # only M0 can be used
            return self._keep_mask(masks[0], began, count)
        if self.consensus == "vote":
            return self._keep_mask(vote(masks), began, count)
        if self.consensus == "medoid":
            place = medoid(masks)
            return self._keep_mask(masks[place], began, {**count, "medoid": float(used[place])})
        mean = self._mean.value
        return self._keep(self.pipeline.mask(mean), mean, began, count)

    def _keep_mask(self, mask: Mask, began: float, more: Mapping[str, float]) -> Signals:
        """Record a mask without probabilities: entropy and confidence are not computable."""
        nothing = Prediction(mask, np.zeros(mask.shape, np.float32), 0.0)
        signals = {**self.record.measured(nothing), "entropy": None, "msp": None, "entropy_on_d": None, **more}
        return self.record.add(mask, signals, began, more)

    # ---- result ----

    def shrink(self, step: int, alpha: float) -> Mask:
        """Refuse: no weights move, so there is nothing to interpolate."""
        raise BadInput(
            f"{self.how.objective} changes no weights, so state {step} cannot be interpolated; deploy it unchanged"
        )

    @property
    def trajectory(self) -> Trajectory:
        """Everything so far."""
        made_by = f"{self.how.objective} consensus={self.consensus}"
        found = self.record.trajectory(self.case_id, made_by, self.how.seed)
        return replace(found, rungs=self.rungs[: self.step], left_out=dict(self.left_out))


def _entropy(shares: Tensor, head: str) -> np.ndarray:
    """Entropy of each voxel of probabilities, nats."""
    parts = _plain_entropy(shares)
    if head != "softmax":
        parts += _plain_entropy(1 - shares)
    return np.asarray(parts.cpu().numpy())


def _plain_entropy(shares: Tensor) -> Tensor:
    """Sum over classes of -p log p; 0 where p is 0. On CPU much faster than torch.special.entr."""
    return shares.clamp_min(torch.finfo(shares.dtype).tiny).log_().mul_(shares).sum(1).neg_()


class SharedSource:
    """M0, predicted once for all proposers of a case; each gets a copy of the probabilities."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._found: tuple[Mask, Tensor] | None = None

    def __call__(self) -> tuple[Mask, Tensor]:
        """M0 and its probabilities."""
        if self._found is None:
            self._found = self._pipeline.source()
        mask, shares = self._found
        return mask, shares.clone()

    def first(self, predict: Callable[[], Mask]) -> OwnPrediction:
        """Return a prediction function whose first call, that of M0, returns the known mask."""
        known = [self()[0]]
        return OwnPrediction.instead(predict, lambda: known.pop() if known else predict())
