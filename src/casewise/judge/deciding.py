"""One recorded case shown to a controller, step by step, until it decides: what a live run would have seen and paid."""

from __future__ import annotations

from casewise.archive.layout import mask_sha256
from casewise.archive.store import Archive
from casewise.core.errors import BadInput
from casewise.core.records import SOURCE, Action, Controller, Decision, Mask, State, Verdict
from casewise.judge.controllers.region_gate import RegionGate, with_accepted


def decision_of(archive: Archive, controller: Controller, case_id: str, *, calibration_id: str = "") -> Decision:
    """The decision that the controller takes on one recorded case."""
    for step in range(archive.steps + 1):
        seen = archive.observation(case_id, step)
        verdict = controller.decide(seen)
        if verdict is not None:
            state_hash = _state_hash(archive, controller, case_id, verdict)
            return Decision.of(seen, verdict, controller.name, calibration_id=calibration_id, state_hash=state_hash)
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
    return _gated(archive, controller, decision.case_id, decision.accepted or ())


def _gated(archive: Archive, gate: RegionGate, case_id: str, accepted: tuple[int, ...]) -> Mask:
    edit = archive.edit(case_id, State(1))
    return with_accepted(*edit, accepted, min_area=gate.min_area, keep_small=gate.keep_small)


def _state_hash(archive: Archive, controller: Controller, case_id: str, verdict: Verdict) -> str:
    known = archive.entries[case_id].mask_sha256
    if verdict.action is Action.GATE and isinstance(controller, RegionGate):
        if not verdict.accepted and not controller.keep_small:
            return known[str(SOURCE)]  # a gate that accepts nothing deploys M0
        return mask_sha256(_gated(archive, controller, case_id, verdict.accepted or ()))
    if str(verdict.state) not in known:
        raise BadInput(
            f"{controller.name} deploys state {verdict.state} of case {case_id}, which was not recorded; "
            f"recorded are {', '.join(known)}. Record with shrink {verdict.state.shrink:g}, or calibrate unshrunk"
        )
    return known[str(verdict.state)]
