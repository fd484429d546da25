"""Learn-then-test over a grid (T6): rollback cuts x depths of the low and mid action x shrink, one deployed.

Three ways to pay for choosing. ``chains``: each action pair is a chain of cuts, walked at delta / number of pairs with
exact jump points. ``holm`` and ``pareto`` give half of the units away: that half fixes the cuts (and, for pareto, the
order by looking at labels), and the other half is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.archive.store import Archive
from casewise.core.brief import UNIT, counted
from casewise.core.errors import BadInput, Refused, TooFewCases
from casewise.core.records import Policy
from casewise.judge.calibration.cuts import FEWEST
from casewise.judge.calibration.designs import DESIGNS
from casewise.judge.calibration.fit import calibrate
from casewise.judge.certificates.certificate import Certificate, policy_digest
from casewise.judge.certificates.certify_router import ORDERS, Promise, issued, limits, noted
from casewise.judge.certificates.evidence import (
    Evidence,
    Floats,
    check_router,
    cluster_of,
    cluster_rows,
    deployed_numbers,
    router_evidence,
)
from casewise.judge.certificates.risk_control import (
    best_certified,
    by_kept_share,
    fixed_sequence,
    holm,
    joint_p_values,
    p_values,
    pareto_order,
)
from casewise.judge.controllers.router import bucket_of
from casewise.judge.policy import check_go, no_go

FAMILIES = ("chains", "holm", "pareto")
_CUTS = 20  # quantiles of the coordinate on the half that fixes the grid


def action_pairs(policy: Policy, archive: Archive, deepest: int = 3) -> list[Policy]:
    """The router with every (low depth, mid depth, shrink) that was recorded; fixed before any label is seen."""
    if not {"low", "mid"} <= set(policy.options):
        raise BadInput(f"a grid varies the actions of a router, got {policy.controller}")
    depths = range(1, min(deepest, archive.steps) + 1)
    shrinks = {state: state.shrink for state in archive.states if state.shrink}
    mids = [{"action": "depth", "depth": depth} for depth in depths]
    mids += [{"action": "depth", "depth": s.step, "shrink": s.shrink} for s in shrinks if s.step <= deepest]
    lows = [{"action": "depth", "depth": depth} for depth in depths]
    return [replace(policy, options={**policy.options, "low": low, "mid": mid}) for low in lows for mid in mids]


def certify_grid(
    archive: Archive, policy: Policy, asked: Promise, *, family: str = "chains", force: bool = False
) -> tuple[Certificate, Policy]:
    """The configuration of greatest metric among those that are certified together with probability 1 - delta."""
    if family not in FAMILIES or asked.delta is None:
        raise BadInput(f"a grid needs --delta and one of the families {', '.join(FAMILIES)}, got {family!r}")
    said = noted(archive, policy, {"method": f"grid {family}", **asdict(asked)}, force=force)
    grid = [Variant(one, router_evidence(archive, one, margin=asked.margin)) for one in action_pairs(policy, archive)]
    found = searched(grid, asked, family)
    best = grid[0] if found is None else found.variant
    cut, p = (None, None) if found is None else (found.cut, found.p)
    chosen = policy if found is None else best.policy
    certificate, certified = issued(archive, chosen, asked, best.evidence, cut, p, reach(grid, asked, family), (), said)
    actions = {} if found is None else {name: str(bucket_of(chosen.options[name])) for name in ("low", "mid")}
    more = "".join(f" The {name} action is now: {action}." for name, action in actions.items())
    details = {"family_wise": family, "action_pairs": len(grid), "p_value": _kind(asked), **actions}
    before = deployed_numbers(archive, policy, margin=asked.margin)
    changed: dict[str, Any] = {"deployed": {**certificate.deployed, "before": before}}
    changed |= {"policy_before": policy_digest(policy), "advice": certificate.advice + more}
    return replace(certificate, details=details, **changed), certified


def certify_designs(
    archive: Archive, policies: Sequence[Policy], asked: Promise, *, force: bool = False
) -> tuple[Certificate, Policy]:
    """The best of several routers, certified together: each is a chain of cuts, walked at delta / number of routers.

    This is the valid way to choose a design with the labels that certify it; one certificate for each and the best of
    them is not.
    """
    if len(policies) < 2 or asked.delta is None:
        raise BadInput(f"certifying designs together needs --method ltt and two or more of them, got {len(policies)}")
    return _together(archive, policies, asked, force=force)


def _together(
    archive: Archive, policies: Sequence[Policy], asked: Promise, *, force: bool
) -> tuple[Certificate, Policy]:
    for one in policies:
        check_router(one)
        check_go(one, force=force)
    names = [one.name for one in policies]
    digests = [policy_digest(one) for one in policies]
    said = noted(archive, policies[0], {"method": "designs", "designs": digests, **asdict(asked)}, force=force)
    grid = [Variant(one, router_evidence(archive, one, margin=asked.margin)) for one in policies]
    found = _chains(grid, asked)
    best = grid[0] if found is None else found.variant
    cut, p = (None, None) if found is None else (found.cut, found.p)
    where = reach(grid, asked, "chains")
    certificate, certified = issued(
        archive, best.policy, asked, best.evidence, cut, p, where, (), said, designs=len(grid)
    )
    advice = certificate.advice + ("" if found is None else f" Of {', '.join(names)} it is {best.policy.name!r}.")
    details = {"family_wise": "chains", "designs": names, "p_value": _kind(asked)}
    return replace(certificate, details=details, advice=advice), certified


def certify_default(
    archive: Archive, asked: Promise, *, force: bool = False, **options: Any
) -> tuple[Certificate, Policy]:
    """The best of all ways to choose among candidates, certified with the choice: learn-then-test over the designs.

    Half of the patients fit every design; the other half tests them together. Which half is by the order of their
    names, so no label has a say. What is a NO-GO on the half that fits takes no part. ``options`` are those of
    calibrate (flag_below, at, consensus, allowed_hurt).
    """
    if asked.delta is None:
        raise BadInput(
            "policy 'default' chooses among designs with these labels, so the choice is part of what is certified: "
            "add --method ltt, or certify one design that is named"
        )
    fit, test = halves_of(archive)
    names = [name for name in DESIGNS if name != "m0"]
    made = [calibrate(fit, name, **options) for name in names]
    helping = [one for one in made if force or no_go(one) is None]
    if not helping:
        raise Refused(
            f"NO-GO: none of {', '.join(names)} helps more of the {len(fit.ids)} cases that fit it than it hurts; keep "
            "M0, or add --force to use one all the same (every output says so)"
        )
    certificate, certified = _together(test, helping, asked, force=force)
    more = f" Designs were fitted on {len(fit.ids)} cases and tested on {len(test.ids)} others."
    out = [one.name for one in made if not force and no_go(one) is not None]
    more += f" NO-GO on the cases that fit, and so left out: {', '.join(out)}." if out else ""
    return replace(certificate, advice=certificate.advice + more), certified


def halves_of(archive: Archive) -> tuple[Archive, Archive]:
    """(half of the patients by the order of their names, the others): who fits and who tests, without any label."""
    units = sorted({cluster_of(archive, case) for case in archive.ids})
    first = set(units[: len(units) // 2])
    fitting = sum(cluster_of(archive, case) in first for case in archive.ids)
    if len(units) < 4 or fitting < FEWEST:
        raise TooFewCases(
            f"designs are fitted on half of the {UNIT[1]} and tested on the others: at least 4, and {FEWEST} cases in "
            f"the first half, got {len(units)} with {counted(fitting, 'case')} in it; label more"
        )
    fit, test = (
        archive.select(ids=[case for case in archive.ids if (cluster_of(archive, case) in first) == side])
        for side in (True, False)
    )
    return fit, test


@dataclass(frozen=True, eq=False)
class Variant:
    """A router with one pair of actions, and what calibration says about it."""

    policy: Policy
    evidence: Evidence

    def risks(self, cuts: Floats, asked: Promise) -> list[Floats]:
        """(unit, cut) losses of each risk, by envelope."""
        kept = self.evidence.values[:, None] < cuts[None, :]
        each = (self.evidence.loss(name)[:, None] * kept for name in asked.losses)
        return [cluster_rows(losses, self.evidence.clusters, asked.within) for losses in each]

    def gains(self, cuts: Floats) -> Floats:
        """The metric that each cut gains over M0, with the router's own cuts where they are tighter."""
        own = float(self.policy.options["cut_high"])
        kept = self.evidence.values[:, None] < np.minimum(cuts, own)[None, :]
        return np.asarray((np.nan_to_num(self.evidence.own["gain"])[:, None] * kept).mean(axis=0))

    def part(self, side: NDArray[np.bool_]) -> Variant:
        """The same router on some of the cases."""
        one, pick = self.evidence, np.flatnonzero(side)
        picked = replace(
            one,
            ids=tuple(one.ids[i] for i in pick),
            clusters=tuple(one.clusters[i] for i in pick),
            values=one.values[pick],
            low={name: values[pick] for name, values in one.low.items()},
            mid={name: values[pick] for name, values in one.mid.items()},
            own={name: values[pick] for name, values in one.own.items()},
        )
        return replace(self, evidence=picked)


@dataclass(frozen=True, eq=False)
class Found:
    """A certified configuration."""

    variant: Variant
    cut: float
    p: float
    gain: float


def searched(grid: Sequence[Variant], asked: Promise, family: str) -> Found | None:
    """The certified configuration of greatest gain over all variants of the same cases; None if there is none."""
    return _chains(grid, asked) if family == "chains" else _halves(grid, asked, family)


def reach(grid: Sequence[Variant], asked: Promise, family: str) -> tuple[float, int]:
    """The smallest alpha that these units support by this family, and the n that the asked alpha needs."""
    delta, units = float(asked.delta or 0), len(set(grid[0].evidence.clusters))
    if family == "chains":
        return limits(asked, units, _kind(asked), delta / len(grid))
    most = len(grid) * _CUTS  # configurations; ties in the coordinate leave fewer
    floor, needed = limits(asked, units - units // 2, _kind(asked), delta / most if family == "holm" else delta)
    return floor, 2 * needed


def _chains(grid: Sequence[Variant], asked: Promise) -> Found | None:
    """Each variant's own jump points, from the one that keeps least; the best of what all chains certify."""
    level = float(asked.delta or 0) / len(grid)
    best: Found | None = None
    for variant in grid:
        cuts = np.append(np.unique(variant.evidence.values), np.inf)
        order = by_kept_share((variant.evidence.values[:, None] < cuts[None, :]).mean(axis=0))
        p, gains = _joint(variant.risks(cuts, asked), asked, level), variant.gains(cuts)
        at = best_certified(fixed_sequence(p, order, level), gains)
        if at is not None and (best is None or gains[at] > best.gain):
            best = Found(variant, float(cuts[at]), float(p[at]), float(gains[at]))
    return best


def _halves(grid: Sequence[Variant], asked: Promise, family: str) -> Found | None:
    delta, clusters = float(asked.delta or 0), grid[0].evidence.clusters
    units = sorted(set(clusters))
    if len(units) < 4:
        raise TooFewCases(f"the family {family!r} halves the cases, got {len(units)}; use 'chains'")
    first = np.isin(clusters, units[: len(units) // 2])
    learn, test = [one.part(first) for one in grid], [one.part(~first) for one in grid]
    cuts = np.append(np.unique(np.quantile(learn[0].evidence.values, np.arange(1, _CUTS) / _CUTS)), np.inf)
    p = _joint(_stacked(test, cuts, asked), asked, delta)
    gains = np.concatenate([one.gains(cuts) for one in test])
    if family == "holm":
        passed = holm(p, delta)
    else:
        risks = np.stack([losses.mean(axis=0) for losses in _stacked(learn, cuts, asked)])
        learned = np.concatenate([one.gains(cuts) for one in learn])
        passed = fixed_sequence(p, pareto_order(risks, learned, asked.alphas), delta)
    at = best_certified(passed, gains)
    if at is None:
        return None
    return Found(grid[at // len(cuts)], float(cuts[at % len(cuts)]), float(p[at]), float(gains[at]))


def _stacked(variants: Sequence[Variant], cuts: Floats, asked: Promise) -> list[Floats]:
    each = [one.risks(cuts, asked) for one in variants]
    return [np.concatenate([losses[r] for losses in each], axis=1) for r in range(len(asked.losses))]


def _joint(tables: Sequence[Floats], asked: Promise, level: float) -> Floats:
    each = [
        p_values(table, alpha, kind=_kind(asked), delta=level, orders=ORDERS)
        for table, alpha in zip(tables, asked.alphas, strict=True)
    ]
    return joint_p_values(each)


def _kind(asked: Promise) -> str:
    return "betting" if asked.p_value == "auto" else asked.p_value
