"""Certificates for the region gate: the paper's surrogate (T1), deployed HA by its envelope (T5), inflated CRC (T7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from casewise.archive.store import Archive
from casewise.core.errors import BadInput, TooFewCases
from casewise.core.records import SOURCE, Policy, State
from casewise.judge.certificates.certificate import Certificate, certified_gate, origin_of, policy_digest
from casewise.judge.certificates.certify_router import curve, noted
from casewise.judge.certificates.crc import (
    conformal_bounds,
    conformal_cases,
    conformal_floor,
    conformal_setting,
    inflated_bounds,
    inflated_setting,
    inflation,
    left_out_reliability,
    stability,
    tested_reliability,
)
from casewise.judge.certificates.evidence import cluster_of
from casewise.judge.certificates.gate_losses import Gated, gate_table, gated
from casewise.judge.certificates.loss_table import LossTable
from casewise.judge.certificates.statements import population_of, promise, refusal, unit_of
from casewise.judge.controllers.about import about
from casewise.judge.controllers.region_gate import gated as gated_mask
from casewise.judge.controllers.region_gate import region_scores
from casewise.judge.ledger import unlock
from casewise.judge.policy import check_binding, controller_kind, fitted_on
from casewise.measure.metrics.harm import harm

POPULATIONS = ("all", "scored")
KINDS = {"surrogate": "T1", "envelope": "T5", "deployed": "T7"}


def gated_case(archive: Archive, case_id: str, *, keep_small: bool = False) -> Gated:
    """One case's regions and what each prefix of them costs; deployed HA is measured on the gated masks (L1-L4, L9)."""
    configuration = archive.configuration
    min_area, ignore = int(configuration.get("min_area", 16)), configuration.get("ignore")
    masks, label = archive.masks(case_id), archive.label(case_id)
    source, adapted = masks[SOURCE], masks[State(1)]
    raw = harm(source, adapted, label, min_area=min_area, foreground=False, ignore=ignore)
    scores = np.array(region_scores(archive.observation(case_id, 1)))
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
    """The labelled cases of a population: 'all' (unscorable cases cost 0) or 'scored' (at least one region) (L8)."""
    if population not in POPULATIONS:
        raise BadInput(f"a gate's population is {' or '.join(POPULATIONS)}, got {population!r}")
    labelled = [case for case in archive.ids if archive.entry(case).labelled]
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
    thresholds: Sequence[float] | None = None,
    evaluation: Archive | None = None,
    force: bool = False,
) -> tuple[Certificate, Policy]:
    """A certificate for the region gate: 'surrogate', 'envelope', or 'deployed' on thresholds fixed in advance."""
    if not about(controller_kind(policy)).gates:
        raise BadInput(f"a gate certificate needs the policy 'region-gate', got {policy.name!r} ({policy.controller})")
    check_binding(policy, archive.binding)
    question = {"method": loss, "alphas": [alpha], "population": population, "within": within, "at": thresholds}
    said = noted(archive, policy, question, force=force)
    if evaluation is not None:
        evaluation = unlock(evaluation, purpose="certify", policy=fitted_on(policy, archive.entries.values()))
    keep_small = bool(policy.options.get("keep_small", False))
    ids, cases = gated_cases(archive, population=population, keep_small=keep_small)
    clusters = [cluster_of(archive, case) for case in ids]
    at = _grid(loss, thresholds)
    tables = {
        name: gate_table(cases, name, at=at, clusters=clusters, within=within)
        for name in ("surrogate", "deployed", "envelope")
    }
    ungated = {
        name: gate_table(cases, name, at=np.array([-np.inf]), clusters=clusters, within=within) for name in tables
    }
    table = tables[loss]
    chosen, bounds = _chosen(table, loss, alpha)
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
        method={"surrogate": "crc", "envelope": "envelope", "deployed": "inflated"}[loss],
        alpha=alpha,
        delta=None,
        cut=cut,
        bound=None if chosen is None else float(bounds[chosen]),
        kept=0.0 if chosen is None else float(table.kept[chosen]),
        curve=curve(table, bounds),
        details=_details(tables, loss, alpha, population, within),
        deployed=_deployed(tables, chosen, ungated),
        **_reliability(tables, loss, fresh),
        **_about(archive, policy, certified, ids, table, loss, alpha, cut, population),
        **origin_of(archive),
        **said,
    )
    return certificate, certified


def _grid(loss: str, thresholds: Sequence[float] | None) -> Any:
    if loss == "deployed" and not thresholds:
        raise BadInput("inflated CRC needs thresholds that were fixed in advance (--threshold, several times)")
    return None if loss != "deployed" else np.asarray(thresholds, dtype=float)


def _chosen(table: LossTable, loss: str, alpha: float) -> tuple[int | None, Any]:
    if loss == "deployed":
        return inflated_setting(table, alpha), inflated_bounds(table)
    return conformal_setting(table, alpha), conformal_bounds(table)


def _deployed(
    tables: dict[str, LossTable], chosen: int | None, ungated: dict[str, LossTable]
) -> dict[str, dict[str, float]]:
    """Surrogate and deployed HA side by side, un-gated and gated; neither can be quoted alone (L7)."""

    def at(found: dict[str, LossTable], column: int | None) -> dict[str, float]:
        numbers = {name: 0.0 if column is None else float(found[name].risks[column]) for name in found}
        kept = 0.0 if column is None else float(found["deployed"].kept[column])
        return {"ha": numbers["deployed"], "surrogate": numbers["surrogate"], "kept": kept}

    return {"before": at(ungated, 0), "certified": at(tables, chosen)}


def _details(tables: dict[str, LossTable], loss: str, alpha: float, population: str, within: str) -> dict[str, Any]:
    details: dict[str, Any] = {"population": population, "within_cluster": within}
    if loss == "deployed":
        table = tables["deployed"]
        details["inflation"] = inflation(table.units, len(table.settings))
        details["stability_estimated_not_guaranteed"] = stability(table, alpha)
    return details


def _reliability(tables: dict[str, LossTable], loss: str, fresh: dict[str, LossTable] | None) -> dict[str, Any]:
    if loss == "deployed":
        return {}
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
    price = inflation(table.units, len(table.settings)) if loss == "deployed" else conformal_floor(table.units)
    needed = (
        int(np.ceil(np.log(len(table.settings) + 1) / (2 * alpha**2))) if loss == "deployed" else conformal_cases(alpha)
    )
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
