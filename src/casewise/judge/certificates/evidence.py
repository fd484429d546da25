"""From an archive and a policy to what certificates read: coordinates, and the loss of each possible action."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from casewise.archive.store import Archive
from casewise.core.durable import text_sha256
from casewise.core.errors import BadInput, Refused, TooFewCases
from casewise.core.records import Controller, Policy, State, Verdict
from casewise.judge.certificates.loss_table import Floats, policy_envelope
from casewise.judge.controllers.about import about
from casewise.judge.deciding import decision_of
from casewise.judge.outcomes import deployed, judged_share, outcomes
from casewise.judge.policy import (
    among_candidates,
    check_binding,
    check_held_out,
    controller_kind,
    controller_of,
    is_hybrid,
)

LOSSES = ("ha", "harmed", "dice", "worse-voxels")
"""What can be certified of a router; each is defined for every labelled case (docs/explanation/certificates.md)."""
UNFITTED = ("consensus", "highest-agreement", "medoid")
"""Designs that no label chose or fitted: they may be certified on the cases that they were calibrated on."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What calibration says about a router: the coordinate of each case, and what each action would cost it."""

    ids: tuple[str, ...]
    clusters: tuple[str, ...]  # hashed, so that their order is fixed in advance and says nothing
    values: Floats  # the coordinate u of the probe step
    low: Mapping[str, Floats]  # loss name -> loss of the low action, in [0, 1]; also "gain", the metric's change
    mid: Mapping[str, Floats]
    own: Mapping[str, Floats]  # of the action that the policy's own low/mid cut (of the case's group) chooses

    def loss(self, name: str) -> Floats:
        """The policy envelope (2.3 b): the worse of the two actions that a kept case may get."""
        return policy_envelope(self.low[name], self.mid[name])


def router_evidence(archive: Archive, policy: Policy, *, overlap: bool = True, margin: float = 0.0) -> Evidence:
    """Evidence for a router from all labelled cases; with ``overlap=False`` its own calibration cases are refused.

    ``margin`` is the loss of the metric that a case may have before it counts as harmed.
    """
    check_router(policy)
    check_binding(policy, archive.binding)
    if among_candidates(policy):
        return _choice_evidence(archive, policy, margin)
    if not overlap:
        check_held_out(policy, archive.entries.values())
    if policy.options.get("coordinate") == "risk" and set(policy.calibration_cases) & set(archive.ids):
        raise Refused(
            "the coordinate 'risk' was standardized on these cases, so they are not exchangeable with new ones; "
            "certify on other labelled cases or calibrate with coordinate 'delta' or 'regions'"
        )
    ids, costs = _scored(archive)
    low, mid = (_forced(policy, cut) for cut in (np.inf, -np.inf))
    own = controller_of(_keeping(policy))
    verdicts = {case: verdict_of(archive, low, case) for case in ids}
    return Evidence(
        ids,
        tuple(cluster_of(archive, case) for case in ids),
        np.array([_value(case, verdicts[case]) for case in ids]),
        _losses(costs, {case: verdict.state for case, verdict in verdicts.items()}, margin),
        _losses(costs, {case: verdict_of(archive, mid, case).state for case in ids}, margin),
        _losses(costs, {case: verdict_of(archive, own, case).state for case in ids}, margin),
    )


def check_router(policy: Policy) -> None:
    """Only a policy that rolls back above a cut can be certified by its cut."""
    if is_hybrid(policy):
        raise Refused(
            f"policy {policy.name!r} is hybrid: its cut-points are a function of the stream, so no calibration can "
            f"certify them; certify the seed-only policy"
        )
    hard = dict(policy.options.get("hard", {"action": "rollback"}))
    if among_candidates(policy):
        return
    if not about(controller_kind(policy)).is_router or hard.get("action") != "rollback":
        raise BadInput(
            f"a rollback certificate needs a router whose hard bucket rolls back, got policy {policy.name!r} "
            f"({policy.controller}); calibrate one of cardiac, prostate, driving, default or stop-router"
        )


def _choice_evidence(archive: Archive, policy: Policy, margin: float) -> Evidence:
    """Of a policy that chooses among all candidates: what is deployed if kept, and the size of its edit.

    The cut is on the size of the edit: a larger one goes back to M0, so losses only grow with the cut. What labels
    chose (a fitted design, or the best of several) is refused on the same cases or patients.
    """
    if policy.name not in UNFITTED:
        check_held_out(policy, archive.entries.values())
    rows = _choice_rows(archive, replace(policy, options={**policy.options, "cut_high": np.inf}))
    ids, values = tuple(rows["case"]), rows["value"].to_numpy(float)
    if not np.isfinite(values).all():
        lost = rows.loc[~np.isfinite(values), "case"].iloc[0]
        raise BadInput(f"case {lost} has no finite size of its edit; record it again")
    losses = _row_losses(rows, rows["change"].to_numpy(float), margin)
    return Evidence(ids, tuple(cluster_of(archive, case) for case in ids), values, losses, losses, losses)


def _choice_rows(archive: Archive, policy: Policy) -> pd.DataFrame:
    """What a policy that chooses among candidates deploys for each labelled case, and what that costs."""
    ids, _ = _scored(archive)
    controller = controller_of(policy)
    decided = [decision_of(archive, controller, case) for case in ids]
    return deployed(outcomes(archive), decided, archive=archive, controller=controller)


def verdict_of(archive: Archive, controller: Controller, case_id: str) -> Verdict:
    """What a controller decides about a recorded case."""
    for step in range(1, archive.steps + 1):
        verdict = controller.decide(archive.observation(case_id, step))
        if verdict is not None:
            return verdict
    raise BadInput(f"policy asks for more than the {archive.steps} recorded steps of case {case_id}; record more steps")


def cluster_of(archive: Archive, case_id: str) -> str:
    """The independent unit of a case (its patient or sequence, else itself), hashed."""
    return text_sha256(archive.entry(case_id).cluster or case_id)


def deployed_losses(
    archive: Archive, policy: Policy, *, margin: float = 0.0
) -> tuple[tuple[str, ...], dict[str, Floats]]:
    """What a policy really does to each labelled case: every loss, the metric's gain, and whether it is kept."""
    if among_candidates(policy):
        rows = _choice_rows(archive, policy)
        found = _row_losses(rows, rows["change"].to_numpy(float), margin)
        return tuple(rows["case"]), {**found, "kept": (~rows["rolled_back"]).to_numpy(float)}
    ids, costs = _scored(archive)
    controller = controller_of(policy)
    states = {case: verdict_of(archive, controller, case).state for case in ids}
    kept = np.array([float(state.step > 0) for state in states.values()])
    return ids, {**_losses(costs, states, margin), "kept": kept}


def deployed_numbers(archive: Archive, policy: Policy, *, margin: float = 0.0) -> dict[str, float]:
    """The means of :func:`deployed_losses`, and the share of the deployed edit that HA judged.

    The gain is the mean over the cases whose metric is defined.
    """
    if among_candidates(policy):
        rows = _choice_rows(archive, policy)
        made = _row_losses(rows, rows["change"].to_numpy(float), margin)
        made["gain"] = made["gain"][np.isfinite(made["gain"])]
        told = {name: float(values.mean()) if len(values) else 0.0 for name, values in made.items()}
        told["kept"] = float((~rows["rolled_back"]).mean())
        share = judged_share(rows)
        return told if share is None else {**told, "judged": share}
    ids, costs = _scored(archive)
    controller = controller_of(policy)
    states = {case: verdict_of(archive, controller, case).state for case in ids}
    found = _losses(costs, states, margin)
    found["gain"] = found["gain"][np.isfinite(found["gain"])]
    numbers = {name: float(values.mean()) if len(values) else 0.0 for name, values in found.items()}
    numbers["kept"] = float(np.mean([state.step > 0 for state in states.values()]))
    judged = judged_share(costs.loc[[(case, state.step, state.shrink) for case, state in states.items()]])
    return numbers if judged is None else {**numbers, "judged": judged}


def _scored(archive: Archive) -> tuple[tuple[str, ...], pd.DataFrame]:
    """The labelled cases, none left out, and what every state of them costs."""
    labelled = tuple(case for case in archive.ids if archive.entry(case).labelled)
    if not labelled:
        raise TooFewCases(f"{archive.path} has no labelled case; a certificate needs labels")
    columns = ["metric", "ha", "unscored", "area", "worse_voxels", "better_voxels"]
    return labelled, outcomes(archive).set_index(["case", "step", "shrink"])[columns]


def _losses(frame: pd.DataFrame, states: Mapping[str, State], margin: float = 0.0) -> dict[str, Floats]:
    """Losses in [0, 1] of the given state of each case, defined for all of them.

    A label without foreground has no Dice. Such a case is harmed, and loses 1, where more voxels became wrong than
    right: adaptation drew something where nothing is.
    """
    rows = frame.loc[[(case, state.step, state.shrink) for case, state in states.items()]]
    source = frame.loc[[(case, 0, 0.0) for case in states], "metric"].to_numpy(float)
    return _row_losses(rows, rows["metric"].to_numpy(float) - source, margin)


def _row_losses(rows: pd.DataFrame, change: Floats, margin: float) -> dict[str, Floats]:
    worse = (rows["worse_voxels"] > rows["better_voxels"]).to_numpy(float)
    defined = np.isfinite(change)
    return {
        "ha": rows["ha"].to_numpy(float),
        "harmed": np.where(defined, change < -margin, worse).astype(float),
        "dice": np.where(defined, np.maximum(0.0, -np.where(defined, change, 0.0)), worse),
        "worse-voxels": rows["worse_voxels"].to_numpy(float),
        "gain": change,
    }


def _forced(policy: Policy, cut_low: float) -> Controller:
    """The router that keeps every case, all as low (cut at infinity) or all as mid (cut at minus infinity)."""
    options: dict[str, Any] = {**policy.options, "cut_low": cut_low, "cut_high": np.inf}
    options.pop("inference", None)
    return controller_of(replace(policy, options=options, groups={}))


def _keeping(policy: Policy) -> Policy:
    """The policy with its own low/mid cuts, that never rolls back."""
    groups = {name: {**more, "cut_high": np.inf} for name, more in policy.groups.items()}
    return replace(policy, options={**policy.options, "cut_high": np.inf}, groups=groups)


def _value(case_id: str, verdict: Verdict) -> float:
    if verdict.value is None or not np.isfinite(verdict.value):
        raise BadInput(f"case {case_id} has no finite {verdict.coordinate}; record it again")
    return float(verdict.value)
