"""One recorded case shown to a controller, step by step, until it decides: what a live run would have seen and paid.

A controller that chooses among candidates sees all of them at once; :func:`setting_of` says which those are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from casewise.archive.layout import mask_sha256
from casewise.archive.store import Archive
from casewise.core.errors import BadInput
from casewise.core.records import Action, Controller, Decision, Mask, Observation, State, deployed

CONSENSUS_NAMES = ("consensus", "mean", "weighted", "vote", "majority")
"""What a rung is called that was made of the others."""


def decision_of(archive: Archive, controller: Controller, case_id: str, *, calibration_id: str = "") -> Decision:
    """The decision that the controller takes on one recorded case; its state names the ladder."""
    if getattr(controller, "ladders", ()):
        return _among_ladders(archive, controller, case_id, calibration_id)
    if archive.joined:  # M0 for everyone, whatever the ladders hold
        archive = archive.on(archive.joined[0])
    for step in range(archive.steps + 1):
        seen = archive.observation(case_id, step)
        if step == archive.steps and hasattr(controller, "compared"):
            seen = compared(controller, seen, candidate_masks(archive, case_id))
        verdict = controller.decide(seen)
        if verdict is not None:
            decision = Decision.of(seen, verdict, controller.name, calibration_id=calibration_id)
            decision = replace(decision, state_hash=_state_hash(archive, controller, decision))
            return replace(decision, state=decision.state.on(archive.ladder_name or ""))
    raise BadInput(
        f"{controller.name} asked for step {archive.steps + 1} of case {case_id}, the archive holds {archive.steps} "
        f"steps per case; lower its cap or depth, or record more steps"
    )


def _among_ladders(archive: Archive, controller: Controller, case_id: str, calibration_id: str) -> Decision:
    """A controller that reads several ladders sees all their candidates at once, and decides once."""
    ladders = controller.ladders  # type: ignore[attr-defined]
    seen = archive.whole_observation(case_id, ladders)
    if hasattr(controller, "compared"):
        seen = compared(controller, seen, candidate_masks(archive, case_id, ladders))
    verdict = controller.decide(seen)
    if verdict is None:
        raise BadInput(f"{controller.name} saw every candidate of case {case_id} and asked for one more step")
    view = archive.on(verdict.state.ladder) if verdict.state.step else archive.on(archive.ladders[0])
    executed = sum(len(signals) - 1 for signals in seen.ladders.values())
    made = replace(Decision.of(seen, verdict, controller.name, calibration_id=calibration_id), executed=executed)
    state_hash = _state_hash(view, controller, replace(made, state=verdict.state.on("")))
    return replace(made, state_hash=state_hash)


def compared(controller: Controller, seen: Observation, masks: Mapping[State, Mask]) -> Observation:
    """The observation of a complete case, with what the controller reads from the masks of all candidates."""
    reads = getattr(controller, "compared", None)
    return seen if reads is None else reads(seen, masks)


def candidate_masks(archive: Archive, case_id: str, ladders: Collection[str] = ()) -> dict[State, Mask]:
    """Every unshrunk candidate of a case, M0 first: of the ladder in view, or of several that are named."""
    if not ladders:
        return {state: mask for state, mask in archive.masks(case_id).items() if not state.shrink}
    found: dict[State, Mask] = {}
    for name in ladders:
        own = archive.on(name).masks(case_id)
        found |= {state.on(name): mask for state, mask in own.items() if not state.shrink}
    return found


def deployed_mask(archive: Archive, controller: Controller, decision: Decision) -> Mask:
    """The mask that a decision deploys."""
    return deployed(controller, lambda state: archive.mask(decision.case_id, state), decision)


def unshrunk_hint(archive: Archive, state: State) -> str:
    """How to go on without a shrunk state; one of views or members cannot be recorded."""
    without = "calibrate with --unshrunk"
    if any(entry.rungs for entry in archive.entries.values()):
        return f"its candidates move no weights and have no shrunk states, so {without}"
    return f"record with --shrink {state.step}:{state.shrink:g}, or {without}"


def _state_hash(archive: Archive, controller: Controller, decision: Decision) -> str:
    known = archive.entries[decision.case_id].mask_sha256
    if str(decision.state) not in known:
        raise BadInput(
            f"{controller.name} deploys state {decision.state} of case {decision.case_id}, which was not recorded; "
            f"recorded are {', '.join(known)}; {unshrunk_hint(archive, decision.state)}"
        )
    if decision.action is Action.GATE:  # composed of several, so no recorded mask
        return mask_sha256(deployed_mask(archive, controller, decision))
    return known[str(decision.state)]


@dataclass(frozen=True)
class Setting:
    """What all designs share: the candidates, the consensus among them, and who has a vote."""

    steps: int
    consensus: str
    ladders: tuple[str, ...] = ()  # read together; none for the ladder in view
    silent: tuple[str, ...] = ()
    background: bool = False


def has_consensus(archive: Archive, consensus: str | None) -> bool:
    """Whether an archive holds a candidate that was made of the others, or one is named."""
    views = [archive.on(name) for name in archive.joined] or [archive]
    rungs = [rung for view in views for rung in next(iter(view.entries.values())).rungs]
    return consensus is not None or any(rung.split("(")[0] in CONSENSUS_NAMES for rung in rungs)


def setting_of(
    archive: Archive, *, consensus: str | None = None, silent: Sequence[str] = (), ladders: Sequence[str] = ()
) -> Setting:
    """The candidates of an archive; the consensus is found by the name of its rung unless it is given."""
    views = ladder_views(archive, ladders)
    rungs: dict[State, str] = {}
    for name, view in views.items():
        entry = next(iter(view.entries.values()), None)
        if entry is not None:
            rungs |= {State(step).on(name): rung for step, rung in enumerate(entry.rungs, start=1)}
    made = {state: rung for state, rung in rungs.items() if rung.split("(")[0] in CONSENSUS_NAMES}
    if consensus is None and made:
        consensus = str(min(made, key=lambda state: CONSENSUS_NAMES.index(made[state].split("(")[0])))
    if consensus is None:
        raise BadInput(
            f"no candidate of {archive.path} is called {' or '.join(CONSENSUS_NAMES)}; record views or members with a "
            f"consensus, or say which candidate it is"
        )
    others = [str(state) for state in made if str(state) != consensus]
    first = next(iter(views.values()))
    return Setting(
        first.steps,
        consensus,
        tuple(ladders),
        tuple(dict.fromkeys((*silent, *others))),
        str(first.configuration.get("metric", "dice")) == "miou",
    )


def ladder_views(archive: Archive, ladders: Sequence[str]) -> dict[str, Archive]:
    """The ladders that are read, by name; the one in view has no name in states."""
    return {name: archive.on(name) for name in ladders} if ladders else {"": archive.one()}


def whole_case(archive: Archive, case_id: str, setting: Setting) -> Observation:
    """All candidates of a case, as a controller that chooses among them is shown it."""
    if setting.ladders:
        return archive.whole_observation(case_id, setting.ladders)
    return archive.observation(case_id, archive.steps)
