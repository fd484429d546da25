"""The heart, live: adapt one case step by step, and keep only as much of it as the controller trusts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from casewise.core.errors import BadInput
from casewise.core.records import Action, Case, Controller, Decision, Mask, Observation, Trajectory, Verdict

if TYPE_CHECKING:
    from casewise.adapt.episode import Episode


@dataclass(frozen=True, eq=False)
class Guarded:
    """The mask to use, the decision behind it, and every candidate that was made on the way."""

    mask: Mask
    decision: Decision
    trajectory: Trajectory


def guard(
    case: Case | Any,  # or an array (channel, *space)
    network: Any,  # an nn.Module or a backbone
    objective: Any,  # an objective, its name, or its address "package.module:Name"
    controller: Controller,
    *,
    steps: int,
    seed: int = 0,
    calibration_id: str = "",  # which calibration the controller's cut-points came from; goes into the decision
    **options: Any,  # of adapt.episode.Episode
) -> Guarded:
    """Segment one case with adaptation, keeping only as much of it as the controller trusts.

    The controller is asked after every step, M0 included, and no update is made that it did not ask for. A rollback
    returns the cached M0 mask itself (D11); a shrink is predicted from the interpolated weights (D10).
    """
    from casewise.archive.layout import mask_sha256

    case = case if isinstance(case, Case) else Case("case", case)
    with _episode(case, network, objective, controller, seed=seed, **options) as episode:
        seen, verdict = _decided(episode, case, controller, steps)
        mask = _deployed(episode, controller, verdict)
        named = {"state_hash": mask_sha256(mask), "calibration_id": calibration_id}
        return Guarded(mask, Decision.of(seen, verdict, controller.name, **named), episode.trajectory)


def _decided(episode: Episode, case: Case, controller: Controller, steps: int) -> tuple[Observation, Verdict]:
    while True:
        seen = Observation(case.id, case.group, episode.signals, case.cluster)
        verdict = controller.decide(seen)
        if verdict is not None:
            return seen, verdict
        if seen.step >= steps:
            raise BadInput(
                f"{controller.name} asked for step {seen.step + 1} of case {case.id}, the horizon is steps={steps}; "
                "lower its cap or depth, or allow more steps"
            )
        episode.advance(last=seen.step + 1 == steps)


def _deployed(episode: Episode, controller: Controller, verdict: Verdict) -> Mask:
    if verdict.action is Action.GATE:
        gated: Mask = controller.output(episode.masks[0], episode.masks[verdict.state.step], verdict)  # type: ignore[attr-defined]
        return gated
    if verdict.state.shrink:
        return episode.shrink(verdict.state.step, verdict.state.shrink)
    return episode.masks[verdict.state.step]


def _episode(
    case: Case, network: Any, objective: Any, controller: Controller, *, signals: tuple[Any, ...] = (), **options: Any
) -> Episode:
    """The case on loan: through a backbone's own preparation, or straight into a module; with the signals needed."""
    from torch import nn

    from casewise.adapt.batch import as_batch
    from casewise.adapt.episode import Episode
    from casewise.adapt.objectives import objective_of
    from casewise.adapt.probes import PROBES

    needed = [name for name in sorted(controller.needs) if name in PROBES and name not in signals]
    options = {"signals": (*signals, *needed), "keep_parameters": bool(controller.states), **options}
    if isinstance(network, nn.Module):
        module, inputs = network, as_batch(case.image, network)
    else:
        prepared = network.prepare(case)
        module, inputs = network.network, prepared.inputs
        options = {"head": network.head, "forward": prepared.forward, "predict": prepared.predict, **options}
    return Episode(module, inputs, objective_of(objective), case_id=case.id, **options)
