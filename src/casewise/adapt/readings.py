"""The ladder of forward passes: M0, then one reading of the case after the other, then their consensus.

It is lent and advanced like an :class:`~casewise.adapt.episode.Episode`, so whatever decides on one decides on the
other; but nothing is updated, and a step is a forward pass. The readings are those of views or of other models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from torch import Tensor, nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Invert, Pipeline
from casewise.adapt.consensus import Ballots, Mean, balanced_entropy, intent_weights, medoid, vote
from casewise.adapt.logits import at_resolution, labels, logits_of, probabilities
from casewise.adapt.recording import Prediction, Recording
from casewise.adapt.snapshot import restored
from casewise.core.errors import BadInput, Mismatch, NotFinite
from casewise.core.records import Mask, Signals, Trajectory
from casewise.measure.masks import weighted_labels
from casewise.measure.signals.agreement import agreement


@dataclass(frozen=True, eq=False)
class Reading:
    """One way to read the case: its name, and how to get the probabilities, (n, classes, *space)."""

    name: str
    read: Callable[[], Tensor]
    weight: float = 1.0


def logits_pipeline(
    network: nn.Module,
    whole: Tensor,
    head: str,
    logits: Callable[[Tensor], Tensor] | None = None,
    space: Sequence[int] | None = None,
) -> Pipeline:
    """The pipeline of a network whose logits are resized to ``space`` (default: that of the inputs) and are the mask.

    ``logits`` gives them for a whole (n, channel, *space), at any resolution; default: what the network returns.
    """
    run = logits or (lambda inputs: logits_of(network(inputs)))
    grid = tuple(space or whole.shape[2:])

    def at_grid(inputs: Tensor, invert: Invert) -> Tensor:
        with torch.inference_mode():
            return at_resolution(invert(run(inputs)), grid).float()

    def source() -> tuple[Mask, Tensor]:
        with torch.inference_mode():
            found = at_resolution(run(whole), grid).float()
            return _joined(labels(found, head)), probabilities(found, head)

    def mask(shares: Tensor) -> Mask:
        return _joined(labels(shares if head == "softmax" else shares - 0.5, head))

    return Pipeline(
        whole, lambda inputs, invert: probabilities(at_grid(inputs, invert), head), source, mask, network,
        rows_alone=True,
    )  # fmt: skip


class Readings:
    """A frozen network on loan for one case; ``advance`` takes the next reading, and at the end the consensus.

    With ``running`` a step is the consensus of all readings so far, so that a stop rule can end the case as soon as the
    mask has settled. A reading that cannot be used (NaN, constant) is left out and reported; its step repeats M0.
    """

    def __init__(
        self,
        network: nn.Module,  # is given back bit-identical
        pipeline: Pipeline,
        readings: Sequence[Reading],
        how: Adaptation,
        *,
        case_id: str,
        head: str,
        running: bool = False,
        source: Callable[[], tuple[Mask, Tensor]] | None = None,  # M0, where it was predicted already
        source_weight: float = 1.0,  # of M0 in a mean: how many readings it is the mean of
        before_forward: Callable[[], None] | None = None,
    ) -> None:
        self.network, self.pipeline, self.readings = network, pipeline, tuple(readings)
        self.case_id, self.head = case_id, head
        self.how, self.consensus, self.running = how, how.consensus, running
        self.record = Recording(how.min_area, how.foreground)
        self.left_out: dict[str, str] = {}
        self._source, self._source_weight = source or pipeline.source, source_weight
        self._look = before_forward or (lambda: None)
        self._mean = Mean()
        self._ballots = Ballots(head) if how.keep_ballots or how.consensus == "intent" else None
        self._entropies: list[float] = []
        self._loan: ExitStack | None = None

    @property
    def rungs(self) -> tuple[str, ...]:
        """What the steps are called."""
        names = tuple(reading.name for reading in self.readings)
        return names if self.running else (*names, self.consensus)

    # ---- the loan ----

    def __enter__(self) -> Readings:
        with ExitStack() as stack:
            stack.enter_context(restored(self.network, ()))
            self.network.eval()
            self._look()
            began = time.perf_counter()
            mask, shares = self._source()
            if not torch.isfinite(shares.sum()):  # finite only where every term is, and cheap
                raise NotFinite(f"the probabilities of M0 of case {self.case_id} are not finite; look at the image")
            self._shape = shares.shape
            self._keep(mask, shares, began, {})
            self._take(mask, shares, self._source_weight)
            self._loan = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loan, self._loan = self._loan, None
        self._mean = Mean()
        if loan is not None:
            loan.__exit__(kind, error, trace)

    # ---- one step ----

    @property
    def step(self) -> int:
        """Readings so far, and the consensus where it was formed."""
        return len(self.record.masks) - 1

    @property
    def updates(self) -> int:
        """Steps that were made; what a decision calls executed."""
        return self.step

    def advance(self, *, last: bool = False) -> Signals:
        """The next reading, or the consensus after the last of them; returns its signals."""
        if self._loan is None:
            raise BadInput("the network is not on loan; advance() works inside 'with Readings(...) as readings:'")
        began = time.perf_counter()
        if self.step == len(self.readings):
            if self.running:
                raise BadInput(f"case {self.case_id} has {len(self.readings)} readings, one more was asked for")
            return self._form_consensus(began)
        self._look()
        reading = self.readings[self.step]
        try:
            shares = reading.read()
            if not torch.isfinite(shares.sum()):  # finite only where every term is, and cheap
                raise NotFinite(f"its probabilities are not finite for case {self.case_id}")
            if shares.shape != self._shape:
                got, own = tuple(shares.shape), tuple(self._shape)
                raise Mismatch(
                    f"{reading.name} gave probabilities of shape {got} for case {self.case_id}, M0's are {own}; "
                    "leave it out"
                )
            mask = self.pipeline.mask(shares)
        except (BadInput, NotFinite) as error:
            return self._leave_out(reading, str(error), began)
        return self._use(reading, mask, shares, began)

    def _use(self, reading: Reading, mask: Mask, shares: Tensor, began: float) -> Signals:
        if not self.running:
            self._keep(mask, shares, began, {"left_out": 0.0})
            self._take(mask, shares, reading.weight)
            return self.record.signals[-1]
        before = self.record.masks[-1]
        self._take(mask, shares, reading.weight)
        mean = self._mean.value
        settled = self.pipeline.mask(mean)
        self._keep(settled, mean, began, {"left_out": 0.0, "settled": agreement(before, settled)})
        return self.record.signals[-1]

    def _leave_out(self, reading: Reading, reason: str, began: float) -> Signals:
        self.left_out[reading.name] = reason
        place = self.step if self.running else 0  # a running consensus stays what it was
        settled = {"settled": 1.0} if self.running else {}
        self.record.masks.append(self.record.masks[place])
        self.record.signals.append({**self.record.signals[place], "left_out": 1.0, **settled})
        self.record.seconds.append(time.perf_counter() - began)
        self.record.diagnostics.append({"left_out": 1.0})
        return self.record.signals[-1]

    def _take(self, mask: Mask, shares: Tensor, weight: float) -> None:
        """Count a reading for the consensus."""
        if self._ballots is not None:
            self._ballots.add(shares, mask)
        if self.consensus == "intent":
            self._entropies.append(balanced_entropy(_entropy(shares, self.head).reshape(mask.shape), mask))
        if self.consensus in ("mean", "weighted"):
            self._mean.add(shares, weight)

    def _keep(self, mask: Mask, shares: Tensor, began: float, more: Mapping[str, float]) -> None:
        entropy = _entropy(shares, self.head)
        surest = shares.amax(1) if self.head == "softmax" else torch.maximum(shares, 1 - shares).prod(1)
        seen = Prediction(mask, entropy.reshape(mask.shape), float(surest.mean()))
        signals = {**self.record.measured(seen), **more}
        self.record.masks.append(mask)
        self.record.signals.append(signals)
        if len(self.record.masks) > 1:
            self.record.diagnostics.append(dict(more))
        self.record.seconds.append(time.perf_counter() - began)

    # ---- the consensus ----

    def _form_consensus(self, began: float) -> Signals:
        used = [0, *(k + 1 for k, reading in enumerate(self.readings) if reading.name not in self.left_out)]
        masks, count = [self.record.masks[place] for place in used], {"readings": float(len(used))}
        if len(used) == 1:  # nothing but M0 was left
            return self._keep_mask(masks[0], began, count)
        if self.consensus in ("mean", "weighted"):
            mean = self._mean.value
            self._keep(self.pipeline.mask(mean), mean, began, count)
            return self.record.signals[-1]
        if self.consensus == "vote":
            return self._keep_mask(vote(masks), began, count)
        if self.consensus == "medoid":
            place = medoid(masks)
            return self._keep_mask(masks[place], began, {**count, "medoid": float(used[place])})
        return self._keep_mask(self._intent(masks), began, count)

    def _keep_mask(self, mask: Mask, began: float, more: Mapping[str, float]) -> Signals:
        """A consensus that has no probabilities of its own: entropy and confidence are not computable."""
        nothing = Prediction(mask, np.zeros(mask.shape, np.float32), 0.0)
        signals = {**self.record.measured(nothing), "entropy": None, "msp": None, "entropy_on_d": None, **more}
        self.record.masks.append(mask)
        self.record.signals.append(signals)
        self.record.diagnostics.append(dict(more))
        self.record.seconds.append(time.perf_counter() - began)
        return signals

    def _intent(self, masks: Sequence[Mask]) -> Mask:
        assert self._ballots is not None
        voxels = _disputed(masks)
        weights = intent_weights(self._entropies)
        made = masks[0].copy()
        made.reshape(-1)[voxels] = weighted_labels(self._ballots.on(voxels), weights, self.head)
        return made

    # ---- what came of it ----

    @property
    def signals(self) -> Sequence[Signals]:
        """Signals of the steps so far, beginning with M0."""
        return tuple(self.record.signals)

    @property
    def masks(self) -> Sequence[Mask]:
        """Masks of the steps so far, beginning with M0."""
        return tuple(self.record.masks)

    def shrink(self, step: int, alpha: float) -> Mask:
        """Refused: no weights move, so there is nothing to interpolate."""
        raise BadInput(f"readings move no weights, so step {step} cannot be shrunk by {alpha:g}; deploy it as it is")

    @property
    def trajectory(self) -> Trajectory:
        """Everything so far."""
        made_by = f"{self.how.objective} consensus={self.consensus}"
        found = self.record.trajectory(self.case_id, made_by, self.how.seed, with_entropies=False)
        kept = None
        if (
            self.how.keep_ballots
            and self._ballots is not None
            and self.step >= len(self.readings)
            and not self.left_out
        ):
            kept = self._ballots.on(_disputed(found.masks))
        return Trajectory(
            case_id=found.case_id, masks=found.masks, signals=found.signals, made_by=found.made_by, seed=found.seed,
            seconds=found.seconds, spent=found.spent, diagnostics=found.diagnostics, ballots=kept,
            rungs=self.rungs[: self.step], left_out=dict(self.left_out),
        )  # fmt: skip


def _disputed(masks: Sequence[Mask]) -> np.ndarray:
    """Flat positions at which any mask differs from the first."""
    source = masks[0]
    return np.flatnonzero(np.any([mask != source for mask in masks[1:]], axis=0))


def _entropy(shares: Tensor, head: str) -> np.ndarray:
    """Entropy of each voxel of probabilities, nats."""
    parts = _plain_entropy(shares)
    if head != "softmax":
        parts += _plain_entropy(1 - shares)
    return np.asarray(parts.cpu().numpy())


def _plain_entropy(shares: Tensor) -> Tensor:
    """The sum over classes of -p log p; 0 where p is 0. On CPU much faster than torch.special.entr."""
    return shares.clamp_min(torch.finfo(shares.dtype).tiny).log_().mul_(shares).sum(1).neg_()


def _joined(found: Mask) -> Mask:
    return found[0] if len(found) == 1 else found
