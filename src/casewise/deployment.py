"""Model + adaptation + policy (+ certificate, watch), bound once: how a case is segmented under guard.

``casewise predict``, ``serve`` and ``record`` and their workers on this and other machines all go through a
:class:`Deployment`. It is data, so it travels between processes; each loads the model once::

    deployment = Deployment(Model("MODEL"), (Adaptation("tent"),), policy)
    deployment.check()                      # refuses what does not belong together
    found = deployment.segment(case)        # found.mask, found.decision, found.status
    trajectory = deployment.record(case)    # every candidate, for an archive
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone, Prepared, load_backbone
from casewise.adapt.backbones.merged import merged
from casewise.adapt.contract import CONTRACTS, check_contract, estimate_bytes
from casewise.adapt.episode import as_inputs, run_episode
from casewise.adapt.forwards import Forwards
from casewise.adapt.parameters import select
from casewise.adapt.proposers import SharedSource, readings_of
from casewise.archive.layout import image_sha256, mask_sha256
from casewise.core.brief import counted
from casewise.core.errors import BadInput, CasewiseError, Mismatch, MovedUnselected, NotFinite, Refused, in_one_line
from casewise.core.predicted import Finding
from casewise.core.records import (
    DONE,
    FALLBACK,
    SOURCE,
    Action,
    Binding,
    Case,
    Controller,
    Decision,
    Mask,
    Observation,
    Policy,
    State,
    Trajectory,
    deployed,
    joint_binding,
)
from casewise.guard import Guarded, check_bound, decided, episode_of, fallen_back, prepared
from casewise.judge.certificates.certificate import (
    NO_GO,
    Certificate,
    check_certificate,
    check_feasible,
    outside_promise,
)
from casewise.judge.deciding import compared
from casewise.judge.monitors.watch import Watching
from casewise.judge.policy import READY, adapts, calibration_case, check_binding, check_go, controller_of, no_go


@dataclass(frozen=True)
class Model:
    """What to load, and how; hashable and picklable, so that workers load their own."""

    spec: str
    weights: Path | None = None
    folds: tuple[int | str, ...] | None = None
    checkpoint: str = "checkpoint_final.pth"
    device: str = "cpu"
    step_size: float = 0.5
    mirroring: bool = True
    trust: bool = False
    trust_bundle: bool = False
    trust_architectures: tuple[str, ...] = ()  # classes that a model folder may name
    merge: tuple[str, ...] = ()  # classes merged or renamed, such as "disc=rim+cup"

    def load(self) -> Backbone:
        """The backbone; the same object each time in one process."""
        return _loaded(self)


@functools.lru_cache(maxsize=1)
def _loaded(model: Model) -> Backbone:
    plain = load_backbone(
        model.spec,
        weights=model.weights,
        fold=model.folds,
        checkpoint=model.checkpoint,
        device=model.device,
        step_size=model.step_size,
        mirroring=model.mirroring,
        trust=model.trust,
        trust_bundle=model.trust_bundle,
        trust_architectures=model.trust_architectures,
    )
    return merged(plain, model.merge)


def device_of(asked: str | None) -> str:
    """The device that was asked for, else the GPU where there is one."""
    if asked is not None:
        return asked
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class OutOfTime(CasewiseError):
    """The case's time is up; raised between forwards, so that the network is given back."""


@dataclass(frozen=True, eq=False)
class Segmented:
    """One case under guard: the mask to use, M0, the decision behind it, and every candidate that was made."""

    mask: Mask
    source: Mask
    decision: Decision
    trajectory: Trajectory
    status: str = DONE  # or "fallback" where M0 replaced a failure or a time-out
    error: Exception | None = None
    findings: tuple[Finding, ...] = ()  # of the input contract
    ladders: Mapping[str, Trajectory] = field(default_factory=dict)  # all of them, where several were read together
    notes: tuple[str, ...] = ()  # what no promise covers about this case: a calibration case, a forced no-go, ...
    monitor: Mapping[str, Any] | None = None  # what the watch says after this case
    seconds: float = 0.0

    @property
    def executed(self) -> int:
        """Updates that were made, those of a failed adaptation included."""
        return self.decision.executed


@dataclass(frozen=True)
class Deployment:
    """How cases are segmented under guard. Not for two threads at once: there is one network, and it is lent out."""

    model: Model
    proposers: tuple[Adaptation, ...] = (Adaptation(),)  # what makes candidates, each against the same M0
    policy: Policy = READY["m0"]
    certificate: Certificate | None = None
    watch: Watching | None = field(default=None, compare=False)
    contract: str = "refuse"  # of the model with its images: "refuse", "warn" or "off"
    max_ram: int | None = None  # bytes for one case; more is refused before the first forward
    ladders: tuple[str, ...] = ("",)  # what the candidates of each proposer are called; "" where there is one
    force: bool = False  # deploy a policy that calibration called NO-GO; every output says so
    void: str = ""  # why the certificate no longer holds, where the watch is kept elsewhere

    def __post_init__(self) -> None:
        if self.contract not in CONTRACTS:
            raise BadInput(f"--contract is one of {', '.join(CONTRACTS)}, got {self.contract!r}")
        if not self.proposers or len(self.proposers) != len(self.ladders):
            raise BadInput(
                f"a deployment needs a name for each proposer, got {len(self.proposers)} and {len(self.ladders)} names"
            )
        if len(set(self.ladders)) < len(self.ladders):
            raise BadInput(f"two proposers are called alike: {', '.join(self.ladders)}; name them: NAME=PROPOSAL")

    # ---- what it is made of ----

    @property
    def backbone(self) -> Backbone:
        """The model, loaded."""
        return self.model.load()

    @property
    def adaptation(self) -> Adaptation:
        """How the candidates are made that the policy decides on; the first proposer where it does not say."""
        named = self.policy.ladder in self.ladders
        return self.proposers[self.ladders.index(self.policy.ladder) if named else 0]

    @property
    def plain_adaptation(self) -> dict[str, Any]:
        """How candidates are made, for JSON; of every ladder by its name, where several are read together."""
        if not self.policy.ladders:
            return self.adaptation.as_plain()
        named = zip(self.ladders, self.proposers, strict=True)
        return {**self.adaptation.as_plain(), "ladders": {name: how.as_plain() for name, how in named}}

    @property
    def binding(self) -> Binding:
        """What a policy must have been fitted on to decide here."""
        if not self.policy.ladders:
            return self.adaptation.binding(self.backbone)
        backbone, hows = self.backbone, dict(zip(self.ladders, self.proposers, strict=True))
        if lost := [name for name in self.policy.ladders if name not in hows]:
            raise Mismatch(
                f"policy {self.policy.name!r} reads ladder {', '.join(lost)}, and nobody proposes its candidates; "
                f"proposed are {', '.join(map(repr, self.ladders))}"
            )
        read = {name: hows[name] for name in self.policy.ladders}
        return joint_binding({name: (how.binding(backbone), how.horizon(backbone)) for name, how in read.items()})

    @property
    def active_policy(self) -> Policy:
        """What decides the next case: the policy, or M0 once the watch suspended it."""
        return self.policy if self.watch is None else self.watch.policy(self.policy)

    @property
    def adapts(self) -> bool:
        """Whether any update may be made."""
        return adapts(self.policy)

    @property
    def suspended(self) -> bool:
        """Whether the exchangeability alarm was raised: M0 for everyone until somebody recalibrates."""
        return self.watch is not None and self.watch.state.suspended

    @property
    def promise(self) -> dict[str, Any] | None:
        """The certificate in short; void once an alarm says that it no longer holds."""
        if self.certificate is None:
            return None
        one, void = self.certificate, self.why_void
        short = {"kind": one.kind, "statement": one.statement, "alpha": one.alpha, "delta": one.delta}
        return {**short, "void": void is not None, "why_void": void, "warnings": list(one.warnings)}

    @property
    def why_void(self) -> str | None:
        """Why the certificate no longer holds, as a sentence; None where it does, or where there is none."""
        if self.certificate is None:
            return None
        if no_go(self.policy) is not None:
            return NO_GO
        return (self.void or None) if self.watch is None else self.watch.void

    @property
    def warnings(self) -> tuple[str, ...]:
        """What every output of this deployment says: a forced no-go, and a certificate that no longer holds."""
        advised = no_go(self.policy)
        forced = () if advised is None else (f"{advised}. It was deployed all the same (--force).",)
        return (*forced, *(() if self.why_void is None else (self.why_void,)))

    @property
    def monitor(self) -> dict[str, Any] | None:
        """What the watch says now; None where nothing is watched."""
        if self.watch is None:
            return None
        state = self.watch.state
        return {"cases": len(state.decided), "alarms": state.alarms, "suspended": state.suspended}

    # ---- what it does ----

    def check(self) -> None:
        """Refuse, before the first case, what belongs to another model, objective, loader or calibration."""
        if self.adapts and self.policy.ladders:
            check_binding(self.policy, self.binding)
            for how in self.proposers:
                if how.forward_only is None:
                    select(self.backbone.network, how.parameters)
        elif self.adapts:
            check_bound(self.policy, replace(self.adaptation, steps=self.policy.steps), self.backbone)
            if self.adaptation.forward_only is None:
                select(self.backbone.network, self.adaptation.parameters)
            elif self.adaptation.horizon(self.backbone) != self.policy.steps:
                raise Refused(
                    f"policy {self.policy.name!r} decides on {counted(self.policy.steps, 'candidate')}, "
                    f"{self.adaptation.objective} makes {self.adaptation.horizon(self.backbone)}; calibrate again"
                )
        check_go(self.policy, force=self.force)
        controller_of(self.active_policy)
        if self.certificate is not None:
            check_certificate(self.certificate, self.policy, self.binding)
            check_feasible(self.certificate)

    def segment(self, case: Case, *, deadline: float | None = None, known: Iterable[Finding] = ()) -> Segmented:
        """Segment one case; M0 where adaptation fails or ``deadline`` (of time.monotonic) passes.

        ``known`` are findings about the case from elsewhere, such as the headers of its whole folder.
        """
        began = time.monotonic()
        self._check_memory(case)
        findings = self._checked_contract(case, known)
        found = self._guarded(case, self.active_policy, deadline)
        if self.watch is not None:
            self.watch.show(found.decision)
        return Segmented(
            mask=found.mask,
            source=found.trajectory.masks[0],
            decision=found.decision,
            trajectory=found.trajectory,
            status=found.status,
            error=found.error,
            ladders=found.ladders,
            findings=findings,
            notes=self._notes(case, found),
            monitor=self.monitor,
            seconds=time.monotonic() - began,
        )

    def record(self, case: Case) -> Trajectory:
        """Adapt one case over the whole horizon and keep every candidate; a failure is raised."""
        (made,) = self.record_ladders(case, (self.ladders[self.proposers.index(self.adaptation)],)).values()
        return made

    def record_ladders(self, case: Case, ladders: Iterable[str] | None = None) -> dict[str, Trajectory]:
        """The ladders that are asked for, all by default, against one M0 that is predicted once."""
        return dict(self._ladder_by_ladder(case, self.backbone.prepare(case), ladders))

    def _ladder_by_ladder(
        self, case: Case, ready: Prepared, ladders: Iterable[str] | None
    ) -> Iterator[tuple[str, Trajectory]]:
        asked = None if ladders is None else set(ladders)
        hows = {
            name: how for name, how in zip(self.ladders, self.proposers, strict=True) if asked is None or name in asked
        }
        shared = _shared_source(ready, tuple(hows.values()))
        for name, how in hows.items():
            yield name, self._recorded(case, ready, how, shared)

    def _recorded(self, case: Case, ready: Prepared, how: Adaptation, shared: SharedSource | None) -> Trajectory:
        backbone = self.backbone
        if how.forward_only is not None:
            return readings_of(backbone, ready, case, how, shared)
        predict = ready.predict
        if predict is not None and shared is not None:
            predict = shared.first(predict)
        return run_episode(
            backbone.network,
            ready.inputs,
            how,
            case_id=case.id,
            forward=ready.forward,
            predict=predict,
            head=backbone.head,
        )

    def estimated_bytes(self, shape: tuple[int, ...]) -> int:
        """Peak memory of a case with an image of this shape, (channel, *space)."""
        return estimate_bytes(self.backbone, shape, adapts=self.adapts, max_slices=self.adaptation.max_slices)

    # ---- how ----

    def _guarded(self, case: Case, policy: Policy, deadline: float | None) -> Guarded:
        if not adapts(policy):
            own = str(policy.options.get("reason", "no adaptation was asked for"))
            return self._source_only(
                case, self._prepared(case), "the policy is suspended: M0" if self.suspended else own
            )
        clock, ready = _Clock(deadline), self._prepared(case)
        how, controller = replace(self.adaptation, steps=policy.steps), controller_of(policy)
        if getattr(controller, "ladders", ()):
            return self._among_ladders(case, ready, controller, policy, clock)
        episode = episode_of(case, self.backbone, ready, how, controller, before_forward=clock.look)
        with ExitStack() as stack:
            try:
                stack.enter_context(episode)
            except (BadInput, NotFinite):
                raise
            except Exception as error:  # M0 with a graph did not succeed, mostly for want of memory: M0 without one
                return self._source_only(case, ready, f"adaptation failed: {in_one_line(error)}", error)
            clock.running = True
            try:
                with stack.pop_all():
                    found = decided(
                        episode, case, controller, calibration_id=policy.calibration_id, ladder=policy.ladder
                    )
            except MovedUnselected as error:
                _loaded.cache_clear()  # the network was given back; the next case loads it again nevertheless
                return fallen_back(found, error)
            return found

    def _among_ladders(
        self, case: Case, ready: Prepared, controller: Controller, policy: Policy, clock: _Clock
    ) -> Guarded:
        """A controller that reads several ladders: all their candidates are made, then it decides once.

        Where one of them fails, or the time is up between two forwards, M0 is the one that was predicted for them all.
        """
        hows = dict(zip(self.ladders, self.proposers, strict=True))
        read: tuple[str, ...] = controller.ladders  # type: ignore[attr-defined]
        shared = _shared_source(ready, tuple(hows[name] for name in read))
        made: dict[str, Trajectory] = {}
        executed = 0
        try:
            for name in read:
                episode = episode_of(
                    case, self.backbone, ready, hows[name], controller, before_forward=clock.look, source=shared
                )
                with episode:
                    clock.running = True
                    try:
                        while episode.step < episode.how.steps:
                            episode.advance(last=episode.step + 1 == episode.how.steps)
                    finally:
                        made[name] = episode.trajectory
                        executed += episode.updates
            first = next(iter(made.values()))
            seen = Observation(
                case.id, case.group, first.signals[:1], case.cluster,
                {name: one.signals for name, one in made.items()}, {name: one.rungs for name, one in made.items()},
            )  # fmt: skip
            masks = {State(0): first.masks[0]}
            for name, one in made.items():
                masks |= {State(step).on(name): mask for step, mask in enumerate(one.masks)}
            verdict = controller.decide(compared(controller, seen, masks))
            if verdict is None:
                raise BadInput(f"{controller.name} saw every candidate of case {case.id} and asked for one more step")
            decision = Decision.of(seen, verdict, controller.name, calibration_id=policy.calibration_id)
            mask = deployed(controller, lambda state: masks[state], decision)
        except Exception as error:
            if isinstance(error, MovedUnselected):
                _loaded.cache_clear()  # the network was given back; the next case loads it again nevertheless
            reason = f"adaptation failed: {in_one_line(error)}"
            if not made:
                if isinstance(error, (BadInput, NotFinite)):
                    raise
                return self._source_only(case, ready, reason, error)
            first = next(iter(made.values()))
            back = self._rollback(case, first.masks[0], reason, controller.name, executed)
            return Guarded(first.masks[0], back, first, FALLBACK, error, made)
        decision = replace(decision, executed=executed, state_hash=mask_sha256(mask))
        return Guarded(mask, decision, made.get(decision.state.ladder, first), ladders=made)

    def _notes(self, case: Case, found: Guarded) -> tuple[str, ...]:
        """What a reader of this case must know; a calibration case is recognised by its image, under any name."""
        image = image_sha256(case.image)
        seen = calibration_case(self.policy, case.id, cluster=case.cluster, input_sha256=image)
        outside = None if self.certificate is None else outside_promise(self.certificate, found.decision, image)
        unread = unread_of(found.ladders.values() or (found.trajectory,))
        return (*self.warnings, *(said for said in (seen, outside) if said), *unread)

    def _prepared(self, case: Case) -> Prepared:
        with _refusing(case):
            return prepared(case, self.backbone)

    def _source_only(self, case: Case, ready: Prepared, reason: str, error: Exception | None = None) -> Guarded:
        mask = self._source(case, ready)
        decision = self._rollback(case, mask, reason, "m0", 0)
        status = DONE if error is None else FALLBACK
        return Guarded(mask, decision, Trajectory(case.id, (mask,), ({},)), status, error)

    def _rollback(self, case: Case, mask: Mask, reason: str, controller: str, executed: int) -> Decision:
        return Decision(
            case.id, Action.ROLLBACK, SOURCE, executed=executed, controller=controller, group=case.group,
            cluster=case.cluster, reason=reason, state_hash=mask_sha256(mask),
        )  # fmt: skip

    def _source(self, case: Case, ready: Prepared) -> Mask:
        """M0 without an episode: no graph, no signals, the least memory."""
        backbone = self.backbone
        inputs = as_inputs(ready.inputs, next(backbone.network.parameters()))
        forwards = Forwards(
            backbone.network, inputs, {}, Adaptation(max_slices=self.adaptation.max_slices), forward=ready.forward,
            predict=ready.predict, head=backbone.head,
        )  # fmt: skip
        with _refusing(case):
            return forwards.mask(where=f"in M0 of case {case.id}")

    def _checked_contract(self, case: Case, known: Iterable[Finding]) -> tuple[Finding, ...]:
        if self.contract == "off":
            return ()
        findings = (*check_contract(case, self.backbone.expects), *known)
        refusals = [finding.message for finding in findings if finding.level == "refusal"]
        if refusals and self.contract == "refuse":
            raise Refused(
                f"case {case.id} breaks the model's input contract: {'; '.join(refusals)}; correct the file, or pass "
                "--contract warn"
            )
        return findings

    def _check_memory(self, case: Case) -> None:
        if self.max_ram is None:
            return
        need = self.estimated_bytes(case.image.shape)
        if need > self.max_ram:
            raise Refused(
                f"case {case.id} needs about {need / 2**30:.1f} GiB, --max-ram allows {self.max_ram / 2**30:.1f} GiB; "
                "lower --max-slices or raise the limit"
            )


def _shared_source(ready: Prepared, hows: tuple[Adaptation, ...]) -> SharedSource | None:
    """M0 for several ladders of a case, where it comes out of a pipeline; an update may need a graph of its own."""
    forwards = any(how.forward_only is not None for how in hows)
    if ready.pipeline is None or not (forwards or (len(hows) > 1 and ready.predict is not None)):
        return None
    return SharedSource(ready.pipeline)


def unread_of(made: Iterable[Trajectory]) -> tuple[str, ...]:
    """What to say of candidates that could not be read and have no vote."""
    return tuple(f"{rung} was left out: {why}" for one in made for rung, why in one.left_out.items())


@contextmanager
def _refusing(case: Case) -> Iterator[None]:
    """What a library raises when memory or an image does not suffice, as a refusal of the image."""
    try:
        yield
    except CasewiseError:
        raise
    except (MemoryError, RuntimeError, ValueError) as error:
        raise Refused(f"the model cannot segment an image of shape {case.image.shape}: {in_one_line(error)}") from error


class _Clock:
    """Stops a case between two forwards once its time is up; M0 is always predicted, so it runs after that."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline
        self.running = False

    def look(self) -> None:
        if self.running and self.deadline is not None and time.monotonic() > self.deadline:
            raise OutOfTime("the time limit of the case is over")
