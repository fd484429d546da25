"""A new watch from a calibration archive: what each monitor compares the stream with."""

from __future__ import annotations

from collections.abc import Sequence

from casewise.archive.store import Archive
from casewise.core.errors import BadInput, Refused
from casewise.core.records import Policy
from casewise.judge.calibration.hybrid import stream_of
from casewise.judge.certificates.evidence import deployed_losses, router_evidence, verdict_of
from casewise.judge.monitors.audit_process import Audit
from casewise.judge.monitors.exchangeability import Exchangeability
from casewise.judge.monitors.proxy import Proxy
from casewise.judge.monitors.reference import Reference
from casewise.judge.monitors.watch import MONITORS, Monitor, Watch
from casewise.judge.policy import check_binding, controller_of, is_hybrid


def start_watch(
    archive: Archive,
    policy: Policy,
    kinds: Sequence[str] = ("exchangeability",),
    *,
    delta: float = 0.05,
    limit: float | None = None,
    tolerance: float = 0.0,
    loss: str = "ha",
    seed: int = 0,
) -> Watch:
    """A watch over the stream of one policy; each monitor is false with probability at most ``delta``.

    ``limit`` is the promised risk that audits are held against (alpha of the certificate).
    """
    check_binding(policy, archive.binding)
    if is_hybrid(policy) and "exchangeability" not in kinds:
        raise Refused(f"policy {policy.name!r} is hybrid: it runs only under the exchangeability alarm; leave it on")

    def built(kind: str) -> Monitor:
        if kind == "exchangeability":
            pool = stream_of(policy).monitor.pool if is_hybrid(policy) else coordinates(archive, policy)
            return Exchangeability(pool, delta, seed)
        if kind == "audit":
            if limit is None:
                raise BadInput("the audit alarm needs the promised risk; give --limit or --certificate")
            return Audit(limit, delta)
        if kind == "reference":
            return Reference.of(deployed_losses(archive, policy)[1][loss].tolist(), tolerance=tolerance, delta=delta)
        MONITORS[kind]
        evidence = router_evidence(archive, policy)
        harmed = (evidence.loss(loss) > 0).tolist()
        return Proxy.of(evidence.values.tolist(), harmed, tolerance=tolerance, delta=delta)

    return Watch(policy.calibration_id, {kind: built(kind) for kind in kinds})


def coordinates(archive: Archive, policy: Policy) -> tuple[float, ...]:
    """The coordinate that the policy reads of every case, labelled or not."""
    controller = controller_of(policy)
    values = [verdict_of(archive, controller, case).value for case in archive.ids]
    known = tuple(float(value) for value in values if value is not None)
    if len(known) < len(values) or not known:
        raise BadInput(f"policy {policy.name!r} ({policy.controller}) reads no coordinate that could be monitored")
    return known
