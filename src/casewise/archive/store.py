"""An archive of trajectories: written case by case, atomically, and read without a network (D14).

An archive holds M0 of every case once, and one or more ladders of candidates against it. ``archive.ladders`` names
them, ``archive.ladder(name)`` returns the view of one of them, which replay, calibration and study read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
from numpy.typing import NDArray

from casewise.archive import layout
from casewise.archive.layout import Entry, unpacked
from casewise.archive.manifest import (
    check_joins,
    check_manifest,
    check_same,
    made_by,
    named_ladders,
    software,
    write_manifest,
)
from casewise.archive.write_case import sweep, write_case, write_ladder
from casewise.core.durable import file_lock, text_sha256, write_json
from casewise.core.errors import BadInput, DamagedArchive, Locked, Mismatch
from casewise.core.formats import json_text
from casewise.core.records import (
    EVALUATION,
    Binding,
    Case,
    Mask,
    Observation,
    Signals,
    State,
    Trajectory,
    check_ladder,
    joint_binding,
)
from casewise.core.text import brief, pluralize

_OF_TRAJECTORY = ("made_by", "seed", "seconds", "spent", "diagnostics", "ladder", "rungs")  # fields of an entry


@dataclass(eq=False, repr=False)
class Archive:
    """Recorded trajectories of a cohort. A view (:meth:`select`, :meth:`ladder`) shows part of the same folder."""

    __repr__ = brief

    path: Path
    manifest: Mapping[str, Any]
    entries: Mapping[str, Entry]
    evaluation: bool = False  # True: every case is an evaluation case, whatever its split is
    unlocked_by: str = ""  # hash of the line of the exposure ledger that says why evaluation labels are read (F12)
    ladder_name: str | None = ""  # the ladder in view; "" is the unnamed one, None says that one must be chosen first
    cases: Mapping[str, Entry] | None = field(default=None, repr=False)  # where M0 is; None: entries
    parts: Mapping[str, Mapping[str, Entry]] = field(default_factory=dict, repr=False)  # named ladders, then cases
    joined: tuple[str, ...] = ()  # the ladders that are read together, where several are in view

    @property
    def ladders(self) -> tuple[str, ...]:
        """Names of the ladders that are held; a single one may be called ""."""
        return named_ladders(self.manifest)

    def ladder(self, name: str) -> Archive:
        """Return the view of one ladder: its binding and horizon, states without its name, the cases that have it."""
        if name not in self.ladders:
            known = ", ".join(repr(one) for one in self.ladders)
            raise BadInput(f"archive {self.path} has no ladder {name!r}; it has {known}")
        cases = self._cases
        found = cases if not name else {one: self.parts[name][one] for one in cases if one in self.parts[name]}
        return replace(self, ladder_name=name, cases=cases, entries=MappingProxyType(dict(found)), joined=())

    def join(self, ladders: Collection[str]) -> Archive:
        """Return the view of several ladders that one controller reads together; every case must have each of them."""
        views = {name: self.ladder(name) for name in ladders}
        if len(views) < 2:
            raise BadInput(
                f"joining needs at least two ladders, got {', '.join(ladders) or 'none'}; archive.ladder takes one"
            )
        for name, view in views.items():
            if lacking := [case_id for case_id in self._cases if case_id not in view.entries]:
                raise BadInput(
                    f"{len(lacking)} cases of {self.path} lack ladder {name!r} ({', '.join(lacking[:3])}); record "
                    f"it for them, too: casewise record with the same --propose continues"
                )
        return replace(self, ladder_name=None, entries=self._cases, cases=self._cases, joined=tuple(views))

    def only_ladder(self, ladder: str | None = None) -> Archive:
        """Return the named ladder; without a name the one in view, or the only one."""
        if ladder is not None:
            return self.ladder(ladder)
        self._facts  # noqa: B018  raises an error if there are several and none is chosen
        return self

    @property
    def _facts(self) -> Mapping[str, Any]:
        """Entry of the manifest for the ladder in view."""
        if self.joined:
            own = {name: self.ladder(name)._facts for name in self.joined}
            first = next(iter(own.values()))
            bindings = {name: (Binding(**facts["binding"]), int(facts["steps"])) for name, facts in own.items()}
            steps = sum(count for _, count in bindings.values())
            return {**first, "binding": asdict(joint_binding(bindings)), "steps": steps}
        if self.ladder_name is None:
            names = ", ".join(repr(name) for name in self.ladders)
            how = "choose one with --ladder NAME (calibrate, certify, qc: or several); ladders=[NAME, ...] in Python"
            raise BadInput(f"archive {self.path} holds several ladders ({names}); {how}")
        facts: Mapping[str, Any] = self.manifest["ladders"][self.ladder_name] if self.ladder_name else self.manifest
        return facts

    @property
    def _cases(self) -> Mapping[str, Entry]:
        return self.entries if self.cases is None else self.cases

    @property
    def binding(self) -> Binding:
        """Model, proposer, loader and measure of the trajectories."""
        return Binding(**self._facts["binding"])

    @property
    def steps(self) -> int:
        """The horizon K: updates that each case has."""
        return int(self._facts["steps"])

    @property
    def configuration(self) -> Mapping[str, Any]:
        """objective, learning_rate, metric, min_area, foreground, ignore, classes, ..."""
        return dict(self._facts["configuration"])

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
        """Return the sha256 over the manifest and every case in view."""
        words = [json_text(asdict(self.binding), sort_keys=True)]
        words += [f"{name} {entry.digest}" for name, entry in self.entries.items()]
        words += [f"{ladder} {self.ladder(ladder).digest}" for ladder in self.joined]
        return text_sha256("\n".join(words))

    def select(self, ids: Collection[str] | None = None, split: str | None = None) -> Archive:
        """Return a view of some of the cases: by id, by split, or both."""
        if ids is not None and (unknown := sorted(set(ids) - set(self.entries))):
            raise BadInput(
                f"archive {self.path} has no case {', '.join(unknown[:5])}; "
                f"it has {pluralize(len(self.entries), 'case')}"
            )
        kept = {
            name: entry
            for name, entry in self.entries.items()
            if (ids is None or name in ids) and (split is None or entry.split == split)
        }
        cases = MappingProxyType({name: entry for name, entry in self._cases.items() if name in kept})
        return replace(self, entries=MappingProxyType(kept), cases=cases)

    def marked(self, split: str) -> Archive:
        """Return the cases of a split, or all cases if none is marked with it."""
        found = self.select(split=split)
        return found if found.ids else self

    def locked(self) -> Archive:
        """Return the same cases with locked labels; ``judge.ledger.unlock`` writes down why they are read (F12)."""
        return replace(self, evaluation=True, unlocked_by="")

    def check_unlocked(self, ids: Iterable[str]) -> None:
        """Refuse the labels of evaluation cases until the exposure ledger has a line about them."""
        closed = [name for name in ids if self.evaluation or self.entry(name).split == EVALUATION]
        if closed and not self.unlocked_by and any(self.entry(name).labelled for name in closed):
            raise Locked(
                f"the labels of {len(closed)} evaluation cases of {self.path} are locked ({', '.join(closed[:3])}); "
                f"state the purpose to read them: casewise.judge.ledger.unlock(archive, purpose='...')"
            )

    def entry(self, case_id: str) -> Entry:
        """The entry of one case."""
        if case_id not in self.entries:
            raise BadInput(
                f"archive {self.path} has no case {case_id!r}; it has {pluralize(len(self.entries), 'case')}"
            )
        return self.entries[case_id]

    def masks(self, case_id: str, states: Collection[State] | None = None) -> dict[State, Mask]:
        """Recorded masks of a case by state: all of them, or M0 and the given states."""
        known = self.entry(case_id).states
        states = None if states is None else [self._own(state) for state in states]
        wanted = range(len(known)) if states is None else sorted({0, *(known.index(state) for state in states)})
        found = self._decoded(case_id, self._file(case_id, layout.MASKS), self._encoded(case_id), wanted)
        return {known[place]: found[place] for place in wanted}

    def mask(self, case_id: str, state: State) -> Mask:
        """One recorded mask; a state may name its ladder."""
        if state.ladder and state.ladder != self.ladder_name:
            return self.ladder(state.ladder).mask(case_id, state)
        state = self._own(state)
        if state not in self.entry(case_id).states:
            recorded = ", ".join(map(str, self.entry(case_id).states))
            raise BadInput(f"state {state} of case {case_id} was not recorded; recorded are {recorded}")
        return self.masks(case_id, (state,))[state]

    def _own(self, state: State) -> State:
        return state.on("") if state.ladder == self.ladder_name else state

    def label(self, case_id: str) -> Mask:
        """The label of a case, once evaluation labels are unlocked."""
        self.check_unlocked((case_id,))
        self.entry(case_id)
        if layout.LABEL not in self._cases[case_id].files:
            raise BadInput(f"the label of case {case_id} was never recorded")
        file = self.path / layout.CASES / case_id / layout.LABEL
        return self._decoded(case_id, file, unpacked(file), (0,))[0]

    def trajectory(self, case_id: str) -> Trajectory:
        """Return the recorded trajectory of a case."""
        entry, masks = self.entry(case_id), self.masks(case_id)
        signals = self.signals_of(case_id)
        return Trajectory(
            case_id=case_id,
            masks=tuple(masks[State(step)] for step in range(self.steps + 1)),
            signals=tuple(signals[State(step)] for step in range(self.steps + 1)),
            shrunk={state: mask for state, mask in masks.items() if state.shrink},
            shrunk_signals={state: values for state, values in signals.items() if state.shrink},
            **{name: getattr(entry, name) for name in _OF_TRAJECTORY},
        )

    def signals(self) -> pd.DataFrame:
        """One row for each (case, step, shrink), with every label-free signal; NaN where not computable."""
        return self._signals.copy()

    def signals_of(self, case_id: str) -> Mapping[State, Signals]:
        """The signals of each state of one case; None where not computable."""
        self.entry(case_id)
        return self._ladders[case_id]

    def observation(self, case_id: str, step: int) -> Observation:
        """Return the input of a controller for a case after ``step`` updates."""
        entry = self.entry(case_id)
        rungs = {"": entry.rungs}
        return Observation(case_id, entry.group, self._steps[case_id][: step + 1], entry.cluster, rungs=rungs)

    def whole_observation(self, case_id: str, ladders: Collection[str] | None = None) -> Observation:
        """Return the input of a controller of several ladders: M0 and the candidates of all or some ladders."""
        names = self.ladders if ladders is None else tuple(ladders)
        seen = {name: self._view(name)._steps[case_id] for name in names}
        source = next(iter(seen.values()))[:1]
        entry = self.entry(case_id)
        rungs = {name: self._view(name).entry(case_id).rungs for name in names}
        return Observation(case_id, entry.group, source, entry.cluster, seen, rungs)

    def _view(self, ladder: str) -> Archive:
        """The view of one ladder, made once."""
        views: dict[str, Archive] = self.__dict__.setdefault("_views", {})
        if ladder not in views:
            views[ladder] = self.ladder(ladder)
        return views[ladder]

    def add(self, case: Case, trajectory: Trajectory, label: Mask | None = None) -> Archive:
        """Write one case atomically; a case that is already recorded is not changed."""
        if trajectory.steps != self.steps:
            raise BadInput(
                f"this archive holds {pluralize(self.steps, 'step')} for each case, "
                f"case {case.id} has {trajectory.steps}"
            )
        if case.id in self.entries:
            return self
        if not self.ladder_name:
            entry = write_case(self.path, case, trajectory, label)
            self.entries = self.cases = _sorted({**self.entries, case.id: entry})
        else:
            self._add_ladder(case, replace(trajectory, ladder=self.ladder_name), label)
        self._forget()
        return self

    def _add_ladder(self, case: Case, trajectory: Trajectory, label: Mask | None) -> None:
        """Write a named ladder of a case; first write the case itself, with M0 and label, if it is missing."""
        known = self._cases.get(case.id)
        if known is None:
            source = Trajectory(
                case.id, trajectory.masks[:1], trajectory.signals[:1], seed=trajectory.seed,
                seconds=trajectory.seconds[:1], appearance=trajectory.appearance,
            )  # fmt: skip
            known = write_case(self.path, case, source, label)
            self.cases = _sorted({**self._cases, case.id: known})
        entry = write_ladder(self.path, known, trajectory)
        self.entries = _sorted({**self.entries, case.id: entry})
        self.parts = {**self.parts, trajectory.ladder: self.entries}

    def seal(self) -> Archive:
        """Write the list of cases with their digests into the manifest, so that a lost case is noticed."""
        with file_lock(self.path / layout.LOCK):
            return self._seal()

    def _seal(self) -> Archive:
        manifest = dict(layout.read_json(self.path / layout.MANIFEST))  # with the changes of all writers
        there = _read_cases(self.path)
        parts = _read_parts(self.path, there, manifest)
        cases: dict[str, Any] = {}
        for name, entry in there.items():
            ladders = {ladder: found[name].digest for ladder, found in parts.items() if name in found}
            sealed = {"split": entry.split, "sha256": entry.digest}
            cases[name] = {**sealed, "ladders": ladders} if ladders else sealed
        manifest = {**manifest, "schema": layout.SCHEMA, "cases": cases}
        write_manifest(self.path, manifest)
        self.manifest, self.parts, self.cases = MappingProxyType(manifest), parts, there
        self.entries = parts[self.ladder_name] if self.ladder_name else there
        self._forget()
        return self

    @cached_property
    def _signals(self) -> pd.DataFrame:
        name = f"signals-{self.digest}"
        return layout.cached_table(self.path, name, lambda: layout.signal_table(self.path, self.entries))

    @cached_property
    def _ladders(self) -> dict[str, dict[State, Signals]]:
        return layout.ladders(self._signals)

    @cached_property
    def _steps(self) -> dict[str, tuple[Signals, ...]]:
        plain = [State(step) for step in range(self.steps + 1)]
        return {name: tuple(ladder[state] for state in plain) for name, ladder in self._ladders.items()}

    def _encoded(self, case_id: str) -> dict[str, NDArray[Any]]:
        """Return the stored masks of a case; M0 of a named ladder is stored with the case."""
        entry, own = self.entries[case_id], unpacked(self._file(case_id, layout.MASKS))
        if not entry.ladder:
            return own
        case = self.path / layout.CASES / case_id / layout.MASKS
        try:
            return layout.with_source(own, unpacked(case))
        except (KeyError, ValueError, IndexError) as error:
            raise DamagedArchive(f"{case} does not hold M0 of case {case_id} ({error}); record it again") from error

    def _decoded(
        self, case_id: str, file: Path, arrays: Mapping[str, NDArray[Any]], wanted: Collection[int]
    ) -> dict[int, Mask]:
        try:
            found = layout.decode_masks(arrays, self.entries[case_id].shape, wanted)
            return {place: found[place] for place in wanted}
        except (KeyError, ValueError, IndexError) as error:
            raise DamagedArchive(
                f"{file} does not hold the masks of case {case_id} ({error}); record it again"
            ) from error

    def _file(self, case_id: str, name: str) -> Path:
        return self.path / layout.CASES / self.entries[case_id].place / name

    def _forget(self) -> None:
        for name in ("states", "digest", "_signals", "_ladders", "_steps", "_views"):
            self.__dict__.pop(name, None)


def create_archive(
    path: str | Path, *, binding: Binding, steps: int, configuration: Mapping[str, Any] | None = None, ladder: str = ""
) -> Archive:
    """Create an archive, or open the existing one if it was made in the same way, so that interrupted runs resume.

    Args:
        path: Folder of the archive.
        binding: Origin of the trajectories: model, objective, loader and measure.
        steps: Number of updates or candidates of each case.
        configuration: Metric, min_area and other facts that reports print.
        ladder: Name of the ladder. A further ladder can be added to an archive of the same model, loader and measure;
            its cases keep their M0.

    Returns:
        The archive, with that ladder in view.

    Raises:
        Mismatch: If the folder has an archive that was made in another way.

    Example:
        >>> import tempfile
        >>> binding = Binding("sha256 of the weights", "tent", "nifti", "min_area=16")
        >>> create_archive(tempfile.mkdtemp(), binding=binding, steps=4).ids
        ()
    """
    path = Path(path)
    facts = made_by(binding, steps, configuration or {})
    check_archive_place(path)
    with file_lock(path / layout.LOCK):  # else one of two writers could lose its ladder
        return _created(path, facts, ladder)


def _created(path: Path, facts: dict[str, Any], ladder: str) -> Archive:
    sweep(path)
    if (path / layout.MANIFEST).exists():
        there = open_archive(path)
        if ladder in there.ladders:
            check_same(path, there.ladder(ladder)._facts, facts)
            return there.ladder(ladder)
        if not ladder:
            raise Mismatch(
                f"{path} holds named ladders ({', '.join(there.ladders)}), so a further one needs a name; "
                f"record it with --propose, or choose another folder"
            )
        check_joins(path, there.ladder(there.ladders[0])._facts, ladder, facts)
        manifest = {**there.manifest, "schema": layout.SCHEMA}
        manifest["ladders"] = {**there.manifest.get("ladders", {}), check_ladder(ladder): facts}
        write_manifest(path, manifest)
        return open_archive(path).ladder(ladder)
    (path / layout.CASES).mkdir(parents=True, exist_ok=True)
    held = {"ladders": {check_ladder(ladder): facts}} if ladder else facts
    manifest = {"schema": layout.SCHEMA, **held, "software": software()}
    write_manifest(path, manifest)
    return open_archive(path).ladder(ladder)


def describe_cases(path: str | Path, cases: Iterable[Any]) -> tuple[str, ...]:
    """Fill in group, cluster and split of recorded cases, if the archive lacks them.

    A person may add ``cases.csv`` after the first recording. Values that the archive already has are never changed.

    Args:
        path: An archive; nothing happens where there is none yet.
        cases: Objects with ``id``, ``group``, ``cluster`` and ``split``; None where a fact is not known.

    Returns:
        The ids of the cases that were updated.

    Raises:
        Mismatch: If a case has another group, cluster or split in the archive.
    """
    path = Path(path)
    if not (path / layout.MANIFEST).exists():
        return ()
    with file_lock(path / layout.LOCK):
        archive = open_archive(path)
        known, fresh = archive._cases, {}
        for case in cases:
            entry = known.get(case.id)
            said = {name: value for name in ("group", "cluster", "split") if (value := getattr(case, name)) is not None}
            if entry is None or all(getattr(entry, name) == value for name, value in said.items()):
                continue
            for name, value in said.items():
                if getattr(entry, name) not in (None, value):
                    raise Mismatch(
                        f"case {case.id} was recorded with {name} {getattr(entry, name)!r} and has {value!r} now; "
                        f"correct the table, or record into another folder"
                    )
            fresh[case.id] = replace(entry, **said)
        for name, entry in fresh.items():
            write_json(path / layout.CASES / name / layout.ENTRY, entry.as_dict(), indent=None)
        if fresh:
            open_archive(path)._seal()
    return tuple(fresh)


def check_archive_place(path: Path) -> None:
    """Refuse a folder that has cases/ but no manifest: other software made it."""
    found = sorted(one.name for one in (path / layout.CASES).glob("*") if not one.name.startswith(layout.HALF_WRITTEN))
    if found and not (path / layout.MANIFEST).exists():  # last: it is written before a case
        raise BadInput(
            f"{path} has a folder {layout.CASES}/ with {found[0]} and no {layout.MANIFEST}, so it is not an "
            f"archive; choose another folder with -o"
        )


def open_archive(path: str | Path, *, ladder: str | None = None) -> Archive:
    """Open an existing archive; incomplete cases of an interrupted run are not in it.

    Args:
        path: Folder of the archive.
        ladder: Ladder to look at; default: the only one. With several, :meth:`Archive.ladder` chooses.

    Returns:
        The archive.

    Raises:
        Mismatch: If the archive has another schema.
        DamagedArchive: If the manifest or a case is damaged.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> made = create_archive(folder, binding=Binding("model", "tent", "nifti", "min_area=16"), steps=4)
        >>> open_archive(folder).binding.objective
        'tent'
    """
    path = Path(path)
    manifest = layout.read_json(path / layout.MANIFEST)
    if manifest.get("schema") != layout.SCHEMA:
        raise Mismatch(
            f"{path} has archive schema {manifest.get('schema')}, this casewise reads {layout.SCHEMA}; record again"
        )
    try:
        check_manifest(manifest, str(path / layout.MANIFEST))
    except BadInput as error:
        raise DamagedArchive(str(error)) from error
    names = named_ladders(manifest)
    if not names:
        raise DamagedArchive(f"{path / layout.MANIFEST} names no ladder; restore it or record again")
    cases = _read_cases(path)
    parts = _read_parts(path, cases, manifest)
    _check_sealed(path, manifest, cases, parts)
    archive = Archive(path, MappingProxyType(manifest), cases, ladder_name=None, cases=cases, parts=parts)
    if ladder is not None:
        return archive.ladder(ladder)
    return archive.ladder(names[0]) if len(names) == 1 or names[0] == "" else archive


def as_archive(source: str | Path | Archive, ladders: Collection[str] = ()) -> Archive:
    """Open an archive, or take an open one, and choose the ladders to read.

    Args:
        source: An archive or its folder.
        ladders: Names of the ladders to read; without any the only one there is. Several are joined.

    Raises:
        BadInput: The archive holds several ladders and none is named.
    """
    archive = source if isinstance(source, Archive) else open_archive(source)
    return archive.join(ladders) if len(ladders) > 1 else archive.only_ladder(*ladders)


def _check_sealed(
    path: Path, manifest: Mapping[str, Any], cases: Mapping[str, Entry], parts: Mapping[str, Mapping[str, Entry]]
) -> None:
    lost = sorted(set(manifest.get("cases", {})) - set(cases))
    if lost:
        raise DamagedArchive(f"{path} lost {len(lost)} of its cases: {', '.join(lost[:5])}; restore the folder")
    for name, sealed in manifest.get("cases", {}).items():
        for ladder in sealed.get("ladders", {}):
            if name not in parts.get(ladder, {}):
                raise DamagedArchive(f"{path} lost ladder {ladder!r} of case {name}; restore the folder")


def _read_parts(path: Path, cases: Mapping[str, Entry], manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Entry]]:
    """The named ladders: for each, the entries of the cases that have it."""
    found: dict[str, Mapping[str, Entry]] = {}
    for ladder in manifest.get("ladders", {}):
        check_ladder(ladder)
        files = {name: path / layout.CASES / name / f"{layout.LADDER}{ladder}" / layout.ENTRY for name in cases}
        entries = {name: _read_entry(file) for name, file in files.items() if file.exists()}
        for name, entry in entries.items():
            wrong = entry.contradicts(cases[name]) + (["ladder"] if entry.ladder != ladder else [])
            if wrong:
                raise DamagedArchive(
                    f"{files[name]} contradicts its case on {', '.join(wrong)}; the archive was edited"
                )
        told = ("group", "cluster", "split")  # a table may have added these after the ladder was recorded
        found[ladder] = MappingProxyType(
            {
                name: replace(entry, **{fact: getattr(cases[name], fact) for fact in told})
                for name, entry in entries.items()
            }
        )
    return found


def _read_cases(path: Path) -> Mapping[str, Entry]:
    """The entries of all complete cases, by id."""
    found = {}
    for folder in sorted((path / layout.CASES).glob("*")):
        if folder.name.startswith(layout.HALF_WRITTEN):
            continue
        file = folder / layout.ENTRY
        found[folder.name] = entry = _read_entry(file)
        if entry.id != folder.name:
            raise DamagedArchive(f"{file} describes case {entry.id!r}, not {folder.name!r}; the archive was edited")
    return MappingProxyType(found)


def _read_entry(file: Path) -> Entry:
    try:
        return Entry.from_dict(layout.read_json(file))
    except BadInput as error:
        raise DamagedArchive(f"{file} does not describe a case ({error}); record the case again") from error


def _sorted(entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
    return MappingProxyType({name: entries[name] for name in sorted(entries)})
