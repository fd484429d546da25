"""The page of a comparison (with a plan, the dossier), and every other file that it leaves in its folder.

The page is one file, loads nothing, prints on A4, and escapes everything that came from files. ``summary.json`` says
the same for machines.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from casewise.core.durable import replacing, write_durably, write_json
from casewise.core.errors import BadPair, CasewiseError
from casewise.core.formats import csv_cell
from casewise.core.text import pluralize
from casewise.data.pairs import read_image, read_pair
from casewise.judge.outcomes import judged_sentence
from casewise.measure.changes import NOTABLE, label_name
from casewise.measure.measures import UNIT_SPACING
from casewise.report.comparison_pictures import case_pictures, label_colors
from casewise.report.comparison_text import (
    METRICS,
    WORDS,
    change_counts,
    check_lines,
    headline,
    junit_xml,
    markdown_summary,
    of_whom,
    plain_agreement,
    plain_interval,
    plain_number,
    plain_percent,
    plain_signed,
    short_number,
    unseen_harm,
    verdict_reason,
)
from casewise.study.compare import Outcome, csv_rows
from casewise.study.compared_cohort import MANY, ComparedCase
from casewise.study.compared_pairs import Settings


def write_comparison(out: Path, outcome: Outcome, *, old: str, new: str, pictures: int = 10) -> None:
    """Write the page, the tables, Markdown, JUnit XML and summary.json of a comparison.

    Args:
        out: The folder.
        outcome: What :func:`casewise.study.compare.compare_folders` returned.
        old: What the old masks are called on the page.
        new: What the new masks are called.
        pictures: How many cases are shown with pictures, the most suspicious first.
    """
    summary = outcome.as_dict()
    write_tables(out, outcome)
    write_durably(out / "summary.md", markdown_summary(summary).encode())
    write_durably(out / "junit.xml", junit_xml(summary, list(outcome.files)).encode())
    facts = {
        "old": old,
        "new": new,
        "unit": "mm" if any(case.found.spacing_known for case in outcome.cases) else "voxels",
        "hd95": outcome.settings.surfaces == "all",
        "min_area": outcome.settings.min_area,
        "zero_is_label": outcome.settings.zero_is_label,
    }
    page = comparison_page(summary, shown_cases(outcome, pictures), facts)
    write_durably(out / "report.html", page.encode())
    write_json(out / "summary.json", summary)  # last: it vouches for the rest


def write_tables(out: Path, outcome: Outcome) -> None:
    """cases.csv, labels.csv and regions.csv, row by row; a table without rows is an empty file."""
    with ExitStack() as opened:
        files = {}
        for name in ("cases.csv", "labels.csv", "regions.csv"):
            unfinished = opened.enter_context(replacing(out / name))
            files[name] = opened.enter_context(unfinished.open("w", encoding="utf-8", newline=""))
        tables: dict[str, Any] = {}
        for name, row in csv_rows(outcome):
            if name not in tables:
                tables[name] = csv.DictWriter(files[name], fieldnames=list(row), lineterminator="\n")
                tables[name].writeheader()
            known = {column: None if value != value else value for column, value in row.items()}  # NaN: an empty cell
            tables[name].writerow({column: csv_cell(value) for column, value in known.items()})


def shown_cases(outcome: Outcome, most: int) -> list[dict[str, Any]]:
    """The first cases of the page with their pictures; unchanged ones are not shown."""
    at = {case_id: number for number, case_id in enumerate(outcome.found.cohort.ids)}
    crossed: dict[str, list[str]] = {}
    for one in outcome.measures:
        for crossing in one.crossings:
            words = f"{one.name} {crossing.decision} changed: {crossing.old:.3g} -> {crossing.new:.3g}"
            truth = "" if crossing.label is None else f", label {crossing.label:.3g} ({crossing.right} is right)"
            for case_id in crossing.cases:
                crossed.setdefault(case_id, []).append(words + truth)
    shown: list[dict[str, Any]] = []
    for case_id in outcome.first_shown:
        if len(shown) >= most:
            break
        case = outcome.cases[at[case_id]]
        if case.found.changed:
            shown.append({**_shown_case(case, outcome), "crossings": crossed.get(case_id, [])})
    return shown


def _shown_case(case: ComparedCase, outcome: Outcome) -> dict[str, Any]:
    plain = {**case.found.as_dict(), "warnings": case.found.warned(outcome.names)}
    change = None if not case.found.labelled or case.found.change != case.found.change else case.found.change
    facts = {**plain, "id": case.id, "group": case.group, "change": change, "pictures": []}
    return {**facts, "pictures": _drawn(case.id, outcome, outcome.settings)}


def _drawn(case_id: str, outcome: Outcome, settings: Settings) -> list[tuple[str, str]]:
    pair = outcome.files[case_id]
    try:
        old, new, label = read_pair(pair, resample=settings.resample)
    except BadPair:  # it could be read when it was compared
        return []
    try:
        image = None if pair.image is None else read_image(pair.image)
    except (CasewiseError, OSError, ValueError):
        image = None  # a picture without its image is still a picture of the masks
    truth = None if label is None else label.mask
    return case_pictures(old.mask, new.mask, truth, image, names=outcome.names, zero_is_label=settings.zero_is_label)


def comparison_page(summary: Mapping[str, Any], cases: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """The page from summary.json, the cases in the order to show them (with pictures) and the facts of the run."""
    templates = resources.files("casewise.report") / "templates"
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "number": plain_number, "signed": plain_signed, "interval": plain_interval, "percent": plain_percent,
        "agreement": plain_agreement, "metric": METRICS.__getitem__, "box": _box,
        "short": short_number,
    }  # fmt: skip
    names = {int(key): name for key, name in summary.get("names", {}).items()}
    environment.filters["color"] = lambda label: "rgb({}, {}, {})".format(*label_colors(names)[label % 256])
    environment.filters["called"] = lambda label: label_name(label, names)
    return environment.from_string((templates / "comparison.html.j2").read_text(encoding="utf-8")).render(
        said=headline(summary),
        words=WORDS,
        why=verdict_reason(summary) if summary["checks"] else "",
        counts=change_counts(summary),
        pluralize=pluralize,
        whose=of_whom(summary["summary"], named=summary["summary"]["named"]),
        result=summary,
        cohort=summary["summary"],
        judged=judged_sentence(summary["summary"].get("judged")),
        not_met=[line[5:] for line in check_lines(summary) if not line.startswith("ok")],
        limits=known_limits(summary),
        cases=cases,
        facts={"notable": NOTABLE, "many": MANY, **facts},
        style=Markup((templates / "comparison.css").read_text(encoding="utf-8")),
    )


def known_limits(summary: Mapping[str, Any]) -> list[str]:
    """What this comparison cannot show, in sentences."""
    cohort = summary["summary"]
    limits = []
    if "labelled" not in cohort:
        limits.append("There are no labels: nothing here says which of two masks is right.")
    limits.append(unseen_harm(summary))
    if not cohort["named"]:
        limits.append(
            "No patient is named: each case counts as one, so bounds are too narrow if patients have several."
        )
    if summary.get("unit_spacing"):
        limits.append(f"Volumes: {UNIT_SPACING}.")
    if summary["problems"]:
        limits.append(f"{pluralize(len(summary['problems']), 'problem')} with pairs: those are not in the numbers.")
    limits.append("The numbers hold for patients like these; other scanners, sites and diseases are not covered.")
    if summary["plan"] is not None:
        limits.append(
            "The seal shows runs that used this plan's log. It cannot show that somebody looked at the new masks "
            "elsewhere."
        )
    return limits


def _box(region: Mapping[str, Any]) -> str:
    """Where a region lies, counted from 1 as in the titles of the pictures, both ends inside."""
    names = ("slices", "rows", "columns")[-len(region["low"]) :]
    sides = zip(names, region["low"], region["high"], strict=True)
    return ", ".join(
        f"{name} {low + 1} to {high}" if high > low + 1 else f"{name[:-1]} {high}" for name, low, high in sides
    )
