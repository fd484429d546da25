"""The heart, live: adapt one case step by step, and keep only as much of it as the controller trusts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from casewise.core.brief import counted
from casewise.core.errors import BadInput, MovedUnselected, Refused, in_one_line
from casewise.core.records import (
    DONE,
    FALLBACK,
    SOURCE,
    Action,
    Case,
    Controller,
    Decision,
    Mask,
    Observation,
    Policy,
    State,
    Trajectory,
    Verdict,
    deployed,
)  # fmt: skip

if TYPE_CHECKING:
    from casewise.adapt.adaptation import Adaptation
    from casewise.adapt.backbones import Prepared
    from casewise.adapt.episode import Episode
    from casewise.adapt.proposers import SharedSource
    from casewise.adapt.readings import Readings


@dataclass(frozen=True, eq=False)
class Guarded:
    """The mask to use, the decision behind it, and every candidate that was made on the way."""

    mask: Mask
    decision: Decision
    trajectory: Trajectory
    status: str = DONE  # or "fallback": adaptation failed, and the mask is M0 as it was predicted before
    error: Exception | None = None  # why it failed
    ladders: Mapping[str, Trajectory] = field(default_factory=dict)  # all of them, where several were read together


def guard(
    case: Case | Any,  # or an array (channel, *space)
    network: Any,  # an nn.Module or a backbone
    policy: Policy | Controller,
    objective: Any = None,  # an objective, its name, its address "package.module:Name", or an Adaptation
    *,
    calibration_id: str = "",  # of a bare controller: where its cut-points came from; a policy says so itself
    **knobs: Any,  # further fields of an Adaptation: steps, learning_rate, seed, max_slices, ...
) -> Guarded:
    """Segment one case with adaptation, keeping only as much of it as the policy trusts.

    A calibrated policy brings its objective, learning rate, parameters, steps and measure along, and is refused on
    another model or with others of these; ``guard(image, network, policy)`` is all it takes. (How an array was made
    cannot be known here: a policy that was recorded from files expects what their loader makes.) A bare controller
    needs an objective, and steps unless four will do: ``guard(image, network, controller, "tent", steps=2)``.

    The controller is asked after every step, M0 included, and no update is made that it did not ask for. A rollback
    returns the cached M0 mask itself; a shrink is predicted from the interpolated weights. Where adaptation fails, M0
    is returned as it was cached and ``status`` is "fallback". The network comes back as it was.
    """
    case = case if isinstance(case, Case) else Case("case", case)
    how = _adaptation(policy, objective, knobs)
    controller: Controller
    if isinstance(policy, Policy):
        from casewise.judge.policy import controller_of

        check_bound(policy, how, network)
        controller, calibration_id = controller_of(policy), policy.calibration_id
    else:
        controller = policy
    ladder = policy.ladder if isinstance(policy, Policy) else ""
    try:
        with episode_of(case, network, prepared(case, network), how, controller) as episode:
            found = decided(episode, case, controller, calibration_id=calibration_id, ladder=ladder)
    except MovedUnselected as error:
        return fallen_back(found, error)
    return found


def check_bound(policy: Policy, how: Adaptation, network: Any) -> None:
    """Refuse a policy that was fitted with other steps, or on another model, objective, loader or measure."""
    from torch import nn

    from casewise.judge.policy import adapts, check_binding

    if not adapts(policy):
        return
    if policy.binding is not None and how.steps != policy.steps:
        raise Refused(
            f"policy {policy.name!r} was fitted on {counted(policy.steps, 'step')}, {how.steps} were asked for; "
            f"leave them out"
        )
    binding = how.binding(network)
    if isinstance(network, nn.Module) and policy.binding is not None:
        binding = replace(binding, loader=policy.binding.loader)
    check_binding(policy, binding)


def _adaptation(policy: Policy | Controller, objective: Any, knobs: dict[str, Any]) -> Adaptation:
    """What the policy was fitted with, or what was asked for."""
    from casewise.adapt.adaptation import Adaptation, adaptation_of
    from casewise.judge.policy import adapts

    if not isinstance(policy, Policy):
        if objective is None:
            raise BadInput(
                f"{policy.name} does not say how to adapt; name an objective: guard(image, network, controller, 'tent')"
            )
        return Adaptation.of(objective, **knobs)
    fitted = adaptation_of(policy, typed=objective if isinstance(objective, str) else None)
    if fitted is None and objective is None and adapts(policy):
        raise BadInput(
            f"policy {policy.name!r} does not say how its cases were adapted; name the objective, and the learning "
            "rate where it is not the objective's own: guard(image, network, policy, 'tent', learning_rate=...)"
        )
    if isinstance(objective, Adaptation):
        return Adaptation.of(objective, **knobs)
    asked = knobs if objective is None else {"objective": objective, **knobs}
    return Adaptation.of(fitted or Adaptation(steps=policy.steps), **asked)


def prepared(case: Case, network: Any) -> Prepared:
    """The case as an episode wants it: through a backbone's own preparation, or straight into a module."""
    from torch import nn

    from casewise.adapt.backbones import Prepared
    from casewise.adapt.episode import as_batch

    if isinstance(network, nn.Module):
        return Prepared(as_batch(case.image, network))
    ready: Prepared = network.prepare(case)
    return ready


def episode_of(
    case: Case,
    network: Any,
    ready: Prepared,
    how: Adaptation,
    controller: Controller,
    *,
    before_forward: Callable[[], None] | None = None,
    source: SharedSource | None = None,
) -> Episode | Readings:
    """The case on loan, with the signals and the states that the controller needs; ``source`` predicts M0 once."""
    from torch import nn

    readings = how.forward_only
    if readings is not None:
        lent: Readings = readings.episode(network, ready, case, source=source, before_forward=before_forward)
        return lent

    from casewise.adapt.episode import Episode
    from casewise.adapt.probes import PROBES

    needed = [name for name in sorted(controller.needs) if name in PROBES and name not in how.signals]
    wanted = replace(
        how, signals=(*how.signals, *needed), keep_parameters=how.keep_parameters or bool(controller.states)
    )
    bare = isinstance(network, nn.Module)
    return Episode(
        network if bare else network.network,
        ready.inputs,
        wanted,
        case_id=case.id,
        forward=ready.forward,
        predict=ready.predict if ready.predict is None or source is None else source.first(ready.predict),
        head=None if bare else network.head,
        before_forward=before_forward,
    )


def decided(
    episode: Episode | Readings, case: Case, controller: Controller, *, calibration_id: str = "", ladder: str = ""
) -> Guarded:
    """The episode under the controller, from M0 on; whatever fails there, the answer is M0 as it was predicted."""
    from casewise.archive.layout import mask_sha256

    try:
        seen, verdict = _verdict(episode, case, controller)
        decision = Decision.of(seen, verdict, controller.name, calibration_id=calibration_id)
        mask = deployed(controller, lambda state: _mask(episode, state), decision)
    except Exception as error:
        mask = episode.masks[0]
        decision = Decision(
            case.id, Action.ROLLBACK, SOURCE, executed=episode.updates, controller=controller.name, group=case.group,
            cluster=case.cluster, reason=f"adaptation failed: {in_one_line(error)}", calibration_id=calibration_id,
        )  # fmt: skip
        return Guarded(mask, replace(decision, state_hash=mask_sha256(mask)), episode.trajectory, FALLBACK, error)
    named = decision.state.on(ladder)
    return Guarded(mask, replace(decision, state=named, state_hash=mask_sha256(mask)), episode.trajectory)


def fallen_back(found: Guarded, error: Exception) -> Guarded:
    """The same case with M0 as it was predicted before the objective began: what came after it does not count."""
    from casewise.archive.layout import mask_sha256

    mask = found.trajectory.masks[0]
    decision = replace(
        found.decision, action=Action.ROLLBACK, state=SOURCE, state_hash=mask_sha256(mask), accepted=None,
        reason=f"adaptation failed: {in_one_line(error)}",
    )  # fmt: skip
    return replace(found, mask=mask, decision=decision, status=FALLBACK, error=error)


def _verdict(episode: Episode | Readings, case: Case, controller: Controller) -> tuple[Observation, Verdict]:
    from casewise.judge.deciding import compared

    steps = episode.how.steps
    while True:
        seen = Observation(case.id, case.group, episode.signals, case.cluster, rungs={"": episode.rungs})
        if seen.step == steps:
            seen = compared(controller, seen, {State(step): mask for step, mask in enumerate(episode.masks)})
        verdict = controller.decide(seen)
        if verdict is not None:
            return seen, verdict
        if seen.step >= steps:
            raise BadInput(
                f"{controller.name} asked for step {seen.step + 1} of case {case.id}, the horizon is steps={steps}; "
                "lower its cap or depth, or allow more steps"
            )
        episode.advance(last=seen.step + 1 == steps)


def _mask(episode: Episode | Readings, state: State) -> Mask:
    return episode.shrink(state.step, state.shrink) if state.shrink else episode.masks[state.step]
