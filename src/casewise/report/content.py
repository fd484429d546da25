"""What the page says: the words and records that its template is filled with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from casewise import __version__
from casewise.render.tables import Table
from casewise.report import cases
from casewise.report.figures.changes import draw_changes
from casewise.report.inventory import FIGURES, TABLES
from casewise.report.material import Material
from casewise.report.section import Picture
from casewise.report.story import Story, keys, story


def content(
    material: Material,
    *,
    shown: Sequence[cases.Shown],
    inventory: Table,
    origin: Sequence[Table],
    here: Mapping[str, int],
    checked: int,
) -> dict[str, Any]:
    """Everything but the sections and the figures."""
    return {
        **_heading(material),
        **_cases(material, shown),
        "inventory": inventory,
        "inventory_lead": (
            f"{here['tables']} of the paper's {TABLES} tables and {here['figures']} of its {FIGURES} figures are made "
            "from what was given; the others say what they need."
        ),
        "provenance": list(origin),
        "audit_lead": (
            f"The report recomputed bucket sums, help and hurt sums and HA identities for {checked} methods; all "
            f"agree. Archive {material.evaluation.digest[:12]}, seed {material.seed}, B = {material.resamples}."
        ),
        "footer": f"casewise {__version__}. One file, no network. Every number is in results.json at full precision.",
    }


def _heading(material: Material) -> dict[str, Any]:
    title = str(material.configuration.get("dataset") or material.evaluation.path.name)
    size = f"{len(material.evaluation.ids)} evaluation cases × {material.evaluation.steps} updates"
    notices = [one.configuration.get("notice") for one in (material.evaluation, material.calibration)]
    return {
        "title": title,
        "kicker": f"{title} · {size} · policy “{material.policy.name}”",
        "notices": list(dict.fromkeys(str(notice) for notice in notices if notice)),
        "story": the_story(material),
        "keys": keys(material),
        "words": words(material),
    }


def words(material: Material) -> list[tuple[str, str]]:
    """The words that the story and every table use, each in a sentence."""
    steps = material.evaluation.steps
    known = [
        ("M0", "the mask of the source model, without adaptation."),
        (material.reference, f"every case adapted for all {steps} updates; fixed-k stops everywhere after k."),
        ("HA", "harmful accepted area, the share of the changed voxels in regions that became worse than M0."),
        ("BA", "the share in regions that became better."),
        ("Deployable", "the budget k that the labelled calibration cases choose."),
    ]
    if material.is_router:
        meaning = (
            f"COQR, sorts cases by {material.coordinate} after one update: low adapt, mid less, hard roll back to M0."
        )
        known.append(("Router", meaning))
    known.append(("[a, b]", "95 % bootstrap interval."))
    known.append(("Sign-flip p", "how often chance differs as much when the two methods of a case could be swapped."))
    return known


def the_story(material: Material) -> Story:
    """The story, with the attribution line where the policy is a router."""
    return story(material, material.attribution if material.is_router else None)


def _cases(material: Material, shown: Sequence[cases.Shown]) -> dict[str, Any]:
    pictured = sum(bool(one.pictures) for one in shown)
    return {
        "cases": list(shown),
        "case_columns": cases.columns(material),
        "case_sorted": 3,
        "case_facts": {one.id: one.facts for one in shown},
        "case_lead": (
            f"Worst first: by the change of {material.metric} under {material.reference}, without control. "
            "Open a case to see more."
        ),
        "case_note": f"{len(shown)} cases, {pictured} with pictures of the slice that shows most harm.",
        "panel_names": cases.panel_names(material),
        "buckets": sorted({one.bucket for one in shown}),
        "groups": sorted({one.group for one in shown}),
        "reference": material.reference,
    }


def hero(material: Material) -> Picture:
    """The figure below the story: every case, without control and under the policy."""
    names = (material.reference, material.title(material.ours))
    figure = draw_changes(material.uncontrolled, material.router, names=names, metric=material.metric)
    caption = (
        f"One line a case, in the same order in both rows: the change of {material.metric} against M0. Grey ticks: "
        "rolled back to M0. The axis ends at the 99th percentile; longer lines are cut."
    )
    return Picture("changes", "What adaptation did to each case", figure, caption)
