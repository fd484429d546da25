"""Hybrid calibration: the pool grows with the stream and cut-points follow it, only under the alarm on it (E10, S12).

Off unless asked for by name. The pool of the cut-points *is* that of the exchangeability martingale, so one cannot run
without the other; once it alarms, cut-points no longer apply and every case gets M0. Nothing that was promised for
seed-only cut-points holds here. Replay begins with :func:`stream_of`; live, the monitor comes from the watch's file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from casewise.core.errors import BadInput
from casewise.core.records import Controller, Policy
from casewise.judge.calibration.cuts import cut_points
from casewise.judge.monitors.exchangeability import Exchangeability, suspended_policy
from casewise.judge.policy import controller_of, is_hybrid

WARM_UP = 15  # cases of the stream before refitted cut-points replace the calibrated ones
DELTA = 0.05  # chance that the alarm is ever false


@dataclass(frozen=True)
class Stream:
    """A hybrid policy somewhere in its stream, and the martingale that it hangs on."""

    hybrid: Policy  # as calibrated
    monitor: Exchangeability  # calibration pool, the stream so far, and the alarm
    patients: tuple[str, ...] = ()  # those of the stream that have counted

    @property
    def policy(self) -> Policy:
        """What decides the next case: calibrated cut-points in the warm-up, then refitted ones; M0 after an alarm."""
        if self.monitor.alarm:
            return suspended_policy(self.hybrid)
        options = dict(self.hybrid.options)
        settings = options.pop("hybrid")
        if len(self.monitor.stream) >= settings["warm_up"]:
            window = settings["window"] or len(self.monitor.pool)
            low, high = cut_points(self.monitor.pool[-window:], settings["convention"])
            options |= {"cut_low": low, "cut_high": high}
        return replace(self.hybrid, options=options)

    @property
    def controller(self) -> Controller:
        """The router, or M0, for the next case."""
        return controller_of(self.policy)

    def after(self, case_id: str, value: float, cluster: str | None = None) -> Stream:
        """The stream after a case with this coordinate; of a patient or sequence only the first case counts."""
        patient = cluster or case_id
        if patient in self.patients:
            return self
        return replace(self, monitor=self.monitor.seen(case_id, value), patients=(*self.patients, patient))


def stream_of(policy: Policy) -> Stream:
    """The beginning of the stream of a hybrid policy."""
    if not is_hybrid(policy):
        raise BadInput(f"policy {policy.name!r} is seed-only; calibrate with hybrid by name for a stream")
    settings = policy.options["hybrid"]
    return Stream(policy, Exchangeability(tuple(settings["pool"]), settings.get("delta", DELTA)))
