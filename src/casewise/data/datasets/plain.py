"""A plain folder: ``images/`` with or without ``labels/`` and ``cases.csv``; or several such folders side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from casewise.core.errors import BadInput
from casewise.core.records import Mask
from casewise.data.cases_csv import read_table, table_for, with_table
from casewise.data.cohort import Cohort
from casewise.data.datasets.label_files import whole_label
from casewise.data.datasets.located import Found, cohort_of, is_volume, safe_id, visible
from casewise.data.folders import READABLE, list_cases, with_labels
from casewise.data.pictures import read_label_picture


def is_plain(root: Path) -> bool:
    """Whether a folder holds images/, or folders that do, or images itself."""
    return root.is_dir() and (bool(_parts(root)) or _holds_images(root))


def plain(root: Path, *, cluster: str | None = None, ignore: int | None = None) -> Cohort:
    """The cases of a plain folder; of several side by side, each is a group named after its folder.

    Where several of them name their cases alike, an id is the name of the folder and that of the case.

    ``cases.csv`` (in the folder or one level up; columns case, group, cluster, split or their usual other names)
    describes the cases. ``cluster`` is a pattern whose first bracket is the cluster in a case id, such as
    ``(.+)_frame_`` for frames of a sequence; ``ignore`` is a label value that is not scored, such as 255.
    """
    parts = _parts(root)
    found = [case for part in parts for case in _part(part, part.name if part != root else None)]
    if len({case.id for case in found}) < len(found):  # sites that name their cases alike
        found = [replace(case, id=safe_id(case.group or "", case.id)) for case in found]
    if not parts:
        found = [Found(case.id, case.images) for case in list_cases(root)]
    facts = {"group": "name of the folder"} if parts and root not in parts else {}
    table = table_for(root)
    if table is not None:
        read = read_table(table)
        found, facts = with_table(found, read), {**facts, **read.facts}
    if cluster is not None:
        found, facts = list(_clustered(found, cluster)), {**facts, "cluster": f"pattern {cluster} in the id"}
    return cohort_of(root.resolve().name, root, found, label=read_plain_label, ignore=ignore, facts=facts)


def _parts(root: Path) -> list[Path]:
    """The folders that hold images/: the folder itself, else its children."""
    if (root / "images").is_dir():
        return [root]
    return [path for path in visible(root.iterdir()) if (path / "images").is_dir()]


def _holds_images(root: Path) -> bool:
    return any(path.is_file() and path.name.lower().endswith(READABLE) for path in visible(root.iterdir()))


def _part(root: Path, group: str | None) -> Iterator[Found]:
    cases = list_cases(root / "images")
    if (root / "labels").is_dir() and any((root / "labels").iterdir()):
        cases = with_labels(cases, root / "labels")
    for case in cases:
        yield Found(case.id, case.images, (case.label,) if case.label else (), group)


def _clustered(found: Sequence[Found], pattern: str) -> Iterator[Found]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise BadInput(f"{pattern!r} is not a pattern ({error})") from error
    if expression.groups < 1:
        raise BadInput(f"the pattern {pattern!r} needs brackets around the cluster, such as (.+)_frame_")
    for one in found:
        match = expression.match(one.id)
        if match is None:
            raise BadInput(f"the pattern {pattern!r} does not fit case {one.id}; fit it to every id")
        yield replace(one, cluster=match[1])


def read_plain_label(found: Found) -> Mask:
    """A label without any mapping: integers of a NIfTI file or of a picture."""
    path = found.labels[0]
    return whole_label(path) if is_volume(path) else read_label_picture(path)
