"""Guarded prediction of one case: read, check the contract, guard, write; M0 where adaptation fails.

``PredictCase`` is the function that an engine maps over case ids. It is picklable, loads its model once per process,
and writes the case's entry last, so a case with an entry is complete.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from casewise.adapt.backbones import Backbone, Reading
from casewise.core.durable import file_sha256, replacing, write_durably
from casewise.core.errors import CasewiseError, CasewiseWarning, Refused, in_one_line, without_folders
from casewise.core.prediction_record import REGIONS_LISTED, ContractFinding, PredictedCase
from casewise.core.records import FAILED, Case, Mask, Signals, State, Trajectory, candidate_name
from casewise.data.folders import CaseFiles
from casewise.data.nifti import place_like
from casewise.judge.policy import no_go
from casewise.measure.regions import regions_of
from casewise.render.mask_pictures import Preview, grey_levels
from casewise.run.prediction_folder import Layout, input_hashes, versions, write_entry

if TYPE_CHECKING:
    from casewise.deployment import CaseResult, Deployment

Draw = Callable[[Preview], bytes]
"""Draws the overlay PNG."""


@dataclass(frozen=True)
class PredictCase:
    """Everything that one case needs; call it with a case id."""

    deployment: Deployment
    layout: Layout
    cases: Mapping[str, CaseFiles]
    key: str
    timeout_s: float | None = None
    save_candidates: bool = False
    keep_header: bool = False  # every NIfTI output gets the header geometry of its image, exactly
    draw: Draw | None = None
    known: Mapping[str, ContractFinding] = field(default_factory=dict)  # findings from the headers of the whole folder

    def prepare(self) -> None:
        """Load the model; engines call it before the clock of a case starts."""
        _ = self.deployment.backbone

    def __call__(self, case_id: str) -> PredictedCase:
        """Predict one case and return its entry; errors are stored in the entry, not raised."""
        began = time.monotonic()
        files = self.cases[case_id]
        self.layout.forget(case_id)
        try:
            entry = self._predicted(files, began)
        except (CasewiseError, MemoryError, RuntimeError, OSError) as error:
            entry = self.failed(files, in_one_line(error), type(error).__name__)
        entry = replace(entry, timing={**entry.timing, "total_s": round(time.monotonic() - began, 3)})
        write_entry(self.layout, entry)
        return entry

    def failed(self, files: CaseFiles, error: str | None, kind: str | None) -> PredictedCase:
        """Return the entry of a failed case and remove its files."""
        self.layout.forget(files.id)
        return replace(self._blank(files), error=self._nameless(files, error), error_kind=kind)

    def _nameless(self, files: CaseFiles, error: str | None) -> str | None:
        """Strip directories from an error message, because entries are shared."""
        folders = {*(path.parent for path in files.images), self.layout.out}
        return None if error is None else without_folders(error, folders)

    def _blank(self, files: CaseFiles) -> PredictedCase:
        """Return an entry with the facts of the run only."""
        policy = self.deployment.policy
        return PredictedCase(
            case=files.id, name=files.name or files.id, status=FAILED, group=files.group, key=self.key,
            seed=self.deployment.adaptation.seed, device=self.deployment.device,
            trusted_checkpoint=self.deployment.trusted["checkpoint"],
            policy={
                "name": policy.name, "calibration_id": policy.calibration_id, "no_go": no_go(policy),
                **({"ladders": list(policy.ladders)} if policy.ladders else {}),
            },
            certificate=self.deployment.promise, versions=versions(),
        )  # fmt: skip

    def _predicted(self, files: CaseFiles, began: float) -> PredictedCase:
        backbone = self.deployment.backbone
        hashes = input_hashes(files.checked())
        reading = backbone.read(files)
        if input_hashes(files) != hashes:
            raise Refused(f"the image of case {files.id} was changed while it was read; predict it again")
        deadline = None if self.timeout_s is None else began + self.timeout_s
        known = [self.known[files.id]] if files.id in self.known else []
        case = replace(reading.case, modality=files.modality)
        found = self.deployment.predict(case, deadline=deadline, known=known)
        names = {str(state): name for state, (name, _) in named_candidates(found).items()}
        state = found.decision.state
        back = f", {state.shrink:.0%} back" if state.shrink else ""
        made = replace(
            self._blank(files), status=found.status, model=backbone.fingerprint, inputs=hashes, names=names,
            error=None if found.error is None else self._nameless(files, in_one_line(found.error)),
            error_kind=None if found.error is None else type(found.error).__name__,
            outputs=self._write(backbone, reading, found), contract=found.findings, notes=found.notes,
            decision=found.decision, candidate=f"{names[str(state.step)]}{back}" if state.step else "M0",
            signals=signals_of(found), diagnostics=found.trajectory.diagnostics, measures=found.measures,
            appearance={} if found.appearance is None else dict(found.appearance.numbers),
            **self._edit(found.source_mask, found.mask), no_interval=found.no_interval,
            volumes={str(label): round(volume, 4) for label, volume in found.volumes.items()},
            timing={"step_s": [round(seconds, 4) for seconds in found.trajectory.seconds]},
        )  # fmt: skip
        if made.certificate is None or made.certificate["void"] or made.uncovered is None:
            return made
        return replace(made, certificate={**made.certificate, "void": True, "why_void": made.uncovered})

    def _write(self, backbone: Backbone, reading: Reading, found: CaseResult) -> dict[str, str]:
        case_id, source, mask, trajectory = reading.case.id, found.source_mask, found.mask, found.trajectory
        wanted: dict[Path, Mask] = {self.layout.mask(case_id): mask}
        if not np.array_equal(mask, source):
            wanted[self.layout.source(case_id)] = source
        folder, last = self.layout.candidates(case_id), trajectory.masks[-1]
        if not np.array_equal(last, source) and not np.array_equal(last, mask):  # a reviewer may still want it
            wanted[folder / f"{trajectory.steps}{self.layout.ending}"] = last
        if self.save_candidates:
            states = {str(step): candidate for step, candidate in enumerate(trajectory.masks)}
            states |= {str(state): candidate for state, candidate in trajectory.shrunk.items()}
            for ladder, one in _others(found).items():  # in one folder per ladder
                states |= {f"{ladder}/{step}": one.masks[step] for step in range(1, len(one.masks))}
            wanted |= {folder / f"{name}{self.layout.ending}": candidate for name, candidate in states.items()}
        for path, candidate in wanted.items():
            with replacing(path) as temporary:
                self._put(backbone, candidate, reading, temporary)
        paths = list(wanted)
        if self._drawn(reading.case, found):
            paths.append(self.layout.overlay(case_id))
        return {str(path.relative_to(self.layout.out)): file_sha256(path) for path in paths}

    def _drawn(self, case: Case, found: CaseResult) -> bool:
        """Draw the overlay; return False if that fails, which never affects the mask."""
        if self.draw is None:
            return False
        try:
            names, background = self.deployment.backbone.labels, self.deployment.adaptation.foreground
            seen = preview_of(case, found, names=names, background=background)
            write_durably(self.layout.overlay(case.id), self.draw(seen))
        except Exception as error:
            warnings.warn(
                f"the picture of case {case.id} cannot be drawn ({in_one_line(error)}); its mask was written",
                CasewiseWarning,
                stacklevel=2,
            )
            return False
        return True

    def _put(self, backbone: Backbone, mask: Mask, reading: Reading, path: Path) -> None:
        backbone.write(mask, reading, path)
        if self.keep_header:
            place_like(path, self.cases[reading.case.id].images[0])

    def _edit(self, source: Mask, mask: Mask) -> dict[str, Any]:
        """The changed share of M0, and the largest regions: number, voxels, whether it counts, first voxel."""
        how = self.deployment.adaptation
        found = regions_of(source, mask, min_area=how.min_area, foreground=False)
        order = np.argsort(-found.sizes, kind="stable")[:REGIONS_LISTED]
        first = found.voxels[np.unique(found.number, return_index=True)[1]]
        original = np.count_nonzero(source) if how.foreground else source.size
        regions = tuple(
            {
                "number": int(number),
                "voxels": int(found.sizes[number]),
                "counts": bool(found.kept[number]),
                "at": [int(place) for place in np.unravel_index(first[number], found.shape)],
            }
            for number in order
        )
        return {"changed": found.area / original if original else None, "regions": regions}


def signals_of(found: CaseResult) -> dict[str, Signals]:
    """Signals of every state by its name: "0", "1", "2~0.5"; those of ladders beside the deployed one as "tent:1"."""
    trajectory = found.trajectory
    signals: dict[str, Signals] = {str(step): dict(one) for step, one in enumerate(trajectory.signals)}
    signals |= {str(state): dict(one) for state, one in trajectory.shrunk_signals.items()}
    for ladder, other in _others(found).items():
        signals |= {str(State(step).on(ladder)): dict(one) for step, one in enumerate(other.signals) if step}
    return signals


def _others(found: CaseResult) -> dict[str, Trajectory]:
    """Return the ladders that were read, without the deployed one."""
    return {ladder: one for ladder, one in found.ladders.items() if one is not found.trajectory}


SLICES = 6  # further slices of a volume on a case's picture


def preview_of(
    case: Case, found: CaseResult, *, names: Mapping[int, str] = MappingProxyType({}), background: bool = True
) -> Preview:
    """The slice that candidates changed most, or the one with the most foreground; then others that changed."""
    source, adapted, deployed = found.source_mask, found.trajectory.masks[-1], found.mask
    look: dict[str, Any] = {"names": names, "background": background}
    if source.ndim == 2:
        flat = case.image[:, 0] if case.image.ndim == 4 else case.image  # a volume of one slice
        where = None if case.image.ndim < 4 else 0
        return Preview(grey_levels(flat), source, adapted, deployed, where, **look)

    def at(number: int) -> Preview:
        shown = case.image[:, number] if case.image.shape[1:] == source.shape else np.zeros((1, *source.shape[1:]))
        return Preview(grey_levels(shown), source[number], adapted[number], deployed[number], number, **look)

    lasts = [adapted, deployed, *(one.masks[-1] for one in _others(found).values())]
    changed = np.sum([(source != mask).sum(axis=(1, 2)) for mask in lasts], axis=0)
    weight = changed if changed.any() else (source > 0).sum(axis=(1, 2))
    first = int(np.argmax(weight))
    most = [int(number) for number in np.argsort(-weight, kind="stable") if number != first and weight[number]]
    return replace(at(first), more=tuple(map(at, sorted(most[:SLICES]))))


def named_candidates(found: CaseResult) -> dict[State, tuple[str, Mask]]:
    """Name and mask of every candidate; states of ladders that are not deployed have names such as "tent:1"."""
    several, named = len(found.ladders) > 1, {}
    for ladder, one in (found.ladders if several else {"": found.trajectory}).items():
        rungs = one.rungs or tuple(f"step {step}" for step in range(1, one.steps + 1))
        for step, (rung, mask) in enumerate(zip(rungs, one.masks[1:], strict=True), start=1):
            state = State(step).on("" if one is found.trajectory else ladder)
            named[state] = (candidate_name(ladder if several else "", rung), mask)
    return named
