"""One image, one network, one controller: propose candidates, decide, return the mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from inspect import isclass
from typing import TYPE_CHECKING, Any

from casewise.core.errors import BadInput, Refused
from casewise.core.records import Case, Controller, Decision, Mask, Policy, Trajectory, as_image
from casewise.core.seeds import content_id
from casewise.core.text import pluralize

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from casewise.adapt.adaptation import Adaptation
    from casewise.adapt.backbones import Backbone, Prepared
    from casewise.judge.decide import Judge


@dataclass(frozen=True, eq=False)
class Guarded:
    """Result of :func:`guard`.

    Attributes:
        mask: The mask to use.
        decision: The chosen candidate and the reason.
        trajectory: M0 and the candidates that were made, with their signals.
        ladders: The same for every ladder, where several were read together.
    """

    mask: Mask
    decision: Decision
    trajectory: Trajectory
    ladders: Mapping[str, Trajectory] = field(default_factory=dict)


def guard(
    image: Case | NDArray[Any],
    network: Any,
    policy: Policy | Controller | Judge | str,
    objective: Any = None,
    *,
    calibration_id: str = "",
    **options: Any,
) -> Guarded:
    """Propose candidates for one image and let a controller choose one of them.

    The controller decides after every state, M0 included; the next update is made only if it asks for one more step. A
    rollback returns M0 itself. The network is restored bit by bit, also after an exception. An error of the objective
    or of the controller is raised; a :class:`~casewise.deployment.Deployment` returns M0 instead.

    Args:
        image: Array of shape ``(channel, *space)``, or a :class:`~casewise.core.records.Case`. An array is seeded by
            its content.
        network: ``nn.Module`` that returns segmentation logits, a model folder, a hub id, a ``Model`` or a backbone.
        policy: A calibrated policy, a controller, a ``Judge``, or the name of a ready controller (``"frag-stop"``). A
            calibrated policy brings its proposer along and refuses another model.
        objective: Name of a proposer (``"tent"``, ``"views:mri"``), an objective, or an ``Adaptation``. Needed for
            controllers; a calibrated policy has its own.
        calibration_id: Written into the decision of a bare controller.
        **options: Further fields of an ``Adaptation``: ``steps``, ``learning_rate``, ``seed``, ...

    Returns:
        The mask, the decision and the candidates.

    Raises:
        BadInput: If the proposer is missing or the controller asks for more states than there are.
        Mismatch: If a policy was calibrated on another model or with other options.

    Example:
        >>> import numpy as np
        >>> from casewise.adapt.networks import PlainUNet
        >>> image = np.random.default_rng(0).normal(size=(1, 64, 64))
        >>> guard(image, PlainUNet(), "frag-stop", objective="tent", steps=1).decision.reason
        'regions did not change direction within 1 step'
    """
    from casewise.judge.decide import Judge
    from casewise.judge.policy import adapts, judge_of

    network = _network(network)
    case = image if isinstance(image, Case) else Case(content_id(as_image(image)), image)
    if isinstance(policy, str):
        policy = _named(policy, network, objective, options)
    hows = _proposers(policy, objective, options)
    if isinstance(policy, Policy):
        if adapts(policy):
            check_bound(policy, hows, network)
        judge = judge_of(policy)
    else:
        if not isinstance(policy, (Judge, Controller)) or isclass(policy):
            raise BadInput(
                "a controller must be an object with name, needs, states and decide(seen), got "
                f"{f'the class {policy.__name__}' if isclass(policy) else type(policy).__name__}"
            )
        judge = policy if isinstance(policy, Judge) else Judge(policy, calibration_id=calibration_id)
    return run_judge(case, network, judge, hows)


def run_judge(
    case: Case, network: Backbone | Any, judge: Judge, hows: Mapping[str, Adaptation], *,
    prepared: Prepared | None = None, deadline: float | None = None,
) -> Guarded:  # fmt: skip
    """Make the candidates of one case and decide.

    Args:
        case: The case.
        network: The frozen model.
        judge: Controller, cleanup and flag.
        hows: Proposers by the names of their ladders.
        prepared: The case after the preprocessing of the model, if it was prepared before.
        deadline: Time of ``time.monotonic()`` after which no candidate is made.

    Raises:
        Exception: Whatever failed after M0; its attribute ``source_mask`` holds M0, ``made`` the candidates
            by ladder, and ``executed`` the number of updates.
    """
    from casewise.adapt.proposers.live import LiveLadder, prepare, with_needs
    from casewise.judge.decide import decide, mask_of

    wanted = judge.ladders or tuple(hows)[:1]  # a controller that names no ladder reads the first one
    read = {name: with_needs(how, judge.controller) for name, how in hows.items() if name in wanted}
    ready = prepare(case, network) if prepared is None else prepared
    ladder = LiveLadder(case, network, ready, read, together=bool(judge.ladders), deadline=deadline)
    failed: Exception | None = None
    try:
        with ladder:  # the end of the block raises MovedUnselected, even if the objective failed, too
            try:
                decision = decide(judge, ladder)
                own = decision if judge.ladders else replace(decision, state=decision.state.on(""))
                mask = mask_of(judge.controller, ladder.mask, own)
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed
    except Exception as error:
        error.source_mask = ladder.source_mask  # type: ignore[attr-defined]
        error.made = ladder.made  # type: ignore[attr-defined]
        error.executed = ladder.updates  # type: ignore[attr-defined]
        raise
    first = next(iter(ladder.made.values()))
    return Guarded(mask, decision, ladder.made.get(decision.state.ladder, first), ladder.made if judge.ladders else {})


def _network(given: Any) -> Any:
    """Return a network as it is; load a model that is named by a folder, a hub id or a ``Model``."""
    from torch import nn

    from casewise.adapt.model import as_model, loaded

    return given if isinstance(given, nn.Module) or hasattr(given, "prepare") else loaded(as_model(given))


def check_bound(policy: Policy, hows: Mapping[str, Adaptation], network: Any) -> None:
    """Refuse a policy that was fitted with other steps, or on another model, proposer, loader or measure."""
    from torch import nn

    from casewise.core.records import joint_binding
    from casewise.judge.policy import check_binding

    if policy.ladders:
        made = {name: (how.binding(network), how.horizon(network)) for name, how in hows.items()}
        check_binding(policy, joint_binding(made))
        return
    how = next(iter(hows.values()))
    steps = how.horizon(network)
    if policy.binding is not None and steps != policy.steps:
        fitted = pluralize(policy.steps, "candidate")
        raise Refused(f"policy {policy.name!r} was fitted on {fitted}, {how.objective} makes {steps}; calibrate again")
    binding = how.binding(network)
    if isinstance(network, nn.Module) and policy.binding is not None:
        binding = replace(binding, loader=policy.binding.loader)
    check_binding(policy, binding)


def _named(name: str, network: Any, objective: Any, options: Mapping[str, Any]) -> Policy:
    """Return a ready policy by name, for the number of states that the proposer makes."""
    from casewise.adapt.adaptation import Adaptation
    from casewise.judge.policy import ready_policy

    if objective is None:
        raise BadInput(f"{name!r} does not name its proposers; give one: objective='tent'")
    return ready_policy(name, Adaptation.of(objective, **options).horizon(network))


def _proposers(policy: Policy | Controller | Judge, objective: Any, options: dict[str, Any]) -> dict[str, Adaptation]:
    """Return the proposers that a policy was fitted with, or the given one, by the names of ladders."""
    from casewise.adapt.adaptation import Adaptation, proposers_of

    if not isinstance(policy, Policy) or (policy.binding is None and objective is not None):
        if objective is None:
            raise BadInput(
                f"{policy.name} does not name its proposers; give one: guard(image, network, controller, 'tent')"
            )
        return {"": Adaptation.of(objective, **options)}
    fitted = proposers_of(policy, typed=objective if isinstance(objective, str) else None)
    if not fitted and objective is not None:
        return {policy.ladder: Adaptation.of(objective, **options)}
    if not fitted:
        raise BadInput(
            f"policy {policy.name!r} does not name its proposers; give one: guard(image, network, policy, 'tent')"
        )
    asked = {} if objective is None else {"objective": objective}
    if isinstance(objective, Adaptation):
        return {name: Adaptation.of(objective, **options) for name in fitted}
    return {name: Adaptation.of(how, **asked, **options) for name, how in fitted.items()}
