"""Policies: calibrated controllers as data. A policy is stored in policy.json and is refused for another model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from casewise.core.durable import json_sha256, write_json
from casewise.core.errors import BadInput, Mismatch, Overlap, Refused, UnsafeInput
from casewise.core.json_records import from_plain, read_json
from casewise.core.records import EVALUATION, Binding, Controller, Policy
from casewise.core.registry import Registry, check_names_no_code, from_address
from casewise.data.splits import Clustered, check_disjoint, cluster_of, clusters_of
from casewise.judge.appearance import KnownAppearance
from casewise.judge.controllers import CONTROLLERS, takes
from casewise.judge.controllers.flag import Flag
from casewise.judge.controllers.metadata import metadata_of
from casewise.judge.controllers.router import ByGroup, bucket_of
from casewise.judge.decide import Judge

POLICY, HASH = "policy.json", "sha256"
AGAIN = "run casewise calibrate again"
MOST_STEPS = 1000  # a policy that asks for more is a mistake or an attack

MODULATIONS = {
    "frag-subset": "param-subset",
    "frag-entropy-weight": "entropy-weight",
    "frag-anchor-weight": "anchor-weight",
    "frag-combo": "combo",
    "frag-loss-switch": "loss-switch",
}
"""A modulated objective plus frag-stop: which modulation the trajectories must be made with (E3, D8)."""


def _depth(steps: int, **more: Any) -> dict[str, Any]:
    return {"action": "depth", "depth": steps, **more}


def _stop(cap: int) -> dict[str, Any]:
    return {"action": "stop", "depth": cap}


def _router(
    name: str, coordinate: str, low: dict[str, Any], mid: dict[str, Any], steps: int = 4, **more: Any
) -> Policy:
    options = {"coordinate": coordinate, "low": low, "mid": mid, "hard": {"action": "rollback"}, **more}
    return Policy(name, "router", options, steps)


GUARDED: dict[str, Any] = {"fallback": "delta", "guard": True}
"""The router uses the fallback where the tertiles of its coordinate coincide (S11), and rolls back every case where the
retained calibration cases are evidently hurt (M3)."""

STOP_RULES = ("frag-stop", "entropy-stop", "msp-stop", "gradient-stop", "tau-stop")

READY: Registry[Policy] = Registry(
    "policy",
    {
        # Found by a search on real cohorts (docs/decisions/0012): the size of the largest changed piece, and few steps.
        "default": _router("default", "largest", _depth(2), _depth(1), **GUARDED),
        "cardiac": _router("cardiac", "delta", _depth(3), _depth(2, shrink=0.5)),
        "prostate": _router("prostate", "regions", _depth(1), _depth(1)),
        "driving": _router("driving", "delta", _stop(8), _stop(4), 8),
        "stop-router": Policy(
            "stop-router", "stop-router", {"coordinate": "delta", "low_cap": 4, "mid_cap": 2, "mid_shrink": 0.5}, 4
        ),
        # For one candidate, such as a new model version: keep new, ask a person (old until then), keep old.
        "update": _router("update", "largest", _depth(1), {"action": "ask"}, 1, **GUARDED),
        "m0": Policy("m0", "m0", {}, 0),
        "fixed-k": Policy("fixed-k", "fixed-k", {}, 4),
        "settled": Policy("settled", "settled", {"cap": 4}, 4),
        **{name: Policy(name, name, {}, 4) for name in STOP_RULES},
        **{name: Policy(name, "frag-stop", {}, 4) for name in MODULATIONS},
        "region-gate": Policy("region-gate", "region-gate", {"threshold": 0.0}, 1),
        **{name: Policy(name, name, {}, 1) for name, kind in CONTROLLERS.items() if metadata_of(kind).among_candidates},
    },
)
"""Designs by name, uncalibrated: coordinate and actions are fixed, cut-points are fitted on a holdout (E7, E14)."""


def design_of(text: str) -> Policy:
    """Return a design by name, or your own controller by its address ``package.module:Name``; both uncalibrated.

    Any registered controller is a design too, with its default options.
    """
    if not isinstance(text, str):
        raise BadInput(f"a policy must be a name, such as 'default', or package.module:Name, got {type(text).__name__}")
    if ":" not in text:
        return READY[text] if text in READY or text not in CONTROLLERS else Policy(text, text, {}, 4)
    design = Policy(text.partition(":")[2], text, {}, 4)
    controller_of(design)
    return design


def controller_kind(policy: Policy) -> Any:
    """Return the class of a policy's controller, whose metadata can be read without building one."""
    own = ":" in policy.controller
    return from_address(policy.controller, "controller") if own else CONTROLLERS[policy.controller]


def with_cuts(policy: Policy, **cuts: float) -> Policy:
    """Return a router with these cut-points, also for every group."""
    groups = {name: {**own, **cuts} for name, own in policy.groups.items()}
    return replace(policy, options={**policy.options, **cuts}, groups=groups)


def among_candidates(policy: Policy) -> bool:
    """Return True if a policy chooses among all candidates of a case: views, members, steps, imported masks."""
    return metadata_of(controller_kind(policy)).among_candidates


def is_learned(policy: Policy) -> bool:
    """Return True if labels chose or fitted a policy that chooses among candidates."""
    own: Any = controller_of(policy)
    return policy.name.removesuffix("-certified") != own.name or getattr(own, "learned", True)


def adapts(policy: Policy) -> bool:
    """True if a policy may deploy another mask than M0, or looks at candidates to flag M0."""
    return metadata_of(controller_kind(policy)).adapts or bool(policy.flag) or bool(policy.cleanup)


def read_policy(path: str | Path, *, typed: str | None = None) -> Policy:
    """Read a policy from its file, or from the archive folder that contains it.

    Args:
        path: The file or the folder.
        typed: Address ``package.module:Name`` of your own controller. A file never imports code.

    Returns:
        The policy.

    Raises:
        BadInput: If there is no policy.
        Mismatch: If the file has another schema or was edited.
        UnsafeInput: If the file names code that was not typed.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> file = write_policy(folder, Policy("m0", "m0", {}, steps=0))
        >>> read_policy(folder).name
        'm0'
    """
    path = Path(path)
    file = path / POLICY if path.is_dir() else path
    try:
        plain = read_json(file, AGAIN)
        if plain.get("schema") != Policy.schema:
            raise Mismatch(
                f"{file} has policy schema {plain.get('schema')}, this casewise reads {Policy.schema}; {AGAIN}"
            )
        said = {name: value for name, value in plain.items() if name not in ("controller", "adaptation", "ladders")}
        check_names_no_code(said, where=str(file))  # the other three fields are checked where they are used
        policy = from_plain(Policy, {name: value for name, value in plain.items() if name != HASH}, str(file), AGAIN)
        if plain.get(HASH) != _hashed(plain):
            raise Mismatch(f"{file} was edited after it was written: hash mismatch; run casewise calibrate again")
        _check_sense(policy, file)
        if ":" in policy.controller and policy.controller != typed:
            raise UnsafeInput(
                f"{file} names the controller {policy.controller[:100]!r}, which is code to import; if you trust "
                f"it, add --set controller={policy.controller[:100]}"
            )
        return policy
    except FileNotFoundError:
        raise BadInput(f"there is no policy at {file}; run casewise calibrate first") from None


def write_policy(path: str | Path, policy: Policy) -> Path:
    """Write a policy as JSON, atomically.

    Args:
        path: A file, or an archive folder, which gets ``policy.json``.
        policy: The policy.

    Returns:
        The file.

    Example:
        >>> import tempfile
        >>> write_policy(tempfile.mkdtemp(), Policy("m0", "m0", {}, steps=0)).name
        'policy.json'
    """
    path = Path(path)
    file = path / POLICY if path.is_dir() else path
    plain = asdict(policy)
    write_json(file, {**plain, HASH: _hashed(plain)})
    return file


def _hashed(plain: Mapping[str, Any]) -> str:
    """Return the sha256 of a policy as its file holds it, without the hash itself."""
    return json_sha256({name: value for name, value in plain.items() if name != HASH})


def _check_sense(policy: Policy, file: Path) -> None:
    """Refuse values that no calibration writes."""
    from casewise.judge.calibration.adoption import unpromised  # calibration imports policies

    if not 0 <= policy.steps <= MOST_STEPS:
        raise BadInput(
            f"{file} has {policy.steps!r} steps, which must be a whole number from 0 to {MOST_STEPS}; "
            "run casewise calibrate again"
        )
    try:
        unpromised(policy.preflight)
        counts = [policy.preflight.get(name, {}).items() for name in ("retained", "quota")]
        if not all(type(count) is int and 0 <= count < 2**31 for _, count in counts[1]):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BadInput(f"{file} does not say in order what calibration found (preflight); {AGAIN}") from None
    if policy.appearance:
        KnownAppearance.from_plain(policy.appearance)
    kind = CONTROLLERS.get(policy.controller)  # a user's controller is not imported for this check
    fitted = kind is not None and metadata_of(kind).fitted_by in ("cuts", "tau")
    if (fitted or policy.groups or {"cut_low", "cut_high"} & set(policy.options)) and policy.binding is None:
        raise BadInput(
            f"{file} has cut-points, but its binding does not say which model they were fitted on; "
            "run casewise calibrate again"
        )
    design: Policy | None = READY.get(policy.name.removesuffix("-certified"))
    if design is not None and "hard" in design.options and policy.controller == design.controller:
        for options in (policy.options, *policy.groups.values()):
            hard = bucket_of(options.get("hard", design.options["hard"]))
            if hard != bucket_of(design.options["hard"]):
                raise BadInput(
                    f"{file} does {hard} with hard cases, the design {design.name!r} says "
                    f"{bucket_of(design.options['hard'])}; give your own design another name"
                )


def ready_policy(name: str, steps: int, options: Mapping[str, Any] = MappingProxyType({})) -> Policy:
    """Return a policy that needs no calibration, for a ladder of so many states.

    Args:
        name: Name of a ready policy or a registered controller, such as ``"frag-stop"`` or ``"consensus"``.
        steps: Number of states after M0.
        options: Further options of the controller.

    Raises:
        BadInput: If the policy must be calibrated first.
    """
    design = design_of(name)
    kind = controller_kind(design)
    sized = {option: steps for option in ("cap", "steps", "step") if takes(kind, option)}
    if design.name == "consensus":
        sized["consensus"] = str(steps)  # type: ignore[assignment]
    policy = replace(design, options={**design.options, **sized, **options}, steps=steps if adapts(design) else 0)
    controller_of(policy)
    return policy


def is_hybrid(policy: Policy) -> bool:
    """Return True if cut-points follow the stream (E10); then only ``judge.calibration.cuts.Stream`` decides."""
    return "hybrid" in policy.options


def controller_of(policy: Policy) -> Controller:
    """Build the controller of a policy, with the cut-points of all groups.

    Args:
        policy: A calibrated policy, or one that needs no calibration.

    Returns:
        The controller.

    Raises:
        BadInput: If the policy is hybrid, because its cut-points depend on the stream.

    Example:
        >>> controller_of(Policy("m0", "m0", {}, steps=0)).name
        'm0'
    """
    if is_hybrid(policy):
        raise BadInput(
            f"policy {policy.name!r} is hybrid: its cut-points change with new cases, so it has no single "
            f"controller; replay it as a stream, give a watch (casewise monitor --calibration starts one), "
            f"or calibrate without hybrid"
        )
    if not policy.groups:
        return _built(policy, {})
    return ByGroup({name: _built(policy, more) for name, more in policy.groups.items()})


def judge_of(policy: Policy) -> Judge:
    """Return the controller of a policy with the steps that follow its answer: cleanup and flag."""
    flag = from_plain(Flag, policy.flag, f"policy {policy.name!r}", AGAIN) if policy.flag else None
    return Judge(controller_of(policy), policy.cleanup, flag, policy.calibration_id)


def check_binding(policy: Policy, binding: Binding) -> None:
    """Refuse a policy that was fitted on another model, objective, loader or measure, or that needs a modulation."""
    check_modulated(policy, binding)
    if policy.binding is None:
        return
    differing = policy.binding.differences(binding)
    if differing:
        pairs = "; ".join(
            f"{name}: fitted on {policy.binding.facts.get(name)!r}, used with {binding.facts.get(name)!r}"
            for name in differing
        )
        raise Mismatch(
            f"policy {policy.name!r} was fitted on another {', '.join(differing)} ({pairs}); use what it was "
            "fitted on, or calibrate again"
        )


def check_modulated(policy: Policy, binding: Binding) -> None:
    """Refuse a policy whose trajectories must be modulated where they are not (E3): it would decide on other edits."""
    modulation = MODULATIONS.get(policy.name)
    if modulation and binding.options.get("modulation") != modulation:
        raise Mismatch(
            f"policy {policy.name!r} decides on trajectories made with modulation {modulation}, these are made with "
            f"{binding.objective} and modulation {binding.options.get('modulation')}; give the modulated archive "
            "itself as --policy, or make one: casewise record "
            f"--set modulation={modulation} --set statistics=PLAIN, then calibrate"
        )


def fitted_on(policy: Policy, cases: Iterable[Clustered]) -> Policy:
    """Return the policy with these cases, and their patients, added to its calibration cases."""
    cases = list(cases)
    clusters = {**_calibration_clusters(policy), **clusters_of(cases)}
    inputs = {**_calibration_inputs(policy), **{case.id: _input(case) for case in cases}}
    return replace(
        policy,
        calibration_cases=tuple(clusters),
        calibration_clusters=tuple(clusters.values()),
        calibration_inputs=tuple(inputs.get(case_id, "") for case_id in clusters),
    )


def check_held_out(policy: Policy, cases: Iterable[Clustered]) -> None:
    """Refuse to score a policy on the cases that it was fitted on, or on other cases of the same patients (A3).

    If images are known, a case is recognized by its content: a copy under another name is refused, and another image
    that happens to have the same name is not.
    """
    cases = list(cases)
    copies = {case.id: found for case in cases if (found := _same_image(policy, _input(case)))}
    renamed = [f"{name} is {found}" for name, found in copies.items() if name != found]
    if renamed:
        raise Overlap(
            f"{len(renamed)} cases are calibration cases of policy {policy.name!r} under other names "
            f"({'; '.join(renamed[:3])}); remove them"
        )
    known = _calibration_inputs(policy)
    clusters = {}
    for case in cases:
        another = known.get(case.id) and _input(case) and case.id not in copies
        if not another:
            clusters[case.id] = cluster_of(case)
        elif case.cluster:  # the patient counts, not the name of the case
            clusters[f"{case.id} (another image)"] = case.cluster
    names = (f"the calibration of policy {policy.name!r}", EVALUATION)
    check_disjoint(_calibration_clusters(policy), clusters, names=names)


def calibration_case(policy: Policy, case_id: str, *, cluster: str | None, input_sha256: str | None) -> str | None:
    """Return a sentence if a case was among the calibration cases or is of one of their patients; else None.

    It is recognised by its image, under any name; by its name only where the image is not known.
    """
    found = _same_image(policy, input_sha256 or "")
    if found is not None:
        return f"this image is calibration case {found} of policy {policy.name!r}: no certificate covers it"
    if case_id in policy.calibration_cases and not (_calibration_inputs(policy).get(case_id) and input_sha256):
        return f"{case_id} is a calibration case of policy {policy.name!r}: no certificate covers it"
    if cluster is not None and cluster in policy.calibration_clusters:
        return f"patient {cluster} was among the calibration cases of policy {policy.name!r}"
    return None


def no_go(policy: Policy) -> str | None:
    """Return why calibration advised against deploying a policy, as a sentence; None if it did not.

    A policy that deploys M0 for every case cannot harm. A policy that was closed by its guard does that.
    """
    kept = policy.preflight.get("retained", {})
    if kept.get("go") is not False or not adapts(policy) or policy.preflight.get("guard"):
        return None
    return (
        f"NO-GO: of the calibration cases that policy {policy.name!r} keeps adapted, {kept.get('helped')} were "
        f"helped and {kept.get('hurt')} were hurt"
    )


def check_go(policy: Policy, *, force: bool = False) -> str | None:
    """Refuse a policy that calibration advised against, unless forced; then return the sentence, for every output."""
    said = no_go(policy)
    if said is not None and not force:
        raise Refused(
            f"{said}; adapt less or choose another design, or add --set force=true to use it nevertheless (every "
            f"output says so)"
        )
    return said


def _calibration_clusters(policy: Policy) -> dict[str, str]:
    return dict(zip(policy.calibration_cases, policy.calibration_clusters or policy.calibration_cases, strict=True))


def _calibration_inputs(policy: Policy) -> dict[str, str]:
    return dict(zip(policy.calibration_cases, policy.calibration_inputs, strict=False))


def _same_image(policy: Policy, input_sha256: str) -> str | None:
    """The calibration case with this image."""
    found = (name for name, known in _calibration_inputs(policy).items() if known and known == input_sha256)
    return next(found, None)


def _input(case: Clustered) -> str:
    return str(getattr(case, "input_sha256", None) or "")


def _built(policy: Policy, more: Mapping[str, Any]) -> Controller:
    try:
        made: Any = controller_kind(policy)
        options = {**policy.options, **more}
        if isinstance(made, partial):
            made, options = made.func, {**made.keywords, **options}
        if policy.controller in CONTROLLERS:
            made = from_plain(made, options, f"policy {policy.name!r}", "run casewise calibrate first")
        controller: Controller = made(**options) if callable(made) else made
    except TypeError as error:
        raise BadInput(f"policy {policy.name!r} is not calibrated ({error}); run casewise calibrate first") from error
    if lost := [part for part in ("name", "needs", "states", "decide") if not hasattr(controller, part)]:
        raise BadInput(f"{policy.controller} is not a controller: no {' and no '.join(lost)}; see CONTRIBUTING.md")
    return controller
