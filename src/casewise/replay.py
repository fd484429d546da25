"""Decide again on recorded trajectories; no network, no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from casewise.archive.store import Archive
    from casewise.core.records import Controller, Decision, Policy
    from casewise.judge.decide import Judge


def replay(archive: str | Path | Archive, controller: Controller | Judge | Policy | str) -> list[Decision]:
    """Let a controller decide again on recorded cases, in order of their ids; no network is needed.

    A controller gets one step after the other until it decides, as in a live run. The binding of a policy is first
    compared with that of the archive; an image unlike the calibration images gets M0 and a flag, as live, if its
    appearance was recorded. A hybrid policy takes the cases as a stream.

    Args:
        archive: Recorded cases, or their folder.
        controller: A controller, a judge, a policy, or the name of a ready controller (``"frag-stop"``).

    Returns:
        One decision per case.

    Raises:
        Mismatch: If the policy was fitted on another model, objective, loader or measure.

    Example:
        >>> import numpy as np, tempfile
        >>> from casewise import Case, Policy, Trajectory, controller_of, create_archive
        >>> from casewise.core.records import Binding
        >>> binding = Binding("model", "tent", "npy", "min_area=16")
        >>> archive = create_archive(tempfile.mkdtemp(), binding=binding, steps=1)
        >>> masks = np.zeros((4, 4), np.uint8), np.ones((4, 4), np.uint8)
        >>> case = Case("heart_01", np.zeros((1, 4, 4)))
        >>> archive = archive.add(case, Trajectory(case.id, masks, ({}, {})))
        >>> replay(archive, controller_of(Policy("m0", "m0", {}, steps=0)))[0].action.value
        'rollback'
    """
    from casewise.archive.store import Archive, open_archive
    from casewise.core.records import Policy
    from casewise.judge.decide import replay_case
    from casewise.judge.policy import check_binding, is_hybrid, judge_of, ready_policy

    archive = archive if isinstance(archive, Archive) else open_archive(archive)
    controller = ready_policy(controller, archive.steps) if isinstance(controller, str) else controller

    if not isinstance(controller, Policy):
        return [replay_case(archive, controller, case_id) for case_id in archive.ids]
    policy = controller
    if policy.ladders:
        archive = archive.join(policy.ladders)
    elif policy.ladder and archive.ladder_name != policy.ladder:
        archive = archive.ladder(policy.ladder)
    check_binding(policy, archive.binding)
    if is_hybrid(policy):
        return _streamed(archive, policy)
    judge = judge_of(policy)
    return [_bound(archive, policy, replay_case(archive, judge, case_id)) for case_id in archive.ids]


def _bound(archive: Archive, policy: Policy, decision: Decision) -> Decision:
    """Return the decision of a live run that also looks at the image: its numbers are those that were recorded."""
    from casewise.core.records import SOURCE
    from casewise.judge.appearance import Appearance, KnownAppearance, bound_by_appearance
    from casewise.judge.policy import adapts

    entry = archive.entry(decision.case_id)
    if not (policy.appearance and entry.appearance and adapts(policy)):
        return decision
    look = Appearance(entry.id, entry.appearance, entry.cluster).with_agreement(decision.agreement)
    known = KnownAppearance.from_plain(policy.appearance)
    return bound_by_appearance(decision, look, known, entry.mask_sha256[str(SOURCE)])[0]


def _streamed(archive: Archive, policy: Policy) -> list[Decision]:
    """Replay a hybrid policy: each decision moves the cut-points of the next, until the alarm suspends them (E10)."""
    from casewise.judge.calibration.cuts import stream_of
    from casewise.judge.decide import replay_case

    stream, decisions = stream_of(policy), []
    for case_id in archive.ids:
        decided = replay_case(archive, stream.controller, case_id, calibration_id=policy.calibration_id)
        decision = _bound(archive, policy, decided)
        decisions.append(decision)
        if decision.value is not None:
            stream = stream.after(case_id, decision.value, decision.cluster)
    return decisions
