"""What a run promises: the certificate of its policy, compared with everything that it is bound to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from casewise.core.errors import Mismatch
from casewise.core.records import Binding, Policy
from casewise.core.strict_json import worded
from casewise.judge.certificates.certificate import (
    CERTIFICATE,
    Certificate,
    check_certificate,
    check_feasible,
    read_certificate,
)

CERTIFIED = "-certified"


def promise_of(policy: Policy, file: str | None, binding: Binding, certificate: Path | None) -> Certificate | None:
    """The certificate that a run stands under, after it was compared with policy, model, objective, loader and measure.

    A certificate that is named must hold. One that lies beside a certified policy must belong to it, and may be the
    record of a failed attempt, whose policy deploys M0; a certified policy without its certificate is refused.
    """
    if certificate is not None:
        found = read_certificate(certificate)
        check_certificate(found, policy, binding)
        check_feasible(found)
        return found
    if not policy.name.endswith(CERTIFIED):
        return None
    beside = Path(file or ".").parent / CERTIFICATE
    if not beside.is_file():
        raise Mismatch(
            f"policy {policy.name!r} comes with a certificate, and there is none at {beside}; keep the two together"
        )
    found = read_certificate(beside)
    check_certificate(found, policy, binding)
    return found if found.feasible else None


def in_short(certificate: Certificate | None) -> dict[str, Any] | None:
    """The promise for a machine-readable report."""
    if certificate is None:
        return None
    return {"statement": certificate.statement, "alpha": certificate.alpha, "cut": worded(certificate.cut)}
