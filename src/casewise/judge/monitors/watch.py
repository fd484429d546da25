"""The watch over one stream: its monitors and their state, in one small file that survives restarts.

Every monitor counts patients (or sequences). Cases of one patient resemble each other, so monitors that count cases
raise too many alarms on healthy streams (docs/how-to/monitor.md). The numbers of a patient are those of
the first case; the loss is the mean over the audited cases, and counts when the audits of the next patient begin.
A case without a cluster counts as one patient.

Three label-free numbers of a decision are watched, as far as the calibration cases have them: ``value`` (the number
that the policy read: a router's coordinate, or the size of the edit), ``agreement`` of the deployed mask with the other
candidates, and ``foreground``, the share of the image that the deployed mask covers. The last two do not depend on M0,
so they can show a loss of quality that also affects M0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from casewise.archive.store import Archive
from casewise.core.durable import file_lock, file_stamp, write_json
from casewise.core.errors import BadInput, CasewiseError, Mismatch, Refused
from casewise.core.json_records import from_plain, read_json
from casewise.core.records import Decision, Policy
from casewise.core.registry import Registry, check_names_no_code
from casewise.data.splits import cluster_of
from casewise.judge.calibration.cuts import Stream, stream_of
from casewise.judge.certificates.certificate import Certificate
from casewise.judge.decide import deployed_mask, replay_case
from casewise.judge.monitors.audits import Audit, audit_of, check_loss
from casewise.judge.monitors.exchangeability import AUDITED, SUSPENDED, Exchangeability, GoLive, suspended_policy
from casewise.judge.policy import check_binding, is_hybrid, judge_of

Monitor: TypeAlias = Audit | Exchangeability | GoLive
SCHEMA = 3

MONITORS: Registry[type[Any]] = Registry(
    "monitor", {"exchangeability": Exchangeability, "go-live": GoLive, "audit": Audit}
)
DRIFT = ("exchangeability", "go-live")
"""Monitors of label-free numbers: their alarm suspends the policy, because the calibration no longer applies."""
WATCHED = ("value", "agreement", "foreground")
"""Label-free numbers of a decision. A drift monitor has one part for each, such as ``go-live/agreement``."""
UNSEEN = (
    "No monitor sees a mistake that leaves these numbers as they were, such as a lesion that the model and all of its "
    "candidates miss in the same way. Only labelled audits show it."
)
OVERTAKEN = "the certificate is void: the watch belongs to another policy; start a new watch"


@dataclass(frozen=True)
class Watch:
    """Monitors by name over one stream of one policy. A case is added once, and a patient counts once."""

    calibration_id: str  # calibration of the watched policy; other policies refuse this state
    monitors: Mapping[str, Monitor] = field(default_factory=dict)
    decided: tuple[str, ...] = ()  # case ids whose numbers were seen
    audited: tuple[str, ...] = ()  # case ids whose loss was seen
    decided_patients: tuple[str, ...] = ()
    audited_patients: tuple[str, ...] = ()
    waiting: tuple[str, tuple[float, ...]] | None = None  # the patient whose audits are not complete, and their losses
    suspend_on_harm: bool = False  # True: an alarm of audit also deploys M0

    @property
    def suspended(self) -> bool:
        """True if M0 must be deployed for every further case."""
        return self.suspension is not None

    @property
    def suspension(self) -> str | None:
        """Reason why M0 must be deployed, as a sentence; None while the policy decides."""
        kinds = {_kind(name) for name in self.alarms}
        if kinds.intersection(DRIFT):
            return SUSPENDED
        return AUDITED if self.suspend_on_harm and "audit" in kinds else None

    @property
    def void(self) -> str | None:
        """Reason why the certificate of the watched policy is void, as a sentence; None while it holds."""
        if not self.alarms:
            return None
        raised = " and the ".join(self.alarms)
        return f"the certificate is void: the {raised} alarm was raised; recalibrate and certify again"

    @property
    def alarms(self) -> dict[str, int]:
        """Monitors that raised an alarm, and after how many patients."""
        return {name: one.alarm_at for name, one in self.monitors.items() if one.alarm_at is not None}

    def decision(self, case_id: str, numbers: Mapping[str, float], cluster: str | None = None) -> Watch:
        """Return the watch after one more decision.

        Args:
            case_id: Name of the case; a case that was seen before changes nothing.
            numbers: Numbers of the decision by name, see :data:`WATCHED`; those that are missing are not watched.
            cluster: Patient or sequence; only its first case counts.

        Raises:
            BadInput: A number is not finite, or is not known.
        """
        for name, value in numbers.items():
            if name not in WATCHED or math.isnan(value):
                raise BadInput(f"{name} of case {case_id} must be one of {', '.join(WATCHED)} and no NaN, got {value}")
        if case_id in self.decided:
            return self
        decided = (*self.decided, case_id)
        patient = cluster or case_id
        if patient in self.decided_patients:
            return replace(self, decided=decided)
        after = dict(self.monitors)
        for key, one in self.monitors.items():
            number = numbers.get(key.partition("/")[2] or "value")
            if isinstance(one, Exchangeability) and number is not None:
                after[key] = one.seen(case_id, number)
            elif isinstance(one, GoLive) and number is not None:
                after[key] = one.seen(number)
        return replace(self, monitors=after, decided=decided, decided_patients=(*self.decided_patients, patient))

    def audit(self, case_id: str, loss: float, cluster: str | None = None) -> Watch:
        """Return the watch after one more labelled case; ``loss`` is the certified loss of the deployed mask.

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
        """Return the watch with the audits of the last patient counted; later cases of that patient do not count."""
        if self.waiting is None:
            return self
        patient, losses = self.waiting
        loss = float(np.mean(losses))
        after = {name: one.seen(loss) if isinstance(one, Audit) else one for name, one in self.monitors.items()}
        return replace(self, monitors=after, waiting=None, audited_patients=(*self.audited_patients, patient))


def _kind(key: str) -> str:
    """Return the monitor name of a key such as ``go-live/agreement``."""
    return key.partition("/")[0]


def numbers_of(decision: Decision) -> dict[str, float]:
    """Return the watched numbers that a decision has."""
    found = {name: getattr(decision, name) for name in WATCHED}
    return {name: float(value) for name, value in found.items() if value is not None and not math.isnan(value)}


def start_watch(
    archive: Archive, policy: Policy, kinds: Sequence[str] = DRIFT, *, delta: float = 0.05, limit: float | None = None,
    certificate: Certificate | None = None, first: int = 20, suspend_on_harm: bool = False,
) -> Watch:  # fmt: skip
    """Start a watch over the stream of one policy.

    Args:
        archive: The calibration cases, labelled or not.
        policy: The policy that decides the stream.
        kinds: Names of :data:`MONITORS`.
        delta: Chance of a false alarm of each kind, over the whole stream; the parts of a drift monitor share it.
        limit: Risk that audits are held against, where there is no certificate.
        certificate: Certificate whose promise the audits test, see :func:`audit_of`.
        first: Number of patients that the go-live test compares with the calibration patients.
        suspend_on_harm: True if an alarm of the audits deploys M0, too.

    Returns:
        The watch, with nothing seen.

    Raises:
        BadInput: A monitor lacks an input.
        Refused: A hybrid policy would run without its alarm.
    """
    check_binding(policy, archive.binding)
    if is_hybrid(policy) and "exchangeability" not in kinds:
        raise Refused(f"policy {policy.name!r} is hybrid and needs the monitor exchangeability; do not leave it out")
    monitors: dict[str, Monitor] = {}
    for kind in kinds:
        MONITORS[kind]
        if kind in DRIFT:
            pools = calibration_numbers(archive, policy)
            for name, pool in pools.items():
                own = {"first": first} if kind == "go-live" else {}
                key = kind if name == "value" else f"{kind}/{name}"
                monitors[key] = MONITORS[kind](pool, delta=delta / len(pools), **own)
        elif certificate is not None:
            monitors[kind] = audit_of(certificate, delta)
        elif limit is not None:
            monitors[kind] = Audit(limit, delta)
        else:
            raise BadInput("the audit alarm needs the promised risk; give --certificate FILE or --set limit=RISK")
    return Watch(policy.calibration_id, monitors, suspend_on_harm=suspend_on_harm)


def calibration_numbers(archive: Archive, policy: Policy) -> dict[str, tuple[float, ...]]:
    """Return the watched numbers of the first case of every patient; numbers that a patient lacks are left out.

    Raises:
        BadInput: No number is known for all patients.
    """
    if is_hybrid(policy):
        return {"value": stream_of(policy).monitor.pool}
    judge = judge_of(policy)
    first: dict[str, str] = {}
    for case in archive.ids:
        first.setdefault(cluster_of(archive.entry(case)), case)
    found = []
    for case in first.values():
        decision = replay_case(archive, judge, case)
        mask = deployed_mask(archive, judge.controller, decision)
        found.append(numbers_of(replace(decision, foreground=float(np.mean(mask > 0)))))
    pools = {name: tuple(one[name] for one in found) for name in WATCHED if all(name in one for one in found)}
    if not pools:
        raise BadInput(f"{archive.path} has no case to compare with; record cases first")
    return pools


def active_policy(policy: Policy, watch: Watch) -> Policy:
    """Return the policy of the next case: the given one, or M0 after an alarm that suspends it.

    A hybrid policy gets the cut-points of its stream so far; it is refused without a watch.
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
        if watch.suspension is None:
            return Stream(policy, monitor).policy
    return policy if watch.suspension is None else suspended_policy(policy, watch.suspension)


def watch_lock(path: str | Path) -> AbstractContextManager[object]:
    """Hold a watch for this process alone, from reading to writing, so that no other process's change is lost."""
    return file_lock(Path(path).with_name(f".{Path(path).name}.lock"))


def write_watch(path: str | Path, watch: Watch) -> Path:
    """Write the state atomically."""
    write_json(Path(path), {"schema": SCHEMA, **asdict(watch)})
    return Path(path)


def read_watch(path: str | Path) -> Watch:
    """Read a watch from its file."""
    again = "start a new one"
    try:
        plain = read_json(Path(path), again)
        if plain.pop("schema", None) != SCHEMA:
            raise Mismatch(
                f"{path} is a watch of another schema, this casewise reads {SCHEMA}; "
                f"start a new one with casewise monitor --calibration"
            )
        check_names_no_code(plain, where=str(path))
        monitors = plain.get("monitors", {})
        if isinstance(monitors, dict):
            monitors = {
                name: from_plain(MONITORS[_kind(name)], one, str(path), again) for name, one in monitors.items()
            }
        return from_plain(Watch, {**plain, "monitors": monitors}, str(path), again)
    except FileNotFoundError:
        raise BadInput(f"there is no watch at {path}; start one with casewise monitor --calibration") from None


class Watching:
    """The watch over a stream of decisions; it is written after every case, so that interrupted runs resume.

    Several processes may share the file: services and runs add decisions, ``casewise monitor`` adds audits. The file is
    read again before each decision, so that no alarm is lost.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = (file_stamp(path), read_watch(path))
        self._own = self._known[1].calibration_id

    @property
    def state(self) -> Watch:
        """Current content of the file; its last content if it is missing or damaged."""
        stamp = file_stamp(self.path)
        if stamp != self._known[0]:
            with suppress(CasewiseError, OSError):
                self._known = (stamp, read_watch(self.path))
        return self._known[1]

    @property
    def void(self) -> str | None:
        """Reason why the certificate no longer holds; None if it does."""
        return self.state.void if self.state.calibration_id == self._own else OVERTAKEN

    def policy(self, policy: Policy) -> Policy:
        """Return the policy of the next case."""
        return active_policy(policy, self.state)

    def show(self, decision: Decision | None) -> None:
        """Add a decision; a case that was seen before, has no number, or follows a suspension does not count."""
        if decision is None or not numbers_of(decision):
            return
        with watch_lock(self.path):
            before = self.state
            if before.calibration_id != self._own or before.suspended:
                return  # the file now has the watch of another policy, or M0 was deployed after an alarm
            after = before.decision(decision.case_id, numbers_of(decision), decision.cluster)
            if after is not before:
                write_watch(self.path, after)
                self._known = (file_stamp(self.path), after)
