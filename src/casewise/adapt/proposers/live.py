"""Make the candidates of one case with a live network, for recording and for :func:`casewise.judge.decide.decide`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray
from torch import Tensor, nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone, Prepared, logits_pipeline
from casewise.adapt.backbones.module import CONVOLUTIONS, as_backbone, as_batch
from casewise.adapt.episode import Episode, as_inputs
from casewise.adapt.forward_episode import SharedSource
from casewise.adapt.probes import PROBES
from casewise.adapt.proposers import PreparedCase, States, proposer_of
from casewise.adapt.stream import CaseStream
from casewise.archive.layout import mask_sha256
from casewise.core.errors import BadInput, OutOfTime
from casewise.core.records import Case, Controller, Mask, Observation, State, Trajectory


def prepare(case: Case, network: Backbone | nn.Module) -> Prepared:
    """Prepare a case through a backbone's own preprocessing, or as a batch for a bare module."""
    if isinstance(network, nn.Module):
        found = (CONVOLUTIONS[type(layer)] for layer in network.modules() if type(layer) in CONVOLUTIONS)
        return Prepared(as_batch(case.image, next(found, case.image.ndim - 1)))
    return network.prepare(case)


def with_needs(how: Adaptation, controller: Controller) -> Adaptation:
    """Return the adaptation with the signals and states that a controller reads."""
    if not how.is_gradient:
        return how
    needed = [name for name in sorted(controller.needs) if name in PROBES and name not in how.signals]
    keep = how.keep_parameters or bool(controller.states)
    return replace(how, signals=(*how.signals, *needed), keep_parameters=keep)


def shared_source(prepared: Prepared, hows: Mapping[str, Adaptation]) -> SharedSource | None:
    """Return M0 for several proposers of a case, where a pipeline can predict it once for all of them."""
    forwards = any(not how.is_gradient for how in hows.values())
    if prepared.pipeline is None or not (forwards or (len(hows) > 1 and prepared.predict is not None)):
        return None
    return SharedSource(prepared.pipeline)


def record_case(
    case: Case,
    network: Backbone | nn.Module,
    hows: Mapping[str, Adaptation],
    prepared: Prepared | None = None,
    streams: Mapping[str, CaseStream] | None = None,
) -> dict[str, Trajectory]:
    """Make every candidate of a case.

    Args:
        case: The case.
        network: The frozen model; it is restored bit by bit.
        hows: Proposers by the names of their ladders.
        prepared: The case after the preprocessing of the model, if it was prepared before.
        streams: By ladder, for proposers that carry their weights from case to case.

    Returns:
        The trajectory of each ladder, all against one M0.
    """
    ready = prepare(case, network) if prepared is None else prepared
    source = shared_source(ready, hows)
    made: dict[str, Trajectory] = {}
    for name, how in hows.items():
        if streams and name in streams:
            made[name] = _of_stream(streams[name], case, ready)
            continue
        with proposer_of(how).propose(PreparedCase(case, ready, source), network) as states:
            made[name] = all_states(states)
    return made


def _of_stream(stream: CaseStream, case: Case, prepared: Prepared) -> Trajectory:
    """Make every state of the next case of a stream; after a failure the stream starts from the source again."""
    try:
        return all_states(stream.next(case, prepared))
    except BaseException:
        stream.restart()
        raise


def all_states(states: States) -> Trajectory:
    """Make every state of a case, and the shrunk states that the options name."""
    while states.step < states.how.steps:
        states.advance(last=states.step + 1 == states.how.steps)
        for state in states.how.shrink if states.shrinks else ():
            if state.step == states.step:
                states.shrink(state.step, state.shrink)
    return states.trajectory


def run_episode(
    network: nn.Module,
    image: Tensor | NDArray[Any],
    objective: Any,
    *,
    case_id: str = "case",
    forward: Callable[[Tensor], Tensor] | None = None,
    predict: Callable[[], Mask] | None = None,
    head: str | None = None,
    **options: Any,
) -> Trajectory:
    """Make every candidate of one image with a network, and leave the network as it was found.

    Args:
        network: A network that returns segmentation logits.
        image: The image as the network takes it, ``(n, channel, *space)``: n slices of a volume, or n = 1.
        objective: Name of a proposer (``"tent"``, ``"views:photo"``, ``"members:FOLDER"``), an address
            ``package.module:Name``, an objective, a function ``(network, image) -> list of masks``, or an
            :class:`~casewise.adapt.adaptation.Adaptation`.
        case_id: Id of the case; seeds depend on it.
        forward: Function from inputs to logits at the resolution of the mask; default: the network.
        predict: Function that returns the mask with the current weights; default: the labels of the logits.
        head: ``"softmax"`` or ``"sigmoid"``; default: sigmoid for one channel, else softmax.
        **options: Further fields of an ``Adaptation``: ``steps``, ``learning_rate``, ``seed``, ``shrink``, ...

    Returns:
        M0 and the candidates, with their signals.

    Raises:
        BadInput: If the image or an option cannot be used.

    Example:
        >>> import numpy as np
        >>> from casewise.adapt.networks import PlainUNet
        >>> run_episode(PlainUNet(), np.zeros((1, 1, 64, 64)), "views:photo").rungs[:2]
        ('mirror(x)', 'gamma(0.8,range)')
    """
    if not isinstance(network, nn.Module):
        raise BadInput(f"run_episode takes a torch.nn.Module, got {type(network).__name__}; casewise.guard takes both")
    how = Adaptation.of(objective, **options)
    if how.is_gradient:
        with Episode(network, image, how, case_id=case_id, forward=forward, predict=predict, head=head) as episode:
            return all_states(episode)
    inputs = as_inputs(image, next(network.parameters()))
    backbone: Any = as_backbone(network)
    backbone = backbone if head is None else replace(backbone, head=head)
    pipeline = logits_pipeline(network, inputs, backbone.head, forward)
    volume = inputs[0] if len(inputs) == 1 else inputs.transpose(0, 1)
    case = Case(case_id, volume.cpu().numpy())
    return record_case(case, backbone, {"": how}, Prepared(inputs, forward, predict, pipeline))[""]


def unread_notes(made: Iterable[Trajectory]) -> tuple[str, ...]:
    """Return a sentence for each candidate that could not be made; it is not part of a consensus."""
    return tuple(f"{rung} was left out: {why}" for one in made for rung, why in one.left_out.items())


class LiveLadder:
    """Candidates of one case, made when a controller needs them; a context manager that restores the network.

    With one proposer the states are made one by one. With several named ones all states are made on entry, because the
    controllers that read several ladders decide once.

    Args:
        case: The case.
        network: The frozen model.
        prepared: The case after the preprocessing of the model.
        hows: Proposers by the names of their ladders.
        together: True if a controller reads several ladders at once.
        deadline: Time of ``time.monotonic()`` after which no forward pass starts; M0 is always predicted.
    """

    def __init__(
        self, case: Case, network: Backbone | nn.Module, prepared: Prepared, hows: Mapping[str, Adaptation], *,
        together: bool = False, deadline: float | None = None,
    ) -> None:  # fmt: skip
        self.case, self.hows, self.together = case, dict(hows), together
        self.made: dict[str, Trajectory] = {}
        self._network, self._prepared = network, prepared
        self._deadline, self._stack = deadline, ExitStack()
        self._states: States | None = None  # the episode of the only ladder
        self._now: States | None = None  # the episode of the current ladder
        self._updates = 0  # updates of the earlier ladders

    def __enter__(self) -> LiveLadder:
        source = shared_source(self._prepared, self.hows)
        if not self.together:
            ((_, how),) = self.hows.items()
            self._states = self._now = self._lend(how, source)
            self._stack.enter_context(self._states)
            return self
        for name, how in self.hows.items():
            with self._lend(how, source) as states:
                self._updates += 0 if self._now is None else self._now.updates
                self._now = states
                try:
                    while states.step < states.how.steps:
                        states.advance(last=states.step + 1 == states.how.steps)
                finally:
                    self.made[name] = states.trajectory
        return self

    def _lend(self, how: Adaptation, source: SharedSource | None) -> States:
        return proposer_of(how).propose(PreparedCase(self.case, self._prepared, source, self._before), self._network)

    def _before(self) -> None:
        if self._deadline is not None and self.source_mask is not None and time.monotonic() > self._deadline:
            raise OutOfTime("the time limit of the case was reached")

    def __exit__(self, *error: Any) -> None:
        if self._states is not None:
            self.made[self.name or ""] = self._states.trajectory
        self._stack.__exit__(*error)

    # ---- what decide() asks ----

    @property
    def name(self) -> str | None:
        """Name of the ladder; None where several are read together."""
        return None if self.together else next(iter(self.hows))

    @property
    def source_mask(self) -> Mask | None:
        """M0 as it was predicted; None before that."""
        if self.made:
            return next(iter(self.made.values())).masks[0]
        return None if self._now is None or not self._now.record.masks else self._now.record.masks[0]

    @property
    def updates(self) -> int:
        """Number of updates or forward passes on all ladders, including an update whose mask was not predicted."""
        return self._updates + (0 if self._now is None else self._now.updates)

    @property
    def complete(self) -> bool:
        """True when every state has been made."""
        return self._states is None or self._states.step >= self._states.how.steps

    @property
    def executed(self) -> int:
        """Number of states made so far, M0 excluded."""
        if self._states is not None:
            return self._states.updates
        return sum(one.steps for one in self.made.values())

    def advance(self) -> None:
        """Make the next state."""
        if self._states is None:
            raise BadInput(f"every candidate of case {self.case.id} was made, and the controller asked for one more")
        self._states.advance(last=self._states.step + 1 == self._states.how.steps)

    def observation(self) -> Observation:
        """Signals of the states made so far."""
        case = self.case
        if self._states is not None:
            return Observation(
                case.id, case.group, tuple(self._states.record.signals), case.cluster,
                rungs={"": tuple(self._states.rungs)},
            )  # fmt: skip
        first = next(iter(self.made.values()))
        return Observation(
            case.id, case.group, first.signals[:1], case.cluster,
            {name: one.signals for name, one in self.made.items()},
            {name: one.rungs for name, one in self.made.items()},
        )  # fmt: skip

    def masks(self) -> dict[State, Mask]:
        """Masks of the states made so far, without shrunk ones."""
        if self._states is not None:
            return {State(step): mask for step, mask in enumerate(self._states.record.masks)}
        return {State(step).on(name): mask for name, one in self.made.items() for step, mask in enumerate(one.masks)}

    def mask(self, state: State) -> Mask:
        """Mask of one state; a shrunk one is predicted from interpolated weights."""
        if self._states is None:
            return self.masks()[state]
        return self._states.shrink(state.step, state.shrink) if state.shrink else self._states.record.masks[state.step]

    def sha256(self, state: State) -> str:
        """Hash of the mask of one state."""
        return mask_sha256(self.mask(state))
