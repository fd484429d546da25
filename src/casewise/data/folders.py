"""Input folders: nnU-Net's ``{CASE}_{XXXX}.{ending}`` and plain ``{case}.{ending}``, as cases with their files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from casewise.core.errors import BadInput, UnsafeInput
from casewise.core.records import check_case_id, made_case_id
from casewise.data.cases_csv import read_table, with_table
from casewise.data.pictures import ENDINGS

READABLE = (".nii.gz", ".nii", *ENDINGS)
_CHANNEL = re.compile(r"(?P<case>.+)_(?P<channel>\d{4})")


@dataclass(frozen=True)
class CaseFiles:
    """A case that has not been opened: its image files in the order of their channels, and where its label is."""

    id: str
    images: tuple[Path, ...]
    label: Path | None = None
    group: str | None = None
    cluster: str | None = None
    split: str | None = None
    name: str | None = None  # what the files call the case, where that is no id and one was made from it

    def __post_init__(self) -> None:
        check_case_id(self.id)

    @classmethod
    def called(cls, name: str, images: tuple[Path, ...]) -> CaseFiles:
        """A case under the name of its files; spaces and letters of all languages are fine."""
        case_id = made_case_id(name)
        return cls(case_id, images, name=None if case_id == name else name)


def list_cases(folder: Path, *, ending: str | None = None) -> tuple[CaseFiles, ...]:
    """The cases of a folder in sorted order; ``ending`` (nnU-Net's ``file_ending``) takes only files that end so.

    A folder whose every file is named ``{CASE}_{XXXX}`` is read the nnU-Net way, any other as one file per case. Hidden
    files are passed over.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; give the folder that holds the images")
    files = sorted(path for path in folder.iterdir() if path.is_file() and _ending(path, ending) and _visible(path))
    if not files:
        raise BadInput(f"{folder} holds no image that ends in {ending or ', '.join(READABLE)}")
    for path in files:
        _inside(path, folder)
    stems = {path: path.name[: -len(_ending(path, ending) or "")] for path in files}
    channels = {path: _CHANNEL.fullmatch(stem) for path, stem in stems.items()}
    if all(channels.values()):
        return _by_channel({path: match for path, match in channels.items() if match is not None})
    named = Counter(stems.values())
    cases = [
        CaseFiles.called(stem, (path,)) if named[stem] == 1 else CaseFiles.called(path.name, (path,))
        for path, stem in stems.items()  # a.nii beside a.nii.gz: two cases, with their endings in the ids
    ]
    return tuple(sorted(cases, key=lambda case: case.id))


def _visible(path: Path) -> bool:
    return not path.name.startswith(".")


def _by_channel(channels: dict[Path, re.Match[str]]) -> tuple[CaseFiles, ...]:
    cases: dict[str, list[Path]] = {}
    for path, match in sorted(channels.items(), key=lambda item: (item[1]["case"], item[1]["channel"])):
        cases.setdefault(match["case"], []).append(path)
    return tuple(CaseFiles.called(case, tuple(paths)) for case, paths in cases.items())


def _ending(path: Path, wanted: str | None) -> str | None:
    for ending in (wanted,) if wanted else READABLE:
        if ending and path.name.lower().endswith(ending.lower()):
            return ending
    return None


def _inside(path: Path, root: Path) -> None:
    if root.resolve() not in path.resolve().parents:
        raise UnsafeInput(f"{path.name} is a link that leaves {root}; copy the file into the folder")


def with_labels(cases: Sequence[CaseFiles], folder: Path) -> tuple[CaseFiles, ...]:
    """Pair cases with ``{CASE}.{ending}`` of a label folder; a case without one stays unlabelled."""
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; give the folder that holds the labels")
    files = [path for path in sorted(folder.iterdir()) if _visible(path)]
    by_stem = {made_case_id(path.name[: -len(end)]): path for path in files if (end := _ending(path, None))}
    if not any(case.id in by_stem for case in cases):
        raise BadInput(
            f"no label in {folder} is named after a case; cases are called {[case.id for case in cases[:3]]}, "
            f"labels {sorted(by_stem)[:3]}"
        )
    return tuple(replace(case, label=by_stem.get(case.id)) for case in cases)


def with_groups(cases: Sequence[CaseFiles], table: Path) -> tuple[CaseFiles, ...]:
    """Add group, cluster and split from a CSV with the column case and those that ``data/cases_csv.py`` knows."""
    return tuple(with_table(cases, read_table(table)))


def part_of(cases: Iterable[CaseFiles], *, parts: int, part: int) -> tuple[CaseFiles, ...]:
    """nnU-Net's sharding by stride: ``cases[part_id::num_parts]``."""
    if parts < 1 or not 0 <= part < parts:
        raise BadInput(f"-part_id counts from 0 to -num_parts - 1, got -part_id {part} of -num_parts {parts}")
    return tuple(cases)[part::parts]
