"""What a run promises, and whether it still may: the certificate of its policy, and the watch over its stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from casewise.core.errors import Mismatch
from casewise.core.records import Binding, Policy
from casewise.judge.certificates.certificate import (
    CERTIFICATE,
    Certificate,
    check_certificate,
    check_feasible,
    read_certificate,
)
from casewise.judge.monitors.state import Watch, active_policy, read_watch, write_watch

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


def policy_under_watch(policy: Policy, watch: Path | None) -> Policy:
    """The policy, or M0 for everyone once the watch says that its cut-points no longer apply."""
    return policy if watch is None else active_policy(policy, read_watch(watch))


def remember(watch: Path, entries: Iterable[Mapping[str, Any]]) -> Watch:
    """Show the decisions of a run to the watch, in order of their cases, and keep its state."""
    state = read_watch(watch)
    for entry in entries:
        value = (entry.get("decision") or {}).get("value")
        if value is not None:
            state = state.decision(str(entry["case"]), float(value))
    write_watch(watch, state)
    return state


def in_short(certificate: Certificate | None) -> dict[str, Any] | None:
    """The promise for a machine-readable report."""
    if certificate is None:
        return None
    return {"statement": certificate.statement, "alpha": certificate.alpha, "cut": certificate.cut}
