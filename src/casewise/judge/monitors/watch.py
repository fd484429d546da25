"""The watch over one stream: its monitors and what they have seen, in one small file that survives restarts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from casewise.core.durable import write_json
from casewise.core.errors import BadInput, Mismatch, Refused
from casewise.core.records import Policy
from casewise.core.registry import Registry
from casewise.judge.calibration.hybrid import Stream
from casewise.judge.monitors.audit_process import Audit
from casewise.judge.monitors.exchangeability import Exchangeability, suspended_policy
from casewise.judge.monitors.proxy import Proxy
from casewise.judge.monitors.reference import Reference
from casewise.judge.policy import is_hybrid

Monitor = Audit | Reference | Proxy | Exchangeability
SCHEMA = 1

MONITORS: Registry[Callable[..., Monitor]] = Registry(
    "monitor", {"audit": Audit, "reference": Reference, "proxy": Proxy, "exchangeability": Exchangeability}
)


@dataclass(frozen=True)
class Watch:
    """Monitors by name over one stream of one policy. A case is counted once, however often it is shown."""

    calibration_id: str  # of the policy that is watched; another one refuses this state
    monitors: Mapping[str, Monitor] = field(default_factory=dict)
    decided: tuple[str, ...] = ()  # case ids whose coordinate was seen
    audited: tuple[str, ...] = ()  # case ids whose loss was seen

    @property
    def suspended(self) -> bool:
        """Whether cut-points no longer apply, so that M0 must be deployed."""
        return "exchangeability" in self.monitors and self.monitors["exchangeability"].alarm

    @property
    def alarms(self) -> dict[str, int]:
        """Monitors that raised an alarm, and after how many cases."""
        return {name: one.alarm_at for name, one in self.monitors.items() if one.alarm_at is not None}

    def decision(self, case_id: str, value: float) -> Watch:
        """The watch after one more decision; ``value`` is the coordinate that the policy read."""
        if case_id in self.decided:
            return self
        after = dict(self.monitors)
        for name, one in self.monitors.items():
            if isinstance(one, Exchangeability):
                after[name] = one.seen(case_id, value)
            elif isinstance(one, Proxy):
                after[name] = one.seen(value)
        return replace(self, monitors=after, decided=(*self.decided, case_id))

    def audit(self, case_id: str, loss: float) -> Watch:
        """The watch after one more labelled case; ``loss`` is the certified loss of what was deployed."""
        if case_id in self.audited:
            return self
        after = {
            name: one.seen(loss) if isinstance(one, Audit | Reference) else one for name, one in self.monitors.items()
        }
        return replace(self, monitors=after, audited=(*self.audited, case_id))


def active_policy(policy: Policy, watch: Watch) -> Policy:
    """What decides the next case: the policy, or M0 once the exchangeability alarm was raised.

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
        return Stream(policy, monitor).policy
    return suspended_policy(policy) if watch.suspended else policy


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
            raise Mismatch(f"{path} is a watch of another schema; this casewise reads {SCHEMA}")
        monitors = {name: _monitor(name, values) for name, values in plain.pop("monitors").items()}
        return Watch(plain["calibration_id"], monitors, tuple(plain["decided"]), tuple(plain["audited"]))
    except FileNotFoundError:
        raise BadInput(f"there is no watch at {path}; start one with casewise monitor --calibration") from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not a watch ({error}); start a new one") from error


def _monitor(name: str, values: Mapping[str, Any]) -> Monitor:
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return MONITORS[name](**fields)
