"""Evidence for certificates: the coordinate of each labelled case, and the loss of each action of a policy.

For a rollback cut the deployed harm grows with the cut, so conformal risk control certifies it directly.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from casewise.archive.store import Archive
from casewise.core.durable import text_sha256
from casewise.core.errors import BadInput, Overlap, Refused, TooFewCases
from casewise.core.records import Decision, Policy
from casewise.core.registry import Registry
from casewise.core.text import UNIT, pluralize
from casewise.judge import policy as policies
from casewise.judge.controllers.metadata import metadata_of
from casewise.judge.decide import replay_case
from casewise.judge.ledger import check_not_chosen
from casewise.judge.outcomes import deployed_rows, judged_share, outcomes

Floats = NDArray[np.float64]
Together = Collection[str] | None
ACCEPT = 1e-12  # a bound equal to alpha is valid; rounding must not reject it


@dataclass(frozen=True, eq=False)
class LossTable:
    """Losses in [0, 1] of n units (rows) under m settings (columns), the most conservative setting first."""

    losses: Floats  # (unit, setting)
    settings: Floats  # (setting,): rollback cuts ascending, or gate thresholds descending
    kept: Floats  # (setting,): share of cases (or regions) that each setting keeps, label-free

    def __post_init__(self) -> None:
        check_losses(self.losses)

    @property
    def units(self) -> int:
        """The n of every bound: independent units, which are clusters (patients), not volumes."""
        return len(self.losses)

    @property
    def risks(self) -> Floats:
        """Empirical risk of each setting."""
        return np.asarray(self.losses.mean(axis=0))

    @property
    def is_monotone(self) -> bool:
        """True if no unit's loss falls as settings get more permissive, which CRC needs."""
        return bool((np.diff(self.losses, axis=1) >= 0).all())


def check_losses(losses: ArrayLike) -> Floats:
    """Refuse losses outside [0, 1] or not finite: every bound here assumes the range."""
    array = np.asarray(losses, dtype=float)
    if array.size and not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
        raise BadInput("losses must be finite and in [0, 1]; drop undefined cases or rescale before certifying")
    return array


def check_level(name: str, level: float) -> float:
    """Refuse a promised risk or failure chance outside (0, 1)."""
    if not 0 < level < 1:
        raise BadInput(f"{name} must lie strictly between 0 and 1, got {level}")
    return float(level)


def check_within(within: str) -> None:
    """Refuse a way to join the losses of one patient that is not known."""
    if within not in ("mean", "max"):
        raise BadInput(f"losses of a cluster must be joined by 'mean' or 'max', got {within!r}")


def cluster_rows(losses: Floats, clusters: Sequence[Hashable] | None, within: str = "mean") -> Floats:
    """One row per cluster: the mean (or the worst) of its cases, so that rows are exchangeable.

    Two volumes of one patient are not exchangeable with two volumes of two patients; patients are. A mean or a
    maximum of monotone losses in [0, 1] is again one, so the same certificate holds per patient with n = patients.
    """
    check_within(within)
    if clusters is None:
        return losses
    if len(clusters) != len(losses):
        raise BadInput(f"need one cluster per case, got {len(clusters)} for {pluralize(len(losses), 'case')}")
    names, number = np.unique(np.asarray([str(name) for name in clusters]), return_inverse=True)
    join = np.mean if within == "mean" else np.max
    return np.stack([join(losses[number == k], axis=0) for k in range(len(names))])


def rollback_table(
    values: ArrayLike, losses: ArrayLike, *, clusters: Sequence[Hashable] | None = None, within: str = "mean"
) -> LossTable:
    r"""Losses :math:`L_i(c) = h_i 1[u_i < c]` at every jump point c: the distinct values ascending, then infinity.

    ``values`` are the calibration coordinates u, ``losses`` the loss h of the action for a kept case. A case is rolled
    back iff u >= c, so the first cut keeps nothing and the last keeps everything.

    >>> rollback_table([1.0, 2.0], [0.5, 1.0]).losses
    array([[0. , 0.5, 0.5],
           [0. , 0. , 1. ]])
    """
    u, h = np.asarray(values, dtype=float), check_losses(losses)
    if u.ndim != 1 or u.shape != h.shape or not np.isfinite(u).all():
        raise BadInput(f"need one finite coordinate and one loss per case, got shapes {u.shape} and {h.shape}")
    cuts = np.append(np.unique(u), np.inf)
    kept = u[:, None] < cuts[None, :]
    return LossTable(cluster_rows(h[:, None] * kept, clusters, within), cuts, kept.mean(axis=0))


LOSSES = Registry("loss", {name: name for name in ("ha", "harmed", "dice", "worse-voxels")})
"""What can be certified of a router; each is defined for every labelled case (docs/explanation/certificates.md)."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """The coordinate of each labelled case, and the loss of each action of a router."""

    ids: tuple[str, ...]
    clusters: tuple[str, ...]  # hashed, so that their order is fixed in advance and does not depend on the labels
    values: Floats  # the coordinate u of the probe step
    low: Mapping[str, Floats]  # loss name -> loss of the low action, in [0, 1]; also "gain", the metric's change
    mid: Mapping[str, Floats]
    own: Mapping[str, Floats]  # losses of the action that the policy's own low/mid cut (of the case's group) chooses

    def loss(self, name: str) -> Floats:
        """Return the worse loss of the two actions that a kept case may get: valid wherever the low/mid cut falls."""
        return np.maximum(self.low[name], self.mid[name])


def router_evidence(
    archive: Archive, policy: Policy, *, overlap: bool = True, margin: float = 0.0, together: Together = ()
) -> Evidence:
    """Return the evidence for a router from all labelled cases; ``overlap=False`` refuses its calibration cases.

    ``together`` names the designs that are certified together; None: the design was fixed in advance.
    ``margin`` is the loss of the metric that a case may have before it counts as harmed.
    """
    check_router(policy)
    policies.check_binding(policy, archive.binding)
    check_not_chosen(archive, policy, together)
    if policies.among_candidates(policy):
        return _choice_evidence(archive, policy, margin)
    if not overlap:
        policies.check_held_out(policy, archive.entries.values())
    if policy.options.get("coordinate") == "risk" and set(policy.calibration_cases) & set(archive.ids):
        raise Refused(
            "the coordinate 'risk' was standardized on these cases, so they are not exchangeable with new ones; "
            "certify on other labelled cases or calibrate with coordinate 'delta' or 'regions'"
        )
    ids, costs = _labelled(archive), outcomes(archive).set_index(["case", "step", "shrink"])
    plain = replace(policy, groups={})
    kept = [policies.with_cuts(plain, cut_low=cut, cut_high=np.inf) for cut in (np.inf, -np.inf)]  # all low, all mid
    kept.append(policies.with_cuts(policy, cut_high=np.inf))  # its own low/mid cuts
    low, mid, own = (
        [replay_case(archive, router, case) for case in ids] for router in map(policies.controller_of, kept)
    )
    return Evidence(
        ids,
        tuple(cluster_of(archive, case) for case in ids),
        np.array([_value(decision) for decision in low]),
        *(_losses(costs, decisions, margin) for decisions in (low, mid, own)),
    )


def check_router(policy: Policy) -> None:
    """Refuse a policy that does not roll back above a cut."""
    if policies.is_hybrid(policy):
        raise Refused(
            f"policy {policy.name!r} is hybrid: its cut-points change with new cases, so they cannot be "
            f"certified; certify a policy without hybrid"
        )
    hard = dict(policy.options.get("hard", {"action": "rollback"}))
    if policies.among_candidates(policy):
        return
    if not (metadata_of(policies.controller_kind(policy)).adapts or policy.cleanup):
        raise Refused(f"policy {policy.name!r} keeps M0 for every case, so there is nothing to certify")
    if not metadata_of(policies.controller_kind(policy)).is_router or hard.get("action") != "rollback":
        raise BadInput(
            f"a rollback certificate needs a router whose hard bucket rolls back, got policy {policy.name!r} "
            f"({policy.controller}); calibrate one of cardiac, prostate, driving, default or stop-router"
        )


def _check_kept_aside(policy: Policy, archive: Archive) -> None:
    """Refuse labels that chose or fitted the policy, and name the remedy."""
    try:
        policies.check_held_out(policy, archive.entries.values())
    except Overlap as error:
        raise Overlap(
            f"{error}. Keep {UNIT[1]} aside that calibrate does not use, or let certify split them: "
            "casewise certify ARCHIVE --policy default --method ltt"
        ) from error


def _choice_evidence(archive: Archive, policy: Policy, margin: float) -> Evidence:
    """Return the evidence for a policy that chooses among all candidates: losses, and the size of the edit.

    The cut is on the size of the edit: a larger edit goes back to M0, so losses only grow with the cut. A policy that
    labels fitted or chose is refused on the same cases or patients.
    """
    if policies.is_learned(policy):
        _check_kept_aside(policy, archive)
    rows = _deployed_table(archive, replace(policy, options={**policy.options, "cut_high": np.inf}))
    ids, values = tuple(rows["case"]), rows["value"].to_numpy(float)
    if not np.isfinite(values).all():
        lost = rows.loc[~np.isfinite(values), "case"].iloc[0]
        raise BadInput(f"case {lost} has no finite size of its edit; record it again")
    losses = _row_losses(rows, rows["change"].to_numpy(float), margin)
    return Evidence(ids, tuple(cluster_of(archive, case) for case in ids), values, losses, losses, losses)


def _deployed_table(archive: Archive, policy: Policy) -> pd.DataFrame:
    """Return the state that a policy deploys for each labelled case, with its metric and losses; flags change
    neither."""
    judge = replace(policies.judge_of(policy), flag=None)
    decided = [replay_case(archive, judge, case) for case in _labelled(archive)]
    return deployed_rows(archive, decided, judge.controller)


def cluster_of(archive: Archive, case_id: str) -> str:
    """Return the independent unit of a case (its patient or sequence, else itself), hashed."""
    return text_sha256(archive.entry(case_id).cluster or case_id)


def deployed_numbers(archive: Archive, policy: Policy, *, margin: float = 0.0) -> dict[str, float]:
    """Return the means of every loss, of the gain and of the kept share over the labelled cases of a policy.

    The gain is the mean over the cases whose metric is defined. ``judged`` is the share of the deployed edit that HA
    judged; it is left out where nothing was changed.
    """
    rows = _deployed_table(archive, policy)
    found = _row_losses(rows, rows["change"].to_numpy(float), margin)
    found["gain"] = found["gain"][np.isfinite(found["gain"])]
    numbers = {name: float(values.mean()) if len(values) else 0.0 for name, values in found.items()}
    numbers["kept"] = float((~rows["rolled_back"]).mean())
    judged = judged_share(rows)
    return numbers if judged is None else {**numbers, "judged": judged}


def _labelled(archive: Archive) -> tuple[str, ...]:
    labelled = tuple(case for case in archive.ids if archive.entry(case).labelled)
    if not labelled:
        raise TooFewCases(f"{archive.path} has no labelled case; a certificate needs labels")
    return labelled


def _losses(frame: pd.DataFrame, decisions: Sequence[Decision], margin: float) -> dict[str, Floats]:
    """Losses of the state that each decision deploys."""
    rows = frame.loc[[(one.case_id, one.state.step, one.state.shrink) for one in decisions]]
    source = frame.loc[[(one.case_id, 0, 0.0) for one in decisions], "metric"].to_numpy(float)
    return _row_losses(rows, rows["metric"].to_numpy(float) - source, margin)


def _row_losses(rows: pd.DataFrame, change: Floats, margin: float) -> dict[str, Floats]:
    """Losses in [0, 1] of each row, defined for all of them, and the change of the metric.

    A label without foreground has no Dice. Such a case is harmed, and loses 1, where more voxels became wrong than
    right: adaptation drew something where nothing is.
    """
    worse = (rows["worse_voxels"] > rows["better_voxels"]).to_numpy(float)
    defined = np.isfinite(change)
    return {
        "ha": rows["ha"].to_numpy(float),
        "harmed": np.where(defined, change < -margin, worse).astype(float),
        "dice": np.where(defined, np.maximum(0.0, -np.where(defined, change, 0.0)), worse),
        "worse-voxels": rows["worse_voxels"].to_numpy(float),
        "gain": change,
    }


def _value(decision: Decision) -> float:
    if decision.value is None or not np.isfinite(decision.value):
        raise BadInput(f"case {decision.case_id} has no finite {decision.coordinate}; record it again")
    return float(decision.value)
