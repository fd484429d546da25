"""The report of a study: from archives and a policy to tables, figures, results.json and one page.

results.json: every number at full precision under stable keys (docs/reference/results-json.md).

report.html of a study: one self-contained file. Everything that came from data is escaped by the template.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from enum import Enum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from tqdm import tqdm

from casewise import __version__
from casewise.archive.store import Archive, open_archive
from casewise.core.brief import counted
from casewise.core.errors import BadInput
from casewise.core.formats import json_text
from casewise.core.records import Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.outcomes import judged_sentence, judged_share
from casewise.judge.policy import read_policy
from casewise.render.ink import Picture, page_svg, svg_text, write_png
from casewise.render.tables import Table, write_csv, write_tex
from casewise.report import cases
from casewise.study.analyses import chosen_analyses, sections_of
from casewise.study.audit import audit_study, provenance, provenance_tables, without_folders
from casewise.study.finding import Finding, Section
from casewise.study.inventory import FIGURES, TABLES, counts, inventory_table
from casewise.study.story import advised, hero, keys, story, words
from casewise.study.study import Extras, Study


@cache
def _environment() -> Environment:
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def _template(name: str) -> str:
    return (resources.files("casewise.report") / "templates" / name).read_text(encoding="utf-8")


def render(
    content: Mapping[str, Any], *, sections: Sequence[Section], hero: Sequence[Picture], drawings: Mapping[str, str]
) -> str:
    """The page from its content; ``drawings`` (picture id to SVG) become inline SVG in the page's own colors."""
    return (
        _environment()
        .from_string(_template("report.html.j2"))
        .render(
            **content,
            sections=[_drawn(section, drawings) for section in sections],
            hero=[_svg(picture, drawings) for picture in hero],
            style=Markup(_template("style.css")),
            script=Markup(_template("page.js")),
        )
    )


def _drawn(section: Section, drawings: Mapping[str, str]) -> dict[str, Any]:
    fields = ("id", "title", "lead", "notes", "tables", "missing")
    pictures = [_svg(one, drawings) for one in section.pictures]
    return {**{name: getattr(section, name) for name in fields}, "pictures": pictures}


def _svg(picture: Picture, drawings: Mapping[str, str]) -> dict[str, Any]:
    drawn = Markup(page_svg(drawings[picture.id], title=picture.title))
    return {**{name: getattr(picture, name) for name in ("id", "title", "caption", "paper")}, "svg": drawn}


def content(
    study: Study,
    *,
    shown: Sequence[cases.Shown],
    inventory: Table,
    origin: Sequence[Table],
    here: Mapping[str, int],
    checked: int,
) -> dict[str, Any]:
    """Everything but the sections and the figures."""
    return {
        **_heading(study),
        **_cases(study, shown),
        "inventory": inventory,
        "inventory_lead": (
            f"{here['tables']} of the paper's {TABLES} tables and {here['figures']} of its {FIGURES} figures are made "
            "from what was given; the others say what they need."
        ),
        "provenance": list(origin),
        "audit_lead": (
            f"The report recomputed bucket sums, help and hurt sums and HA identities for {checked} methods; all "
            f"agree. Archive {study.evaluation.digest[:12]}, seed {study.seed}, B = {study.resamples}."
        ),
        "footer": f"casewise {__version__}. One file, no network. Every number is in results.json at full precision.",
    }


def _heading(study: Study) -> dict[str, Any]:
    title = str(study.configuration.get("dataset") or study.evaluation.path.name)
    what = "candidates" if study.rungs else "updates"
    size = f"{counted(len(study.evaluation.ids), 'evaluation case')} × {study.evaluation.steps} {what}"
    notices = [one.configuration.get("notice") for one in (study.evaluation, study.calibration)]
    return {
        "title": title,
        "kicker": f"{title} · {size} · policy “{study.policy.name}”",
        "notices": [*advised(study), *dict.fromkeys(str(notice) for notice in notices if notice)],
        "story": story(study),
        "keys": keys(study),
        "words": words(study),
    }


def _cases(study: Study, shown: Sequence[cases.Shown]) -> dict[str, Any]:
    pictured = sum(bool(one.pictures) for one in shown)
    return {
        "cases": list(shown),
        "case_columns": cases.columns(study),
        "case_sorted": 3 + len(study.extras.others),
        "case_facts": {one.id: one.facts for one in shown},
        "case_lead": (
            f"Worst first: by the change of {study.metric} under {study.everywhere}, without control. "
            "Open a case to see more."
        ),
        "case_note": (
            f"{counted(len(shown), 'case')}, {pictured} with pictures of the slice that shows most harm. Deployed: "
            f"{judged_sentence(judged_share(study.router))}."
        ),
        "panel_names": cases.panel_names(study),
        "classes": study.classes.legend,
        "buckets": sorted({one.bucket for one in shown}),
        "groups": sorted({one.group for one in shown}),
        "reference": study.everywhere,
        "metric": study.metric,
    }


SCHEMA = 1


def plain(value: Any) -> Any:
    """JSON types; what is undefined (NaN) becomes null, infinities become strings."""
    if isinstance(value, pd.DataFrame):
        return [plain(row) for row in value.to_dict("records")]
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray | list | tuple | set | frozenset | pd.Series):
        return [plain(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def finding_plain(finding: Finding) -> dict[str, Any]:
    """One finding: what it is, on how many cases, how it was made, and its rows."""
    return {
        "n": finding.n,
        "spec": finding.spec,
        "made": plain(finding.made),
        "notes": list(finding.notes),
        "reason": finding.reason,
        "rows": plain(finding.table),
    }


def findings_of(sections: Iterable[Section]) -> dict[str, dict[str, Any]]:
    """Findings by their stable key."""
    return {finding.name: finding_plain(finding) for section in sections for finding in section.findings}


def write_results(path: Path, content: Mapping[str, Any]) -> None:
    """Strict JSON: no NaN, keys in the order in which they were made."""
    path.write_text(json_text(plain(content), indent=1) + "\n", encoding="utf-8")


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
    """Refuse a place that holds something else than a report that casewise wrote: that one would go, with all in it."""
    foreign = sorted(_foreign(out)) if out.is_dir() else []
    if foreign or (out.exists() and not out.is_dir()):
        what = ", ".join(foreign[:3]) or "a file"
        raise BadInput(f"{out} holds {what}, which is no report of casewise; choose another folder with -o")


def _foreign(out: Path) -> Iterator[str]:
    """What no earlier report left here: it wrote every table and figure in two forms, and results.json says so."""
    there = {part.name for part in out.iterdir()}
    yield from there if there and not _is_ours(out / "results.json") else there - _PARTS
    for folder, forms in (("tables", (".csv", ".tex")), ("figures", (".svg", ".png"))):
        for file in (out / folder).iterdir() if (out / folder).is_dir() else ():
            if file.suffix not in forms or not all(file.with_suffix(form).is_file() for form in forms):
                yield f"{folder}/{file.name}"


def _is_ours(results: Path) -> bool:
    try:
        return "casewise" in json.loads(results.read_text(encoding="utf-8"))["provenance"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


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
