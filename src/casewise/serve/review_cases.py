"""The prediction folder that a reviewer opens: its cases in order, the regions of an edit, and slices as PNGs.

Cases come worst first, without a label: no output, M0 after a failure, flagged cases, then by the lower bound of the
estimated quality, else by the size of the edit. Every file is compared with its recorded hash before it is read.
Regions compare raw labels, as the region gate does (L1), so a change of class is listed too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from casewise.core.chain import Chain
from casewise.core.durable import file_sha256
from casewise.core.errors import BadInput, Mismatch, Refused, UnsafeInput
from casewise.core.prediction_record import PredictedCase
from casewise.core.records import FAILED, Action, Mask, check_case_id
from casewise.data.folders import READABLE, CaseFiles
from casewise.data.nifti import check_header
from casewise.data.pairs import read_image, read_mask
from casewise.data.pictures import is_picture
from casewise.measure.masks import bounding_box
from casewise.measure.regions import regions_of
from casewise.render.mask_pictures import Classes, png_bytes, windowed
from casewise.run.prediction_folder import Layout, read_entry, unfinished


@dataclass(frozen=True)
class ReviewCase:
    """One case before its masks are opened; it needs no label."""

    id: str
    about: str  # sha256 of what a review would be about: another output has another one
    status: str = "done"  # done, fallback or failed
    group: str | None = None
    action: str | None = None  # rollback, keep, shrink, gate; None where nothing was decided
    reason: str = ""
    error: str = ""
    warnings: tuple[str, ...] = ()
    states: Mapping[str, str] = field(default_factory=dict)  # names of adapted masks that are there, by state
    adapted: str | None = None  # the state that is shown first: the deployed one, else the last
    edit: float | None = None  # voxels that it changes, by M0's foreground
    inputs: Mapping[str, str] = field(default_factory=dict)  # sha256 of each image file by name
    flagged: bool = False  # True if the policy flagged the case
    quality: float | None = None  # estimate of the deployed mask's metric, without a label
    quality_low: float | None = None  # lower bound of it

    @property
    def has_masks(self) -> bool:
        """True if there is anything to look at."""
        return self.status != "failed"


@dataclass(frozen=True, eq=False)
class Masks:
    """The masks of one case on one grid; None if a mask is missing."""

    source: Mask
    adapted: Mask | None
    deployed: Mask
    spacing_mm: tuple[float, ...] | None  # one for each axis


DEPLOYED = "deployed"
"""Name of a deployed mask that is not a saved candidate: composed of pieces, or of a step that was not saved."""


def state_order(name: str) -> tuple[str, int, float]:
    """Sorts "1", "2", "2~0.5", "10" as steps, not as text; "tent:1", of another ladder, after them."""
    ladder, _, state = name.rpartition(":")
    step, _, shrink = state.partition("~")
    return ladder, int(step), float(shrink or 0)


def shown_first(states: tuple[str, ...]) -> str | None:
    """The deployed mask, if it is not a candidate; else the deepest plain state of the deployed ladder."""
    if DEPLOYED in states:
        return DEPLOYED
    own = [name for name in states if ":" not in name] or list(states)
    plain = [name for name in own if "~" not in name]
    return max(plain or own, key=state_order, default=None)


def worst_first(cases: Mapping[str, ReviewCase]) -> list[str]:
    """Return case ids in the order in which a person should look at them."""
    tiers = {"failed": 0, "fallback": 1}
    estimated = any(case.quality_low is not None for case in cases.values())

    def key(case_id: str) -> tuple[int, float, str]:
        case = cases[case_id]
        low = -1.0 if case.quality_low is None else case.quality_low  # an unknown quality comes first
        return tiers.get(case.status, 2 if case.flagged else 3), low if estimated else -(case.edit or 0.0), case_id

    return sorted(cases, key=key)


# ---- the folder ----

_STATE = re.compile(r"([a-z0-9][a-z0-9_+.-]{0,63}:)?\d{1,6}(~0?\.\d{1,6})?")


@dataclass(frozen=True)
class Predictions:
    """A prediction folder; entries are read once, when the page is started."""

    path: Path

    @classmethod
    def of(cls, path: Path) -> Predictions:
        """Return the folder; refuse one that casewise predict did not write, or that holds no case."""
        folder = cls(path)
        if not folder.audit.is_file():
            raise BadInput(f"{path} is not a folder of casewise predict; give its output folder (-o)")
        if not folder.cases:
            raise BadInput(f"{path} holds no case to review")
        return folder

    @property
    def audit(self) -> Path:
        """The run's own audit log."""
        return self.path / "audit.jsonl"

    @cached_property
    def entries(self) -> Mapping[str, PredictedCase]:
        """Entries by case id; a case whose entry is broken has no output, and the others can still be reviewed."""
        found = {}
        for file in sorted((self.path / "casewise").glob("*.json")):
            entry = read_entry(file)
            case_id = check_case_id(file.stem)
            if entry is None or entry.case != case_id:
                entry = PredictedCase(
                    case_id, FAILED, error=f"{file.name} does not belong to the case; predict the case again"
                )
            found[case_id] = entry
        return found

    @cached_property
    def cases(self) -> Mapping[str, ReviewCase]:
        """Every case of the folder."""
        return {case_id: self._case(case_id, entry) for case_id, entry in self.entries.items()}

    def _audited(self, *events: str) -> list[dict[str, Any]]:
        return [line for line in Chain(self.audit).lines() if line.get("event") in events]

    @property
    def lost(self) -> list[str]:
        """Cases that the audit log names and whose JSON file is missing: it was removed, or the run was killed."""
        ended = dict.fromkeys(str(line.get("case")) for line in self._audited("case", "case-kept"))
        return [case_id for case_id in (*ended, *unfinished(self.path)) if case_id not in self.entries]

    @cached_property
    def _last_run(self) -> Mapping[str, Any]:
        return (self._audited("run-started") or [{}])[-1]

    @property
    def min_area(self) -> int:
        """As the last run measured."""
        return int((self._last_run.get("adaptation") or {}).get("min_area", 16))

    @property
    def classes(self) -> Classes:
        """Class names of the model of the last run."""
        background = (self._last_run.get("adaptation") or {}).get("foreground", True)
        return Classes(_named(self._last_run.get("classes")), bool(background))

    def about(self, case_id: str) -> str:
        """sha256 of the entry, and through it of every output."""
        return file_sha256(Layout(self.path, "").entry(case_id))

    def masks(self, case_id: str, state: str | None) -> Masks:
        """Deployed, M0 (which is the deployed one after a rollback) and the given adapted state."""
        case, layout = self.cases[case_id], self._layout(case_id)
        if not case.has_masks:
            raise BadInput(f"case {case_id} has no output: {case.error}")
        source, deployed = (read_mask(self.file_of(case_id, which)) for which in ("m0", "deployed"))
        adapted = None if state is None else read_mask(self.file_of(case_id, "adapted", state))
        path = layout.mask(case_id)
        sizes = None if is_picture(path) else tuple(abs(size) for size in check_header(path).zooms[:3][::-1])
        return Masks(source, adapted, deployed, sizes)

    def file_of(self, case_id: str, which: str, state: str | None = None) -> Path:
        """The file of the deployed mask, of M0 ("m0") or of an adapted state, with the bytes that were recorded."""
        layout = self._layout(case_id)
        if which == "deployed":
            return self._checked(case_id, layout.mask(case_id))
        if which == "m0":
            kept = layout.source(case_id)
            return self._checked(case_id, kept if self._names(case_id, kept) else layout.mask(case_id))
        saved = layout.candidates(case_id) / f"{str(state).replace(':', '/')}{layout.ending}"
        if state is not None and self._names(case_id, saved):
            return self._checked(case_id, saved)
        states = self.cases[case_id].states
        if (state == DEPLOYED and state in states) or list(states) == [state]:  # the only one that was kept
            return self._checked(case_id, layout.mask(case_id))
        raise BadInput(f"state {state} of case {case_id} was not saved; predict with --set save-candidates=true")

    def overlay(self, case_id: str) -> Path | None:
        """The overlay that was drawn, unless it was changed since."""
        path = Layout(self.path, "").overlay(case_id)
        return self._checked(case_id, path) if self._names(case_id, path) else None

    def _case(self, case_id: str, entry: PredictedCase) -> ReviewCase:
        decision, signals = entry.decision, entry.signals
        states = self._states(case_id, entry)
        own = "" if decision is None or decision.rolled_back else str(decision.state.on(""))
        adapted = own if own in states and DEPLOYED not in states else shown_first(states)
        last = shown_first(tuple(name for name in signals if _STATE.fullmatch(name)))
        measured = signals.get(adapted or "") or signals.get(last or "") or {}
        sure = None if entry.uncovered else decision  # no estimate holds where the labels do not cover a case
        return ReviewCase(
            id=case_id, about=self.about(case_id), status=entry.status, group=entry.group, action=entry.action,
            reason=entry.reason, error=entry.error or "", warnings=entry.warnings,
            states={state: _name(state, entry) for state in states}, adapted=adapted,
            edit=_finite(measured.get("delta_foreground")), inputs=entry.inputs,
            flagged=decision is not None and decision.flagged,
            quality=None if sure is None else _finite(sure.quality),
            quality_low=None if sure is None else _finite(sure.quality_low),
        )  # fmt: skip

    def _states(self, case_id: str, entry: PredictedCase) -> tuple[str, ...]:
        """Saved candidates, those of other ladders by name; without them the deployed state, where that is not M0.

        A deployed mask that none of the saved ones is (pieces of one, or another step) comes first, as "deployed".
        """
        start = f"casewise/candidates/{case_id}/"
        names = [name.removeprefix(start) for name in entry.outputs if name.startswith(start)]
        stems = {name[: -len(end)].replace("/", ":", 1) for name in names for end in READABLE if name.endswith(end)}
        found = sorted((stem for stem in stems if _STATE.fullmatch(stem) and stem != "0"), key=state_order)
        changed = any(name.startswith("casewise/source/") for name in entry.outputs)
        if not changed:
            return tuple(found)
        state = "0" if entry.decision is None else str(entry.decision.state.on(""))
        if not found:
            return (state,)
        composed = entry.decision is not None and (entry.decision.action is Action.GATE or entry.decision.cleanup)
        return (DEPLOYED, *found) if composed or state not in found else tuple(found)

    def _layout(self, case_id: str) -> Layout:
        for ending in READABLE:
            if f"{case_id}{ending}" in self.entries[case_id].outputs:
                return Layout(self.path, ending)
        raise BadInput(f"the JSON file of case {case_id} names no mask; run casewise inspect {self.path}")

    def _names(self, case_id: str, path: Path) -> bool:
        return path.relative_to(self.path).as_posix() in self.entries[case_id].outputs

    def _checked(self, case_id: str, path: Path) -> Path:
        """The path, inside the folder and with the bytes that were recorded."""
        name = path.relative_to(self.path).as_posix()
        if self.path.resolve() not in path.resolve().parents:
            raise UnsafeInput(f"{name} is a link out of {self.path}; copy the file into the folder")
        if not path.is_file() or file_sha256(path) != self.entries[case_id].outputs.get(name):
            raise Refused(f"{name} is missing or was changed after it was written; predict case {case_id} again")
        return path


def _name(state: str, entry: PredictedCase) -> str:
    """Return the displayed name of a state: the name of its candidate where the entry has it."""
    if state == DEPLOYED:
        cleaned = ", after cleanup" if entry.decision and entry.decision.cleanup else ""
        return f"written mask ({entry.candidate}{cleaned})"
    deployed = entry.decision is not None and str(entry.decision.state.on("")) == state
    return entry.names.get(state) or (entry.candidate if deployed and entry.candidate else f"candidate {state}")


def _finite(value: Any) -> float | None:
    """Return a JSON number as a float; None for everything else."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def ending_of(path: Path) -> str:
    """Return the ending of an image or mask file, such as ``.nii.gz``."""
    return next((end for end in READABLE if path.name.lower().endswith(end)), path.suffix)


def _named(plain: Any) -> dict[int, str]:
    """Class names by number, from JSON that anybody may have written."""
    pairs = plain.items() if isinstance(plain, Mapping) else ()
    return {int(value): str(name) for value, name in pairs if str(value).isdecimal()}


# ---- what the page draws ----

LISTED = 200


def listed_regions(masks: Masks, *, min_area: int) -> dict[str, Any]:
    """List the regions where M0 and the adapted mask differ, the largest first."""
    if masks.adapted is None:
        return {"area": 0, "total": 0, "crumbs": 0, "regions": []}
    found = regions_of(masks.source, masks.adapted, min_area=min_area, foreground=False)
    order = np.argsort(found.number, kind="stable")
    groups = np.split(found.voxels[order], np.cumsum(found.sizes)[:-1]) if found.area else []
    rows = [_row(number, groups[component], masks) for number, component in enumerate(np.flatnonzero(found.kept))]
    rows.sort(key=lambda row: -row["voxels"])
    crumbs = int(found.sizes[~found.kept].sum())
    return {"area": found.area, "total": len(rows), "crumbs": crumbs, "regions": rows[:LISTED]}


def _row(number: int, voxels: NDArray[np.int64], masks: Masks) -> dict[str, Any]:
    assert masks.adapted is not None
    source, adapted = masks.source.reshape(-1)[voxels], masks.adapted.reshape(-1)[voxels]
    places = np.unravel_index(voxels, masks.source.shape)
    return {
        "number": number,
        "voxels": len(voxels),
        "added": int(((source == 0) & (adapted != 0)).sum()),
        "removed": int(((source != 0) & (adapted == 0)).sum()),
        "relabeled": int(((source != 0) & (adapted != 0)).sum()),
        "deployed": float((masks.deployed.reshape(-1)[voxels] == adapted).mean()),
        "box": [[int(axis.min()), int(axis.max())] for axis in places],
        "at": [int(np.bincount(axis).argmax()) for axis in places],  # the slice of each axis that shows most of it
    }


def changes_by_slice(masks: Masks) -> list[list[int]]:
    """For each axis, how many voxels of each slice changed; M0's foreground where nothing did."""
    adapted = masks.source if masks.adapted is None else masks.adapted
    changed = masks.source != adapted
    if not changed.any():
        changed = masks.source != masks.deployed
    weight = changed if changed.any() else masks.source > 0
    axes = range(weight.ndim)
    return [weight.sum(axis=tuple(other for other in axes if other != axis)).tolist() for axis in axes]


Pixels = NDArray[np.uint8]
WINDOWS = ("whole", "near")
"""1st to 99th percentile of the whole image, or of the box around the masks (soft tissue of a CT)."""
Where = tuple[int, int] | None
"""Axis and number of a slice; None for a picture, which has only one."""
MARGIN = 12


@dataclass(frozen=True)
class Images:
    """The images that the cases were made from, by case id; empty where no folder was given."""

    files: Mapping[str, CaseFiles]

    def channels(self, case_id: str) -> int:
        """Number of image files; 0 where there is no image."""
        return len(self.files[case_id].images) if case_id in self.files else 0

    def problem(self, case: ReviewCase) -> str | None:
        """Return why the image of a case cannot be shown; None where it can."""
        if not self.files:
            return "no images: start with --images DIR to show them under the masks"
        if case.id not in self.files:
            return f"the image folder has no case {case.id}"
        for path in self.files[case.id].images:
            if case.inputs and case.inputs.get(path.name) != file_sha256(path):
                return f"{path.name} is not the image that was segmented (its hash differs), so it is not shown"
        return None

    def read(self, case: ReviewCase, channel: int, window: str, masks: Masks) -> Pixels:
        """One channel in 8 bits: (*space), or (rows, columns, 3) for a color picture."""
        problem = self.problem(case)
        if problem is not None:
            raise Mismatch(problem)
        path = self.files[case.id].images[channel]
        image = read_image(path)
        space = image.shape[:2] if is_picture(path) else image.shape
        if space != masks.source.shape:
            raise Mismatch(f"{path.name} has shape {space}, its mask {masks.source.shape}; give the original images")
        return image if is_picture(path) else windowed(image, image[_near(masks)] if window == "near" else None)


def _near(masks: Masks) -> tuple[slice, ...]:
    """The box around the foreground of every mask with a margin; everything where there is no foreground."""
    known = [mask for mask in (masks.source, masks.adapted, masks.deployed) if mask is not None]
    present = np.asarray(np.logical_or.reduce([mask > 0 for mask in known]))
    if not present.any():
        return (slice(None),) * present.ndim
    return tuple(slice(max(0, part.start - MARGIN), part.stop + MARGIN) for part in bounding_box(present))


def mask_slice(masks: Masks, where: Where) -> bytes:
    """A PNG whose red, green and blue are the labels of M0, adapted and deployed; M0 if a mask is missing.

    Labels above 255 begin again at 1: colors repeat, boundaries between neighbors stay.
    """
    source = plane(masks.source, where)
    adapted = source if masks.adapted is None else plane(masks.adapted, where)
    return png(np.stack([_bytes(mask) for mask in (source, adapted, plane(masks.deployed, where))], axis=-1))


def _bytes(mask: Mask) -> Pixels:
    whole = mask.astype(np.int64)
    return np.where(whole > 0, (whole - 1) % 255 + 1, 0).astype(np.uint8)


def plane(values: NDArray[Any], where: Where) -> NDArray[Any]:
    """One slice of a volume, or the picture itself."""
    return values if where is None else np.take(values, where[1], axis=where[0])


def png(pixels: NDArray[Any]) -> bytes:
    """Encode pixels as a PNG with light compression, because it stays on one machine."""
    return png_bytes(Image.fromarray(np.ascontiguousarray(pixels)), compress_level=1)
