"""The heart again, from disk: the same decisions on recorded trajectories; no network, no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from casewise.archive.store import Archive
    from casewise.core.records import Controller, Decision, Policy


def replay(archive: Archive, controller: Controller | Policy) -> list[Decision]:
    """Let a controller decide again on recorded trajectories, case by case in order of their ids.

    A controller is shown one step after the other until it decides, exactly as live, so ``executed`` is what a live
    run would have paid. A policy is first checked against what made the archive; a hybrid one takes the cases as a
    stream.
    """
    from casewise.core.records import Policy
    from casewise.judge.deciding import decision_of
    from casewise.judge.policy import check_binding, controller_of, is_hybrid

    if not isinstance(controller, Policy):
        return [decision_of(archive, controller, case_id) for case_id in archive.ids]
    policy = controller
    if policy.ladders:
        archive = archive.together(policy.ladders)
    elif policy.ladder and archive.ladder_name != policy.ladder:
        archive = archive.on(policy.ladder)
    check_binding(policy, archive.binding)
    if is_hybrid(policy):
        return _streamed(archive, policy)
    decides = controller_of(policy)
    return [decision_of(archive, decides, case_id, calibration_id=policy.calibration_id) for case_id in archive.ids]


def _streamed(archive: Archive, policy: Policy) -> list[Decision]:
    """Each decision moves the cut-points of the next (E10), until the stream's alarm suspends them all."""
    from casewise.judge.calibration.cuts import stream_of
    from casewise.judge.deciding import decision_of

    stream, decisions = stream_of(policy), []
    for case_id in archive.ids:
        decision = decision_of(archive, stream.controller, case_id, calibration_id=policy.calibration_id)
        decisions.append(decision)
        if decision.value is not None:
            stream = stream.after(case_id, decision.value, decision.cluster)
    return decisions
