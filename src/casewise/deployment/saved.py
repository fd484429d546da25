"""A deployment as one folder: policy, certificate, tuned weights and hashes; the model inside or beside it.

``deployment.json`` lists every file with its hash and names its model. A folder that was changed, or
that meets another model, is refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from casewise.adapt.adaptation import proposers_of
from casewise.adapt.model import Model, device_of
from casewise.adapt.objectives import check_named_in_file
from casewise.core.durable import file_sha256, json_sha256, write_json
from casewise.core.errors import BadInput, Mismatch, Refused, UnsafeInput
from casewise.core.json_records import UNFINISHED, from_plain, read_json
from casewise.core.records import Policy
from casewise.core.registry import is_address
from casewise.deployment import Deployment
from casewise.judge.certificates.certificate import (
    CERTIFICATE,
    Certificate,
    check_certificate,
    read_certificate,
    write_certificate,
)
from casewise.judge.policy import POLICY, READY, adapts, design_of, read_policy, write_policy
from casewise.study.deployed_measures import DeployedMeasures

DEPLOYMENT, MEASURES, MODEL = "deployment.json", "measures.json", "model"
TUNED: str = "tuned"
SCHEMA = 1
OPTIONS = ("contract", "force", "max_ram")  # fields of a Deployment that are saved in its folder


@dataclass(frozen=True)
class _Described:
    """The fields of deployment.json."""

    schema: int
    model: Mapping[str, Any]
    contract: str
    force: bool
    max_ram: int | None
    files: Mapping[str, str]
    sha256: str


def save(deployment: Deployment, folder: Path, *, copy_model: bool) -> Path:
    """Write a deployment; see :meth:`Deployment.save`."""
    if deployment.adapts and not (deployment.policy.adaptation or deployment.policy.ladders):
        raise BadInput(
            f"policy {deployment.policy.name!r} does not name its proposers, so it cannot be saved; "
            "calibrate the policy on an archive, or use casewise.fit"
        )
    folder.mkdir(parents=True, exist_ok=True)
    policy = deployment.policy
    for name, how in deployment.proposers.items():
        if how.tuned is not None and Path(how.tuned).resolve() != (folder / TUNED).resolve():
            shutil.copytree(how.tuned, folder / TUNED, dirs_exist_ok=True)
        if how.tuned is not None:
            policy = with_tuned_at(policy, name, TUNED)
    write_policy(folder / POLICY, policy)
    (folder / CERTIFICATE).unlink(missing_ok=True)  # a certificate of an earlier deployment does not hold for this one
    if deployment.certificate is not None:
        write_certificate(folder / CERTIFICATE, deployment.certificate)
    (folder / MEASURES).unlink(missing_ok=True)
    if deployment.measures is not None:
        write_json(folder / MEASURES, deployment.measures.as_dict())
    plain = _plain_model(deployment, folder, copy_model=copy_model)
    tuned = (folder / TUNED).rglob("*") if any(how.tuned for how in deployment.proposers.values()) else ()
    files = {
        path.relative_to(folder).as_posix(): file_sha256(path)
        for path in sorted([folder / POLICY, folder / CERTIFICATE, folder / MEASURES, *tuned])
        if path.is_file()
    }
    options = {name: getattr(deployment, name) for name in OPTIONS}
    content = {"schema": SCHEMA, "model": plain, **options, "files": files}
    write_json(folder / DEPLOYMENT, {**content, "sha256": json_sha256(content)})
    return folder


def _plain_model(deployment: Deployment, folder: Path, *, copy_model: bool) -> dict[str, Any]:
    """Describe the model for deployment.json."""
    bound = {
        "fingerprint": deployment.backbone.fingerprint,
        "loader": deployment.backbone.loader,
        "name": deployment.backbone.name,
    }
    if not isinstance(deployment.model, Model):
        if copy_model:
            raise BadInput("only a model folder can be copied; this model is a network in memory")
        return {**bound, "spec": None}
    model = deployment.model
    if copy_model:
        _copy_model(Path(model.spec), folder / MODEL)
    if copy_model or Path(model.spec).resolve() == (folder / MODEL).resolve():
        model = replace(model, spec=MODEL)
    elif Path(model.spec).exists():
        model = replace(model, spec=str(Path(model.spec).resolve()))
    plain = {name: value for name, value in asdict(model).items() if not name.startswith("trust")}
    return {**bound, **plain, "weights": None if model.weights is None else str(model.weights.resolve())}


def open_deployment(model: Any, policy: str | Path | None = None, **options: Any) -> Deployment:
    """Return the deployment that a user names: a saved folder, or a model with a policy.

    Args:
        model: A saved deployment, or a model as :class:`Deployment` takes it.
        policy: ``policy.json``, the archive that holds it, or ``"m0"``. Not needed for a saved deployment.
        **options: Fields of :class:`Deployment`; ``certificate`` may be a file, ``controller`` and ``objective`` are
            the addresses of a controller and a proposer of the user's own that the policy file names, ``max_slices``
            limits memory, ``model_at`` is the new path of the model of a saved deployment.

    Raises:
        BadInput: If there is neither a deployment nor a policy.
        Refused: If an uncertified policy is named beside a certified one.
    """
    slices = options.pop("max_slices", None)
    typed = {name: options.pop(name, None) for name in ("controller", "objective")}
    certificate, moved = options.pop("certificate", None), options.pop("model_at", None)
    if isinstance(certificate, (str, Path)):
        certificate = read_certificate(certificate)
    spec = model.spec if isinstance(model, Model) else model
    if isinstance(spec, (str, Path)) and is_deployment(spec):
        if policy is not None:
            raise BadInput(f"{spec} is a deployment with its own policy; leave --policy out")
        found = load(spec, model=moved, **typed, **_typed_for(model), **options)
        certificate = certificate or found.certificate
    elif policy is None:
        unfinished = isinstance(spec, (str, Path)) and (Path(spec) / "plan.json").is_file()
        raise BadInput(f"{spec} is {UNFINISHED}" if unfinished else NO_POLICY)
    elif moved is not None:
        raise BadInput(f"--model-at works only with a deployment, and {spec} is none; leave it out")
    else:
        chosen, beside = _policy_at(str(policy), typed["controller"], force=bool(options.get("force")))
        found = Deployment(model, chosen, proposers_of(chosen, typed=typed["objective"]), **options)
        certificate = certificate or beside
    found = replace(found, certificate=certificate)
    if slices is not None:
        limited = {name: replace(how, max_slices=slices) for name, how in found.proposers.items()}
        found = replace(found, proposers=limited)
    found.check()
    return found


NO_POLICY = (
    "there is no policy that decides between masks. Make a deployment from labelled cases: casewise fit -m MODEL -i "
    "IMAGES -l LABELS -o DEPLOYMENT, then give -m DEPLOYMENT; or pass --policy m0 for the model's own masks"
)
CERTIFIED_POLICY = "policy-certified.json"


def _policy_at(text: str, typed: str | None, *, force: bool) -> tuple[Policy, Certificate | None]:
    """Return a policy from its file, from an archive folder, or by name, and the certificate beside it."""
    path = Path(text)
    if not path.exists():
        if text not in READY and ("/" in text or text.endswith(".json")):
            raise BadInput(f"there is no policy at {text}; {NO_POLICY}")
        policy = design_of(text)
        if adapts(policy):
            raise BadInput(f"policy {text!r} is not calibrated; {NO_POLICY}")
        return policy, None
    folder = path if path.is_dir() else path.parent
    certified = folder / CERTIFIED_POLICY
    if path.is_dir() and certified.is_file():
        path = certified
    policy = read_policy(path, typed=typed)
    if not policy.name.endswith("-certified"):
        if certified.is_file() and not force:
            raise Refused(f"{certified} is certified and {path.name} is not; give {certified}, or add --set force=true")
        return policy, None
    if not (folder / CERTIFICATE).is_file():
        raise Mismatch(f"policy {policy.name!r} needs its certificate, and there is none at {folder / CERTIFICATE}")
    found = read_certificate(folder / CERTIFICATE)
    check_certificate(found, policy)
    return policy, found if found.feasible else None


def _typed_for(model: Any) -> dict[str, Any]:
    """Return the fields of a typed model that a saved deployment takes: this machine's device, and what is trusted."""
    if not isinstance(model, Model):
        return {}
    taken = ("device", "weights", "trust", "trust_bundle", "trust_architectures")
    plain = Model(model.spec)
    if own := [n for n in Model.__dataclass_fields__ if n not in taken and getattr(model, n) != getattr(plain, n)]:
        raise BadInput(f"{model.spec} is a deployment that fixes {', '.join(own)}; leave these options out")
    typed = {name: getattr(model, name) for name in taken}
    return {name: value for name, value in typed.items() if name == "device" or value}


def is_deployment(folder: str | Path) -> bool:
    """True if a folder holds a saved deployment."""
    return (Path(folder) / DEPLOYMENT).is_file()


def archive_of(folder: Path) -> Path:
    """Return the archive that a deployment of fit was calibrated on; any other folder is returned as it is.

    Cases that were set aside for a promise come first: the weights that new cases get have predicted them.
    """
    if not is_deployment(folder):
        return folder
    return next((place for name in ("held-out", "archive") if (place := folder / name).is_dir()), folder)


def load(
    folder: str | Path,
    *,
    model: Any = None,
    controller: str | None = None,
    objective: str | None = None,
    **options: Any,
) -> Deployment:
    """Read a deployment that was saved as a folder.

    Args:
        folder: The folder.
        model: Path of the model, or the network itself; default: the path at saving. Another model is refused.
        controller: Address of your own controller, if the policy names one: files may not name code to run.
        objective: Address of your own proposer, or other models as members.
        **options: Fields of :class:`Deployment` or of its :class:`~casewise.adapt.model.Model` that differ here, such
            as ``device``, ``watch`` or ``max_ram``.

    Returns:
        The deployment.

    Raises:
        BadInput: If the folder holds no deployment, or the model cannot be found.
        Mismatch: If a file was changed, or the model is another one.

    Example:
        >>> deployment = casewise.load("deployment/")  # doctest: +SKIP
        >>> deployment.predict("heart.nii.gz").mask  # doctest: +SKIP
    """
    folder = Path(folder)
    plain = read_description(folder)
    policy = read_policy(folder / POLICY, typed=controller)
    hows = proposers_of(policy, typed=objective, folder=folder)
    certificate = read_certificate(folder / CERTIFICATE) if CERTIFICATE in plain["files"] else None
    if MEASURES in plain["files"]:
        options.setdefault("measures", DeployedMeasures.from_dict(read_json(folder / MEASURES, "fit again")))
    facts = plain["model"]
    fields = {name: options.pop(name) for name in list(options) if name in Model.__dataclass_fields__}
    found = _model_of(folder, facts, model, fields)
    deployment = Deployment(
        found, policy, hows, certificate=certificate, folder=folder,
        **{**{name: plain[name] for name in OPTIONS}, **options},
    )  # fmt: skip
    own = deployment.backbone.fingerprint
    if own != facts["fingerprint"]:
        raise Mismatch(
            f"{folder} was fitted on model {facts['name']} with hash {facts['fingerprint']!s:.12}, this model has hash "
            f"{own[:12]}; give the model that it was fitted on, or fit again"
        )
    deployment.check()
    return deployment


def read_description(folder: Path) -> dict[str, Any]:
    """Read ``deployment.json`` and compare every file that it lists with its hash."""
    file = folder / DEPLOYMENT
    if not file.is_file():
        raise BadInput(f"{folder} is not a deployment (it has no {DEPLOYMENT}); make one with casewise fit")
    plain = read_json(file, "fit again")
    if plain.get("schema") != SCHEMA:
        raise Mismatch(f"{file} has schema {plain.get('schema')}, this version reads {SCHEMA}; fit again")
    from_plain(_Described, plain, str(file), "fit again")
    content = {name: value for name, value in plain.items() if name != "sha256"}
    if POLICY not in plain["files"] or not {"fingerprint", "name"} <= set(plain["model"]):
        raise BadInput(f"{file} does not list {POLICY} or its model; fit again")
    changed = ["deployment.json"] if plain["sha256"] != json_sha256(content) else []
    for name, known in plain["files"].items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise BadInput(f"{file} names {name!r}, which lies outside the folder; fit again")
        if not path.is_file() or file_sha256(path) != known:
            changed.append(name)
    if changed:
        raise Mismatch(f"{folder} was changed after it was written: hash mismatch of {', '.join(changed)}; fit again")
    return plain


def _model_of(folder: Path, facts: dict[str, Any], given: Any, fields: dict[str, Any]) -> Any:
    """Return the model of a saved deployment."""
    if given is not None and not isinstance(given, (str, Path)):
        return given
    spec = given or facts.get("spec")
    if spec is None:
        raise BadInput(
            f"{folder} was fitted on a network in memory; pass it: casewise.load(folder, model=network), or name the "
            "function that returns it: --model-at package.module:function --weights FILE"
        )
    spec = str(folder / MODEL) if given is None and spec == MODEL else str(spec)
    if given is None and is_code(spec):
        raise UnsafeInput(
            f"{folder} names the model {spec[:100]!r}, which is code to import; if you trust it, add "
            f"--model-at {spec[:100]}"
        )
    if "/" in spec and Path(spec).is_absolute() and not Path(spec).exists():
        raise BadInput(f"the model of {folder} is no longer at {spec}; name its folder with --model-at FOLDER")
    own = {name for name in Model.__dataclass_fields__ if name != "spec" and not name.startswith("trust")}
    written = {name: facts[name] for name in own & set(facts)}
    known = from_plain(Model, {**written, "spec": spec}, str(folder / DEPLOYMENT), "fit again")
    if known.device.startswith("cuda"):
        known = replace(known, device=device_of(None))  # this machine may have no GPU
    return replace(known, **fields)


OWN_NETWORKS = "casewise.adapt.networks:"
"""Factories that a saved deployment may name; others are code of the user's own."""


def is_code(spec: str) -> bool:
    """True if a model is an address of the user's own code."""
    return is_address(spec) and not spec.startswith(OWN_NETWORKS)  # also where a file has this name


def predict_command(folder: Path, model: Any, policy: Policy) -> str:
    """Return the command that segments new cases, with the code of the user's own that only a person may name."""
    words = f"casewise predict -i IN -o OUT -m {folder}"
    if getattr(model, "bare", False):  # only the caller knows how to scale files
        return f'casewise.load("{folder}", model=network).predict(image)'
    if not isinstance(model, Model):
        words += " --model-at package.module:function  # returns the same Module: docs/how-to/own-network.md"
    elif is_code(model.spec):
        words += f" --model-at {model.spec}"
    for options in (policy.adaptation, *policy.ladders.values()):
        try:
            check_named_in_file(options.get("objective", "tent"), typed=None, where="")
        except UnsafeInput:
            words += f" --set objective={options['objective']}"
    return words


def _copy_model(source: Path, target: Path) -> None:
    """Copy a model folder; refuse to mix it with existing files."""
    if not source.is_dir():
        raise BadInput(f"only a model folder can be copied, got {str(source)!r}")
    if source.resolve() == target.resolve():
        return
    there = {path.relative_to(target) for path in target.rglob("*")} if target.exists() else set()
    if strange := sorted(map(str, there - {path.relative_to(source) for path in source.rglob("*")})):
        raise BadInput(f"{target} holds {strange[0]}, which is not a file of the model; save to another folder")
    shutil.copytree(source, target, dirs_exist_ok=True)


def with_tuned_at(policy: Policy, ladder: str, folder: str) -> Policy:
    """Return the policy with its tuned weights at a path relative to the deployment's folder."""
    if policy.ladders:
        return replace(policy, ladders={**policy.ladders, ladder: {**policy.ladders[ladder], "tuned": folder}})
    return replace(policy, adaptation={**policy.adaptation, "tuned": folder})
