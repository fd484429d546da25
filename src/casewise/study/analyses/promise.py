"""The certificate of the policy: its statement, its numbers and the reliability diagram."""

from __future__ import annotations

import pandas as pd

from casewise.core.errors import Mismatch
from casewise.judge.certificates.certificate import (
    DRIFTED,
    NO_GO,
    Certificate,
    check_certificate,
    outside_promise,
    policy_digest,
)
from casewise.judge.monitors.quota import quota_drift, quota_of
from casewise.judge.policy import no_go
from casewise.render.ink import Picture, draw_reliability
from casewise.render.tables import DASH, Cell, Table
from casewise.study.finding import Section, not_run, show
from casewise.study.study import Study

_NUMBERS = "kind loss method alpha delta population units cases floor needed cut bound kept"


def section(study: Study) -> Section:
    """The statement and the numbers of certificate.json, and the reliability diagram where it has one (fig:crc)."""
    found, what = study.extras.certificate, "certificate and reliability diagram (fig:crc)"
    if found is None:
        reason = "needs certificate.json beside the calibration archive; casewise certify writes it"
        return not_run("certificate", "Certificate", what, reason)
    if policy_digest(study.policy) not in (found.policy, found.policy_before):
        reason = (
            f"the certificate beside the calibration archive belongs to another policy ({found.policy_name}); there is "
            f"none for {study.policy.name}: run casewise certify"
        )
        return not_run("certificate", "Certificate", what, reason)
    curve = pd.DataFrame(found.reliability)
    drawn = not curve.empty and {"alpha", "risk"} <= set(curve.columns)
    missing = {} if drawn else {"reliability diagram (fig:crc)": "the certificate holds no risks at several levels"}
    notes = (*found.warnings, *(f"It is void if {reason}." for reason in found.invalid_if))
    pictures = (_picture(found, curve),) if drawn else ()
    return Section("certificate", "Certificate", _lead(study, found), (_table(found),), pictures, (), notes, missing)


def _lead(study: Study, found: Certificate) -> str:
    if not found.feasible:
        return f"Nothing is certified, so M0 would always be deployed. {found.advice}"
    holds, said = promised(study)
    return said if holds else f"Nothing is promised: {said}."


def promised(study: Study) -> tuple[bool, str]:
    """True and the promise about the deployed masks, or False and why there is none."""
    found = study.extras.certificate
    if found is None:
        return False, "there is no certificate; casewise certify can issue one"
    try:
        check_certificate(found, study.policy, study.evaluation.binding)
    except Mismatch as error:
        if policy_digest(study.policy) == found.policy_before:
            return False, "the certificate is for policy-certified.json, the certified form of this policy; study that"
        return False, str(error)
    if not found.feasible:
        return False, f"nothing could be certified at {found.alpha:g}, so M0 would always be deployed"
    if no_go(study.policy) is not None:
        return False, NO_GO
    decisions = study.decisions[study.ours]
    if quota_drift(study.policy, quota_of(decisions)) is not None:
        return False, DRIFTED
    outside = sum(outside_promise(found, decision) is not None for decision in decisions)
    statement = found.statement.rstrip(".")
    return True, f"{statement}{f' (it does not cover {outside} of {len(decisions)} cases)' if outside else ''}."


def _table(found: Certificate) -> Table:
    cells: list[dict[str, Cell]] = []
    for name in _NUMBERS.split():
        value: Cell = getattr(found, name)
        cells.append({"name": name, "value": DASH if value is None else value})
    for policy, numbers in found.deployed.items():
        cells += [{"name": f"{policy}: {name}", "value": value} for name, value in numbers.items()]
    caption = f"Policy {found.policy_name}, calibration {found.calibration_id[:12]}. {found.advice}"
    return show("certificate", "Numbers of the certificate", cells, caption=caption, collapsed=True)


def _picture(found: Certificate, curve: pd.DataFrame) -> Picture:
    caption = (
        f"Promised risk against risk ({found.reliability_from or 'origin not said'}); below the diagonal the "
        f"promise held. Levels that so few cases cannot certify are left out."
    )
    known = curve[["alpha", "risk"]].dropna()
    figure = draw_reliability(known["alpha"].tolist(), {found.policy_name or "policy": known["risk"].tolist()})
    return Picture("crc", "Reliability diagram", figure, caption, "fig:crc")
