"""Guarded prediction of one case: read, check the contract, guard, write; M0 where adaptation fails.

``PredictCase`` is what an engine maps over case ids. It is picklable, loads its model once a process, and writes the
case's entry last, so a case whose entry is there is whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from casewise.adapt.backbones import Backbone, Prepared, Reading
from casewise.adapt.logits import labels
from casewise.archive.layout import mask_sha256
from casewise.core.durable import file_sha256, replacing, write_durably
from casewise.core.errors import CasewiseError, NotFinite, Refused
from casewise.core.records import SOURCE, Action, Case, Decision, Mask, Policy, Trajectory
from casewise.data.folders import CaseFiles
from casewise.data.nifti import place_like
from casewise.guard import guard
from casewise.judge.policy import controller_of
from casewise.measure.regions import regions_of
from casewise.run.contract import Finding, check_contract
from casewise.run.entry import DONE, FAILED, FALLBACK, SCHEMA, as_json, input_hashes, signals_of, versions
from casewise.run.local import in_one_line
from casewise.run.memory import estimate_bytes
from casewise.run.model import Adaptation, Model
from casewise.run.outputs import Layout
from casewise.run.preview import Preview, preview_of

REGIONS_LISTED = 50

Draw = Callable[[Preview], bytes]
"""Draws the overlay PNG; given from above, because pictures belong to reports."""


class OutOfTime(CasewiseError):
    """The case's time is up; raised between forwards, so that the network is given back."""


@dataclass(frozen=True)
class PredictCase:
    """Everything that one case needs; call it with a case id."""

    model: Model
    adaptation: Adaptation
    policy: Policy
    layout: Layout
    cases: Mapping[str, CaseFiles]
    key: str
    contract: str = "refuse"  # "refuse", "warn" or "off"
    timeout_s: float | None = None
    max_ram: int | None = None
    save_candidates: bool = False
    keep_header: bool = False  # every NIfTI output gets the header geometry of its image, exactly
    draw: Draw | None = None
    known: Mapping[str, Finding] = field(default_factory=dict)  # findings from the headers of the whole folder

    def prepare(self) -> None:
        """Load the model; engines call it before the clock of a case starts."""
        self.model.load()

    def __call__(self, case_id: str) -> dict[str, Any]:
        """Predict one case; the entry that was written. Errors of the case are in the entry, not raised."""
        began = time.monotonic()
        files = self.cases[case_id]
        self.layout.forget(case_id)
        entry = self.blank(files)
        try:
            entry |= self._predicted(files, began)
        except (CasewiseError, MemoryError, RuntimeError, OSError) as error:
            self.layout.forget(case_id)
            entry |= {"status": FAILED, "error": in_one_line(error), "error_kind": type(error).__name__}
        entry["timing"] = {**entry.get("timing", {}), "total_s": round(time.monotonic() - began, 3)}
        write_durably(self.layout.entry(case_id), as_json(entry))
        return entry

    def blank(self, files: CaseFiles) -> dict[str, Any]:
        """An entry before anything is known of the case."""
        return {
            "schema": SCHEMA,
            "case": files.id,
            "group": files.group,
            "key": self.key,
            "seed": self.adaptation.seed,
            "device": self.model.device,
            "trusted_checkpoint": self.model.trust,
            "policy": {"name": self.policy.name, "calibration_id": self.policy.calibration_id},
            "versions": versions(),
            "outputs": {},
            "inputs": {},
            "error": None,
        }

    def _predicted(self, files: CaseFiles, began: float) -> dict[str, Any]:
        backbone = self.model.load()
        hashes = input_hashes(files)
        reading = backbone.read(files)
        self._check_memory(backbone, reading.case)
        findings = self._check_contract(backbone, reading.case)
        mask, decision, trajectory, error = self._decided(backbone, reading.case, began)
        outputs = self._write(backbone, reading, mask, trajectory)
        return {
            "status": DONE if error is None else FALLBACK,
            "error": None if error is None else in_one_line(error),
            "error_kind": None if error is None else type(error).__name__,
            "model": backbone.fingerprint,
            "inputs": hashes,
            "outputs": outputs,
            "contract": findings,
            "decision": decision.as_dict(),
            "signals": signals_of(trajectory),
            "diagnostics": [dict(facts) for facts in trajectory.diagnostics],
            "regions": self._regions(trajectory.masks[0], mask),
            "timing": {"step_s": [round(seconds, 4) for seconds in trajectory.seconds]},
        }

    def _check_memory(self, backbone: Backbone, case: Case) -> None:
        if self.max_ram is None:
            return
        need = estimate_bytes(backbone, case.image.shape, adapts=self.adapts, max_slices=self.adaptation.max_slices)
        if need > self.max_ram:
            raise Refused(
                f"case {case.id} needs about {need / 2**30:.1f} GiB, --max-ram allows {self.max_ram / 2**30:.1f} GiB; "
                f"lower --max-slices or raise the limit"
            )

    def _check_contract(self, backbone: Backbone, case: Case) -> list[dict[str, Any]]:
        if self.contract == "off":
            return []
        findings = list(check_contract(case, backbone.expects))
        if case.id in self.known:
            findings.append(self.known[case.id])
        refusals = [finding.message for finding in findings if finding.level == "refusal"]
        if refusals and self.contract == "refuse":
            raise Refused(f"case {case.id}: {'; '.join(refusals)}; correct the file, or pass --contract warn")
        return [asdict(finding) for finding in findings]

    @property
    def adapts(self) -> bool:
        """Whether any update will be made."""
        return self.policy.controller != "m0"

    def _decided(
        self, backbone: Backbone, case: Case, began: float
    ) -> tuple[Mask, Decision, Trajectory, Exception | None]:
        if not self.adapts:
            reason = str(self.policy.options.get("reason", "no adaptation was asked for"))
            return *_source_only(backbone, case, reason), None
        limited = Limited(backbone, None if self.timeout_s is None else began + self.timeout_s)
        try:
            guarded = guard(
                case,
                limited,
                self.adaptation.built(),
                controller_of(self.policy),
                steps=self.policy.steps,
                seed=self.adaptation.seed,
                learning_rate=self.adaptation.learning_rate,
                parameters=self.adaptation.parameters,
                min_area=self.adaptation.min_area,
                foreground=self.adaptation.foreground,
                max_slices=self.adaptation.max_slices,
            )
        except (OutOfTime, MemoryError, torch.OutOfMemoryError, NotFinite, RuntimeError) as error:
            _free(self.model.device)
            return *_source_only(backbone, case, f"adaptation failed: {in_one_line(error)}", limited.source), error
        decision = replace(guarded.decision, calibration_id=self.policy.calibration_id)
        return guarded.mask, decision, guarded.trajectory, None

    def _write(self, backbone: Backbone, reading: Reading, mask: Mask, trajectory: Trajectory) -> dict[str, str]:
        case_id, source = reading.case.id, trajectory.masks[0]
        wanted: dict[Path, Mask] = {self.layout.mask(case_id): mask}
        if not np.array_equal(mask, source):
            wanted[self.layout.source(case_id)] = source
        if self.save_candidates:
            folder = self.layout.candidates(case_id)
            states = {str(step): candidate for step, candidate in enumerate(trajectory.masks)}
            states |= {str(state): candidate for state, candidate in trajectory.shrunk.items()}
            wanted |= {folder / f"{name}{self.layout.ending}": candidate for name, candidate in states.items()}
        for path, candidate in wanted.items():
            with replacing(path) as temporary:
                self._put(backbone, candidate, reading, temporary)
        paths = list(wanted)
        if self.draw is not None:
            picture = self.draw(preview_of(reading.case, source, trajectory.masks[-1], mask))
            write_durably(self.layout.overlay(case_id), picture)
            paths.append(self.layout.overlay(case_id))
        return {str(path.relative_to(self.layout.out)): file_sha256(path) for path in paths}

    def _put(self, backbone: Backbone, mask: Mask, reading: Reading, path: Path) -> None:
        backbone.write(mask, reading, path)
        if self.keep_header:
            place_like(path, self.cases[reading.case.id].images[0])

    def _regions(self, source: Mask, mask: Mask) -> list[dict[str, Any]]:
        """The largest regions of the edit that is deployed: number, voxels, whether it counts, first voxel."""
        found = regions_of(source, mask, min_area=self.adaptation.min_area, foreground=self.adaptation.foreground)
        order = np.argsort(-found.sizes, kind="stable")[:REGIONS_LISTED]
        first = found.voxels[np.unique(found.number, return_index=True)[1]]
        return [
            {
                "number": int(number),
                "voxels": int(found.sizes[number]),
                "counts": bool(found.kept[number]),
                "at": [int(place) for place in np.unravel_index(first[number], found.shape)],
            }
            for number in order
        ]


class Limited:
    """A backbone that looks at the clock before every forward and remembers M0, so that it survives a failure."""

    def __init__(self, backbone: Backbone, deadline: float | None) -> None:
        self.network = backbone.network
        self.head = backbone.head
        self.source: Mask | None = None
        self._backbone = backbone
        self._deadline = deadline

    def prepare(self, case: Case) -> Prepared:
        """The backbone's own preparation, with the clock in front."""
        prepared = self._backbone.prepare(case)
        own = prepared.forward or _network_forward(self._backbone)

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            self._look()
            return own(inputs)

        def predict() -> Mask:
            self._look()
            assert prepared.predict is not None
            mask = prepared.predict()
            self.source = mask if self.source is None else self.source
            return mask

        return Prepared(prepared.inputs, forward, predict if prepared.predict is not None else None)

    def _look(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise OutOfTime("the time limit of the case is over")


def _network_forward(backbone: Backbone) -> Callable[[torch.Tensor], torch.Tensor]:
    from casewise.adapt.logits import at_resolution, logits_of

    return lambda inputs: at_resolution(logits_of(backbone.network(inputs)), inputs.shape[2:])


def source_mask(backbone: Backbone, case: Case) -> Mask:
    """M0 without an episode: no graph, no signals, the least memory."""
    prepared = backbone.prepare(case)
    if prepared.predict is not None:
        return prepared.predict()
    forward = prepared.forward or _network_forward(backbone)
    with torch.inference_mode():
        found = labels(forward(prepared.inputs), backbone.head)
    return np.asarray(found[0] if len(found) == 1 else found)


def _source_only(
    backbone: Backbone, case: Case, reason: str, cached: Mask | None = None
) -> tuple[Mask, Decision, Trajectory]:
    """M0, the cached one where there is one (D11), with a decision that says why."""
    mask = source_mask(backbone, case) if cached is None else cached
    decision = Decision(
        case.id, Action.ROLLBACK, SOURCE, executed=0, controller="m0", group=case.group, reason=reason,
        state_hash=mask_sha256(mask),
    )  # fmt: skip
    return mask, decision, Trajectory(case.id, (mask,), ({},))


def _free(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
