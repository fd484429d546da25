"""Certificates for a router by its rollback cut: T2, T3, T4 by CRC; T6 and T8 by learn-then-test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from casewise.archive.store import Archive
from casewise.core.errors import BadInput
from casewise.core.records import Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.core.text import UNIT, pluralize
from casewise.data.splits import cluster_of
from casewise.judge.certificates import certificate as wording
from casewise.judge.certificates import evidence as labelled
from casewise.judge.certificates import risk_control
from casewise.judge.certificates.certificate import Certificate, policy_digest
from casewise.judge.certificates.evidence import LOSSES, Evidence, Floats, LossTable, Together
from casewise.judge.decide import replay_case
from casewise.judge.ledger import attempt_sentence, certification_attempt, compared_as, earlier_looks, unlock
from casewise.judge.monitors.quota import quota_of
from casewise.judge.outcomes import LITTLE, judged_sentence
from casewise.judge.policy import check_go, fitted_on, judge_of
from casewise.measure.metrics import METRICS

KINDS = {"ha": "T2", "harmed": "T3", "dice": "T4", "worse-voxels": "T2"}
STREAM = (
    "The masks of these cases depend on the cases before them in a stream, so the patients are not independent: the "
    "promise holds for none of another order"
)
ORDERS = 25  # fixed permutations of the cases over which betting averages


@dataclass(frozen=True)
class Promise:
    """Losses and levels of a promise: risks with their alphas, and the method."""

    losses: tuple[str, ...] = ("ha",)
    alphas: tuple[float, ...] = (0.1,)
    delta: float | None = None  # None: in expectation (CRC)
    within: str = "mean"  # how the cases of one patient are joined
    low_mid: str = "envelope"  # or "fixed": the low/mid cut comes from other cases
    margin: float = 0.0  # a case is harmed where its metric falls by more than this

    def __post_init__(self) -> None:
        for one in self.losses:
            LOSSES[one]  # raises UnknownName with a suggestion
        if not self.losses or len(self.losses) != len(self.alphas):
            raise BadInput(f"need one alpha per loss, got {self.losses} and {self.alphas}")
        if not all(0 < alpha < 1 for alpha in self.alphas):
            raise BadInput(f"alpha must lie between 0 and 1, got {', '.join(map(str, self.alphas))}")
        if self.delta is None and len(self.losses) > 1:
            raise BadInput("CRC certifies one risk at a time; several at once need method 'ltt' and --delta")
        if self.low_mid not in ("envelope", "fixed"):
            raise BadInput(f"low_mid must be 'envelope' or 'fixed', got {self.low_mid!r}")
        if self.delta is not None:
            labelled.check_level("delta", self.delta)
        labelled.check_within(self.within)
        if not 0 <= self.margin < 1:
            raise BadInput(f"a margin must be a loss of the metric between 0 and 1, such as 0.01, got {self.margin}")
        if self.margin and "harmed" not in self.losses:
            raise BadInput(f"a margin works only with the loss 'harmed', got {', '.join(self.losses)}; leave it out")

    @property
    def label(self) -> str:
        """The losses, joined by ``+``."""
        return "+".join(self.losses)


def certify_router(
    archive: Archive, policy: Policy, asked: Promise, *, evaluation: Archive | None = None, force: bool = False,
    together: Together = (),
) -> tuple[Certificate, Policy]:  # fmt: skip
    """Certify the deployed harm of a router; return the certificate and the router with cut_high = min(own, certified).

    Without a certified cut the policy is M0. Labels of ``evaluation`` are read through its exposure ledger, and the
    attempt is written into that of ``archive``. A policy that calibration advised against needs ``force``. ``together``
    is None if the policy was fixed before these labels compared it with others.
    """
    labelled.check_router(policy)
    check_go(policy, force=force)
    evidence = labelled.router_evidence(
        archive, policy, overlap=asked.low_mid == "envelope", margin=asked.margin, together=together
    )
    if evaluation is not None:
        evaluation = unlock(evaluation, purpose="certify", policy=fitted_on(policy, archive.entries.values()))
    said = note_attempt(archive, policy, {"method": "crc or ltt", **asdict(asked)}, force=force, together=together)
    tables = tuple(loss_table(evidence, asked, name) for name in asked.losses)
    kind = chosen_p_value(asked, evidence)
    if asked.delta is None:
        at = risk_control.conformal_setting(tables[0], asked.alphas[0])
        scores = risk_control.conformal_bounds(tables[0])
    else:
        passed, scores = tested_cuts(tables, asked, kind, asked.delta)
        at = int(passed[-1]) if len(passed) else None
    cut = None if at is None else float(tables[0].settings[at])
    bound = None if at is None else float(scores[at])
    reach = limits(asked, tables[0].units, kind)
    certificate, certified = issue(archive, policy, asked, evidence, cut, bound, reach, curve(tables[0], scores), said)
    more = _reliability(policy, asked, evidence, tables, evaluation)
    return replace(certificate, details=_details(asked, kind), **more), certified


def note_attempt(
    archive: Archive, policy: Policy, question: Mapping[str, Any], *, force: bool, together: Together = ()
) -> dict[str, Any]:
    """Write down the attempt and return its number with the warnings: a forced no-go, earlier looks at the labels.

    Call it when the labels can be read; a refused question is not an attempt. ``together`` names the policies that
    are certified with this one; None stands for all.
    """
    warning = check_go(policy, force=force)
    attempt = certification_attempt(archive, {"policy": policy_digest(policy), "name": policy.name, **question})
    warnings = [f"{warning}. It was certified nevertheless (--set force=true)."] if warning else []
    warnings += [attempt_sentence(attempt)] if attempt > 1 else []
    views = [archive.ladder(name) for name in archive.joined] or [archive]
    warnings += [f"{STREAM}."] if any("order" in view.configuration for view in views) else []
    warnings += earlier_looks(archive, None if together is None else {compared_as(policy), *together})
    return {"attempt": attempt, "warnings": tuple(warnings)}


def issue(
    archive: Archive, policy: Policy, asked: Promise, evidence: Evidence, cut: float | None, bound: float | None,
    reach: tuple[float, int], points: tuple[dict[str, float], ...], said: Mapping[str, Any], designs: int = 1,
    in_all: int = 0,
) -> tuple[Certificate, Policy]:  # fmt: skip
    """Return the certificate of a search that found ``cut`` (or None) among ``designs``, and the certified policy.

    ``in_all``: number of patients that are needed together with those that fitted the policies.
    """
    certified = fitted_on(wording.certified_policy(policy, cut), archive.entries.values())
    if "quota" in certified.preflight:  # another cut changes how many cases each bucket gets
        decided = (replay_case(archive, judge_of(certified), case) for case in archive.ids)
        certified = replace(certified, preflight={**certified.preflight, "quota": quota_of(decided)})
    units = len(set(evidence.clusters))
    unit = wording.unit_of(len(evidence.ids), units)
    after = labelled.deployed_numbers(archive, certified, margin=asked.margin)
    if cut is not None and not after["kept"]:  # a promise about M0 alone
        return issue(archive, policy, asked, evidence, None, None, reach, points, said, designs, in_all)
    before = labelled.deployed_numbers(archive, policy, margin=asked.margin)
    own = float(policy.options.get("cut_high", float("inf")))
    flags = "" if cut is None else _flag_sentence(archive, policy, (asked.delta or 0.1) / designs, designs)
    if "ha" in asked.losses and before.get("judged", 1.0) < LITTLE:
        said = {**said, "warnings": (*said["warnings"], f"{judged_sentence(before['judged'])}.")}
    metric = METRICS[str(archive.configuration.get("metric", "dice"))].title
    promised = wording.promise(
        asked.losses, asked.alphas, asked.delta, certified.name, metric, units, unit, asked.margin
    )
    certificate = wording.new_certificate(
        archive, policy, certified, evidence.ids, units,
        kind=KINDS[asked.label] if asked.delta is None else ("T6" if len(asked.losses) == 1 else "T8"),
        statement=promised + flags, loss=asked.label, method="crc" if asked.delta is None else "ltt",
        alpha=asked.alphas[0], delta=asked.delta, floor=reach[0], needed=in_all or reach[1],
        cut=cut, bound=bound, kept=after["kept"], deployed={"before": before, "certified": after},
        advice=wording.tightening(own, cut) if cut is not None
        else wording.refusal(min(asked.alphas), units, *reach, unit, in_all) if before["kept"] or units < reach[1]
        else f"Nothing is certified: policy {policy.name!r} keeps M0 for all of these cases by itself.",
        curve=points, **said,
    )  # fmt: skip
    return certificate, certified


def _flag_sentence(archive: Archive, policy: Policy, delta: float, designs: int) -> str:
    """Return the promise about the share of flagged cases; nothing if the flag was fitted on these patients."""
    if not policy.flag or policy.groups:
        return ""
    known = set(policy.calibration_clusters or policy.calibration_cases)
    if known.intersection(map(cluster_of, archive.entries.values())):
        return f" The share of flagged cases is not promised, because the flag was fitted on these {UNIT[1]}."
    share, most = flagged_share(archive, policy, delta=delta)
    return (
        f" With probability at least {1 - delta * designs:g}, at most {most:.1%} of the cases of a new "
        f"{UNIT[0]} are flagged for a person, on average ({share:.1%} of the cases of the certificate)."
    )


def flagged_share(archive: Archive, policy: Policy, *, delta: float) -> tuple[float, float]:
    """Return the share of flagged cases, and its upper bound over new patients at level 1 - delta, for any cut.

    A case counts as flagged if its candidate or M0 is flagged, so the result does not depend on the cut.
    """
    flagged = np.zeros(len(archive.ids), bool)
    for cut in (np.inf, -np.inf):
        judge = judge_of(replace(policy, options={**policy.options, "cut_high": cut}))
        flagged |= np.array([replay_case(archive, judge, case).flagged for case in archive.ids], bool)
    rows = labelled.cluster_rows(flagged.astype(float)[:, None], [cluster_of(archive.entry(c)) for c in archive.ids])
    return float(flagged.mean()), risk_control.share_bound(rows, 1 - delta, binary=len(rows) == len(flagged))


def limits(asked: Promise, units: int, kind: str, delta: float | None = None) -> tuple[float, int]:
    """Return the smallest alpha that n units support, and the n that the given alpha needs."""
    smallest, level = min(asked.alphas), delta or asked.delta
    needed = risk_control.patients_needed(smallest, delta=level, binary=kind != "betting")
    if level is None:
        return risk_control.conformal_floor(units), needed
    reach = risk_control.betting_alpha if kind == "betting" else risk_control.ltt_alpha
    return reach(units, level), needed


def loss_table(evidence: Evidence, asked: Promise, name: str) -> LossTable:
    """Return the rollback table of one loss: by envelope, or with the policy's own low/mid cut."""
    losses = evidence.own[name] if asked.low_mid == "fixed" else evidence.loss(name)
    return labelled.rollback_table(evidence.values, losses, clusters=evidence.clusters, within=asked.within)


def curve(table: LossTable, scores: Floats) -> tuple[dict[str, float], ...]:
    """Return every jump point with its kept share and its bound or p-value."""
    rows = zip(table.settings, table.kept, table.risks, scores, strict=True)
    return tuple({"setting": float(c), "kept": float(k), "risk": float(r), "bound": float(b)} for c, k, r, b in rows)


def chosen_p_value(asked: Promise, evidence: Evidence) -> str:
    """Return the kind of p-value: binomial if units lose 0 or 1 by construction, else betting."""
    alone = len(set(evidence.clusters)) == len(evidence.ids) or asked.within == "max"
    return "binomial" if asked.losses == ("harmed",) and alone else "betting"


def tested_cuts(tables: Sequence[LossTable], asked: Promise, kind: str, level: float) -> tuple[Any, Floats]:
    """Test cuts from the one that keeps least until the first p-value above ``level``.

    Args:
        tables: The losses of each risk, over the same cuts.
        asked: Losses and levels of the promise.
        kind: Kind of p-value.
        level: Chance that the walk passes a cut whose risk is above alpha.

    Returns:
        The columns that passed, in the order of the walk, and the p-value of every column (the largest of all risks).
    """
    each = [
        risk_control.p_values(table.losses, alpha, kind=kind, delta=level, orders=ORDERS)
        for table, alpha in zip(tables, asked.alphas, strict=True)
    ]
    joint = np.max(np.stack(each), axis=0)
    return risk_control.fixed_sequence(joint, np.argsort(tables[0].kept, kind="stable"), level), joint


def _details(asked: Promise, kind: str) -> dict[str, Any]:
    details: dict[str, Any] = {"low_mid": asked.low_mid, "within_cluster": asked.within}
    details |= {"margin": asked.margin} if asked.margin else {}
    if asked.delta is not None:
        details |= {"p_value": kind, "family_wise": "fixed sequence by kept share"}
        details |= {"alphas": list(asked.alphas), "orders": ORDERS, "order_seed": RESAMPLING_SEED}
    return details


def _reliability(
    policy: Policy, asked: Promise, evidence: Evidence, tables: Sequence[LossTable], evaluation: Archive | None
) -> dict[str, Any]:
    if asked.delta is not None:
        return {}
    own, fresh, source = replace(asked, low_mid="fixed"), None, ""
    if evaluation is not None:
        seen = labelled.router_evidence(evaluation, policy, overlap=False, margin=asked.margin, together=None)
        fresh = loss_table(seen, asked, asked.label), loss_table(seen, own, asked.label)
        source = pluralize(len(seen.ids), "evaluation case")
    return reliability_points(tables[0], loss_table(evidence, own, asked.label), fresh, source)


def reliability_points(
    certified: LossTable, paid: LossTable, fresh: tuple[LossTable, LossTable] | None, source: str
) -> dict[str, Any]:
    """Return the points of the reliability diagram (L10), and where they come from.

    Args:
        certified: The losses that the setting is chosen by.
        paid: The deployed losses of the same units, at the same settings.
        fresh: Both tables of evaluation cases; without them each unit is scored by the setting of the others.
        source: Origin of ``fresh``, in words.
    """
    points = risk_control.reliability(certified, paid, fresh)
    left_out = "leave-one-out on the calibration cases"
    return {"reliability": points, "reliability_from": left_out if fresh is None else source}
