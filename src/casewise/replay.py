"""The heart again, from disk: the same decisions on recorded trajectories; no network, no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from casewise.archive.store import Archive
    from casewise.core.records import Controller, Decision, Mask, Policy


def replay(archive: Archive, controller: Controller | Policy) -> list[Decision]:
    """Let a controller decide again on recorded trajectories, case by case in order of their ids.

    A controller is shown one step after the other until it decides, exactly as live, so ``executed`` is what a live
    run would have paid. A policy is first checked against what made the archive.
    """
    from casewise.core.records import Policy

    calibration_id = ""
    if isinstance(controller, Policy):
        from casewise.judge.policy import check_binding, controller_of

        check_binding(controller, archive.binding)
        calibration_id, controller = controller.calibration_id, controller_of(controller)
    return [_decided(archive, controller, case_id, calibration_id) for case_id in archive.ids]


def deployed_mask(archive: Archive, controller: Controller, decision: Decision) -> Mask:
    """The mask that a decision deploys."""
    from casewise.core.errors import BadInput
    from casewise.core.records import SOURCE, Action, State
    from casewise.judge.controllers.region_gate import RegionGate, gated

    if decision.action is not Action.GATE:
        return archive.mask(decision.case_id, decision.state)
    if not isinstance(controller, RegionGate):
        raise BadInput(f"case {decision.case_id} was gated, so its mask needs the gate, got {controller.name}")
    masks = archive.masks(decision.case_id)
    kept = decision.accepted or ()
    return gated(masks[SOURCE], masks[State(1)], kept, min_area=controller.min_area, keep_small=controller.keep_small)


def _decided(archive: Archive, controller: Controller, case_id: str, calibration_id: str) -> Decision:
    from dataclasses import replace

    from casewise.archive.layout import mask_sha256
    from casewise.core.errors import BadInput
    from casewise.core.records import Action, Decision

    for step in range(archive.steps + 1):
        seen = archive.observation(case_id, step)
        verdict = controller.decide(seen)
        if verdict is None:
            continue
        decision = Decision.of(seen, verdict, controller.name, calibration_id=calibration_id)
        if decision.action is Action.GATE:
            return replace(decision, state_hash=mask_sha256(deployed_mask(archive, controller, decision)))
        states = archive.entries[case_id].mask_sha256
        if str(decision.state) not in states:
            raise BadInput(
                f"{controller.name} deploys state {decision.state} of case {case_id}, which was not recorded; "
                f"recorded are {', '.join(states)}. Record with shrink={decision.state.shrink:g}"
            )
        return replace(decision, state_hash=states[str(decision.state)])
    raise BadInput(
        f"{controller.name} asked for step {archive.steps + 1} of case {case_id}, the archive holds {archive.steps} "
        f"steps a case; lower its cap or depth, or record more steps"
    )
