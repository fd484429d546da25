"""From what a user names to what runs: the policy, its certificate and watch, the cases, the engine, the deployment."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from casewise.adapt.adaptation import Adaptation, adaptation_of
from casewise.archive.store import open_archive
from casewise.core.brief import UNIT, counted
from casewise.core.errors import BadInput, CasewiseError, Mismatch, MissingExtra, Refused
from casewise.core.records import Policy
from casewise.core.registry import Registry
from casewise.data.dicom import is_dicom_folder
from casewise.data.folders import CaseFiles, list_cases, part_of, table_for, with_groups, with_labels
from casewise.deployment import Deployment, Model
from casewise.judge.certificates.certificate import CERTIFICATE, Certificate, check_certificate, read_certificate
from casewise.judge.controllers import takes
from casewise.judge.monitors.watch import Watching
from casewise.judge.policy import READY, adapts, controller_kind, controller_of, design_of, is_hybrid, read_policy
from casewise.run.dicom import series_cases, write_series

ENGINES = Registry("engine", {"local": "casewise.run.local:LocalEngine", "ray": "casewise.run.ray:RayEngine"})
CERTIFIED = "-certified"

NO_POLICY = (
    "there is no policy, so nothing says when to trust another mask than the model's own. Calibrate one on labelled "
    "cases: casewise record -m MODEL -i IMAGES -l LABELS -o ARCHIVE --propose views:mri (or photo, driving, ct), then "
    "casewise calibrate ARCHIVE --policy default, then --policy ARCHIVE; or pass --policy m0 for the model's own masks"
)


def assembled(
    model: Model,
    policy: str | None,
    *,
    asked: Mapping[str, Any],
    controller: str | None = None,
    certificate: Path | None = None,
    watch: Path | None = None,
    contract: str = "refuse",
    max_ram: int | None = None,
    force: bool = False,
) -> Deployment:
    """A deployment, checked: everything that can be refused is refused here, before the first case.

    ``asked`` are fields of an :class:`Adaptation`; all others are those that the policy's cases were adapted with.
    """
    decides, fitted = chosen_policy(
        policy, steps=asked.get("steps"), objective=asked.get("objective"), controller=controller
    )
    promised = certificate_for(decides, policy, certificate)
    watching = None if watch is None else Watching(watch)
    if decides.ladders:
        ladders = _ladders_of(decides, asked)
        deployment = Deployment(
            model, tuple(ladders.values()), decides, promised, watching, contract, max_ram, tuple(ladders), force
        )
        _checked(deployment, model)
        return deployment
    how = replace(fitted or Adaptation(), **{**asked, "steps": decides.steps})
    if how.forward_only is None and decides.name == "consensus" and decides.binding is None:
        raise BadInput("policy consensus deploys the consensus of several readings; name them: --objective views:mri")
    if how.forward_only is not None and adapts(decides):
        decides = _over_readings(decides, how.horizon(model.load()))
        how = replace(how, steps=decides.steps)
    deployment = Deployment(model, (how,), decides, promised, watching, contract, max_ram, force=force)
    _checked(deployment, model)
    return deployment


def _checked(deployment: Deployment, model: Model) -> None:
    """Check a deployment; where nnU-Net's mirroring may be all that differs, the refusal says so first."""
    try:
        deployment.check()
    except Mismatch as error:
        if _reads_views_otherwise(deployment):
            word = "--mirrored-views" if deployment.adaptation.mirrored_views else "--unmirrored-views"
            raise Mismatch(f"the policy read its views otherwise: leave {word} out. In full: {error}") from error
        fitted = "" if deployment.policy.binding is None else deployment.policy.binding.loader
        if "mirroring=" not in fitted or ("mirroring=None" in fitted) != model.mirroring:
            raise
        said = "without mirroring: add --disable_tta" if model.mirroring else "with mirroring: leave --disable_tta out"
        raise Mismatch(f"the cases of this policy were recorded {said}. In full: {error}") from error


def _reads_views_otherwise(deployment: Deployment) -> bool:
    """Whether the policy says how its views were mirrored, and this run was asked to read them otherwise."""
    fitted = deployment.policy.adaptation.get("mirrored_views")
    return fitted is not None and fitted != deployment.adaptation.mirrored_views


def _ladders_of(policy: Policy, asked: Mapping[str, Any]) -> dict[str, Adaptation]:
    """How the candidates of every ladder are made that a policy reads; it brings all of them along."""
    typed = asked.get("objective")
    if typed is not None and typed not in [plain.get("objective") for plain in policy.ladders.values()]:
        raise BadInput(
            f"policy {policy.name!r} brings its own candidates along, those of {', '.join(policy.ladders)}; leave "
            f"--objective {typed} out"
        )
    where, more = (
        f"policy {policy.name!r}",
        {name: value for name, value in asked.items() if name not in ("objective", "steps")},
    )
    return {
        name: replace(Adaptation.from_plain(plain, typed=typed, where=where), **more)
        for name, plain in policy.ladders.items()
    }


def _over_readings(policy: Policy, steps: int) -> Policy:
    """An uncalibrated policy over the readings of a case, whose number the model and its views say."""
    if policy.binding is not None:
        return policy
    if policy.name == "consensus":
        return replace(policy, steps=steps, options={**policy.options, "consensus": str(steps), "steps": steps})
    if policy.name == "settled":
        return replace(policy, steps=steps, options={**policy.options, "cap": steps})
    return replace(policy, steps=steps)


def chosen_policy(
    text: str | None, *, steps: int | None = None, objective: str | None = None, controller: str | None = None
) -> tuple[Policy, Adaptation | None]:
    """A policy from its file, from the archive folder that holds it, or by name; and how its cases were adapted."""
    if text is None:
        raise BadInput(NO_POLICY)
    path = Path(text)
    if not path.exists():
        return _named(text, steps), None
    policy = read_policy(path, typed=controller)
    if steps is not None and steps != policy.steps:
        raise Refused(
            f"policy {policy.name!r} was fitted on {counted(policy.steps, 'step')}, --steps {steps} was asked; "
            f"leave it out"
        )
    if not is_hybrid(policy):  # which decides only under a watch
        controller_of(policy)
    folder = path if path.is_dir() else path.parent
    if policy.ladders:
        return policy, None
    fitted = None if policy.adaptation else _recorded(folder, objective, policy.ladder)
    return policy, fitted or adaptation_of(policy, typed=objective)


def _named(name: str, steps: int | None) -> Policy:
    if name not in READY and ("/" in name or name.endswith(".json")):
        raise BadInput(f"there is no policy at {name}; {NO_POLICY}")
    policy = design_of(name)
    if name == "consensus":  # of how many readings, the model and its views say later
        return replace(policy, options={"consensus": "1", "steps": 1})
    if takes(controller_kind(policy), "step"):
        policy = replace(policy, options={"step": steps or policy.steps})
    if steps is not None and adapts(policy):
        policy = replace(policy, steps=steps)
    try:
        controller_of(policy)
    except BadInput as error:
        raise BadInput(f"{error}; {NO_POLICY}") from error
    return policy


def _recorded(folder: Path, objective: str | None, ladder: str) -> Adaptation | None:
    """How the archive beside a policy of casewise 0.1 was recorded; None where there is no archive."""
    try:
        archive = open_archive(folder, ladder=ladder or None).one()
    except CasewiseError:
        return None
    plain = archive.configuration.get("adaptation")
    return None if plain is None else Adaptation.from_plain(plain, typed=objective)


def certificate_for(policy: Policy, named: str | None, certificate: Path | None) -> Certificate | None:
    """The certificate that a run stands under; ``Deployment.check`` compares it with everything that it is bound to.

    One that lies beside a certified policy must belong to it, and may be the record of a failed attempt, whose policy
    deploys M0; a certified policy without its certificate is refused.
    """
    if certificate is not None:
        return read_certificate(certificate)
    if not policy.name.endswith(CERTIFIED):
        return None
    beside = Path(named or ".").parent / CERTIFICATE
    if not beside.is_file():
        raise Mismatch(
            f"policy {policy.name!r} comes with a certificate, and there is none at {beside}; keep the two together"
        )
    found = read_certificate(beside)
    check_certificate(found, policy)
    return found if found.feasible else None


def model_folder(dataset: str, configuration: str, plans: str, trainer: str, environment: Mapping[str, str]) -> Path:
    """nnU-Net's ``nnUNet_results/DatasetXXX_Name/TRAINER__PLANS__CONFIG`` from its own flags."""
    root = environment.get("nnUNet_results")
    if not root:
        raise BadInput("-d needs the environment variable nnUNet_results; set it, or give the model folder with -m")
    pattern = f"Dataset{int(dataset):03d}_*" if dataset.isdigit() else dataset
    found = sorted(Path(root).glob(f"{pattern}/{trainer}__{plans}__{configuration}"))
    if len(found) != 1:
        raise BadInput(f"{pattern}/{trainer}__{plans}__{configuration} names {len(found)} folders in {root}; use -m")
    return found[0]


def chosen_engine(name: str, *, address: str | None = None, **options: Any) -> Any:
    """An engine by name, imported when it is asked for; only Ray has an address to join."""
    module, _, kind = ENGINES[name].partition(":")
    if address is not None:
        if name != "ray":
            raise BadInput(f"--address {address} is a Ray cluster; add --engine ray")
        options["address"] = address
    try:
        return getattr(importlib.import_module(module), kind)(**options)
    except ImportError as error:
        raise MissingExtra(f"engine {name} cannot be imported ({error}); pip install 'casewise[{name}]'") from error


def _described_beside(cases: tuple[CaseFiles, ...], table: Path) -> tuple[tuple[CaseFiles, ...], str]:
    """Cases as a table that nobody named describes them, and a sentence about it; as they were if it does not fit."""
    try:
        described = with_groups(cases, table)
    except BadInput as error:
        return cases, f"{table} is not used: {error}. Mend it, or name another table with --groups"
    patients = len({files.cluster or files.id for files in described})
    of = f"{counted(len(described), 'case')} of {counted(patients, *UNIT)}"
    return described, f"{table} says which {UNIT[0]} and which group a case belongs to ({of})"


def gathered_cases(
    model: Model,
    images: Path,
    *,
    labels: Path | None = None,
    groups: Path | None = None,
    parts: tuple[int | None, int | None] = (None, None),
    environment: Mapping[str, str] | None = None,
    keep: Path | None = None,
    refused: dict[str, str] | None = None,
    channels: Sequence[str] = (),
    notes: list[str] | None = None,
) -> tuple[CaseFiles, ...]:
    """The cases of a folder that this process takes, with labels and groups where there are any.

    Without ``groups`` a ``cases.csv`` in the folder or one level above it is read, if it has all the cases; ``notes``
    is told so.

    The series of a DICOM folder are written as NIfTI below ``keep``; ``refused`` is told which cannot be read, and why.
    ``channels`` says by description which series of a study is which channel.
    """
    series = is_dicom_folder(images)
    if channels and not series:
        raise BadInput(f"--channels names DICOM series, and {images} holds none; leave it out")
    if series:
        if keep is None:
            raise BadInput(f"{images} holds DICOM, which this command does not take; casewise predict and record do")
        backbone = model.load()
        wanted = backbone.expects.channels
        cases, problems = series_cases(images, keep, ending=backbone.ending, channels=channels, wanted=wanted)
        (refused if refused is not None else {}).update(problems)
    else:
        cases = list_cases(images, ending=model.load().ending, links=True)
    if labels is not None:
        cases = with_labels(cases, labels)
    beside = table_for(images) if groups is None and not series else None
    if groups is not None:
        cases = with_groups(cases, groups)
    elif beside is not None:
        cases, said = _described_beside(cases, beside)
        (notes if notes is not None else []).append(said)
    number, own = part_from(*parts, environment or {})
    cases = part_of(cases, parts=number, part=own)
    if series:
        cases, problems = write_series(images, cases, channels=channels)
        (refused if refused is not None else {}).update(problems)
    return cases


def part_from(num_parts: int | None, part_id: int | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """(number of parts, own part). Flags win; without flags a SLURM array of tasks is one part for each task.

    >>> part_from(None, None, {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "1"})
    (4, 2)
    """
    if num_parts is not None or part_id is not None:
        return num_parts or 1, part_id or 0
    count = environment.get("SLURM_ARRAY_TASK_COUNT")
    if count is None:
        return 1, 0
    try:
        first = int(environment.get("SLURM_ARRAY_TASK_MIN", "0"))
        step = int(environment.get("SLURM_ARRAY_TASK_STEP", "1"))
        return int(count), (int(environment["SLURM_ARRAY_TASK_ID"]) - first) // step
    except (KeyError, ValueError) as error:
        raise BadInput(f"the SLURM array variables are incomplete ({error}); pass -num_parts and -part_id") from error
