"""The report of a study: from archives and a policy to tables, figures, results.json and one page."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from casewise.archive.store import Archive, open_archive
from casewise.core.errors import BadInput
from casewise.core.records import Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.policy import read_policy
from casewise.render.ink import Picture, svg_text, write_png
from casewise.render.tables import Table, write_csv, write_tex
from casewise.report import cases
from casewise.report.results_json import SCHEMA, findings_of, plain, write_results
from casewise.report.study_page import content, render
from casewise.study.analyses import chosen_analyses, sections_of
from casewise.study.audit import audit_study
from casewise.study.finding import Section
from casewise.study.inventory import counts, inventory_table
from casewise.study.provenance import provenance, provenance_tables, without_folders
from casewise.study.story import advised, hero, story
from casewise.study.study import Extras, Study

_PARTS = frozenset({"report.html", "results.json", "tables", "figures"})


def build(
    evaluation: Archive | str | Path,
    calibration: Archive | str | Path,
    policy: Policy | str | Path,
    out: str | Path,
    *,
    extras: Extras | None = None,
    only: Collection[str] | None = None,
    pictures: int = cases.PICTURES,
    resamples: int = 5000,
    seed: int = RESAMPLING_SEED,
    progress: bool = True,
) -> Path:
    """Write the report of a study into the folder ``out`` and give the path of its page.

    ``only`` names analyses of :data:`casewise.study.analyses.ANALYSES`; the story and the case table are always there.
    The folder is written beside its place and moved there when it is whole. A report that contradicts itself is
    refused, with the error :class:`casewise.core.errors.Refused`.
    """
    analyses = chosen_analyses(only)
    check_place(Path(out))
    known = policy if isinstance(policy, Policy) else read_policy(policy)
    with tqdm(total=len(analyses) + 6, disable=not progress, unit="part", leave=False) as bar:

        def tick(what: str) -> None:
            bar.set_description(what)
            bar.update()

        study = Study.of(
            _archive(evaluation),
            _archive(calibration),
            known,
            extras=extras,
            resamples=resamples,
            seed=seed,
            progress=tick,
        )
        tick("checking the arithmetic")
        checked = audit_study(study)
        sections = sections_of(study, analyses, progress=tick)
        tick("pictures of the cases")
        shown = list(cases.shown_cases(study, pictures=pictures))
        tick("writing")
        with whole_folder(Path(out)) as folder:
            write_report(folder, study, sections, shown, checked)
    return Path(out) / "report.html"


def _archive(given: Archive | str | Path) -> Archive:
    return given if isinstance(given, Archive) else open_archive(given)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder that appears whole or not at all; an earlier report in its place goes, anything else is refused."""
    check_place(out)
    half = out.with_name(f".{out.name}.part")
    shutil.rmtree(half, ignore_errors=True)
    for part in ("tables", "figures"):
        (half / part).mkdir(parents=True)
    try:
        yield half
        shutil.rmtree(out, ignore_errors=True)
        half.rename(out)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def check_place(out: Path) -> None:
    """Refuse a place that holds something else than a report."""
    foreign = sorted(part.name for part in out.iterdir() if part.name not in _PARTS) if out.is_dir() else []
    if foreign or (out.exists() and not out.is_dir()):
        what = ", ".join(foreign[:3]) or "a file"
        raise BadInput(f"{out} holds {what}, which is no report; choose another folder with -o")


def write_report(
    folder: Path, study: Study, sections: Sequence[Section], shown: Sequence[cases.Shown], checked: int
) -> None:
    """Everything into one folder."""
    first = hero(study)
    made = {id for section in sections for id in _ids(section)}
    missing = {name for section in sections for name in section.missing}
    inventory = inventory_table(made, others=bool(study.extras.others), missing=missing)
    origin = list(provenance_tables(study))
    write_tables(folder / "tables", [cases.case_table(study), inventory, *origin, *_tables(sections)])
    drawings = write_pictures(folder / "figures", [first, *(one for part in sections for one in part.pictures)])
    write_results(folder / "results.json", _results(study, sections, inventory))
    words = content(
        study, shown=shown, inventory=inventory, origin=origin, here=counts(made), checked=checked
    )  # fmt: skip
    spoken = [section for section in sections if section.tables or section.pictures or section.lead]
    page = render(words, sections=spoken, hero=[first], drawings=drawings)
    (folder / "report.html").write_text(page, encoding="utf-8")
    _hide_folders(folder, study)


def _ids(section: Section) -> Iterator[str]:
    yield from (one.id for one in section.tables)
    yield from (one.id for one in section.pictures)


def _tables(sections: Sequence[Section]) -> Iterator[Table]:
    for section in sections:
        yield from section.tables


def write_tables(folder: Path, made: Sequence[Table]) -> None:
    """Every table as CSV and LaTeX."""
    for one in made:
        write_csv(folder / f"{one.id}.csv", one)
        write_tex(folder / f"{one.id}.tex", one)


def write_pictures(folder: Path, pictures: Sequence[Picture]) -> dict[str, str]:
    """Every figure as SVG and PNG; gives the SVG texts by id, for the page."""
    drawings = {}
    for picture in pictures:
        drawings[picture.id] = svg_text(picture.figure, id=picture.id)
        (folder / f"{picture.id}.svg").write_text(drawings[picture.id], encoding="utf-8")
        write_png(folder / f"{picture.id}.png", picture.figure)
    return drawings


def _results(study: Study, sections: Sequence[Section], inventory: Table) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "provenance": provenance(study),
        "story": vars(story(study)),
        "warnings": advised(study),
        "findings": findings_of(sections),
        "cases": plain(cases.case_frame(study)),
        "not_run": {**study.skipped, **{name: why for one in sections for name, why in one.missing.items()}},
        "inventory": [dict(row) for row in inventory.rows],
    }


def _hide_folders(folder: Path, study: Study) -> None:
    """No path of this machine leaves with the report."""
    archives = [study.evaluation, study.calibration]
    for file in (folder / "report.html", folder / "results.json", *folder.glob("tables/*")):
        text = file.read_text(encoding="utf-8")
        hidden = without_folders(text, archives)
        if hidden != text:
            file.write_text(hidden, encoding="utf-8")
