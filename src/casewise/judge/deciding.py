"""One recorded case shown to a controller, step by step, until it decides: what a live run would have seen and paid."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from casewise.archive.layout import mask_sha256
from casewise.archive.store import Archive
from casewise.core.errors import BadInput
from casewise.core.records import SOURCE, Action, Controller, Decision, Mask, Observation, State, Verdict
from casewise.judge.controllers.merge import merged
from casewise.judge.controllers.region_gate import RegionGate, accepted_voxels, edited


def decision_of(archive: Archive, controller: Controller, case_id: str, *, calibration_id: str = "") -> Decision:
    """The decision that the controller takes on one recorded case; its state names the ladder."""
    if getattr(controller, "ladders", ()):
        return _among_ladders(archive, controller, case_id, calibration_id)
    for step in range(archive.steps + 1):
        seen = archive.observation(case_id, step)
        if step == archive.steps and hasattr(controller, "compared"):
            seen = compared(controller, seen, candidate_masks(archive, case_id))
        verdict = controller.decide(seen)
        if verdict is not None:
            state_hash = _state_hash(archive, controller, case_id, verdict)
            verdict = replace(verdict, state=verdict.state.on(archive.ladder_name or ""))
            return Decision.of(seen, verdict, controller.name, calibration_id=calibration_id, state_hash=state_hash)
    raise BadInput(
        f"{controller.name} asked for step {archive.steps + 1} of case {case_id}, the archive holds {archive.steps} "
        f"steps a case; lower its cap or depth, or record more steps"
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
    state_hash = _state_hash(view, controller, case_id, replace(verdict, state=verdict.state.on("")))
    executed = sum(len(signals) - 1 for signals in seen.ladders.values())
    made = Decision.of(seen, verdict, controller.name, calibration_id=calibration_id, state_hash=state_hash)
    return replace(made, executed=executed)


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


def gated_mask(source: Mask, adapted: Mask, decision: Decision | Verdict, gate: RegionGate) -> Mask:
    """What a gated decision deploys: accepted pieces of an edit, or accepted regions of the step-1 edit."""
    if decision.coordinate != "drop":
        return merged(source, adapted, decision.accepted or ())
    return gate.output(source, adapted, decision)


def deployed_mask(archive: Archive, controller: Controller, decision: Decision) -> Mask:
    """The mask that a decision deploys."""
    if decision.action is not Action.GATE:
        return archive.mask(decision.case_id, decision.state)
    if not hasattr(controller, "output"):
        raise BadInput(f"case {decision.case_id} was gated, so its mask needs the gate, got {controller.name}")
    if decision.state.ladder:
        archive = archive.on(decision.state.ladder)
    own = decision.state.on("")
    masks = archive.masks(decision.case_id, (own,))
    made: Mask = controller.output(masks[SOURCE], masks[own], decision)
    return made


def _state_hash(archive: Archive, controller: Controller, case_id: str, verdict: Verdict) -> str:
    known = archive.entries[case_id].mask_sha256
    if verdict.action is Action.GATE and isinstance(controller, RegionGate):
        return _gated_hash(archive, controller, case_id, verdict)
    if verdict.action is Action.GATE:
        masks = archive.masks(case_id, (verdict.state,))
        return mask_sha256(controller.output(masks[SOURCE], masks[verdict.state], verdict))  # type: ignore[attr-defined]
    if str(verdict.state) not in known:
        raise BadInput(
            f"{controller.name} deploys state {verdict.state} of case {case_id}, which was not recorded; "
            f"recorded are {', '.join(known)}. Record with shrink {verdict.state.shrink:g}, or calibrate unshrunk"
        )
    return known[str(verdict.state)]


def _gated_hash(archive: Archive, gate: RegionGate, case_id: str, verdict: Verdict) -> str:
    """The hash of a gated mask; one that accepts all of the edit, or nothing of it, is a recorded state."""
    source, voxels, values = archive.edit(case_id, verdict.state)
    accepted = verdict.accepted or ()
    passes = accepted_voxels(voxels, source.shape, accepted, min_area=gate.min_area, keep_small=gate.keep_small)
    if passes.all() or not passes.any():
        return archive.entries[case_id].mask_sha256[str(verdict.state if passes.any() else SOURCE)]
    return mask_sha256(edited(source, voxels[passes], values[passes]))
