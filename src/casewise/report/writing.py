"""The report's folder: tables, figures, results.json and the page, there whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from casewise.core.errors import BadInput
from casewise.render.ink import svg_text, write_png
from casewise.render.tables import Table, write_csv, write_tex
from casewise.report import cases
from casewise.report.content import content, hero, the_story
from casewise.report.inventory import counts, inventory_table
from casewise.report.material import Material
from casewise.report.page import render
from casewise.report.provenance import provenance, provenance_tables, without_folders
from casewise.report.results import SCHEMA, findings_of, plain, write_results
from casewise.report.section import Picture, Section

_PARTS = frozenset({"report.html", "results.json", "tables", "figures"})


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
    folder: Path, material: Material, sections: Sequence[Section], shown: Sequence[cases.Shown], checked: int
) -> None:
    """Everything into one folder."""
    first = hero(material)
    made = {id for section in sections for id in _ids(section)}
    missing = {name for section in sections for name in section.missing}
    inventory = inventory_table(made, others=bool(material.extras.others), missing=missing)
    origin = list(provenance_tables(material))
    write_tables(folder / "tables", [cases.case_table(material), inventory, *origin, *_tables(sections)])
    drawings = write_pictures(folder / "figures", [first, *(one for part in sections for one in part.pictures)])
    write_results(folder / "results.json", _results(material, sections, inventory))
    words = content(
        material, shown=shown, inventory=inventory, origin=origin, here=counts(made), checked=checked
    )  # fmt: skip
    spoken = [section for section in sections if section.tables or section.pictures or section.lead]
    page = render(words, sections=spoken, hero=[first], drawings=drawings)
    (folder / "report.html").write_text(page, encoding="utf-8")
    _hide_folders(folder, material)


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


def _results(material: Material, sections: Sequence[Section], inventory: Table) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "provenance": provenance(material),
        "story": vars(the_story(material)),
        "findings": findings_of(sections),
        "cases": plain(cases.case_frame(material)),
        "not_run": {**material.skipped, **{name: why for one in sections for name, why in one.missing.items()}},
        "inventory": [dict(row) for row in inventory.rows],
    }


def _hide_folders(folder: Path, material: Material) -> None:
    """No path of this machine leaves with the report."""
    archives = [material.evaluation, material.calibration]
    for file in (folder / "report.html", folder / "results.json", *folder.glob("tables/*")):
        text = file.read_text(encoding="utf-8")
        hidden = without_folders(text, archives)
        if hidden != text:
            file.write_text(hidden, encoding="utf-8")
