"""Input folders: cases with their files, named as in nnU-Net (``{CASE}_{XXXX}.{ending}``) or ``{case}.{ending}``.

``cases.csv`` gives the group, cluster and split of each case.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from casewise.core.errors import BadInput
from casewise.core.formats import csv_cell, from_csv_cell, read_csv
from casewise.core.records import check_case_id, made_case_id
from casewise.data.pictures import ENDINGS
from casewise.data.splits import Cohort

if TYPE_CHECKING:
    from casewise.data.datasets.located import LocatedCase
    from casewise.data.pairs import Pair

NAME = "cases.csv"
COLUMNS = {
    "group": ("group", "site", "vendor", "condition", "domain", "centre", "center"),
    "cluster": ("cluster", "patient", "subject", "sequence"),
    "split": ("split",),
}
"""For each property, the names of its column; the first one in the table is used."""


Described = TypeVar("Described", bound="CaseFiles | LocatedCase | Pair")
"""A case whose files are known and not yet opened; it has an id, a group, a cluster and a split."""


@dataclass(frozen=True)
class CaseTable:
    """Rows of a table by case, and the column of each property (None: no such column)."""

    name: str  # name of the table's file
    rows: Mapping[str, Mapping[str, str]]
    columns: Mapping[str, str | None]

    @property
    def facts(self) -> dict[str, str]:
        """Source of each property, as text."""
        return {name: f"column {column} of {self.name}" for name, column in self.columns.items() if column}


def table_for(root: Path) -> Path | None:
    """Return ``cases.csv`` in a folder or one level above it; None if there is none."""
    return next((path for path in (root / NAME, root.resolve().parent / NAME) if path.is_file()), None)


def read_table(path: Path) -> CaseTable:
    """Read a table with the column ``case``; each case may occur once."""
    rows = [{name: from_csv_cell(cell) for name, cell in row.items()} for row in read_csv(path)]
    if not rows or "case" not in rows[0]:
        known = ", ".join(column for names in COLUMNS.values() for column in names)
        raise BadInput(f"{path} needs a header with case and any of {known}, and a row for each case")
    by_case = {made_case_id(row["case"]): row for row in rows}  # the same ids as made from file names
    if len(by_case) < len(rows):
        twice = sorted(case for case in by_case if sum(made_case_id(row["case"]) == case for row in rows) > 1)
        raise BadInput(f"{path} has more than one row for {twice[:5]}; keep one row per case")
    columns = {name: next((column for column in known if column in rows[0]), None) for name, known in COLUMNS.items()}
    return CaseTable(path.name, by_case, columns)


def with_table(found: Sequence[Described], table: CaseTable) -> list[Described]:
    """Return the cases with the values of the table; empty cells change nothing."""
    missing = [one.id for one in found if one.id not in table.rows]
    if missing:
        first = next(iter(table.rows))
        lost, count = f"{', '.join(missing[:5])}{', ...' * (len(missing) > 5)}", f"{len(missing)} of {len(found)}"
        raise BadInput(f"{table.name} has no row for {lost} ({count} cases; its first row is about {first}); add them")
    return [_described(one, table) for one in found]


def _described(one: Described, table: CaseTable) -> Described:
    def said(name: str, found: str | None) -> str | None:
        column = table.columns[name]
        return (table.rows[one.id][column] if column else None) or found

    return replace(
        one, group=said("group", one.group), cluster=said("cluster", one.cluster), split=said("split", one.split)
    )


def write_table(cohort: Cohort, folder: Path) -> Path:
    """Write ``cases.csv``: case, group, cluster, split."""
    with (folder / NAME).open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["case", "group", "cluster", "split"])
        cells = ([m.id, m.group or "", m.cluster or "", m.split or ""] for m in cohort.members.values())
        rows.writerows([csv_cell(cell) for cell in row] for row in cells)
    return folder / NAME


READABLE = (".nii.gz", ".nii", *ENDINGS)
_CHANNEL = re.compile(r"(?P<case>.+)_(?P<channel>\d{4})")


@dataclass(frozen=True)
class CaseFiles:
    """The files of a case: images in the order of the channels, and the label. Nothing has been read yet."""

    id: str
    images: tuple[Path, ...]
    label: Path | None = None
    group: str | None = None
    cluster: str | None = None
    split: str | None = None
    name: str | None = None  # name in the files, if the id was made from it because it is not a valid id
    modality: str | None = None  # modality in the header of the image (DICOM)

    def __post_init__(self) -> None:
        check_case_id(self.id)

    @classmethod
    def called(cls, name: str, images: tuple[Path, ...]) -> CaseFiles:
        """Make a case from the name of its files, which may contain spaces and letters of all languages."""
        case_id = made_case_id(name)
        return cls(case_id, images, name=None if case_id == name else name)

    @classmethod
    def of(cls, path: Path) -> CaseFiles:
        """Make a case of one image file, named after it."""
        return cls.called(stem_of(path), (path,))

    def checked(self) -> CaseFiles:
        """Return these files; raise BadInput if one is a link to a missing file, a folder, a pipe or a socket."""
        for path in self.images:
            if path.exists() and not path.is_file():
                raise BadInput(f"{path.name} is a folder, a pipe or a socket and not a file; rename or remove it")
            if path.is_symlink() and not path.exists():
                raise BadInput(f"{path.name} is a link to a missing file; fetch the file (git annex get), or remove it")
        return self


def stem_of(path: Path) -> str:
    """The name without its ending, .nii.gz being one ending."""
    return path.name[:-7] if path.name.lower().endswith(".nii.gz") else path.stem


def list_cases(folder: Path, *, ending: str | None = None, broken_links: bool = False) -> tuple[CaseFiles, ...]:
    """List the cases of a folder in sorted order; ``ending`` (nnU-Net's ``file_ending``) selects files by their ending.

    A folder whose every file is named ``{CASE}_{XXXX}`` is read the nnU-Net way, any other as one file per case. Hidden
    files are passed over. Links are followed. A link to a missing file, and a folder or a pipe that is named like an
    image, are refused; with ``broken_links`` their cases are listed, so that only these fail (``CaseFiles.checked``).

    Raises:
        BadInput: If there is no image, or two files would get one case id.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; give the folder that holds the images")
    files = sorted(path for path in folder.iterdir() if _ending(path, ending) and _visible(path))
    if not files:
        raise BadInput(f"{folder} has no image that ends in {ending or ', '.join(READABLE)}")
    stems = {path: path.name[: -len(_ending(path, ending) or "")] for path in files}
    channels = {path: _CHANNEL.fullmatch(stem) for path, stem in stems.items()}
    if all(channels.values()):
        found = _by_channel({path: match for path, match in channels.items() if match is not None})
        _check_distinct(found)
        return found if broken_links else tuple(case.checked() for case in found)
    named = Counter(stems.values())
    cases = [
        CaseFiles.called(stem, (path,)) if named[stem] == 1 else CaseFiles.called(path.name, (path,))
        for path, stem in stems.items()  # a.nii beside a.nii.gz: two cases, with their endings in the ids
    ]
    _check_distinct(cases)
    return tuple(sorted((case if broken_links else case.checked() for case in cases), key=lambda case: case.id))


def _check_distinct(cases: Iterable[CaseFiles]) -> None:
    """Refuse two files that would become one case."""
    known: dict[str, CaseFiles] = {}
    for case in cases:
        other = known.setdefault(case.id, case)
        if other is not case:
            raise BadInput(f"{other.images[0].name} and {case.images[0].name} would both be case {case.id}; rename one")


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


def with_labels(cases: Sequence[CaseFiles], folder: Path) -> tuple[CaseFiles, ...]:
    """Pair cases with ``{CASE}.{ending}`` of a label folder; a case without one stays unlabelled."""
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; give the folder that holds the labels")
    files = [path for path in sorted(folder.iterdir()) if _visible(path)]
    by_stem: dict[str, Path] = {}
    for path in files:
        if end := _ending(path, None):
            other = by_stem.setdefault(made_case_id(path.name[: -len(end)]), path)
            if other != path and any(case.id == made_case_id(path.name[: -len(end)]) for case in cases):
                raise BadInput(f"{other.name} and {path.name} in {folder} are labels of one case; keep one of them")
    if not any(case.id in by_stem for case in cases):
        raise BadInput(
            f"no label in {folder} has the name of a case; cases are called {[case.id for case in cases[:3]]}, "
            f"labels {sorted(by_stem)[:3]}"
        )
    return tuple(replace(case, label=by_stem.get(case.id)) for case in cases)


def with_groups(cases: Sequence[CaseFiles], table: Path) -> tuple[CaseFiles, ...]:
    """Add group, cluster and split from a CSV with the column case and any column of ``COLUMNS``."""
    return tuple(with_table(cases, read_table(table)))


def part_of(cases: Iterable[CaseFiles], *, parts: int, part: int) -> tuple[CaseFiles, ...]:
    """nnU-Net's sharding by stride: ``cases[part_id::num_parts]``."""
    if parts < 1 or not 0 <= part < parts:
        raise BadInput(f"-part_id must be from 0 to -num_parts - 1, got -part_id {part} of -num_parts {parts}")
    return tuple(cases)[part::parts]
