"""Who calibrates and who evaluates: the two sides of a benchmark, told apart before any label is opened."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from casewise.archive.layout import image_sha256
from casewise.archive.store import Archive
from casewise.core.durable import write_json
from casewise.core.errors import BadInput, Mismatch, TooFewCases
from casewise.core.formats import json_text
from casewise.core.records import CALIBRATION, EVALUATION
from casewise.data.datasets import load_dataset, recognize
from casewise.data.datasets.plain import plain_files
from casewise.data.folders import CaseFiles
from casewise.data.splits import Cohort, check_disjoint, clusters_of, holdout, with_split

PLAN = "plan.json"
COPIES = "data"
WRITTEN = (COPIES, CALIBRATION, EVALUATION, "decisions.json", "result.json")  # each after the plan
AS_THEY_LIE = ("plain", "nnunet_raw")  # layouts whose files need no mapping before a model reads them


@dataclass(frozen=True)
class Sides:
    """Which cases calibrate and which evaluate, and how they were told apart; no label has been opened."""

    calibration: Cohort
    evaluation: Cohort
    how: Mapping[str, Any]
    layouts: tuple[str, str]  # of the two folders, as casewise.data.datasets calls them

    def __post_init__(self) -> None:
        check_disjoint(*(clusters_of(side.members.values()) for side in (self.calibration, self.evaluation)))

    def files(self, split: str, copies: Path) -> tuple[CaseFiles, ...]:
        """What a model reads of one side; of evaluation cases not even the path of a label."""
        calibrates = split == CALIBRATION
        return plain_files(
            self.calibration if calibrates else self.evaluation,
            copies / split,
            as_it_lies=self.layouts[0 if calibrates else 1] in AS_THEY_LIE,
            labels=calibrates,
        )

    def images(self) -> dict[str, dict[str, str | None]]:
        """sha256 of every image by split and case, the same for every model."""
        return {
            split: {case.id: image_sha256(case.image) for case in side}
            for split, side in ((CALIBRATION, self.calibration), (EVALUATION, self.evaluation))
        }


def sides_of(data: Path, calibration: Path | None = None, *, share: float = 0.3, seed: int = 1000) -> Sides:
    """The cases of a dataset folder: by its column split, by a folder of calibration cases, or drawn by cluster.

    Cases without a label can neither calibrate nor be scored here, so they are left out and counted.
    """
    whole = load_dataset(data)
    how: dict[str, Any] = {"by": "folders" if calibration else "column split"}
    if calibration is not None:
        parts = [_marked(load_dataset(calibration), CALIBRATION), _marked(whole, EVALUATION)]
    else:
        marks = {member.split for member in whole.members.values()} & {CALIBRATION, EVALUATION}
        if not marks:
            whole, drawn = _drawn(whole, share, seed)
            how = {"by": "draw of clusters", **drawn}
        elif len(marks) == 1:
            raise BadInput(
                f"{whole.name} marks {next(iter(marks))} cases only; mark calibration and evaluation in the column "
                f"split of cases.csv, or give --calibration FOLDER"
            )
        parts = [whole.select(split=CALIBRATION), whole.select(split=EVALUATION)]
    found = []
    for split, part in zip((CALIBRATION, EVALUATION), parts, strict=True):
        kept = {name: member for name, member in part.members.items() if member.labelled}
        if not kept:
            raise BadInput(f"no {split} case of {part.name} has a label; a benchmark needs labels on both sides")
        how[f"{split} without label"] = len(part) - len(kept)
        found.append(replace(part, members=kept))
    layouts = [recognize(folder) or "" for folder in (calibration or data, data)]
    return Sides(found[0], found[1], how, (layouts[0], layouts[1]))


def _marked(cohort: Cohort, split: str) -> Cohort:
    return replace(cohort, members={name: replace(one, split=split) for name, one in cohort.members.items()})


def _drawn(cohort: Cohort, share: float, seed: int) -> tuple[Cohort, dict[str, Any]]:
    """Calibration clusters drawn within each group, or from all together where a group has too few."""
    labelled = {name: one for name, one in cohort.members.items() if one.labelled}
    if not labelled:
        raise BadInput(f"{cohort.name} has no labels; a benchmark needs them on both sides")
    cohort = replace(cohort, members=labelled)
    try:
        split = holdout(cohort, share=share, seed=seed)
    except TooFewCases:
        split = holdout(cohort, share=share, seed=seed, per_group=False)
    return with_split(cohort, split), {"share": share, "seed": seed, "per_group": split.per_group}


def check_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Write what is benchmarked, or refuse a folder that holds another benchmark: then nothing could be resumed."""
    file, said = folder / PLAN, json.loads(json_text(plan))
    if not file.exists():
        taken = [name for name in WRITTEN if (folder / name).exists()]
        if taken:
            raise BadInput(
                f"{folder} holds {', '.join(taken)}, which no casewise bench wrote and this run would replace; choose "
                f"another folder with -o"
            )
        write_json(file, said)
        return
    try:
        there = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise BadInput(f"{file} is no plan of casewise bench; choose another folder with -o") from None
    differing = [name for name in said if there.get(name) != said[name]]
    if differing:
        raise Mismatch(
            f"{folder} holds a benchmark with other {', '.join(differing)}; choose another folder, or repeat the first "
            f"run's data and options to go on with it"
        )


def part_of(archive: Archive, ids: Iterable[str], ladders: Sequence[str]) -> Archive:
    """An archive as if it held these cases and ladders only; one that it lacks is an error."""
    ids, views = list(ids), [archive.on(ladder) for ladder in ladders]
    lacking = [case_id for view in views for case_id in ids if case_id not in view.entries]
    if lacking:
        raise BadInput(f"{archive.path} lacks {len(lacking)} recordings, such as that of case {lacking[0]}")
    named = {name: facts for name, facts in archive.manifest.get("ladders", {}).items() if name in ladders}
    return replace(views[0], manifest={**archive.manifest, "ladders": named}).select(ids=ids)
