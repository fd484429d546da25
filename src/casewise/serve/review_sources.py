"""The two kinds of folder that a reviewer can open.

What ``casewise predict`` left in a folder, for the reviewer; every mask is compared with its recorded hash first.

An archive, for the reviewer: every recorded state can be looked at; deployed is what policy.json decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from casewise.archive import layout
from casewise.archive.layout import Entry
from casewise.archive.store import Archive
from casewise.core.chain import Chain
from casewise.core.durable import file_sha256
from casewise.core.errors import BadInput, CasewiseError, Refused, UnsafeInput
from casewise.core.predicted import PredictedCase
from casewise.core.records import FAILED, SOURCE, Action, Controller, Decision, Mask, State, check_case_id
from casewise.data import nifti, pictures
from casewise.judge.deciding import decision_of, deployed_mask
from casewise.judge.policy import POLICY, controller_of, read_policy
from casewise.measure.signals.risk import DROP
from casewise.render.masks import Classes
from casewise.run.prediction_folder import Layout, read_entry
from casewise.serve.review_cases import DEPLOYED, Masks, ReviewCase, number_or_none, shown_first, state_order

ENDINGS = (".nii.gz", ".nii", *pictures.ENDINGS)
_STATE = re.compile(r"([a-z0-9][a-z0-9_+.-]{0,63}:)?\d{1,6}(~0?\.\d{1,6})?")


@dataclass(frozen=True)
class Predictions:
    """A prediction folder; entries are read once, when the page is started."""

    path: Path
    kind: str = "prediction folder"

    @property
    def audit(self) -> Path | None:
        """The run's own audit log."""
        return self.path / "audit.jsonl"

    @cached_property
    def entries(self) -> Mapping[str, PredictedCase]:
        """Entries by case id; a case whose entry is broken has no output, and costs no other its review."""
        found = {}
        for file in sorted((self.path / "casewise").glob("*.json")):
            entry = read_entry(file)
            case_id = check_case_id(file.stem)
            if entry is None or entry.case != case_id:
                entry = PredictedCase(case_id, FAILED, error=f"{file.name} is not its entry; predict the case again")
            found[case_id] = entry
        return found

    @cached_property
    def cases(self) -> Mapping[str, ReviewCase]:
        """Every case of the folder."""
        return {case_id: self._case(case_id, entry) for case_id, entry in self.entries.items()}

    @property
    def lost(self) -> tuple[str, ...]:
        """Cases that a run ended, says the audit log, and whose entry is gone."""
        ended = (
            line for line in Chain(self.path / "audit.jsonl").lines() if line.get("event") in ("case", "case-kept")
        )
        return tuple(
            dict.fromkeys(str(line.get("case")) for line in ended if str(line.get("case")) not in self.entries)
        )

    @cached_property
    def _last_run(self) -> Mapping[str, Any]:
        runs = [line for line in Chain(self.path / "audit.jsonl").lines() if line.get("event") == "run-started"]
        return runs[-1] if runs else {}

    @property
    def min_area(self) -> int:
        """As the last run measured."""
        return int((self._last_run.get("adaptation") or {}).get("min_area", 16))

    @property
    def classes(self) -> Classes:
        """As the last run's model calls them."""
        background = (self._last_run.get("adaptation") or {}).get("foreground", True)
        return Classes(_named(self._last_run.get("classes")), bool(background))

    def about(self, case_id: str) -> str:
        """sha256 of the entry, and through it of every output."""
        return file_sha256(Layout(self.path, "").entry(case_id))

    def masks(self, case_id: str, state: str | None) -> Masks:
        """Deployed, M0 (which is the deployed one after a rollback) and the adapted state that was asked for."""
        case, layout = self.cases[case_id], self._layout(case_id)
        if not case.has_masks:
            raise BadInput(f"case {case_id} has no output: {case.error}")
        deployed = self._read(case_id, layout.mask(case_id))
        kept = layout.source(case_id)
        source = self._read(case_id, kept) if self._names(case_id, kept) else deployed
        adapted = None if state is None else self._read(case_id, self.file_of(case_id, "adapted", state))
        return Masks(source, adapted, deployed, _spacing_mm(layout.mask(case_id)))

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
        if (state == DEPLOYED and state in states) or states == (state,):  # the only one that was kept
            return self._checked(case_id, layout.mask(case_id))
        raise BadInput(f"state {state} of case {case_id} was not saved; predict with --save-candidates to keep it")

    def drops(self, case_id: str, state: str) -> Mapping[int, float] | Mask | None:
        """The region scores of the gate, where they were measured for this state."""
        return drops_of(self.entries[case_id].signals.get(state) or {})

    def overlay(self, case_id: str) -> Path | None:
        """The overlay that was drawn, unless it was changed since."""
        path = Layout(self.path, "").overlay(case_id)
        return self._checked(case_id, path) if self._names(case_id, path) else None

    def _case(self, case_id: str, entry: PredictedCase) -> ReviewCase:
        decision, signals = entry.decision, entry.signals
        states = self._states(case_id, entry)
        adapted = shown_first(states)
        last = shown_first(tuple(name for name in signals if _STATE.fullmatch(name)))
        return ReviewCase(
            id=case_id,
            about=self.about(case_id),
            status=entry.status,
            group=entry.group,
            action=entry.action,
            reason="" if decision is None else decision.reason,
            error=entry.error or "",
            warnings=entry.warnings,
            coordinate=None if decision is None else decision.coordinate,
            value=None if decision is None else number_or_none(decision.value),
            cut_low=None if decision is None else number_or_none(decision.cut_low),
            cut_high=None if decision is None else number_or_none(decision.cut_high),
            states=states,
            adapted=adapted,
            signals=dict(signals.get(adapted or "") or signals.get(last or "") or {}),
            inputs=entry.inputs,
            has_deployed=entry.has_output,
            flagged=decision is not None and decision.flagged,
            quality=None if decision is None else number_or_none(decision.quality),
            quality_low=None if decision is None else number_or_none(decision.quality_low),
        )

    def _states(self, case_id: str, entry: PredictedCase) -> tuple[str, ...]:
        """Saved candidates, those of other ladders by name; without them the deployed state, where that is not M0.

        A deployed mask that none of the saved ones is (pieces of one, or another step) comes first, as "deployed".
        """
        start = f"casewise/candidates/{case_id}/"
        names = [name.removeprefix(start) for name in entry.outputs if name.startswith(start)]
        stems = {name[: -len(end)].replace("/", ":", 1) for name in names for end in ENDINGS if name.endswith(end)}
        found = sorted((stem for stem in stems if _STATE.fullmatch(stem) and stem != "0"), key=state_order)
        changed = any(name.startswith("casewise/source/") for name in entry.outputs)
        if not changed:
            return tuple(found)
        state = "0" if entry.decision is None else str(entry.decision.state.on(""))
        if not found:
            return (state,)
        composed = entry.decision is not None and entry.decision.action is Action.GATE
        return (DEPLOYED, *found) if composed or state not in found else tuple(found)

    def _layout(self, case_id: str) -> Layout:
        for ending in ENDINGS:
            if f"{case_id}{ending}" in self.entries[case_id].outputs:
                return Layout(self.path, ending)
        raise BadInput(f"the entry of case {case_id} names no mask; run casewise verify {self.path}")

    def _names(self, case_id: str, path: Path) -> bool:
        return path.relative_to(self.path).as_posix() in self.entries[case_id].outputs

    def _checked(self, case_id: str, path: Path) -> Path:
        """The path, inside the folder and with the bytes that were recorded."""
        name = path.relative_to(self.path).as_posix()
        if self.path.resolve() not in path.resolve().parents:
            raise UnsafeInput(f"{name} is a link that leaves {self.path}; copy the file into the folder")
        if not path.is_file() or file_sha256(path) != self.entries[case_id].outputs.get(name):
            raise Refused(f"{name} is missing or was changed after it was written; predict case {case_id} again")
        return path

    def _read(self, case_id: str, path: Path) -> Mask:
        path = self._checked(case_id, path)
        return pictures.read_label_picture(path) if _is_picture(path) else nifti.read_label(path)


def drops_of(signals: Mapping[str, Any]) -> dict[int, float] | None:
    """Entropy drops by region number from the signals ``drop.0``, ``drop.1``, ...; None where there are none."""
    found = {int(name[len(DROP) :]): value for name, value in signals.items() if name.startswith(DROP)}
    return {number: float(value) for number, value in found.items() if value is not None} or None


def _is_picture(path: Path) -> bool:
    return path.name.lower().endswith(pictures.ENDINGS)


def _spacing_mm(path: Path) -> tuple[float, ...] | None:
    return None if _is_picture(path) else tuple(abs(size) for size in nifti.check_header(path).zooms[:3][::-1])


def _named(plain: Any) -> dict[int, str]:
    """Class names by number, from JSON that anybody may have written."""
    pairs = plain.items() if isinstance(plain, Mapping) else ()
    return {int(value): str(name) for value, name in pairs if str(value).isdecimal()}


@dataclass(frozen=True)
class Recorded:
    """An archive with the decisions of its own policy, where it has one."""

    archive: Archive
    kind: str = "archive"

    @property
    def path(self) -> Path:
        """The archive's folder."""
        return self.archive.path

    @property
    def audit(self) -> Path | None:
        """An archive has no audit log of runs; reviews.jsonl is a chain of its own."""
        return None

    @property
    def min_area(self) -> int:
        """As it was recorded."""
        return int(self.archive.configuration.get("min_area", 16))

    @property
    def classes(self) -> Classes:
        """As they were recorded."""
        made = self.archive.configuration
        return Classes(_named(made.get("names")), bool(made.get("foreground", True)))

    @cached_property
    def controller(self) -> Controller | None:
        """That of policy.json; None where there is none that decides alone, or that was fitted on another ladder."""
        if not (self.path / POLICY).is_file():
            return None
        try:
            policy = read_policy(self.path)
            fits = bool(policy.ladders) or policy.ladder == (self.archive.ladder_name or "")
            return controller_of(policy) if fits else None
        except CasewiseError:
            return None

    @cached_property
    def decisions(self) -> Mapping[str, Decision]:
        """What the policy decides on every case that it can decide on."""
        found: dict[str, Decision] = {}
        for case_id in self.archive.ids if self.controller is not None else ():
            assert self.controller is not None
            try:
                found[case_id] = decision_of(self.archive, self.controller, case_id)
            except CasewiseError:
                continue
        return found

    @cached_property
    def cases(self) -> Mapping[str, ReviewCase]:
        """Every recorded case."""
        return {case_id: self._case(case_id) for case_id in self.archive.ids}

    def about(self, case_id: str) -> str:
        """sha256 of the entry on disk, that of the ladder in view, and through it of every mask."""
        place = self.archive.entry(case_id).place
        return Entry.from_dict(layout.read_json(self.path / layout.CASES / place / layout.ENTRY)).digest

    def masks(self, case_id: str, state: str | None) -> Masks:
        """M0, the state that was asked for, and what the policy deploys."""
        wanted = None if state is None else self._states(case_id)[state]
        found = self.archive.masks(case_id, () if wanted is None else (wanted,))
        decision = self.decisions.get(case_id)
        deployed = None
        if decision is not None and self.controller is not None:
            deployed = deployed_mask(self.archive, self.controller, decision)
        adapted = None if wanted is None else found[wanted]
        return Masks(found[SOURCE], adapted, deployed, self.archive.entry(case_id).spacing_mm)

    def drops(self, case_id: str, state: str) -> Mapping[int, float] | Mask | None:
        """From recorded entropies, else from the region scores of the gate."""
        extras = self.archive.entropies(case_id) or {}
        before, after = extras.get("entropy_0"), extras.get(f"entropy_{state}")
        if before is not None and after is not None and before.shape == after.shape:
            return np.asarray(before, np.float32) - np.asarray(after, np.float32)
        return drops_of(self.archive.ladder(case_id)[self._states(case_id)[state]])

    def overlay(self, case_id: str) -> Path | None:
        """An archive holds no pictures."""
        return None

    def _states(self, case_id: str) -> dict[str, State]:
        return {str(state): state for state in self.archive.entry(case_id).states if state != SOURCE}

    def _case(self, case_id: str) -> ReviewCase:
        entry, decision = self.archive.entry(case_id), self.decisions.get(case_id)
        states = tuple(sorted(self._states(case_id), key=state_order))
        adapted = shown_first(states)
        known = self._states(case_id)
        return ReviewCase(
            id=case_id,
            about=entry.digest,
            group=entry.group,
            action=None if decision is None else decision.action.value,
            reason="" if decision is None else decision.reason,
            coordinate=None if decision is None else decision.coordinate,
            value=None if decision is None else decision.value,
            cut_low=None if decision is None else decision.cut_low,
            cut_high=None if decision is None else decision.cut_high,
            states=states,
            adapted=adapted,
            signals={} if adapted is None else dict(self.archive.ladder(case_id)[known[adapted]]),
            has_deployed=decision is not None,
            flagged=decision is not None and decision.flagged,
            quality=None if decision is None else decision.quality,
            quality_low=None if decision is None else decision.quality_low,
        )
