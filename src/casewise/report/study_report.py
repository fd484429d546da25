"""The report of a study: from archives and a policy to tables, figures, results.json and one page."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from casewise import __version__
from casewise.archive.store import Archive, open_archive
from casewise.core.errors import BadInput, CasewiseError
from casewise.core.records import Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.policy import read_policy
from casewise.report import cases
from casewise.report.figures.changes import draw_changes
from casewise.report.gathering import gather
from casewise.report.ink import write_png, write_svg
from casewise.report.inventory import FIGURES, TABLES, counts, inventory_table
from casewise.report.material import Extras, Material
from casewise.report.page import render
from casewise.report.provenance import provenance, provenance_tables, without_folders
from casewise.report.results import SCHEMA, findings_of, plain, write_results
from casewise.report.section import Picture, Section
from casewise.report.sections import SECTIONS
from casewise.report.story import keys, story
from casewise.report.tables import Table, write_csv, write_tex
from casewise.study.accounting import accounting
from casewise.study.audit import check_audit
from casewise.study.deployment import bucket_decomposition
from casewise.study.helphurt import help_hurt

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

    ``only`` names analyses of :data:`casewise.report.sections.SECTIONS`; the story and the case table are always there.
    The folder is written beside its place and moved there when it is whole, so a failed study leaves no half report
    and no old report that looks like a new one. A report that contradicts itself is refused (Q7-Q10).
    """
    names = list(SECTIONS) if not only else [name for name in only if SECTIONS[name]]
    archives = [open_archive(one) if not isinstance(one, Archive) else one for one in (evaluation, calibration)]
    known = policy if isinstance(policy, Policy) else read_policy(policy)
    with tqdm(total=len(names) + 6, disable=not progress, unit="part", leave=False) as bar:

        def tick(what: str) -> None:
            bar.set_description(what)
            bar.update()

        made = gather(*archives, known, extras=extras, resamples=resamples, seed=seed, progress=tick)
        tick("checking the arithmetic")
        checked = self_audit(made)
        sections = [_section(name, made, tick) for name in names]
        tick("pictures of the cases")
        shown = list(cases.shown_cases(made, pictures=pictures))
        tick("writing")
        with _whole_folder(Path(out)) as folder:
            _write(folder, made, sections, shown, checked)
    return Path(out) / "report.html"


def self_audit(material: Material) -> int:
    """Recompute sums and identities; a report that contradicts itself is not written."""
    return check_audit(
        material.methods,
        deployment=material.method_table,
        accounting=accounting(material.methods, buckets_of=(material.ours,) if material.is_router else ()),
        helphurt=help_hurt(material.methods),
        decomposition=bucket_decomposition(material.router) if material.is_router else None,
    )


def _section(name: str, material: Material, tick: Any) -> Section:
    """One section; what cannot be computed from this archive says so instead of stopping the report."""
    tick(name)
    try:
        return SECTIONS[name](material)
    except CasewiseError as error:
        return Section(name, name.capitalize(), missing={name: str(error)})


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """A folder that appears whole or not at all; an earlier report in its place goes, anything else is refused."""
    foreign = sorted(part.name for part in out.iterdir() if part.name not in _PARTS) if out.is_dir() else []
    if foreign or (out.exists() and not out.is_dir()):
        raise BadInput(f"{out} holds {', '.join(foreign[:3]) or 'a file'}, which is no report; choose another folder with -o")
    half = out.with_name(f".{out.name}.part")
    shutil.rmtree(half, ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    for part in ("tables", "figures"):
        (half / part).mkdir(parents=True)
    try:
        yield half
        half.rename(out)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _write(folder: Path, material: Material, sections: list[Section], shown: list[cases.Shown], checked: int) -> None:
    listed = cases.case_table(material)
    hero = _hero(material)
    made = {one.id for section in sections for one in (*section.tables, *section.pictures)}
    inventory = inventory_table(made, others=bool(material.extras.others))
    origin = list(provenance_tables(material))
    for one in (listed, inventory, *origin, *(one for section in sections for one in section.tables)):
        write_csv(folder / "tables" / f"{one.id}.csv", one)
        write_tex(folder / "tables" / f"{one.id}.tex", one)
    for picture in (hero, *(one for section in sections for one in section.pictures)):
        write_svg(folder / "figures" / f"{picture.id}.svg", picture.figure, id=picture.id)
        write_png(folder / "figures" / f"{picture.id}.png", picture.figure)
    write_results(folder / "results.json", _results(material, sections, inventory))
    content = _content(material, shown, inventory, origin, counts(made), checked)
    page = render(content, sections=[one for one in sections if _says(one)], hero=[hero])
    (folder / "report.html").write_text(page, encoding="utf-8")
    _hide_folders(folder, material)


def _says(section: Section) -> bool:
    """A section that only lacks an optional archive is in the inventory, not on the page."""
    return bool(section.tables or section.pictures or section.lead)


def _hero(material: Material) -> Picture:
    names = (material.reference, material.title(material.ours))
    figure = draw_changes(material.uncontrolled, material.router, names=names, metric=material.metric)
    caption = (
        f"One line a case, in the same order in both rows: the change of {material.metric} against M0. Grey ticks: rolled "
        "back to M0. The axis ends at the 99th percentile; longer lines are cut."
    )
    return Picture("changes", "What adaptation did to each case", figure, caption, wide=True)


def _results(material: Material, sections: list[Section], inventory: Table) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "provenance": provenance(material),
        "story": vars(_story(material)),
        "findings": findings_of(sections),
        "cases": plain(cases.case_frame(material)),
        "not_run": {**material.skipped, **{name: why for one in sections for name, why in one.missing.items()}},
        "inventory": [dict(row) for row in inventory.rows],
    }


def _story(material: Material) -> Any:
    return story(material, material.attribution if material.is_router else None)


def _content(
    material: Material, shown: list[cases.Shown], inventory: Table, origin: list[Table], here: Any, checked: int
) -> dict[str, Any]:
    made = material.configuration
    title = str(made.get("dataset") or material.evaluation.path.name)
    notices = [str(one.configuration["notice"]) for one in (material.evaluation, material.calibration) if "notice" in one.configuration]
    pictured = sum(bool(one.pictures) for one in shown)
    return {
        "title": title,
        "kicker": f"{title} · {len(material.evaluation.ids)} evaluation cases × {material.evaluation.steps} updates · policy “{material.policy.name}”",
        "notices": list(dict.fromkeys(notices)),
        "story": _story(material),
        "keys": keys(material),
        "cases": shown,
        "case_columns": cases.columns(material),
        "case_sorted": 3,
        "case_facts": {one.id: one.facts for one in shown},
        "case_lead": f"Worst first: by the change of {material.metric} under {material.reference}, without control. Open a case to see more.",
        "case_note": f"{len(shown)} cases, {pictured} with pictures; worse and better edits are outlined from step 3 of the strip on.",
        "panel_names": cases.panel_names(material),
        "buckets": sorted({one.bucket for one in shown}),
        "groups": sorted({one.group for one in shown}),
        "reference": material.reference,
        "inventory": inventory,
        "inventory_lead": (
            f"{here['tables']} of the paper's {TABLES} tables and {here['figures']} of its {FIGURES} figures can be made from "
            "what was given; the others say what they need."
        ),
        "provenance": origin,
        "audit_lead": (
            f"The report recomputed bucket sums, help and hurt sums and HA identities for {checked} methods; all agree. "
            f"Archive {material.evaluation.digest[:12]}, bootstrap seed {material.seed}, B = {material.resamples}."
        ),
        "footer": f"casewise {__version__}. One file, no network. Every number is in results.json at full precision.",
    }


def _hide_folders(folder: Path, material: Material) -> None:
    """No path of this machine leaves with the report."""
    archives = [material.evaluation, material.calibration]
    for file in (folder / "report.html", folder / "results.json", *folder.glob("tables/*")):
        text = file.read_text(encoding="utf-8")
        hidden = without_folders(text, archives)
        if hidden != text:
            file.write_text(hidden, encoding="utf-8")
