"""Which policy, model folder and engine a user meant."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from casewise.archive.store import open_archive
from casewise.core.errors import BadInput, CasewiseError, MissingExtra, Refused
from casewise.core.records import Policy
from casewise.core.registry import Registry
from casewise.judge.policy import READY, controller_of, is_hybrid, read_policy
from casewise.run.model import Adaptation
from casewise.run.record import adaptation_of

ENGINES = Registry("engine", {"local": "casewise.run.local:LocalEngine", "ray": "casewise.run.ray:RayEngine"})

NO_POLICY = (
    "there is no policy, so nothing says when to trust an adaptation. Calibrate one: "
    "casewise record -m MODEL -i IMAGES -o ARCHIVE, then casewise calibrate ARCHIVE, then --policy ARCHIVE; "
    "or pass --policy m0 to segment without adaptation"
)


def chosen_policy(
    text: str | None, *, steps: int | None = None, objective: str | None = None
) -> tuple[Policy, Adaptation | None]:
    """A policy from its file, from the archive folder that holds it, or by name; and how that archive was recorded."""
    if text is None:
        raise BadInput(NO_POLICY)
    path = Path(text)
    if not path.exists():
        return _named(text, steps), None
    policy = read_policy(path)
    if steps is not None and steps != policy.steps:
        raise Refused(
            f"policy {policy.name!r} was fitted on {policy.steps} steps, --steps {steps} was asked; leave it out"
        )
    if not is_hybrid(policy):  # which decides only under a watch
        controller_of(policy)
    return policy, _recorded(path if path.is_dir() else path.parent, objective)


def _named(name: str, steps: int | None) -> Policy:
    if name not in READY and ("/" in name or name.endswith(".json")):
        raise BadInput(f"there is no policy at {name}; {NO_POLICY}")
    policy = READY[name]
    if name == "fixed-k":
        policy = replace(policy, options={"step": steps or policy.steps})
    if steps is not None and name != "m0":
        policy = replace(policy, steps=steps)
    try:
        controller_of(policy)
    except BadInput as error:
        raise BadInput(f"{error}; {NO_POLICY}") from error
    return policy


def _recorded(folder: Path, objective: str | None) -> Adaptation | None:
    """How the archive beside a policy was recorded; None where there is no archive."""
    try:
        archive = open_archive(folder)
    except CasewiseError:
        return None
    return adaptation_of(archive.configuration, typed=objective)


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
