"""Certificates for the region gate: the paper's surrogate (T1) and the deployed HA by its envelope (T5).

A region is accepted iff its score > threshold (right-continuous); a higher threshold accepts less. The surrogate
divides by the un-gated edit and falls with the threshold; the deployed HA divides by what was accepted and does not,
so a certificate on the surrogate says nothing about it (L9). The envelope of the deployed HA, per case, does.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from casewise.archive.store import Archive
from casewise.core.errors import BadInput, TooFewCases
from casewise.core.records import SOURCE, Policy, State
from casewise.judge.certificates.certificate import (
    Certificate,
    certified_gate,
    origin_of,
    policy_digest,
    population_of,
    promise,
    refusal,
    unit_of,
)
from casewise.judge.certificates.certify_router import curve, noted
from casewise.judge.certificates.evidence import Floats, LossTable, cluster_of, cluster_rows
from casewise.judge.certificates.risk_control import (
    conformal_bounds,
    conformal_floor,
    conformal_setting,
    left_out_reliability,
    patients_needed,
    tested_reliability,
)
from casewise.judge.controllers.metadata import metadata_of
from casewise.judge.controllers.region_gate import OFF_GRID, region_scores
from casewise.judge.controllers.region_gate import gated as gated_mask
from casewise.judge.ledger import unlock
from casewise.judge.outcomes import judged_share, outcomes
from casewise.judge.policy import check_binding, controller_kind, fitted_on
from casewise.measure.metrics.harm import harm


@dataclass(frozen=True, eq=False)
class Gated:
    """One case's scored regions, and what deploying each prefix of them would cost."""

    scores: Floats  # distinct scores of the case's regions, descending
    surrogate: Floats  # (1 + scores): L4 with nothing accepted, then with all regions of score >= scores[j - 1]
    deployed: Floats  # (1 + scores): HA of the gated mask, same positions
    kept: Floats  # (1 + scores): share of the case's region area that is accepted

    def __post_init__(self) -> None:
        rungs = len(self.scores) + 1
        if not len(self.surrogate) == len(self.deployed) == len(self.kept) == rungs:
            raise BadInput(f"a gated case with {rungs - 1} scores needs {rungs} losses, got {len(self.surrogate)}")
        if (np.diff(self.scores) >= 0).any() or self.surrogate[0] or self.deployed[0]:
            raise BadInput("scores must fall strictly and accepting nothing must cost nothing")


def gated(scores: Floats, sizes: Floats, harmful: Floats, area: int) -> Gated:
    r"""A case from its regions.

    .. math:: L(\lambda) = \sum_{harmful, s > \lambda} |R| / |D_{max}| \quad (L4), \qquad
              HA(\lambda) = \sum_{harmful, s > \lambda} |R| / |D(\lambda)| \quad (L9)

    ``deployed`` is exact when regions are compared as labels and sub-threshold voxels revert (the default of L3);
    for binarized HA the archive layer measures the gated mask itself.
    """
    order = np.argsort(-np.asarray(scores, dtype=float), kind="stable")
    falling, area_by_score = np.asarray(scores, dtype=float)[order], np.cumsum(sizes[order])
    last = np.flatnonzero(np.append(falling[1:] < falling[:-1], True)) if len(falling) else np.empty(0, int)
    accepted = np.concatenate([[0.0], area_by_score[last]])
    harm = np.concatenate([[0.0], np.cumsum((sizes * harmful)[order])[last]])
    deployed = np.divide(harm, accepted, out=np.zeros_like(harm), where=accepted > 0)
    return Gated(falling[last], harm / max(area, 1), deployed, accepted / max(accepted[-1], 1.0))


def thresholds(cases: Sequence[Gated]) -> Floats:
    """Exact jump points: the distinct calibration scores descending, then minus infinity (L5)."""
    scores = [case.scores for case in cases if len(case.scores)]
    return np.append(np.unique(np.concatenate(scores))[::-1], -np.inf) if scores else np.array([-np.inf])


def rungs(case: Gated, at: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.intp]]:
    """How many of the case's distinct scores lie strictly above each threshold."""
    return np.searchsorted(-case.scores, -at, side="left")


def gate_table(
    cases: Sequence[Gated],
    loss: str,
    *,
    at: Floats | None = None,
    clusters: Sequence[Hashable] | None = None,
    within: str = "mean",
) -> LossTable:
    """Losses per threshold, most cautious first: 'surrogate' (T1), 'deployed' (not monotone) or 'envelope' (T5).

    ``at`` replaces the exact jump points by thresholds that were fixed in advance.
    """
    if loss not in ("surrogate", "deployed", "envelope"):
        raise BadInput(f"a gate's loss is 'surrogate', 'deployed' or 'envelope', got {loss!r}")
    at = thresholds(cases) if at is None else np.sort(np.asarray(at, dtype=float))[::-1]
    steps = [rungs(case, at) for case in cases]
    rows = np.stack([_curve(case, loss)[step] for case, step in zip(cases, steps, strict=True)])
    kept = np.stack([case.kept[step] for case, step in zip(cases, steps, strict=True)])
    return LossTable(cluster_rows(rows, clusters, within), at, kept.mean(axis=0))


def envelope(curve: Floats) -> Floats:
    r""":math:`\tilde L(\lambda) = \max_{\lambda' \ge \lambda} HA(\lambda')` of one case: monotone, at least HA (T5)."""
    return np.maximum.accumulate(curve)


def _curve(case: Gated, loss: str) -> Floats:
    if loss == "surrogate":
        return case.surrogate
    return case.deployed if loss == "deployed" else envelope(case.deployed)


POPULATIONS = ("all", "scored")
KINDS = {"surrogate": "T1", "envelope": "T5"}


def gated_case(archive: Archive, case_id: str, *, keep_small: bool = False) -> Gated:
    """One case's regions and what each prefix of them costs; deployed HA is measured on the gated masks (L1-L4, L9)."""
    configuration = archive.configuration
    min_area, ignore = int(configuration.get("min_area", 16)), configuration.get("ignore")
    masks, label = archive.masks(case_id), archive.label(case_id)
    source, adapted = masks[SOURCE], masks[State(1)]
    raw = harm(source, adapted, label, min_area=min_area, foreground=False, ignore=ignore)
    known = region_scores(archive.observation(case_id, 1))
    if known is None:  # the gate rolls it back, whatever the threshold
        return gated(np.empty(0), np.empty(0), np.empty(0), raw.area)
    scores = np.array(known)
    sizes, harmful = raw.table["area"].astype(float), (raw.table["verdict"] == "harmful").astype(float)
    if len(scores) != len(sizes):
        raise BadInput(f"case {case_id} has {len(sizes)} regions and {len(scores)} scores; record it again")
    ladder = gated(scores, sizes, harmful, raw.area)
    foreground = bool(configuration.get("foreground", True))
    deployed = [0.0]
    for score in ladder.scores:
        accepted = tuple(np.flatnonzero(scores >= score).tolist())
        output = gated_mask(source, adapted, accepted, min_area=min_area, keep_small=keep_small)
        found = harm(source, output, label, min_area=min_area, foreground=foreground, ignore=ignore)
        deployed.append(found.ha)
    return Gated(ladder.scores, ladder.surrogate, np.array(deployed), ladder.kept)


def gated_cases(
    archive: Archive, *, population: str = "all", keep_small: bool = False
) -> tuple[tuple[str, ...], list[Gated]]:
    """The labelled cases of a population: 'all' (unscorable cases cost 0) or 'scored' (at least one region) (L8).

    A case whose scores cannot be computed is rolled back, and so it costs nothing either; not all cases may be such.
    """
    if population not in POPULATIONS:
        raise BadInput(f"a gate's population is {' or '.join(POPULATIONS)}, got {population!r}")
    labelled = [case for case in archive.ids if archive.entry(case).labelled]
    if labelled and all(region_scores(archive.observation(case, 1)) is None for case in labelled):
        raise BadInput(f"no case of {archive.path} has region scores: {OFF_GRID}; calibrate another policy")
    found = {case: gated_case(archive, case, keep_small=keep_small) for case in labelled}
    chosen = tuple(case for case in labelled if population == "all" or len(found[case].scores))
    if not chosen:
        raise TooFewCases(f"{archive.path} has no labelled case with a region; nothing can be certified")
    return chosen, [found[case] for case in chosen]


def certify_gate(
    archive: Archive,
    policy: Policy,
    *,
    loss: str,
    alpha: float,
    population: str = "all",
    within: str = "mean",
    evaluation: Archive | None = None,
    force: bool = False,
) -> tuple[Certificate, Policy]:
    """Certify a region gate: its surrogate risk (T1), or its deployed HA by the envelope (T5)."""
    if not metadata_of(controller_kind(policy)).gates:
        raise BadInput(f"a gate certificate needs the policy 'region-gate', got {policy.name!r} ({policy.controller})")
    check_binding(policy, archive.binding)
    question = {"method": loss, "alphas": [alpha], "population": population, "within": within}
    said = noted(archive, policy, question, force=force)
    if evaluation is not None:
        evaluation = unlock(evaluation, purpose="certify", policy=fitted_on(policy, archive.entries.values()))
    keep_small = bool(policy.options.get("keep_small", False))
    ids, cases = gated_cases(archive, population=population, keep_small=keep_small)
    clusters = [cluster_of(archive, case) for case in ids]
    tables = {
        name: gate_table(cases, name, clusters=clusters, within=within)
        for name in ("surrogate", "deployed", "envelope")
    }
    ungated = {
        name: gate_table(cases, name, at=np.array([-np.inf]), clusters=clusters, within=within) for name in tables
    }
    table = tables[loss]
    chosen, bounds = conformal_setting(table, alpha), conformal_bounds(table)
    cut = None if chosen is None else float(table.settings[chosen])
    certified = certified_gate(policy, cut, int(archive.configuration.get("min_area", 16)), archive.binding)
    certified = fitted_on(certified, archive.entries.values())
    fresh = None
    if evaluation is not None:
        others, judged = gated_cases(evaluation, population=population, keep_small=keep_small)
        groups = [cluster_of(evaluation, case) for case in others]
        fresh = {
            name: gate_table(judged, name, clusters=groups, within=within)
            for name in ("surrogate", "deployed", "envelope")
        }
    certificate = Certificate(
        kind=KINDS[loss],
        loss="surrogate" if loss == "surrogate" else "ha",
        method={"surrogate": "crc", "envelope": "envelope"}[loss],
        alpha=alpha,
        delta=None,
        cut=cut,
        bound=None if chosen is None else float(bounds[chosen]),
        kept=0.0 if chosen is None else float(table.kept[chosen]),
        curve=curve(table, bounds),
        details={"population": population, "within_cluster": within},
        deployed=_deployed(tables, chosen, ungated, _judged(archive, ids)),
        **_reliability(tables, loss, fresh),
        **_about(archive, policy, certified, ids, table, loss, alpha, cut, population),
        **origin_of(archive),
        **said,
    )
    return certificate, certified


def _deployed(
    tables: dict[str, LossTable], chosen: int | None, ungated: dict[str, LossTable], judged: dict[str, float]
) -> dict[str, dict[str, float]]:
    """Surrogate and deployed HA side by side, un-gated and gated; neither can be quoted alone (L7)."""

    def at(found: dict[str, LossTable], column: int | None) -> dict[str, float]:
        numbers = {name: 0.0 if column is None else float(found[name].risks[column]) for name in found}
        kept = 0.0 if column is None else float(found["deployed"].kept[column])
        return {"ha": numbers["deployed"], "surrogate": numbers["surrogate"], "kept": kept}

    return {"before": {**at(ungated, 0), **judged}, "certified": at(tables, chosen)}


def _judged(archive: Archive, ids: Sequence[str]) -> dict[str, float]:
    """The share of the un-gated edit that HA judged."""
    rows = outcomes(archive)
    first = (rows["step"] == 1) & (rows["shrink"] == 0) & rows["case"].isin(ids)
    share = judged_share(rows.loc[first])
    return {} if share is None else {"judged": share}


def _reliability(tables: dict[str, LossTable], loss: str, fresh: dict[str, LossTable] | None) -> dict[str, Any]:
    if fresh is None:
        points = left_out_reliability(tables[loss], tables["deployed"])
        return {"reliability": points, "reliability_from": "leave-one-out on the calibration cases"}
    points = tested_reliability(tables[loss], fresh[loss], fresh["deployed"])
    return {"reliability": points, "reliability_from": f"{fresh[loss].units} evaluation units"}


def _about(
    archive: Archive,
    policy: Policy,
    certified: Policy,
    ids: tuple[str, ...],
    table: LossTable,
    loss: str,
    alpha: float,
    cut: float | None,
    population: str,
) -> dict[str, Any]:
    unit = unit_of(len(ids), table.units)
    price, needed = conformal_floor(table.units), patients_needed(alpha)
    which = " with at least one region" if population == "scored" else ""
    said = (
        refusal(alpha, table.units, price, needed, unit)
        if cut is None
        else "Regions with an entropy drop above the certified threshold are kept, the rest goes back to M0."
    )
    words = "surrogate" if loss == "surrogate" else "envelope"
    return {
        "statement": promise((words,), (alpha,), None, certified.name, "", table.units, unit),
        "population": population_of(len(ids), table.units, which),
        "units": table.units,
        "cases": len(ids),
        "floor": price,
        "needed": needed,
        "advice": said,
        "binding": archive.binding,
        "policy": policy_digest(certified),
        "policy_before": policy_digest(policy),
        "policy_name": certified.name,
        "calibration_id": archive.digest,
        "exposures": (*policy.exposures, {"what": "labels used to certify", "cases": list(ids)}),
    }
