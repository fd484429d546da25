"""Learn-then-test over several designs together: the choice of a design is certified, too (T6, T8).

Each design is a chain of rollback cuts. A chain is tested from the cut that keeps least, at delta / number of designs,
until the first p-value above that level. The design with the greatest gain among all that passed is deployed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from casewise.archive.store import Archive
from casewise.core.errors import BadInput, Refused, TooFewCases
from casewise.core.records import Policy
from casewise.core.text import UNIT, pluralize
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.calibration.cuts import FEWEST
from casewise.judge.calibration.designs import DESIGNS
from casewise.judge.certificates.certificate import Certificate, policy_digest
from casewise.judge.certificates.certify_router import Promise, issue, limits, loss_table, note_attempt, tested_cuts
from casewise.judge.certificates.evidence import Evidence, check_router, cluster_of, router_evidence
from casewise.judge.certificates.risk_control import TOGETHER, patients_needed
from casewise.judge.ledger import compared_as
from casewise.judge.policy import check_go, no_go


@dataclass(frozen=True, eq=False)
class DesignEvidence:
    """One design of several that are certified together, and the losses of the cases under it."""

    policy: Policy
    evidence: Evidence

    def gains(self, cuts: Any) -> Any:
        """Mean gain of the metric over M0 at each cut; the design's own cut applies where it is tighter."""
        own = float(self.policy.options["cut_high"])
        kept = self.evidence.values[:, None] < np.minimum(cuts, own)[None, :]
        return (np.nan_to_num(self.evidence.own["gain"])[:, None] * kept).mean(axis=0)


def certify_designs(
    archive: Archive, policies: Sequence[Policy], asked: Promise, *, force: bool = False, halved: bool = False
) -> tuple[Certificate, Policy]:
    """Certify several designs together and return the one with the greatest gain among those that pass.

    This is the valid way to choose a design with the labels that certify it; the best of several single certificates
    is not covered.

    Args:
        archive: Labelled calibration cases.
        policies: Two or more calibrated policies; one is enough where ``halved``.
        asked: Losses and levels of the promise, with a ``delta``.
        force: Certify policies that calibration called NO-GO.
        halved: True if as many other patients fitted the policies.

    Returns:
        The certificate and the policy that it holds for.

    Raises:
        BadInput: There is no ``delta``, or there are fewer than two policies.
    """
    if asked.delta is None or (len(policies) < 2 and not halved):
        raise BadInput(f"certifying designs together needs --method ltt and two or more of them, got {len(policies)}")
    for one in policies:
        check_router(one)
        check_go(one, force=force)
    names = [one.name if halved else compared_as(one) for one in policies]
    digests = [policy_digest(one) for one in policies]
    together = None if halved else names
    each = [router_evidence(archive, one, margin=asked.margin, together=together) for one in policies]
    designs = [DesignEvidence(*pair) for pair in zip(policies, each, strict=True)]
    question = {"method": "designs", "designs": digests, **asdict(asked)}
    said = note_attempt(archive, policies[0], question, force=force, together=together)
    found = best_certified(designs, asked, "betting")
    best, cut, p = (designs[0], None, None) if found is None else found
    taken = names[designs.index(best)]
    where = limits(asked, len(set(best.evidence.clusters)), "betting", asked.delta / len(designs))
    smallest = min(asked.alphas)  # a half that makes fewer designs a NO-GO tests more of them
    in_all = patients_needed(smallest, delta=asked.delta, binary=False, designs=TOGETHER, halved=True) if halved else 0
    certificate, certified = issue(
        archive, best.policy, asked, best.evidence, cut, p, where, (), said, designs=len(designs), in_all=in_all
    )
    advice = certificate.advice + ("" if found is None else f" Of {', '.join(names)} it is {taken!r}.")
    details = {"family_wise": "chains", "designs": names, "p_value": "betting"}
    return replace(certificate, details=details, advice=advice), certified


def best_certified(
    designs: Sequence[DesignEvidence], asked: Promise, kind: str
) -> tuple[DesignEvidence, float, float] | None:
    """Return (design, cut, p-value) with the greatest gain among all certified cuts of all designs; None without any.

    Every design is tested at delta / number of designs, so all that pass are safe together.
    """
    level = float(asked.delta or 0) / len(designs)
    best: tuple[float, DesignEvidence, float, float] | None = None
    for one in designs:
        tables = [loss_table(one.evidence, asked, name) for name in asked.losses]
        passed, p = tested_cuts(tables, asked, kind, level)
        if not len(passed):
            continue
        cuts = tables[0].settings[np.sort(passed)]
        gains = one.gains(cuts)
        at = int(np.argmax(gains))
        if best is None or gains[at] > best[0]:
            best = float(gains[at]), one, float(cuts[at]), float(p[np.sort(passed)[at]])
    return None if best is None else best[1:]


def certify_default(
    archive: Archive, asked: Promise, *, force: bool = False, consensus: str | None = None
) -> tuple[Certificate, Policy]:
    """Fit every design on half of the patients and certify all of them together on the other half.

    The halves are made by the order of hashed names, so no label has a part in it. Designs that are a NO-GO on the
    half that fits are left out.

    Args:
        archive: Labelled calibration cases.
        asked: Losses and levels of the promise, with a ``delta``.
        force: Include designs that are a NO-GO.
        consensus: Name of the candidate that combines the others, if none is called consensus.

    Returns:
        The certificate and the policy that it holds for.

    Raises:
        BadInput: There is no ``delta``.
        Refused: Every design is a NO-GO.
        TooFewCases: There are too few patients or cases to halve.
    """
    if asked.delta is None:
        raise BadInput(
            "policy 'default' chooses among designs with these labels, so the choice must be certified, too: add "
            "--method ltt, or name one design"
        )
    fit, test = halves_of(archive)
    names = [name for name in DESIGNS if name != "m0"]
    made = [calibrate(fit, name, consensus=consensus) for name in names]
    helping = [one for one in made if force or no_go(one) is None]
    if not helping:
        raise Refused(
            f"NO-GO: none of {', '.join(names)} helps more of the {len(fit.ids)} cases that fit it than it hurts; keep "
            "M0, or add --set force=true to use one nevertheless (every output says so)"
        )
    certificate, certified = certify_designs(test, helping, asked, force=force, halved=True)
    more = f" Designs were fitted on {len(fit.ids)} cases and tested on {len(test.ids)} others."
    out = [one.name for one in made if not force and no_go(one) is not None]
    more += f" Left out because they are NO-GO on the cases for fitting: {', '.join(out)}." if out else ""
    return replace(certificate, advice=certificate.advice + more), certified


def halves_of(archive: Archive) -> tuple[Archive, Archive]:
    """Return the cases of half of the patients, by the order of their hashed names, and those of the others."""
    units = sorted({cluster_of(archive, case) for case in archive.ids})
    first = set(units[: len(units) // 2])
    inside = [case for case in archive.ids if cluster_of(archive, case) in first]
    if len(units) < 4 or len(inside) < FEWEST:
        raise TooFewCases(
            f"designs are fitted on half of the {UNIT[1]} and tested on the others: at least 4, and {FEWEST} cases in "
            f"the first half, got {len(units)} with {pluralize(len(inside), 'case')} in it; label more"
        )
    return archive.select(ids=inside), archive.select(ids=[case for case in archive.ids if case not in set(inside)])
