"""The guarded model behind the service: one case in, the mask, the decision and the monitor's state out.

Not for two threads at once: the lane sees to that. The network is given back after every case, whatever happens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from casewise.adapt.backbones import Backbone
from casewise.adapt.parameters import select
from casewise.archive.layout import mask_sha256
from casewise.core.errors import BadInput, NotFinite, Refused
from casewise.core.records import SOURCE, Action, Case, Decision, Mask, Policy
from casewise.guard import guard
from casewise.judge.certificates.certificate import Certificate, check_certificate, check_feasible
from casewise.judge.monitors.watch import Watch, active_policy, read_watch, write_watch
from casewise.judge.policy import check_binding, controller_of
from casewise.run.contract import check_contract
from casewise.run.entry import DONE, FALLBACK
from casewise.run.local import in_one_line
from casewise.run.memory import estimate_bytes
from casewise.run.model import Adaptation, Model
from casewise.run.predict import Limited, OutOfTime, source_mask

FAILURES = (MemoryError, RuntimeError, ValueError)
"""What torch raises when memory or an image does not suffice; BadInput, a ValueError too, is the client's."""


@dataclass(frozen=True, eq=False)
class Answer:
    """What came of one case."""

    mask: Mask
    source: Mask | None  # M0; None where it was not kept
    decision: Decision
    status: str  # "done", or "fallback" where M0 replaced a failure or a time-out
    error: str | None
    warnings: tuple[str, ...]  # of the input contract
    monitor: Mapping[str, Any] | None
    seconds: float


class Segmenter:
    """A model, a policy and, where given, the certificate and the watch that go with it."""

    def __init__(
        self,
        model: Model,
        adaptation: Adaptation,
        policy: Policy,
        *,
        certificate: Certificate | None = None,
        watch: Path | None = None,
        contract: str = "refuse",
        max_ram: int | None = None,
    ) -> None:
        self.backbone: Backbone = model.load()
        self.policy = policy
        self.certificate = certificate
        self._adaptation = adaptation
        self._contract = contract
        self._max_ram = max_ram
        self._watch_path = watch
        self._watch: Watch | None = None if watch is None else read_watch(watch)
        self._check()

    def _check(self) -> None:
        """Refuse, before anybody asks, what belongs to another model, objective, loader or calibration."""
        binding = self._adaptation.binding(self.backbone)
        if self.policy.controller != "m0":
            check_binding(self.policy, binding)
            select(self.backbone.network, self._adaptation.parameters)
        controller_of(self._policy_now())
        if self.certificate is not None:
            check_certificate(self.certificate, self.policy, binding)
            check_feasible(self.certificate)

    def _policy_now(self) -> Policy:
        return self.policy if self._watch is None else active_policy(self.policy, self._watch)

    @property
    def suspended(self) -> bool:
        """Whether the exchangeability alarm was raised: M0 for everyone until somebody recalibrates."""
        return self._watch is not None and self._watch.suspended

    @property
    def promise(self) -> dict[str, Any] | None:
        """The certificate in short; void once any alarm was raised."""
        if self.certificate is None:
            return None
        one = self.certificate
        void = self._watch is not None and bool(self._watch.alarms)
        return {"kind": one.kind, "statement": one.statement, "alpha": one.alpha, "delta": one.delta, "void": void}

    @property
    def monitor(self) -> dict[str, Any] | None:
        """What the watch says now; None where nothing is watched."""
        if self._watch is None:
            return None
        return {"cases": len(self._watch.decided), "alarms": self._watch.alarms, "suspended": self.suspended}

    def segment(self, case: Case, *, deadline: float | None = None) -> Answer:
        """Segment one case; M0 where adaptation fails or ``deadline`` (of time.monotonic) passes."""
        began = time.monotonic()
        self._check_memory(case)
        warnings = self._checked_contract(case)
        policy = self._policy_now()
        mask, source, decision, error = self._decided(case, policy, deadline)
        self._watched(decision)
        return Answer(
            mask,
            source,
            decision,
            DONE if error is None else FALLBACK,
            None if error is None else in_one_line(error),
            warnings,
            self.monitor,
            time.monotonic() - began,
        )

    def _decided(
        self, case: Case, policy: Policy, deadline: float | None
    ) -> tuple[Mask, Mask | None, Decision, Exception | None]:
        how = self._adaptation
        if policy.controller == "m0":
            reason = "the policy is suspended: M0" if self.suspended else "no adaptation was asked for"
            mask = self._source(case)
            return mask, mask, _source_decision(case, mask, reason), None
        limited = Limited(self.backbone, deadline)
        try:
            guarded = guard(
                case,
                limited,
                how.built(),
                controller_of(policy),
                steps=policy.steps,
                seed=how.seed,
                calibration_id=policy.calibration_id,
                learning_rate=how.learning_rate,
                parameters=how.parameters,
                min_area=how.min_area,
                foreground=how.foreground,
                max_slices=how.max_slices,
            )
        except BadInput:
            raise
        except (OutOfTime, NotFinite, *FAILURES) as error:
            mask = self._source(case) if limited.source is None else limited.source
            return mask, mask, _source_decision(case, mask, f"adaptation failed: {in_one_line(error)}"), error
        return guarded.mask, guarded.trajectory.masks[0], guarded.decision, None

    def _source(self, case: Case) -> Mask:
        try:
            return source_mask(self.backbone, case)
        except BadInput:
            raise
        except FAILURES as error:
            raise Refused(
                f"the model cannot segment an image of shape {case.image.shape}: {in_one_line(error)}"
            ) from error

    def _watched(self, decision: Decision) -> None:
        if self._watch is None or self._watch_path is None or decision.value is None:
            return
        after = self._watch.decision(decision.case_id, decision.value, decision.cluster)
        if after is not self._watch:
            write_watch(self._watch_path, after)
            self._watch = after

    def _checked_contract(self, case: Case) -> tuple[str, ...]:
        if self._contract == "off":
            return ()
        findings = list(check_contract(case, self.backbone.expects))
        refusals = [finding.message for finding in findings if finding.level == "refusal"]
        if refusals and self._contract == "refuse":
            raise Refused(f"the image breaks the model's input contract: {'; '.join(refusals)}")
        return tuple(finding.message for finding in findings)

    def _check_memory(self, case: Case) -> None:
        if self._max_ram is None:
            return
        slices = self._adaptation.max_slices
        adapts = self.policy.controller != "m0"
        need = estimate_bytes(self.backbone, case.image.shape, adapts=adapts, max_slices=slices)
        if need > self._max_ram:
            raise Refused(
                f"this image needs about {need / 2**30:.1f} GiB, the service may use {self._max_ram / 2**30:.1f} GiB"
            )


def _source_decision(case: Case, mask: Mask, reason: str) -> Decision:
    """M0, and why (D11)."""
    plain = Decision(case.id, Action.ROLLBACK, SOURCE, executed=0, controller="m0", group=case.group, reason=reason)
    return replace(plain, state_hash=mask_sha256(mask))
