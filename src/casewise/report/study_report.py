"""The report of a study: tables, figures, results.json and one self-contained page.

results.json holds every number at full precision (docs/reference/study-results.md). The template escapes all data.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from tqdm import tqdm

from casewise import __version__
from casewise.archive.store import Archive, open_archive
from casewise.core.errors import BadInput, without_folders
from casewise.core.formats import json_text, parsed_json, worded
from casewise.core.records import Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.core.text import pluralize
from casewise.judge.outcomes import judged_sentence, judged_share
from casewise.judge.policy import read_policy
from casewise.render.ink import Picture, page_svg, svg_text, write_png
from casewise.render.tables import Table, tex, write_csv
from casewise.report import cases
from casewise.report.page import render_page
from casewise.study.analyses import chosen_analyses, sections_of
from casewise.study.finding import Finding, Section
from casewise.study.provenance import provenance, provenance_tables
from casewise.study.study import Extras, Study
from casewise.study.summary_text import advised, hero, keys, report_summary


def _heading(study: Study) -> dict[str, Any]:
    title = str(study.configuration.get("dataset") or study.evaluation.path.name)
    what = "candidates" if study.rungs else "updates"
    size = f"{pluralize(len(study.evaluation.ids), 'evaluation case')} × {study.evaluation.steps} {what}"
    notices = [one.configuration.get("notice") for one in (study.evaluation, study.calibration)]
    return {
        "title": title,
        "kicker": f"{title} · {size} · policy “{study.policy.name}”",
        "notices": [*advised(study), *dict.fromkeys(str(notice) for notice in notices if notice)],
        "summary": report_summary(study),
        "keys": keys(study),
        "study": study,
        "footer": f"casewise {__version__}. One file, no network. Every number is in results.json at full precision.",
    }


def _cases(study: Study, table: Table, shown: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    pictured = sum(bool(one["pictures"]) for one in shown)
    return {
        "cases": shown,
        "case_table": table,
        "case_sorted": 3 + len(study.extras.others),
        "case_facts": {one["id"]: one["facts"] for one in shown},
        "case_note": (
            f"{pluralize(len(shown), 'case')}, {pictured} with pictures of the slice that shows most harm. Deployed: "
            f"{judged_sentence(judged_share(study.policy_rows))}."
        ),
        "panel_names": cases.panel_names(study),
        "classes": study.classes.legend,
        "reference": study.everywhere,
        "metric": study.metric,
    }


SCHEMA = 1


def plain(value: Any) -> Any:
    """Return what JSON lacks as plain types: frames as rows, records as mappings, sets and arrays as lists."""
    if isinstance(value, pd.DataFrame):
        return worded(value.to_dict("records"))
    if is_dataclass(value) and not isinstance(value, type):
        return worded(asdict(value))
    return worded(list(value)) if isinstance(value, np.ndarray | Set | pd.Series) else str(value)


_PARTS = frozenset({"report.html", "results.json", "tables", "figures"})


def build(
    evaluation: Archive | str | Path, calibration: Archive | str | Path, policy: Policy | str | Path, out: str | Path,
    *, extras: Extras | None = None, only: Collection[str] | None = None, pictures: int = cases.PICTURES,
    resamples: int = 5000, seed: int = RESAMPLING_SEED, progress: bool = True,
) -> Path:  # fmt: skip
    """Write the report of a study into the folder ``out`` and give the path of its page.

    ``only`` names analyses of :data:`casewise.study.analyses.ANALYSES`; the page always has a summary and a case table.
    The folder is written under a temporary name and renamed when it is complete.
    """
    analyses = chosen_analyses(only)
    check_place(Path(out))
    known = policy if isinstance(policy, Policy) else read_policy(policy)
    with tqdm(total=len(analyses) + 5, disable=not progress, unit="part", leave=False) as bar:

        def tick(what: str) -> None:
            bar.set_description(what)
            bar.update()

        judged, fitted = (one if isinstance(one, Archive) else open_archive(one) for one in (evaluation, calibration))
        study = Study.of(judged, fitted, known, extras=extras, resamples=resamples, seed=seed, progress=tick)
        sections = sections_of(study, analyses, progress=tick)
        tick("pictures of the cases")
        frame = cases.case_frame(study)
        shown = list(cases.shown_cases(study, frame, pictures=pictures))
        tick("writing")
        with whole_folder(Path(out)) as folder:
            write_report(folder, study, sections, frame, shown)
    return Path(out) / "report.html"


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes the report at the end; an earlier report is replaced, other content is
    refused."""
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
    """Refuse a folder with other content than a report of casewise, because writing would delete it."""
    foreign = sorted(_foreign(out)) if out.is_dir() else []
    if foreign or (out.exists() and not out.is_dir()):
        what = ", ".join(foreign[:3]) or "a file"
        raise BadInput(f"{out} holds {what}, which is not a report of casewise; choose another folder with -o")


def _foreign(out: Path) -> Iterator[str]:
    """Return files that no earlier report wrote: it wrote every table and figure in two forms, and results.json says
    so."""
    there = {part.name for part in out.iterdir()}
    yield from there if there and not _is_ours(out / "results.json") else there - _PARTS
    for folder, forms in (("tables", (".csv", ".tex")), ("figures", (".svg", ".png"))):
        for file in (out / folder).iterdir() if (out / folder).is_dir() else ():
            if file.suffix not in forms or not all(file.with_suffix(form).is_file() for form in forms):
                yield f"{folder}/{file.name}"


def _is_ours(results: Path) -> bool:
    try:
        return "casewise" in parsed_json(results.read_text(encoding="utf-8"))["provenance"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_report(
    folder: Path, study: Study, sections: Sequence[Section], frame: pd.DataFrame, shown: Sequence[Mapping[str, Any]]
) -> None:
    """Write everything into one folder; ``frame`` and ``shown`` are the rows of the case table."""
    first, origin, table = hero(study), list(provenance_tables(study)), cases.case_table(study, frame)
    for one in (table, *origin, *(one for part in sections for one in part.tables)):
        write_csv(folder / "tables" / f"{one.id}.csv", one)
        (folder / "tables" / f"{one.id}.tex").write_text(tex(one), encoding="utf-8")
    drawings = write_pictures(folder / "figures", [first, *(one for part in sections for one in part.pictures)])
    results = {
        "schema": SCHEMA,
        "provenance": provenance(study),
        "summary": vars(report_summary(study)),
        "warnings": advised(study),
        "findings": {one.name: _finding_plain(one) for section in sections for one in section.findings},
        "cases": frame,
        "not_run": {**study.skipped, **{name: why for one in sections for name, why in one.missing.items()}},
    }
    (folder / "results.json").write_text(json_text(results, default=plain, indent=1) + "\n", encoding="utf-8")
    spoken = [section for section in sections if section.tables or section.pictures or section.lead]
    content = {
        **_heading(study),
        **_cases(study, table, shown),
        "sections": spoken,
        "hero": first,
        "provenance": origin,
    }
    page = render_page("report.html.j2", **content, drawings=drawings)
    (folder / "report.html").write_text(page, encoding="utf-8")
    _hide_folders(folder, study)


def _finding_plain(finding: Finding) -> dict[str, Any]:
    """One finding in results.json: on how many cases, how it was made, and its rows."""
    known = {name: getattr(finding, name) for name in ("n", "spec", "made", "notes", "reason")}
    return {**known, "rows": finding.table}


def write_pictures(folder: Path, pictures: Sequence[Picture]) -> dict[str, Markup]:
    """Every figure as SVG and PNG; gives inline SVG in the page's own colors by id, for the page."""
    drawings = {}
    for picture in pictures:
        drawn = svg_text(picture.figure, id=picture.id)
        (folder / f"{picture.id}.svg").write_text(drawn, encoding="utf-8")
        write_png(folder / f"{picture.id}.png", picture.figure)
        drawings[picture.id] = Markup(page_svg(drawn, title=picture.title))
    return drawings


def _hide_folders(folder: Path, study: Study) -> None:
    """Remove the folders of this machine from the report."""
    folders = [*(one.path.parent for one in (study.evaluation, study.calibration)), Path.home()]
    for file in (folder / "report.html", folder / "results.json", *folder.glob("tables/*")):
        text = file.read_text(encoding="utf-8")
        hidden = without_folders(text, folders)
        if hidden != text:
            file.write_text(hidden, encoding="utf-8")
