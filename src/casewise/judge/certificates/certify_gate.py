"""Certificates for the region gate: the paper's surrogate (T1) and the deployed HA by its envelope (T5).

A region is accepted iff its score > threshold (right-continuous); a higher threshold accepts less. The surrogate
divides by the whole edit and falls as the threshold rises. The deployed HA divides by the accepted area and may rise,
so a certificate of the surrogate does not bound it (L9). The envelope of the deployed HA of each case falls, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from casewise.archive.store import Archive
from casewise.core.errors import BadInput, TooFewCases
from casewise.core.records import SOURCE, Policy, State
from casewise.judge.certificates import risk_control
from casewise.judge.certificates.certificate import Certificate, new_certificate, promise, refusal, unit_of
from casewise.judge.certificates.certify_router import curve, note_attempt, reliability_points
from casewise.judge.certificates.evidence import Floats, LossTable, cluster_of, cluster_rows
from casewise.judge.controllers.metadata import metadata_of
from casewise.judge.controllers.region_gate import OFF_GRID, region_scores
from casewise.judge.controllers.region_gate import gated as gated_mask
from casewise.judge.ledger import unlock
from casewise.judge.outcomes import judged_share, outcomes
from casewise.judge.policy import check_binding, controller_kind, fitted_on
from casewise.measure.metrics.harm import harm


@dataclass(frozen=True, eq=False)
class Gated:
    """The scored regions of one case, and the loss of deploying each prefix of them."""

    scores: Floats  # distinct scores of the case's regions, descending
    surrogate: Floats  # (1 + scores): L4 with nothing accepted, then with all regions of score >= scores[j - 1]
    deployed: Floats  # (1 + scores): HA of the gated mask, same positions
    kept: Floats  # (1 + scores): share of the case's region area that is accepted

    def __post_init__(self) -> None:
        rungs = len(self.scores) + 1
        if not len(self.surrogate) == len(self.deployed) == len(self.kept) == rungs:
            raise BadInput(f"a gated case with {rungs - 1} scores needs {rungs} losses, got {len(self.surrogate)}")
        if (np.diff(self.scores) >= 0).any() or self.surrogate[0] or self.deployed[0]:
            raise BadInput("scores must fall strictly, and the loss must be 0 if no region is accepted")


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
    if loss not in TABLES:
        raise BadInput(f"the loss of a gate must be 'surrogate', 'deployed' or 'envelope', got {loss!r}")
    at = thresholds(cases) if at is None else np.sort(np.asarray(at, dtype=float))[::-1]
    # number of distinct scores of each case that are strictly above each threshold
    above = [np.searchsorted(-case.scores, -at, side="left") for case in cases]
    losses = [
        case.surrogate if loss == "surrogate" else case.deployed if loss == "deployed" else envelope(case.deployed)
        for case in cases
    ]
    rows = np.stack([own[place] for own, place in zip(losses, above, strict=True)])
    kept = np.stack([case.kept[place] for case, place in zip(cases, above, strict=True)])
    return LossTable(cluster_rows(rows, clusters, within), at, kept.mean(axis=0))


def envelope(curve: Floats) -> Floats:
    r""":math:`\tilde L(\lambda) = \max_{\lambda' \ge \lambda} HA(\lambda')` of one case: monotone, at least HA (T5)."""
    return np.maximum.accumulate(curve)


POPULATIONS = ("all", "scored")
TABLES = ("surrogate", "deployed", "envelope")


def gated_case(archive: Archive, case_id: str, *, keep_small: bool = False) -> Gated:
    """Return the regions of one case and the loss of each prefix of them; deployed HA is measured on the gated masks
    (L1-L4, L9)."""
    configuration = archive.configuration
    min_area, ignore = int(configuration.get("min_area", 16)), configuration.get("ignore")
    masks, label = archive.masks(case_id), archive.label(case_id)
    source, adapted = masks[SOURCE], masks[State(1)]
    raw = harm(source, adapted, label, min_area=min_area, foreground=False, ignore=ignore)
    known = region_scores(archive.observation(case_id, 1))
    if known is None:  # the gate rolls the case back at every threshold
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
        raise BadInput(f"the population of a gate must be {' or '.join(POPULATIONS)}, got {population!r}")
    labelled = [case for case in archive.ids if archive.entry(case).labelled]
    if labelled and all(region_scores(archive.observation(case, 1)) is None for case in labelled):
        raise BadInput(f"no case of {archive.path} has region scores: {OFF_GRID}; calibrate another policy")
    found = {case: gated_case(archive, case, keep_small=keep_small) for case in labelled}
    chosen = tuple(case for case in labelled if population == "all" or len(found[case].scores))
    if not chosen:
        raise TooFewCases(f"{archive.path} has no labelled case with a region; nothing can be certified")
    return chosen, [found[case] for case in chosen]


def certify_gate(
    archive: Archive, policy: Policy, *, loss: str, alpha: float, population: str = "all", within: str = "mean",
    evaluation: Archive | None = None, force: bool = False,
) -> tuple[Certificate, Policy]:  # fmt: skip
    """Certify a region gate: its surrogate risk (T1), or its deployed HA by the envelope (T5)."""
    if not metadata_of(controller_kind(policy)).gates:
        raise BadInput(f"a gate certificate needs the policy 'region-gate', got {policy.name!r} ({policy.controller})")
    check_binding(policy, archive.binding)
    if evaluation is not None:
        evaluation = unlock(evaluation, purpose="certify", policy=fitted_on(policy, archive.entries.values()))
    keep_small = bool(policy.options.get("keep_small", False))

    def tables_of(labelled: Archive, **fixed: Any) -> tuple[tuple[str, ...], dict[str, LossTable]]:
        ids, cases = gated_cases(labelled, population=population, keep_small=keep_small)
        clusters = [cluster_of(labelled, case) for case in ids]
        return ids, {name: gate_table(cases, name, clusters=clusters, within=within, **fixed) for name in TABLES}

    ids, tables = tables_of(archive)
    _, ungated = tables_of(archive, at=np.array([-np.inf]))
    table = tables[loss]
    question = {"method": loss, "alphas": [alpha], "population": population, "within": within}
    said = note_attempt(archive, policy, question, force=force)
    chosen, bounds = risk_control.conformal_setting(table, alpha), risk_control.conformal_bounds(table)
    if chosen is not None and not table.kept[chosen]:
        chosen = None  # a promise about M0 alone
    cut = None if chosen is None else float(table.settings[chosen])
    options = {**policy.options, "threshold": cut, "min_area": int(archive.configuration.get("min_area", 16))}
    certified = replace(
        policy, name=f"{policy.name}-certified", controller="m0" if cut is None else policy.controller,
        options={} if cut is None else options, binding=archive.binding,
    )  # fmt: skip
    certified = fitted_on(certified, archive.entries.values())
    fresh, source = None, ""
    if evaluation is not None:
        _, judged = tables_of(evaluation)
        fresh, source = (judged[loss], judged["deployed"]), f"{judged[loss].units} evaluation units"
    reliability = reliability_points(table, tables["deployed"], fresh, source)
    unit, floor = unit_of(len(ids), table.units), risk_control.conformal_floor(table.units)
    needed = risk_control.patients_needed(alpha)
    certificate = new_certificate(
        archive, policy, certified, ids, table.units,
        which=" with at least one region" if population == "scored" else "",
        kind="T1" if loss == "surrogate" else "T5",
        statement=promise((loss,), (alpha,), None, certified.name, "", table.units, unit),
        loss="surrogate" if loss == "surrogate" else "ha", method="crc" if loss == "surrogate" else "envelope",
        alpha=alpha, delta=None, floor=floor, needed=needed, cut=cut,
        bound=None if chosen is None else float(bounds[chosen]),
        kept=0.0 if chosen is None else float(table.kept[chosen]),
        advice=refusal(alpha, table.units, floor, needed, unit) if cut is None else
        "Regions with an entropy drop above the certified threshold are kept; the rest of the edit goes back to M0.",
        curve=curve(table, bounds), details={"population": population, "within_cluster": within},
        deployed=_deployed(tables, chosen, ungated, _judged(archive, ids)), **reliability, **said,
    )  # fmt: skip
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
