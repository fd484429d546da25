"""An archive of trajectories: written case by case, whole or not at all, and read without any network (D14)."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from casewise.archive import layout
from casewise.archive.arrays import unpacked
from casewise.archive.layout import Entry
from casewise.archive.write_case import sweep, write_case
from casewise.core.brief import brief
from casewise.core.durable import text_sha256, write_json
from casewise.core.errors import BadInput, DamagedArchive, Locked, Mismatch
from casewise.core.records import EVALUATION, Binding, Case, Mask, Observation, Signals, State, Trajectory
from casewise.core.strict_json import json_text

LabelSource = Callable[[str], Mask]
"""Gives the label of a case id, for archives that hold labels by hash only."""


@dataclass(eq=False, repr=False)
class Archive:
    """Recorded trajectories of a cohort. A view (:meth:`select`) shares the folder and shows some of the cases."""

    __repr__ = brief

    path: Path
    manifest: Mapping[str, Any]
    entries: Mapping[str, Entry]
    labels: LabelSource | None = field(default=None, repr=False)
    evaluation: bool = False  # every case evaluates, whatever its split says
    unlocked_by: str = ""  # hash of the line of the exposure ledger that says why evaluation labels are read (F12)

    @property
    def binding(self) -> Binding:
        """What produced the trajectories."""
        return Binding(**self.manifest["binding"])

    @property
    def steps(self) -> int:
        """The horizon K: updates that each case has."""
        return int(self.manifest["steps"])

    @property
    def configuration(self) -> Mapping[str, Any]:
        """objective, learning_rate, metric, min_area, foreground, ignore, classes, ..."""
        return dict(self.manifest["configuration"])

    @property
    def ids(self) -> tuple[str, ...]:
        """Case ids in sorted order."""
        return tuple(self.entries)

    @cached_property
    def states(self) -> tuple[State, ...]:
        """The states that every case has, source first."""
        shared = [set(entry.states) for entry in self.entries.values()]
        return tuple(sorted(set.intersection(*shared))) if shared else ()

    @cached_property
    def digest(self) -> str:
        """sha256 over the manifest and every case in view: names what a derived table was derived from."""
        words = [json_text(self.manifest["binding"], sort_keys=True)]
        words += [f"{name} {entry.digest}" for name, entry in self.entries.items()]
        return text_sha256("\n".join(words))

    def select(self, ids: Collection[str] | None = None, split: str | None = None) -> Archive:
        """A view of some of the cases: by id, by split, or both."""
        if ids is not None and (unknown := sorted(set(ids) - set(self.entries))):
            raise BadInput(
                f"archive {self.path} has no case {', '.join(unknown[:5])}; it has {len(self.entries)} cases"
            )
        kept = {
            name: entry
            for name, entry in self.entries.items()
            if (ids is None or name in ids) and (split is None or entry.split == split)
        }
        return replace(self, entries=MappingProxyType(kept))

    def marked(self, split: str) -> Archive:
        """The cases of a split, or all where none is marked so."""
        found = self.select(split=split)
        return found if found.ids else self

    def locked(self) -> Archive:
        """The same cases for evaluation: no label is read before ``judge.ledger.unlock`` wrote down why (F12)."""
        return replace(self, evaluation=True, unlocked_by="")

    def check_unlocked(self, ids: Iterable[str]) -> None:
        """Refuse the labels of evaluation cases as long as no line of the exposure ledger says why they are read."""
        closed = [name for name in ids if self.evaluation or self.entry(name).split == EVALUATION]
        if closed and not self.unlocked_by and any(self.entry(name).labelled for name in closed):
            raise Locked(
                f"the labels of {len(closed)} evaluation cases of {self.path} are locked ({', '.join(closed[:3])}); "
                f"say why they are read: casewise.judge.ledger.unlock(archive, purpose='...')"
            )

    def entry(self, case_id: str) -> Entry:
        """The entry of one case."""
        if case_id not in self.entries:
            raise BadInput(f"archive {self.path} has no case {case_id!r}; it has {len(self.entries)} cases")
        return self.entries[case_id]

    def masks(self, case_id: str, states: Collection[State] | None = None) -> dict[State, Mask]:
        """Recorded masks of a case by state: all of them, or M0 and the states asked for."""
        known = self.entry(case_id).states
        wanted = range(len(known)) if states is None else sorted({0, *(known.index(state) for state in states)})
        found = self._decoded(case_id, layout.MASKS, wanted)
        return {known[place]: found[place] for place in wanted}

    def mask(self, case_id: str, state: State) -> Mask:
        """One recorded mask."""
        if state not in self.entry(case_id).states:
            recorded = ", ".join(map(str, self.entry(case_id).states))
            raise BadInput(f"state {state} of case {case_id} was not recorded; recorded are {recorded}")
        return self.masks(case_id, (state,))[state]

    def edit(self, case_id: str, state: State) -> tuple[Mask, NDArray[np.int64], NDArray[Any]]:
        """(M0, flat positions at which the state differs from M0, its labels there): what is stored, undecoded."""
        place = self.entry(case_id).states.index(state)
        return layout.decode_edit(unpacked(self._file(case_id, layout.MASKS)), self.entries[case_id].shape, place)

    def label(self, case_id: str) -> Mask:
        """The truth of a case; from the archive, or from ``labels`` after its hash was compared."""
        entry = self.entry(case_id)
        self.check_unlocked((case_id,))
        if layout.LABEL in entry.files:
            return self._decoded(case_id, layout.LABEL, (0,))[0]
        if not entry.labelled or self.labels is None:
            how = "is kept by hash; open the archive with labels=" if entry.labelled else "was never recorded"
            raise BadInput(f"the label of case {case_id} {how}")
        label = layout.compact_mask(self.labels(case_id))
        if layout.mask_sha256(label) != entry.label_sha256:
            raise Mismatch(
                f"the label given for case {case_id} is not the one that was recorded; give the original file"
            )
        return label

    def probabilities(self, case_id: str) -> dict[str, NDArray[Any]] | None:
        """Optional arrays that were recorded with the case (entropies, probabilities), or None.

        Arrays over space are NaN where no state differs from M0.
        """
        if layout.EXTRAS not in self.entry(case_id).files:
            return None
        return layout.decode_extras(unpacked(self._file(case_id, layout.EXTRAS)), self.masks(case_id))

    def trajectory(self, case_id: str) -> Trajectory:
        """A case as it was recorded."""
        entry, masks = self.entry(case_id), self.masks(case_id)
        signals = self.ladder(case_id)
        return Trajectory(
            case_id=case_id,
            masks=tuple(masks[State(step)] for step in range(self.steps + 1)),
            signals=tuple(signals[State(step)] for step in range(self.steps + 1)),
            shrunk={state: mask for state, mask in masks.items() if state.shrink},
            shrunk_signals={state: values for state, values in signals.items() if state.shrink},
            probabilities=self.probabilities(case_id),
            made_by=entry.made_by,
            seed=entry.seed,
            seconds=entry.seconds,
            diagnostics=entry.diagnostics,
        )

    def signals(self) -> pd.DataFrame:
        """One row for each (case, step, shrink), with every label-free signal; NaN where not computable."""
        return self._signals.copy()

    def ladder(self, case_id: str) -> Mapping[State, Signals]:
        """The signals of each state of one case; None where not computable."""
        self.entry(case_id)
        return self._ladders[case_id]

    def observation(self, case_id: str, step: int) -> Observation:
        """What a controller may see of a case after ``step`` updates."""
        entry = self.entry(case_id)
        return Observation(case_id, entry.group, self._steps[case_id][: step + 1], entry.cluster)

    def add(
        self,
        case: Case,
        trajectory: Trajectory,
        label: Mask | None = None,
        *,
        keep_label: bool = True,
    ) -> Archive:
        """Write one case, whole or not at all; a case that is there already stays as it is.

        ``keep_label=False`` stores the label's hash only, so the archive can be shared where the label cannot.
        """
        if trajectory.steps != self.steps:
            raise BadInput(f"this archive holds {self.steps} steps a case, case {case.id} has {trajectory.steps}")
        if case.id not in self.entries:
            entry = write_case(self.path, case, trajectory, label, keep_label=keep_label)
            self.entries = _sorted({**self.entries, case.id: entry})
            self._forget()
        return self

    def seal(self) -> Archive:
        """Write the list of cases, with their splits and digests, into the manifest; a lost case is then noticed."""
        there = _sorted({entry.id: entry for entry in _read_entries(self.path)})  # of every writer
        cases = {name: {"split": entry.split, "sha256": entry.digest} for name, entry in there.items()}
        manifest = {**self.manifest, "schema": layout.SCHEMA, "cases": cases}
        _write_manifest(self.path, manifest)
        self.manifest, self.entries = MappingProxyType(manifest), there
        self._forget()
        return self

    @cached_property
    def _signals(self) -> pd.DataFrame:
        from casewise.archive.tables import signal_table

        return signal_table(self.path, self.entries, self.digest)

    @cached_property
    def _ladders(self) -> dict[str, dict[State, Signals]]:
        from casewise.archive.tables import ladders

        return ladders(self._signals)

    @cached_property
    def _steps(self) -> dict[str, tuple[Signals, ...]]:
        plain = [State(step) for step in range(self.steps + 1)]
        return {name: tuple(ladder[state] for state in plain) for name, ladder in self._ladders.items()}

    def _decoded(self, case_id: str, name: str, wanted: Collection[int]) -> dict[int, Mask]:
        file = self._file(case_id, name)
        try:
            found = layout.decode_masks(unpacked(file), self.entries[case_id].shape, wanted)
            return {place: found[place] for place in wanted}
        except (KeyError, ValueError, IndexError) as error:
            raise DamagedArchive(
                f"{file} does not hold the masks of case {case_id} ({error}); record it again"
            ) from error

    def _file(self, case_id: str, name: str) -> Path:
        return self.path / layout.CASES / case_id / name

    def _forget(self) -> None:
        for name in ("states", "digest", "_signals", "_ladders", "_steps"):
            self.__dict__.pop(name, None)


def create_archive(
    path: str | Path, *, binding: Binding, steps: int, configuration: Mapping[str, Any] | None = None
) -> Archive:
    """A new archive, or the one that is there when it was made by the same thing (so a killed run goes on)."""
    path = Path(path)
    manifest = _manifest(binding, steps, configuration or {})
    if (path / layout.MANIFEST).exists():
        there = open_archive(path)
        _check_same(path, there.manifest, manifest)
        sweep(path)
        return there
    (path / layout.CASES).mkdir(parents=True, exist_ok=True)
    _write_manifest(path, manifest)
    return Archive(path, MappingProxyType(manifest), MappingProxyType({}))


def open_archive(path: str | Path, *, labels: LabelSource | None = None) -> Archive:
    """An archive that exists; half-written cases of a killed run are not in it."""
    path = Path(path)
    manifest = layout.read_json(path / layout.MANIFEST)
    if manifest.get("schema") not in layout.READABLE:
        known = " and ".join(map(str, layout.READABLE))
        raise Mismatch(f"{path} has archive schema {manifest.get('schema')}, this casewise reads {known}")
    entries = _sorted({entry.id: entry for entry in _read_entries(path)})
    lost = sorted(set(manifest.get("cases", {})) - set(entries))
    if lost:
        raise DamagedArchive(f"{path} lost {len(lost)} of its cases: {', '.join(lost[:5])}; restore the folder")
    return Archive(path, MappingProxyType(manifest), entries, labels)


def _read_entries(path: Path) -> Iterable[Entry]:
    for folder in sorted((path / layout.CASES).glob("*")):
        if folder.name.startswith(layout.HALF_WRITTEN):
            continue
        file = folder / layout.ENTRY
        try:
            entry = Entry.from_dict(layout.read_json(file))
        except (TypeError, KeyError, ValueError) as error:
            raise DamagedArchive(f"{file} does not describe a case ({error}); record the case again") from error
        if entry.id != folder.name:
            raise DamagedArchive(f"{file} describes case {entry.id!r}, not {folder.name!r}; the archive was edited")
        yield entry


def _sorted(entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
    return MappingProxyType({name: entries[name] for name in sorted(entries)})


def _manifest(binding: Binding, steps: int, configuration: Mapping[str, Any]) -> dict[str, Any]:
    if steps < 1:
        raise BadInput(f"an archive holds at least one step a case, got {steps}")
    return {
        "schema": layout.SCHEMA,
        "binding": asdict(binding),
        "steps": steps,
        "configuration": json.loads(json_text(dict(configuration), default=_plain)),
        "software": _software(),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise BadInput(f"a configuration holds plain JSON values, got {type(value).__name__}: {value!r}")


def _software() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("casewise", "numpy", "scipy", "torch", "nnunetv2", "monai", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _check_same(path: Path, there: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    differing = Binding(**there["binding"]).differences(Binding(**asked["binding"]))
    differing += [name for name in ("steps", "configuration") if there[name] != asked[name]]
    if differing:
        raise Mismatch(
            f"{path} holds an archive that was made with another {', '.join(differing)}; choose another folder, "
            f"or repeat the first run's options to go on with it"
        )


def _write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    write_json(path / layout.MANIFEST, dict(manifest))
