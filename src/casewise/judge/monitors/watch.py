"""The watch over one stream: its monitors and what they have seen, in one small file that survives restarts.

Every monitor counts patients (or sequences). Cases of one patient resemble each other, so a bet on each of them accuses
healthy streams: with four correlated cases per patient in one stream out of two. The coordinate of a patient is that of
its first case; its loss is the mean over its audited cases, and counts when the audits of the next patient begin.
A case without a cluster is a patient of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from casewise.archive.store import Archive
from casewise.core.brief import UNIT
from casewise.core.durable import held, write_json
from casewise.core.errors import BadInput, CasewiseError, Mismatch, Refused
from casewise.core.records import Decision, Policy
from casewise.core.registry import Registry
from casewise.data.splits import cluster_of
from casewise.judge.calibration.cuts import Stream, stream_of
from casewise.judge.certificates.evidence import deployed_losses, router_evidence, verdict_of
from casewise.judge.monitors.audits import Audit, Proxy, Reference, check_loss
from casewise.judge.monitors.exchangeability import AUDITED, SUSPENDED, Exchangeability, GoLive, Quota, suspended_policy
from casewise.judge.policy import check_binding, controller_of, is_hybrid

Monitor = Audit | Reference | Proxy | Exchangeability | GoLive | Quota
SCHEMA = 2

MONITORS: Registry[Callable[..., Monitor]] = Registry(
    "monitor",
    {
        "audit": Audit,
        "reference": Reference,
        "proxy": Proxy,
        "exchangeability": Exchangeability,
        "go-live": GoLive,
        "quota": Quota,
    },
)
DRIFT = ("exchangeability", "go-live")
"""Monitors whose alarm always suspends the policy: the cut-points no longer apply."""
OVERTAKEN = "the certificate is void: the watch of another policy took the place of this one's; start it again"
HARM = ("audit", "reference")
"""Monitors of labelled audits: their alarm voids the certificate, and suspends the policy where that was asked for."""


@dataclass(frozen=True)
class Watch:
    """Monitors by name over one stream of one policy. A case is shown once, and a patient counts once."""

    calibration_id: str  # of the policy that is watched; another one refuses this state
    monitors: Mapping[str, Monitor] = field(default_factory=dict)
    decided: tuple[str, ...] = ()  # case ids whose coordinate was seen
    audited: tuple[str, ...] = ()  # case ids whose loss was seen
    decided_patients: tuple[str, ...] = ()
    audited_patients: tuple[str, ...] = ()
    waiting: tuple[str, tuple[float, ...]] | None = None  # the patient whose audits are not complete, and their losses
    suspend_on_harm: bool = False  # whether an alarm of labelled audits deploys M0, too

    @property
    def suspended(self) -> bool:
        """Whether M0 must be deployed for every further case."""
        return self.suspension is not None

    @property
    def suspension(self) -> str | None:
        """Why M0 must be deployed, as a sentence; None while the policy decides."""
        if self._raised(DRIFT):
            return SUSPENDED
        return AUDITED if self.suspend_on_harm and self._raised(HARM) else None

    @property
    def void(self) -> str | None:
        """Why the certificate of the watched policy is void, as a sentence; None while it holds."""
        raised = self._raised((*DRIFT, *HARM, "quota"))
        if not raised:
            return None
        return (
            f"the certificate is void: the {' and the '.join(raised)} alarm was raised; recalibrate and certify again"
        )

    @property
    def alarms(self) -> dict[str, int]:
        """Monitors that raised an alarm, and after how many patients."""
        return {name: one.alarm_at for name, one in self.monitors.items() if one.alarm_at is not None}

    def decision(self, case_id: str, value: float, cluster: str | None = None, bucket: str | None = None) -> Watch:
        """The watch after one more decision; ``value`` is the coordinate that the policy read."""
        if math.isnan(value):  # also where no monitor reads it, or the patient has counted already
            raise BadInput(f"a coordinate must be finite, got {value} for case {case_id}; leave out what has none")
        if case_id in self.decided:
            return self
        decided = (*self.decided, case_id)
        patient = cluster or case_id
        if patient in self.decided_patients:
            return replace(self, decided=decided)
        after = dict(self.monitors)
        for name, one in self.monitors.items():
            if isinstance(one, Exchangeability):
                after[name] = one.seen(case_id, value)
            elif isinstance(one, Proxy | GoLive):
                after[name] = one.seen(value)
            elif isinstance(one, Quota) and bucket is not None:
                after[name] = one.seen(bucket)
        return replace(self, monitors=after, decided=decided, decided_patients=(*self.decided_patients, patient))

    def audit(self, case_id: str, loss: float, cluster: str | None = None) -> Watch:
        """The watch after one more labelled case; ``loss`` is the certified loss of what was deployed.

        The mean loss of a patient counts once, when a case of another patient is audited or :meth:`settled` is called;
        cases of a patient that has counted are remembered and change nothing.
        """
        check_loss(loss)
        if case_id in self.audited:
            return self
        watch, patient = replace(self, audited=(*self.audited, case_id)), cluster or case_id
        if patient in self.audited_patients:
            return watch
        if self.waiting is not None and self.waiting[0] == patient:
            return replace(watch, waiting=(patient, (*self.waiting[1], float(loss))))
        begun = replace(watch.settled(), waiting=(patient, (float(loss),)))
        return begun if cluster else begun.settled()

    def settled(self) -> Watch:
        """The watch with the audits of the last patient counted: no more cases of that patient are expected."""
        if self.waiting is None:
            return self
        patient, losses = self.waiting
        loss = float(np.mean(losses))
        after = {
            name: one.seen(loss) if isinstance(one, Audit | Reference) else one for name, one in self.monitors.items()
        }
        return replace(self, monitors=after, waiting=None, audited_patients=(*self.audited_patients, patient))

    def _raised(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self.alarms]


def start_watch(
    archive: Archive,
    policy: Policy,
    kinds: Sequence[str] = DRIFT,
    *,
    delta: float = 0.05,
    limit: float | None = None,
    tolerance: float = 0.0,
    loss: str = "ha",
    first: int = 20,
    seed: int = 0,
    suspend_on_harm: bool = False,
) -> Watch:
    """A new watch over the stream of one policy; each monitor is false with probability at most ``delta``.

    ``limit`` is the promised risk that audits are held against (alpha of the certificate), ``first`` the number of
    patients that the go-live test compares with the calibration patients.
    """
    check_binding(policy, archive.binding)
    if is_hybrid(policy) and "exchangeability" not in kinds:
        raise Refused(f"policy {policy.name!r} is hybrid: it runs only under the exchangeability alarm; leave it on")

    def built(kind: str) -> Monitor:
        if kind in DRIFT:
            pool = stream_of(policy).monitor.pool if is_hybrid(policy) else coordinates(archive, policy)
            return Exchangeability(pool, delta, seed) if kind == "exchangeability" else GoLive(pool, first, delta)
        if kind == "quota":
            return Quota(policy.preflight.get("quota", {}), delta)
        if kind == "audit":
            if limit is None:
                raise BadInput("the audit alarm needs the promised risk; give --limit or --certificate")
            return Audit(limit, delta)
        if kind == "reference":
            ids, losses = deployed_losses(archive, policy)
            by_patient: dict[str, list[float]] = {}
            for case, one in zip(ids, losses[loss], strict=True):
                by_patient.setdefault(cluster_of(archive.entry(case)), []).append(float(one))
            means = [float(np.mean(each)) for each in by_patient.values()]
            return Reference.of(means, tolerance=tolerance, delta=delta)
        MONITORS[kind]
        evidence = router_evidence(archive, policy)
        harmed = evidence.loss(loss) > 0
        first_of = sorted(np.unique(np.asarray(evidence.clusters), return_index=True)[1])
        return Proxy.of(evidence.values[first_of].tolist(), harmed[first_of].tolist(), tolerance=tolerance, delta=delta)

    monitors = {kind: built(kind) for kind in kinds}
    return Watch(policy.calibration_id, monitors, suspend_on_harm=suspend_on_harm)


def coordinates(archive: Archive, policy: Policy) -> tuple[float, ...]:
    """The coordinate that the policy reads of the first case of every patient, labelled or not."""
    controller = controller_of(policy)
    first: dict[str, str] = {}
    for case in archive.ids:
        first.setdefault(cluster_of(archive.entry(case)), case)
    values = [verdict_of(archive, controller, case).value for case in first.values()]
    known = tuple(float(value) for value in values if value is not None)
    if len(known) < len(values) or not known:
        raise BadInput(f"policy {policy.name!r} ({policy.controller}) reads no coordinate that could be monitored")
    return known


def active_policy(policy: Policy, watch: Watch) -> Policy:
    """What decides the next case: the policy, or M0 once an alarm that suspends it was raised.

    A hybrid policy gets the cut-points of its stream so far; it is refused where nobody watches the stream.
    """
    if watch.calibration_id != policy.calibration_id:
        raise Mismatch(
            f"this watch belongs to calibration {watch.calibration_id[:12]!r}, policy {policy.name!r} to "
            f"{policy.calibration_id[:12]!r}; start a new watch after recalibration"
        )
    if is_hybrid(policy):
        monitor = watch.monitors.get("exchangeability")
        if not isinstance(monitor, Exchangeability):
            raise Refused(f"policy {policy.name!r} is hybrid and this watch has no exchangeability alarm; start one")
        return Stream(policy, monitor).policy if watch.suspension is None else _suspended(policy, watch)
    return policy if watch.suspension is None else _suspended(policy, watch)


def _suspended(policy: Policy, watch: Watch) -> Policy:
    return suspended_policy(policy, watch.suspension or SUSPENDED)


@contextmanager
def alone(path: str | Path) -> Iterator[None]:
    """The file for this process alone, from reading to writing: no word of another one is lost in between."""
    with held(Path(path).with_name(f".{Path(path).name}.lock"), wait=True):
        yield


def write_watch(path: str | Path, watch: Watch) -> Path:
    """Write the state whole or not at all, so a crash leaves the one before."""
    plain = asdict(replace(watch, monitors={}))
    plain["monitors"] = {name: asdict(one) for name, one in watch.monitors.items()}
    write_json(Path(path), {"schema": SCHEMA, **plain})
    return Path(path)


def read_watch(path: str | Path) -> Watch:
    """The state as it was written."""
    try:
        plain = json.loads(Path(path).read_text())
        if plain.pop("schema") != SCHEMA:
            raise Mismatch(
                f"{path} is a watch of another schema, this casewise reads {SCHEMA} (monitors count {UNIT[1]} now); "
                f"start a new one with casewise monitor --calibration"
            )
        monitors = {name: _monitor(name, values) for name, values in plain.pop("monitors").items()}
        waiting = plain.pop("waiting")
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
        }
        return Watch(**fields, monitors=monitors, waiting=None if waiting is None else (waiting[0], tuple(waiting[1])))
    except FileNotFoundError:
        raise BadInput(f"there is no watch at {path}; start one with casewise monitor --calibration") from None
    except (KeyError, TypeError, AttributeError, IndexError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not a watch ({error}); start a new one") from error


class Watching:
    """The watch over a stream of decisions; written after every case, so that a run that is killed goes on from it.

    Its file may be shared: other services and runs add their decisions, ``casewise monitor`` adds audits. What they
    wrote is read before anything is decided or added, so that nobody's alarm is lost.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = (_stamp(path), read_watch(path))
        self._own = self._known[1].calibration_id

    @property
    def state(self) -> Watch:
        """What the file says now; what it said last where it is gone or broken, which the next decision writes anew."""
        stamp = _stamp(self.path)
        if stamp != self._known[0]:
            with suppress(CasewiseError, OSError):
                self._known = (stamp, read_watch(self.path))
        return self._known[1]

    @property
    def void(self) -> str | None:
        """Why the certificate no longer holds; None where it does."""
        return self.state.void if self.state.calibration_id == self._own else OVERTAKEN

    def policy(self, policy: Policy) -> Policy:
        """What decides the next case."""
        return active_policy(policy, self.state)

    def show(self, decision: Decision | None) -> None:
        """Show a decision; one of a case that was seen before, or that read no coordinate, does not count."""
        if decision is None or decision.value is None or math.isnan(decision.value):
            return
        with alone(self.path):
            before = self.state
            if before.calibration_id != self._own:
                return  # the watch of another policy took its place: left as it is, and the next case is refused
            after = before.decision(decision.case_id, decision.value, decision.cluster, decision.bucket)
            if after is not before:
                write_watch(self.path, after)
                self._known = (_stamp(self.path), after)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Another one where a file was replaced or edited; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _monitor(name: str, values: Mapping[str, Any]) -> Monitor:
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return MONITORS[name](**fields)
