"""A model, its proposers, and the policy that decides: everything that is needed to segment new cases.

:func:`casewise.fit` makes a deployment, :meth:`Deployment.save` writes it as one folder, :func:`load` reads it back.
If a case fails after M0 was predicted, a deployment returns M0 and reports the error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from casewise.adapt.adaptation import Adaptation, proposers_of
from casewise.adapt.backbones import Backbone, Prepared, appearance_inputs
from casewise.adapt.contract import CONTRACTS, check_contract, estimate_bytes
from casewise.adapt.episode import as_inputs
from casewise.adapt.forwards import Forwards
from casewise.adapt.model import Model, as_model, forget_loaded
from casewise.adapt.parameters import select
from casewise.adapt.proposers.live import prepare, unread_notes
from casewise.adapt.snapshot import evaluating
from casewise.archive.layout import image_sha256, mask_sha256
from casewise.core.errors import BadInput, CasewiseError, MovedUnselected, NotFinite, Refused, in_one_line
from casewise.core.prediction_record import CALIBRATED, OUTSIDE, ContractFinding
from casewise.core.records import (
    DONE,
    FALLBACK,
    SOURCE,
    Action,
    Binding,
    Case,
    Decision,
    Mask,
    Policy,
    Trajectory,
    as_image,
    joint_binding,
)
from casewise.core.seeds import content_id
from casewise.data.folders import CaseFiles
from casewise.guard import check_bound, run_judge
from casewise.judge.appearance import Appearance, KnownAppearance, appearance_numbers, bound_by_appearance
from casewise.judge.certificates.certificate import (
    NO_GO,
    Certificate,
    check_certificate,
    check_feasible,
    outside_promise,
)
from casewise.judge.monitors.watch import Watching
from casewise.judge.policy import READY, adapts, calibration_case, check_go, judge_of, no_go, read_policy
from casewise.measure.masks import label_volumes
from casewise.measure.measures import named_volumes
from casewise.study.clinical import MeasuredCase
from casewise.study.deployed_measures import DeployedMeasures

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from casewise.run.predict_folder import PredictedFolder

SUMMARY = "fit.json"


@dataclass(frozen=True, eq=False)
class CaseResult:
    """Result of one case.

    Attributes:
        mask: The mask to use.
        source_mask: M0, the mask of the frozen model.
        decision: The chosen candidate and the reason.
        trajectory: The candidates of the chosen ladder.
        status: ``"done"``, or ``"fallback"`` where M0 replaced a failure.
        error: Error, if the case failed.
        findings: Findings of the input contract.
        ladders: Candidates of every ladder, where several were read.
        notes: Warnings about this case, for example that no promise covers it.
        appearance: Appearance of the image for the model; None where the policy does not ask.
        monitor: State of the watch after this case.
        volumes: Volume of every label of the mask by number: ml, or voxels where the spacing is not known.
        measures: Declared measures of the mask: value, low, high, level, unit, and why there is no interval. Measures
            over several scans of a patient need :meth:`Deployment.predict_folder`.
        no_interval: Reason if measures of this case have no interval; empty where they have one.
        seconds: Wall time.
    """

    mask: Mask
    source_mask: Mask
    decision: Decision
    trajectory: Trajectory
    status: str = DONE
    error: Exception | None = None
    findings: tuple[ContractFinding, ...] = ()
    ladders: Mapping[str, Trajectory] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    appearance: Appearance | None = None
    monitor: Mapping[str, Any] | None = None
    volumes: Mapping[int, float] = field(default_factory=dict)
    measures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    no_interval: str = ""
    seconds: float = 0.0

    @property
    def reason(self) -> str:
        """The reason for the chosen mask, in one sentence."""
        return self.decision.reason

    @property
    def flagged(self) -> bool:
        """True if a person should check the mask."""
        return self.decision.flagged

    @property
    def quality(self) -> float | None:
        """Estimated metric of the mask (Dice or mIoU); None where the deployment has no flag."""
        return self.decision.quality

    @property
    def quality_low(self) -> float | None:
        """Lower bound of the metric; None where the deployment has no flag."""
        return self.decision.quality_low

    @property
    def executed(self) -> int:
        """Number of candidates that were made."""
        return self.decision.executed


@dataclass(frozen=True, repr=False)
class Deployment:
    """Model, proposers and policy. Not thread-safe: all cases use the same network.

    Args:
        model: An ``nn.Module`` that returns logits, a folder, a hub id, a :class:`~casewise.adapt.model.Model`, or a
            backbone.
        policy: Decides which candidate is deployed: a policy, its file, or its archive. It brings its proposers
            along. Default: always M0.
        proposers: Proposers by ladder, for a policy that was not calibrated; otherwise the policy's own.
        certificate: The promise that holds for this policy.
        watch: Monitors that see every decision and may suspend the policy.
        contract: Reaction to images that the model was not trained for: ``"refuse"``, ``"warn"`` or ``"off"``.
        max_ram: Bytes for one case; larger cases are refused before the first forward pass.
        force: Deploy a policy that calibration advised against; every output says so.
        void: Reason why the certificate no longer holds, if the watch is kept elsewhere.
        measures: Clinical measures that are computed for every mask, with their intervals.
        folder: Folder of a saved deployment; tuned weights are read from there.

    Example:
        >>> import numpy as np
        >>> from casewise.adapt.networks import PlainUNet
        >>> deployment = Deployment(PlainUNet())  # no policy: every case keeps M0
        >>> deployment.predict(np.random.default_rng(0).normal(size=(1, 64, 64))).mask.shape
        (64, 64)
    """

    model: Any
    policy: Policy = READY["m0"]
    proposers: Mapping[str, Adaptation] = field(default_factory=dict)
    certificate: Certificate | None = None
    watch: Watching | None = field(default=None, compare=False)
    contract: str = "refuse"
    max_ram: int | None = None
    force: bool = False
    void: str = ""
    measures: DeployedMeasures | None = None
    folder: Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", as_model(self.model))
        if isinstance(self.policy, (str, Path)):
            object.__setattr__(self, "policy", read_policy(self.policy))
        if not isinstance(self.policy, Policy):
            raise BadInput(f"a policy must be a Policy, its file or its archive, got {type(self.policy).__name__}")
        if self.contract not in CONTRACTS:
            raise BadInput(f"the contract must be one of {', '.join(CONTRACTS)}, got {self.contract!r}")
        if not self.proposers:
            object.__setattr__(self, "proposers", proposers_of(self.policy, folder=self.folder))

    def __repr__(self) -> str:
        name = self.model.spec if isinstance(self.model, Model) else self.model.name
        return f"Deployment({name}, policy={self.policy.controller!r}, candidates={list(self.proposers)})"

    # ---- its parts ----

    @property
    def backbone(self) -> Backbone:
        """The model, loaded."""
        return self.model.load() if isinstance(self.model, Model) else self.model

    @property
    def device(self) -> str:
        """Device that the model runs on."""
        return str(next(self.backbone.network.parameters()).device)

    @property
    def trusted(self) -> dict[str, Any]:
        """Parts of the model that may run code: checkpoint, bundle, architectures."""
        own = self.model
        if not isinstance(own, Model):  # a network in memory was not read from a file
            return {"checkpoint": False, "bundle": False, "architectures": []}
        named = list(own.trust_architectures)
        return {"checkpoint": own.trust, "bundle": own.trust_bundle, "architectures": named}

    @property
    def adaptation(self) -> Adaptation:
        """Options of the first proposer; without one, every class is compared if the model has no background."""
        if self.proposers:
            return next(iter(self.proposers.values()))
        zero = str(self.backbone.labels.get(0, "background")).lower()
        return Adaptation(steps=0, foreground=zero in ("background", "label_0"))

    @property
    def plain_adaptation(self) -> dict[str, Any]:
        """Options of the proposers, for JSON."""
        plain = self.adaptation.as_plain()
        if not self.policy.ladders:
            return plain
        return {**plain, "ladders": {name: how.as_plain() for name, how in self.proposers.items()}}

    @property
    def binding(self) -> Binding:
        """The binding that a policy must have to decide here."""
        backbone = self.backbone
        if not self.policy.ladders:
            return self.adaptation.binding(backbone)
        return joint_binding(
            {name: (how.binding(backbone), how.horizon(backbone)) for name, how in self.proposers.items()}
        )

    @property
    def active_policy(self) -> Policy:
        """The policy for the next case: the policy, or M0 once the watch suspended it."""
        return self.policy if self.watch is None else self.watch.policy(self.policy)

    @property
    def adapts(self) -> bool:
        """True if candidates are made; False if every case gets M0 at once."""
        return adapts(self.policy)

    @property
    def suspended(self) -> bool:
        """True if an alarm was raised: M0 for every case until the policy is calibrated again."""
        return self.watch is not None and self.watch.state.suspended

    @property
    def promise(self) -> dict[str, Any] | None:
        """The certificate in short; void once it no longer holds."""
        if self.certificate is None:
            return None
        one, void = self.certificate, self.why_void
        short = {"kind": one.kind, "statement": one.statement, "alpha": one.alpha, "delta": one.delta}
        return {**short, "void": void is not None, "why_void": void, "warnings": list(one.warnings)}

    @property
    def why_void(self) -> str | None:
        """Reason why the certificate no longer holds; None where it does, or where there is none."""
        if self.certificate is None:
            return None
        if no_go(self.policy) is not None:
            return NO_GO
        return (self.void or None) if self.watch is None else self.watch.void

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings that every output of this deployment shows."""
        advised = no_go(self.policy)
        forced = () if advised is None else (f"{advised}. It was deployed nevertheless (--set force=true).",)
        return (*forced, *(() if self.why_void is None else (self.why_void,)))

    @property
    def monitor(self) -> dict[str, Any] | None:
        """State of the watch; None where nothing is watched."""
        if self.watch is None:
            return None
        state = self.watch.state
        return {"cases": len(state.decided), "alarms": state.alarms, "suspended": state.suspended}

    # ---- prediction ----

    def check(self) -> None:
        """Refuse, before the first case, a policy or certificate of another model, proposer, loader or calibration.

        Raises:
            Mismatch: If something belongs to another model or calibration.
            Refused: If calibration advised against the policy and ``force`` is not set.
        """
        if self.adapts and not self.proposers:
            raise BadInput(
                f"policy {self.policy.name!r} does not name its proposers; calibrate it on an archive, "
                "or give proposers={'': Adaptation('tent')}"
            )
        if self.adapts:
            check_bound(self.policy, self.proposers, self.backbone)
            for how in self.proposers.values():
                if how.is_gradient:
                    select(self.backbone.network, how.parameters)
        check_go(self.policy, force=self.force)
        judge_of(self.active_policy)
        if self.certificate is not None:
            check_certificate(self.certificate, self.policy, self.binding)
            check_feasible(self.certificate)

    def predict(
        self,
        image: Case | NDArray[Any] | str | Path,
        *,
        deadline: float | None = None,
        known: Iterable[ContractFinding] = (),
    ) -> CaseResult:
        """Segment one image; M0 where something fails after M0 was predicted, or where the time is over.

        Args:
            image: Array of shape ``(channel, *space)``, an image file, or a ``Case``.
            deadline: Time of ``time.monotonic()`` after which no further candidate is made.
            known: Findings about the case from elsewhere, such as the headers of its folder.

        Returns:
            The mask, M0, the decision, the estimated quality and whether a person should check it.

        Raises:
            BadInput: If the image cannot be segmented at all.
            Refused: If the image breaks the input contract or needs too much memory.
        """
        case = self._case(image)
        began = time.monotonic()
        self._check_memory(case)
        findings = self._checked_contract(case, known)
        found = self._guarded(case, self.active_policy, deadline)
        if found.decision is not None:
            covered = float((found.mask > 0).mean())
            found = replace(found, decision=replace(found.decision, foreground=covered))
        if self.watch is not None:
            self.watch.show(found.decision)
        notes = self._notes(case, found)
        return replace(
            found, findings=findings, notes=notes, monitor=self.monitor, **self._measured(case, found, notes),
            seconds=time.monotonic() - began,
        )  # fmt: skip

    def _measured(self, case: Case, found: CaseResult, notes: Sequence[str]) -> dict[str, Any]:
        """Return the volumes of the mask, and the declared measures that need this case alone."""
        volumes = label_volumes(found.mask, case.spacing_mm)
        if self.measures is None:
            return {"volumes": volumes}
        one = MeasuredCase(case.id, case.cluster, None, {"new": named_volumes(volumes, self.label_names)})
        beyond = next((note for note in notes if OUTSIDE in note or CALIBRATED in note), None)
        why = self.measures.no_interval(self.active_policy, found.status, beyond)
        found_here = self.measures.of_cases([one], {case.id: why})[case.id]
        return {"volumes": volumes, "measures": found_here, "no_interval": why}

    @property
    def label_names(self) -> dict[int, str]:
        """Names of the labels without the background, as measures read them."""
        return {value: str(name) for value, name in self.backbone.labels.items() if value}

    def predict_folder(self, images: str | Path, out: str | Path, **options: Any) -> PredictedFolder:
        """Segment every image of a folder: masks, one JSON per case, an audit log and a page.

        Args:
            images: Folder of images, as nnU-Net or casewise reads them.
            out: Folder for the masks; it is created if it does not exist.
            **options: As in :func:`casewise.run.predict_folder.predict_all`: ``jobs``, ``resume``, ``overwrite``, ...

        Returns:
            One record per case, failed cases included, the page, scores and warnings.
        """
        from casewise.run.predict_folder import predict_all

        return predict_all(self, Path(images), Path(out), **options)

    def summary(self) -> str:
        """Describe the deployment in about ten lines: labelled cases, policy, expected gain, promise.

        Raises:
            BadInput: If the deployment was not made by :func:`casewise.fit`.
        """
        from casewise.report.fit_page import summary_lines

        file = None if self.folder is None else self.folder / SUMMARY
        if file is None or not file.is_file():
            raise BadInput("only a deployment that casewise.fit made has a summary")
        return "\n".join(summary_lines(json.loads(file.read_text(encoding="utf-8"))))

    def estimated_bytes(self, shape: tuple[int, ...]) -> int:
        """Estimate the peak memory of a case with an image of this shape, ``(channel, *space)``."""
        gradient = self.adapts and any(how.is_gradient for how in self.proposers.values())
        return estimate_bytes(self.backbone, shape, adapts=gradient, max_slices=self.adaptation.max_slices)

    def save(self, folder: str | Path, *, copy_model: bool = False) -> Path:
        """Write the deployment as one folder: policy, certificate, tuned weights, hashes.

        Args:
            folder: Folder to write; it is created if it does not exist.
            copy_model: Put a copy of the model folder inside, so that the folder can be moved alone.

        Returns:
            The folder.

        Raises:
            BadInput: If ``copy_model`` is set for a model that is not a folder, or the policy does not describe its
                proposers.
        """
        from casewise.deployment.saved import save

        return save(self, Path(folder), copy_model=copy_model)

    # ---- steps of a prediction ----

    def _case(self, image: Case | NDArray[Any] | str | Path) -> Case:
        if isinstance(image, Case):
            return image
        if isinstance(image, (str, Path)):
            return self.backbone.read(CaseFiles.of(Path(image))).case
        return Case(content_id(as_image(image)), image)

    def _guarded(self, case: Case, policy: Policy, deadline: float | None) -> CaseResult:
        with _refusing(case):
            ready = prepare(case, self.backbone)
        if not adapts(policy):
            own = str(policy.options.get("reason", "the policy deploys M0 for every case"))
            return self._source_only(case, ready, "the policy is suspended: M0" if self.suspended else own)

        try:
            found = run_judge(case, self.backbone, judge_of(policy), self.proposers, prepared=ready, deadline=deadline)
        except Exception as error:
            return self._fallen_back(case, ready, policy, error)
        source = found.trajectory.masks[0]
        made = CaseResult(found.mask, source, found.decision, found.trajectory, ladders=found.ladders)
        return self._inside(case, ready, policy, made) if policy.appearance else made

    def _inside(self, case: Case, ready: Prepared, policy: Policy, found: CaseResult) -> CaseResult:
        """Flag an image unlike those of the calibration patients, and return M0 for it."""
        numbers = appearance_numbers(**appearance_inputs(case, ready, found.source_mask, self.backbone))
        look = Appearance(case.id, numbers, case.cluster).with_agreement(found.decision.agreement)
        known = KnownAppearance.from_plain(policy.appearance)
        decision, why = bound_by_appearance(found.decision, look, known, mask_sha256(found.source_mask))
        mask = found.source_mask if decision.rolled_back else found.mask
        notes = (f"{OUTSIDE}: {why}",) if why else ()
        return replace(found, mask=mask, decision=decision, appearance=look, notes=notes)

    def _fallen_back(self, case: Case, ready: Prepared, policy: Policy, error: Exception) -> CaseResult:
        """Return M0 after a failure; raise errors about the image itself."""
        if isinstance(error, MovedUnselected):
            forget_loaded()  # the network was restored; the next case loads it again to be safe
        reason = f"adaptation failed: {in_one_line(error)}"
        mask: Mask | None = getattr(error, "source_mask", None)
        if mask is None:
            if isinstance(error, (BadInput, NotFinite)):
                raise error
            return self._source_only(case, ready, reason, error)
        made: dict[str, Trajectory] = getattr(error, "made", {})
        first = next(iter(made.values()), Trajectory(case.id, (mask,), ({},)))
        executed, name = int(getattr(error, "executed", 0)), judge_of(policy).controller.name
        decision = self._rollback(case, mask, reason, name, executed, policy)
        return CaseResult(mask, mask, decision, first, FALLBACK, error, ladders=made if policy.ladders else {})

    def _source_only(self, case: Case, ready: Prepared, reason: str, error: Exception | None = None) -> CaseResult:
        mask = self._source(case, ready)
        decision = self._rollback(case, mask, reason, "m0", 0, self.policy)
        status = DONE if error is None else FALLBACK
        return CaseResult(mask, mask, decision, Trajectory(case.id, (mask,), ({},)), status, error)

    def _rollback(
        self, case: Case, mask: Mask, reason: str, controller: str, executed: int, policy: Policy
    ) -> Decision:
        return Decision(
            case.id, Action.ROLLBACK, SOURCE, executed=executed, controller=controller, group=case.group,
            cluster=case.cluster, reason=reason, state_hash=mask_sha256(mask),
            flagged=bool(policy.flag),  # without candidates the quality cannot be estimated
        )  # fmt: skip

    def _source(self, case: Case, ready: Prepared) -> Mask:
        """Predict M0 without an episode: no graph, no signals, the least memory."""
        backbone = self.backbone
        inputs = as_inputs(ready.inputs, next(backbone.network.parameters()))
        forwards = Forwards(
            backbone.network, inputs, {}, Adaptation(max_slices=self.adaptation.max_slices), forward=ready.forward,
            predict=ready.predict, head=backbone.head,
        )  # fmt: skip
        with _refusing(case), evaluating(backbone.network):
            return forwards.mask(where=f"in M0 of case {case.id}")

    def _notes(self, case: Case, found: CaseResult) -> tuple[str, ...]:
        """Return the warnings about this case; a calibration case is recognized by its image."""
        image = image_sha256(case.image)
        seen = calibration_case(self.policy, case.id, cluster=case.cluster, input_sha256=image)
        beyond = None if self.certificate is None else outside_promise(self.certificate, found.decision, image)
        unread = unread_notes(found.ladders.values() or (found.trajectory,))
        return (*self.warnings, *found.notes, *(said for said in (seen, beyond) if said), *unread)

    def _checked_contract(self, case: Case, known: Iterable[ContractFinding]) -> tuple[ContractFinding, ...]:
        if self.contract == "off":
            return ()
        findings = (*check_contract(case, self.backbone.expects), *known)
        refusals = [finding.message for finding in findings if finding.level == "refusal"]
        if refusals and self.contract == "refuse":
            raise Refused(
                f"case {case.id} does not meet the model's input contract: {'; '.join(refusals)}; correct the file, or "
                "pass --set contract=warn"
            )
        return findings

    def _check_memory(self, case: Case) -> None:
        if self.max_ram is None:
            return
        need = self.estimated_bytes(case.image.shape)
        if need > self.max_ram:
            raise Refused(
                f"case {case.id} needs about {need / 2**30:.1f} GiB, max-ram allows {self.max_ram / 2**30:.1f} GiB; "
                "lower max-slices or raise the limit"
            )


@contextmanager
def _refusing(case: Case) -> Iterator[None]:
    """Turn errors of libraries about memory or the image into a refusal of the image."""
    try:
        yield
    except CasewiseError:
        raise
    except (MemoryError, RuntimeError, ValueError) as error:
        raise Refused(f"the model cannot segment an image of shape {case.image.shape}: {in_one_line(error)}") from error
