"""The prediction folder that a reviewer opens. Every file is compared with its recorded hash before it is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from casewise.core.chain import Chain
from casewise.core.durable import file_sha256
from casewise.core.errors import BadInput, Refused, UnsafeInput
from casewise.core.prediction_record import PredictedCase
from casewise.core.records import FAILED, Action, Mask, check_case_id
from casewise.data import nifti, pictures
from casewise.render.mask_pictures import Classes
from casewise.run.prediction_folder import Layout, read_entry
from casewise.serve.review_cases import DEPLOYED, Masks, ReviewCase, shown_first, state_order

ENDINGS = (".nii.gz", ".nii", *pictures.ENDINGS)
_STATE = re.compile(r"([a-z0-9][a-z0-9_+.-]{0,63}:)?\d{1,6}(~0?\.\d{1,6})?")


@dataclass(frozen=True)
class Predictions:
    """A prediction folder; entries are read once, when the page is started."""

    path: Path

    @property
    def audit(self) -> Path:
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
        if (state == DEPLOYED and state in states) or list(states) == [state]:  # the only one that was kept
            return self._checked(case_id, layout.mask(case_id))
        raise BadInput(
            f"state {state} of case {case_id} was not saved; predict with --set save-candidates=true to keep it"
        )

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
        return ReviewCase(
            id=case_id,
            about=self.about(case_id),
            status=entry.status,
            group=entry.group,
            action=entry.action,
            reason="" if decision is None else decision.reason,
            error=entry.error or "",
            warnings=entry.warnings,
            states={state: _name(state, entry) for state in states},
            adapted=adapted,
            edit=_finite(measured.get("delta_foreground")),
            inputs=entry.inputs,
            flagged=decision is not None and decision.flagged,
            quality=None if decision is None else _finite(decision.quality),
            quality_low=None if decision is None else _finite(decision.quality_low),
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
        composed = entry.decision is not None and (entry.decision.action is Action.GATE or entry.decision.cleanup)
        return (DEPLOYED, *found) if composed or state not in found else tuple(found)

    def _layout(self, case_id: str) -> Layout:
        for ending in ENDINGS:
            if f"{case_id}{ending}" in self.entries[case_id].outputs:
                return Layout(self.path, ending)
        raise BadInput(f"the entry of case {case_id} names no mask; run casewise inspect {self.path}")

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


def _name(state: str, entry: PredictedCase) -> str:
    """What a person calls a state: the name of its candidate where the entry has it."""
    if state == DEPLOYED:
        return (
            f"written mask ({entry.candidate}{', after cleanup' if entry.decision and entry.decision.cleanup else ''})"
        )
    deployed = entry.decision is not None and str(entry.decision.state.on("")) == state
    return entry.names.get(state) or (entry.candidate if deployed and entry.candidate else f"candidate {state}")


def _finite(value: Any) -> float | None:
    """Return a JSON number as a float; None for everything else."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def ending_of(path: Path) -> str:
    """Return the ending of an image or mask file, such as ``.nii.gz``."""
    return next((end for end in ENDINGS if path.name.lower().endswith(end)), path.suffix)


def _is_picture(path: Path) -> bool:
    return path.name.lower().endswith(pictures.ENDINGS)


def _spacing_mm(path: Path) -> tuple[float, ...] | None:
    return None if _is_picture(path) else tuple(abs(size) for size in nifti.check_header(path).zooms[:3][::-1])


def _named(plain: Any) -> dict[int, str]:
    """Class names by number, from JSON that anybody may have written."""
    pairs = plain.items() if isinstance(plain, Mapping) else ()
    return {int(value): str(name) for value, name in pairs if str(value).isdecimal()}
