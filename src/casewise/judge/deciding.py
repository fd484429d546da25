"""One recorded case shown to a controller, step by step, until it decides: what a live run would have seen and paid."""

from __future__ import annotations

from dataclasses import replace

from casewise.archive.layout import mask_sha256
from casewise.archive.store import Archive
from casewise.core.errors import BadInput
from casewise.core.records import SOURCE, Action, Controller, Decision, Mask, State
from casewise.judge.controllers.region_gate import RegionGate


def decision_of(archive: Archive, controller: Controller, case_id: str, *, calibration_id: str = "") -> Decision:
    """The decision that the controller takes on one recorded case."""
    for step in range(archive.steps + 1):
        seen = archive.observation(case_id, step)
        verdict = controller.decide(seen)
        if verdict is not None:
            decision = Decision.of(seen, verdict, controller.name, calibration_id=calibration_id)
            return replace(decision, state_hash=_state_hash(archive, controller, decision))
    raise BadInput(
        f"{controller.name} asked for step {archive.steps + 1} of case {case_id}, the archive holds {archive.steps} "
        f"steps a case; lower its cap or depth, or record more steps"
    )


def deployed_mask(archive: Archive, controller: Controller, decision: Decision) -> Mask:
    """The mask that a decision deploys."""
    if decision.action is not Action.GATE:
        return archive.mask(decision.case_id, decision.state)
    if not isinstance(controller, RegionGate):
        raise BadInput(f"case {decision.case_id} was gated, so its mask needs the gate, got {controller.name}")
    masks = archive.masks(decision.case_id)
    return controller.output(masks[SOURCE], masks[State(1)], decision)


def _state_hash(archive: Archive, controller: Controller, decision: Decision) -> str:
    if decision.action is Action.GATE:
        return mask_sha256(deployed_mask(archive, controller, decision))
    known = archive.entries[decision.case_id].mask_sha256
    if str(decision.state) not in known:
        raise BadInput(
            f"{controller.name} deploys state {decision.state} of case {decision.case_id}, which was not recorded; "
            f"recorded are {', '.join(known)}. Record with shrink {decision.state.shrink:g}, or calibrate unshrunk"
        )
    return known[str(decision.state)]
