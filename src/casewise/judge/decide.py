"""The decision loop: the same code decides live, in replay and on a pair of masks.

:func:`decide` shows a controller the states of one case, one after the other, until it answers. Then it cleans the
chosen mask and flags the case. A :class:`Ladder` provides the states.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

from casewise.archive.layout import mask_sha256
from casewise.archive.store import Archive
from casewise.core.errors import BadInput
from casewise.core.records import Action, Controller, Decision, Mask, Observation, State, Verdict, deployed
from casewise.judge.controllers.choose import candidate_signals
from casewise.judge.controllers.flag import Flag, deployed_signal
from casewise.measure.cleanup import Cleanup

CONSENSUS_NAMES = ("consensus", "mean", "vote", "average")
"""Names of states that are made of other states."""


@dataclass(frozen=True)
class Judge:
    """A controller and the steps that follow its answer.

    Args:
        controller: Chooses a state from label-free signals.
        cleanup: Cleanup of the chosen mask, as text (see ``casewise.measure.cleanup``); "" for none. A rollback is
            never cleaned, so M0 stays the model's own mask.
        flag: Estimates the quality of the deployed mask and flags the case where it may be low.
        calibration_id: Id of the calibration that fitted the controller.
    """

    controller: Controller
    cleanup: str = ""
    flag: Flag | None = None
    calibration_id: str = ""

    @property
    def name(self) -> str:
        """Name of the controller."""
        return self.controller.name

    @property
    def ladders(self) -> tuple[str, ...]:
        """Named ladders that are read together; empty where one ladder is read. Others are never made."""
        own: tuple[str, ...] = getattr(self.controller, "ladders", ())
        if self.flag is not None and self.flag.quality.signal is not None:
            return own or self.flag.ladders
        reads: tuple[str, ...] = getattr(self.controller, "reads", own)
        return reads or (() if self.flag is None else self.flag.ladders)


class ShownStates(Protocol):
    """States of one case that are shown one after the other."""

    @property
    def complete(self) -> bool:
        """True when every state has been made."""

    @property
    def executed(self) -> int:
        """Number of states made so far, M0 excluded."""

    def advance(self) -> None:
        """Make the next state."""

    def observation(self) -> Observation:
        """Signals of the states made so far."""


@runtime_checkable
class ComparedLadder(ShownStates, Protocol):
    """States whose agreement signals are known without their masks."""

    def compared(self, controller: Controller) -> Observation:
        """Signals of all states, with those that the controller reads from the masks of all."""


class Ladder(ShownStates, Protocol):
    """The states of one case. Live, ``advance`` makes the next one; in replay, it reads the next one."""

    @property
    def name(self) -> str | None:
        """Name of the ladder; None where several named ladders are read together."""

    def masks(self) -> Mapping[State, Mask]:
        """Masks of the states made so far, without shrunk ones."""

    def mask(self, state: State) -> Mask:
        """Mask of one state, shrunk ones included."""

    def sha256(self, state: State) -> str:
        """Hash of the mask of one state."""


def decide(judge: Judge | Controller, ladder: Ladder) -> Decision:
    """Ask a controller after every state of a ladder until it answers; then clean up and flag.

    Args:
        judge: A controller, or a controller with cleanup and flag.
        ladder: States of one case, live or recorded.

    Returns:
        The decision, with the name of its ladder and the hash of the deployed mask.

    Raises:
        BadInput: If the controller asks for more states than the ladder has.
    """
    judge = judge if isinstance(judge, Judge) else Judge(judge)
    controller = judge.controller
    verdict, seen = first_verdict(controller, ladder)
    if judge.flag is not None:
        while not ladder.complete:  # the agreement of the states needs all of them
            ladder.advance()
        whole = ladder.observation()
        if "agreement" not in seen.signals[0] or seen.step < whole.step:
            seen = judge.flag.with_agreement(whole, ladder.masks())
        verdict = judge.flag.applied(verdict, seen)
    agreement = None
    if seen.ladders or "agreement" in seen.signals[0]:
        gated = verdict.action is Action.GATE
        agreement = deployed_signal(candidate_signals(seen), verdict.state, "agreement", gated=gated)
    decision = replace(
        Decision.of(seen, verdict, controller.name, calibration_id=judge.calibration_id, agreement=agreement),
        executed=ladder.executed,
    )
    # Cleanup follows every decision but a rollback to M0; M0 as a policy of its own is cleaned, too.
    cleans = bool(judge.cleanup) and (not decision.rolled_back or controller.name == "m0")
    if decision.action is Action.GATE or cleans:  # the mask may be no state of the ladder
        mask = deployed(controller, ladder.mask, decision)
        cleaned = Cleanup.parse(judge.cleanup if cleans else "").apply(mask)
        if (cleaned != mask).any():
            action = Action.KEEP if decision.rolled_back else decision.action
            decision = replace(decision, cleanup=judge.cleanup, action=action)
        state_hash = mask_sha256(cleaned)
    else:
        state_hash = ladder.sha256(decision.state)
    state = decision.state if ladder.name is None else decision.state.on(ladder.name)
    return replace(decision, state=state, state_hash=state_hash)


def first_verdict(controller: Controller, ladder: Ladder | ComparedLadder) -> tuple[Verdict, Observation]:
    """Show a controller one state after the other until it answers; return the verdict and the last observation.

    Some controllers compare the masks of all states. They get these signals when the ladder is complete: from the
    ladder where it knows them (``compared``), else from the masks.
    """
    reads: Callable[..., Observation] | None = getattr(controller, "compared", None)
    while True:
        seen = ladder.observation()
        if ladder.complete and reads is not None:
            seen = ladder.compared(controller) if isinstance(ladder, ComparedLadder) else reads(seen, ladder.masks())
        verdict = controller.decide(seen)
        if verdict is not None:
            return verdict, seen
        if ladder.complete:
            raise BadInput(
                f"{controller.name} asked for step {seen.step + 1} of case {seen.case_id}, which has "
                f"{seen.step}; lower its cap or depth, or make more steps"
            )
        ladder.advance()


def mask_of(controller: Controller, mask: Callable[[State], Mask], decision: Decision) -> Mask:
    """Return the mask that a decision deploys: a state or merged pieces, after cleanup where there is one.

    Args:
        controller: The controller that decided.
        mask: Gives the mask of any state of the case.
        decision: The decision.
    """
    plain = deployed(controller, mask, decision)
    return Cleanup.parse(decision.cleanup).apply(plain) if decision.cleanup else plain


def deployed_mask(archive: Archive, controller: Controller, decision: Decision) -> Mask:
    """Return the mask that a decision on a recorded case deploys."""
    return mask_of(controller, lambda state: archive.mask(decision.case_id, state), decision)


# ---- recorded ladders ----


class RecordedLadder:
    """One ladder of a recorded case; ``advance`` shows the next recorded step."""

    def __init__(self, archive: Archive, case_id: str) -> None:
        self.archive, self.case_id, self.executed = archive, case_id, 0

    @property
    def name(self) -> str:
        """Name of the ladder."""
        return self.archive.ladder_name or ""

    @property
    def complete(self) -> bool:
        """True when every recorded step has been shown."""
        return self.executed >= self.archive.steps

    def advance(self) -> None:
        """Show the next recorded step."""
        self.executed += 1

    def observation(self) -> Observation:
        """Signals of the steps shown so far."""
        return self.archive.observation(self.case_id, self.executed)

    def masks(self) -> Mapping[State, Mask]:
        """Masks of all recorded states, without shrunk ones."""
        return candidate_masks(self.archive, self.case_id)

    def mask(self, state: State) -> Mask:
        """Mask of a recorded state."""
        return self.archive.mask(self.case_id, state)

    def sha256(self, state: State) -> str:
        """Hash of the mask of a recorded state."""
        known = self.archive.entries[self.case_id].mask_sha256
        if str(state) not in known:
            raise BadInput(
                f"state {state} of case {self.case_id} was not recorded; recorded are {', '.join(known)}; "
                f"{unshrunk_hint(self.archive, state)}"
            )
        return known[str(state)]


class RecordedLadders:
    """Several ladders of a recorded case, shown together."""

    name = None
    complete = True

    def __init__(self, archive: Archive, case_id: str, ladders: Collection[str]) -> None:
        self.archive, self.case_id, self.ladders = archive, case_id, tuple(ladders)

    @cached_property
    def _observation(self) -> Observation:
        return self.archive.whole_observation(self.case_id, self.ladders)

    @property
    def executed(self) -> int:
        """Number of states of all ladders, M0 excluded."""
        return sum(len(signals) - 1 for signals in self._observation.ladders.values())

    def advance(self) -> None:
        """Raise an error: all states were shown together."""
        raise BadInput(f"every candidate of case {self.case_id} was shown, and the controller asked for one more")

    def observation(self) -> Observation:
        """Signals of all states."""
        return self._observation

    def masks(self) -> Mapping[State, Mask]:
        """Masks of all states, without shrunk ones."""
        return candidate_masks(self.archive, self.case_id, self.ladders)

    def mask(self, state: State) -> Mask:
        """Mask of a recorded state."""
        return self._of(state).mask(state.on(""))

    def sha256(self, state: State) -> str:
        """Hash of the mask of a recorded state."""
        return self._of(state).sha256(state.on(""))

    def _of(self, state: State) -> RecordedLadder:
        return RecordedLadder(self.archive.ladder(state.ladder or self.ladders[0]), self.case_id)


def replay_case(
    archive: Archive, judge: Judge | Controller, case_id: str, *, calibration_id: str | None = None
) -> Decision:
    """Decide on one recorded case, exactly as a live run would have decided.

    Args:
        archive: The archive that holds the case.
        judge: A controller, or a controller with cleanup and flag.
        case_id: Id of the case.
        calibration_id: Written into the decision; default: the judge's own.

    Returns:
        The decision; its state names the ladder.
    """
    judge = judge if isinstance(judge, Judge) else Judge(judge)
    if calibration_id is not None:
        judge = replace(judge, calibration_id=calibration_id)
    ladder: Ladder
    if judge.ladders:
        ladder = RecordedLadders(archive, case_id, judge.ladders)
    else:
        ladder = RecordedLadder(archive.ladder(archive.joined[0]) if archive.joined else archive, case_id)
    return decide(judge, ladder)


def candidate_masks(archive: Archive, case_id: str, ladders: Collection[str] = ()) -> dict[State, Mask]:
    """Return every unshrunk candidate of a case, M0 first: of the ladder in view, or of several that are named."""
    if not ladders:
        return {state: mask for state, mask in archive.masks(case_id).items() if not state.shrink}
    found: dict[State, Mask] = {}
    for name in ladders:
        own = archive.ladder(name).masks(case_id)
        found |= {state.on(name): mask for state, mask in own.items() if not state.shrink}
    return found


def unshrunk_hint(archive: Archive, state: State) -> str:
    """Say how to go on without a shrunk state; views and members have none."""
    without = "calibrate with --set unshrunk=true"
    if any(entry.rungs for entry in archive.entries.values()):
        return f"its candidates have no interpolated states, so {without}"
    return f"record with --set shrink={state.step}:{state.shrink:g}, or {without}"


# ---- what the designs of a comparison share ----


@dataclass(frozen=True)
class Setting:
    """Settings that all designs share: the candidates, which one is the consensus, and which ones have a vote."""

    steps: int
    consensus: str
    ladders: tuple[str, ...] = ()  # read together; none for the ladder in view
    silent: tuple[str, ...] = ()
    background: bool = False


def has_consensus(archive: Archive, consensus: str | None) -> bool:
    """Return True if an archive holds a consensus of the other candidates, or one is named."""
    views = {name: archive.ladder(name) for name in archive.joined} or {"": archive}
    return consensus is not None or bool(_consensuses(views))


def _consensuses(views: Mapping[str, Archive]) -> dict[State, str]:
    """Return the name of every candidate that is a consensus of others, without its options, by state."""
    rungs = {name: next((entry.rungs for entry in view.entries.values()), ()) for name, view in views.items()}
    found = {
        State(step).on(name): rung.split("(")[0]
        for name, own in rungs.items()
        for step, rung in enumerate(own, start=1)
    }
    return {state: kind for state, kind in found.items() if kind in CONSENSUS_NAMES}


def setting_of(archive: Archive, *, consensus: str | None = None, ladders: Sequence[str] = ()) -> Setting:
    """Describe the candidates of an archive; the consensus is found by its name unless it is given."""
    views = ladder_views(archive, ladders)
    made = _consensuses(views)
    if consensus is None and made:
        consensus = str(min(made, key=lambda state: CONSENSUS_NAMES.index(made[state])))
    if consensus is None:
        raise BadInput(
            f"no candidate of {archive.path} is called {' or '.join(CONSENSUS_NAMES)}; record views or members with a "
            f"consensus, or say which candidate it is"
        )
    silent = tuple(str(state) for state in made if str(state) != consensus)
    first = next(iter(views.values()))
    every_class = str(first.configuration.get("metric", "dice")) == "miou"
    return Setting(first.steps, consensus, tuple(ladders), silent, background=every_class)


def ladder_views(archive: Archive, ladders: Sequence[str]) -> dict[str, Archive]:
    """Return the ladders to read by name; a single ladder has the name ""."""
    return {name: archive.ladder(name) for name in ladders} if ladders else {"": archive.only_ladder()}


def whole_case(archive: Archive, case_id: str, setting: Setting) -> Observation:
    """Return the observation of all candidates of a case."""
    if setting.ladders:
        return archive.whole_observation(case_id, setting.ladders)
    return archive.observation(case_id, archive.steps)
