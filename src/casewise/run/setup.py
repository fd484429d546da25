"""From choices to work: everything that can be refused is refused here, before the first case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from casewise.adapt.parameters import select
from casewise.core.errors import BadInput
from casewise.core.records import Policy
from casewise.data.folders import CaseFiles, list_cases, part_of, with_groups, with_labels
from casewise.judge.policy import check_binding
from casewise.run.entry import run_key
from casewise.run.folder import orientation_findings
from casewise.run.model import Adaptation, Model
from casewise.run.outputs import Layout
from casewise.run.parts import part_from
from casewise.run.predict import PredictCase

CONTRACTS = ("refuse", "warn", "off")


def gathered_cases(
    model: Model,
    images: Path,
    *,
    labels: Path | None = None,
    groups: Path | None = None,
    parts: tuple[int | None, int | None] = (None, None),
    environment: Mapping[str, str] | None = None,
) -> tuple[CaseFiles, ...]:
    """The cases of a folder that this process takes, with labels and groups where there are any."""
    cases = list_cases(images, ending=model.load().ending)
    if labels is not None:
        cases = with_labels(cases, labels)
    if groups is not None:
        cases = with_groups(cases, groups)
    number, own = part_from(*parts, environment or {})
    return part_of(cases, parts=number, part=own)


def prediction_work(
    model: Model, adaptation: Adaptation, policy: Policy, cases: Sequence[CaseFiles], out: Path, **options: Any
) -> PredictCase:
    """The work of a prediction run; a policy of another model, objective or loader is refused.

    The cases go in without their labels: what decides cannot even find them.
    """
    if options.get("contract", "refuse") not in CONTRACTS:
        raise BadInput(f"--contract is one of {', '.join(CONTRACTS)}, got {options['contract']!r}")
    backbone = model.load()
    binding = adaptation.binding(backbone)
    if policy.controller != "m0":
        check_binding(policy, binding)
        select(backbone.network, adaptation.parameters)
    work = PredictCase(
        model=model,
        adaptation=adaptation,
        policy=policy,
        layout=Layout(out, backbone.ending or _ending_for(cases)),
        cases={files.id: replace(files, label=None) for files in cases},
        key="",
        known=orientation_findings(cases, backbone),
        **options,
    )
    if work.keep_header and not work.layout.ending.endswith((".nii", ".nii.gz")):
        raise BadInput(f"--keep-header is for NIfTI, the masks of this model are {work.layout.ending}; leave it out")
    settings = {
        "seed": adaptation.seed,
        "steps": policy.steps,
        "device": model.device,
        "candidates": work.save_candidates,
        "overlays": work.draw is not None,
        "contract": work.contract,
        "keep_header": work.keep_header,
    }
    return replace(work, key=run_key(binding, policy, settings))


def _ending_for(cases: Sequence[CaseFiles]) -> str:
    volumes = cases and cases[0].images[0].name.lower().endswith((".nii", ".nii.gz"))
    return ".nii.gz" if volumes else ".png"
