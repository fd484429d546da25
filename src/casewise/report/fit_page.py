"""fit.html: the designs that were compared, the chosen one with the reason, its gain, and the promise.

The page is one file that loads nothing. ``summary_lines`` is the summary for a terminal, in about ten lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup
from numpy.typing import NDArray

from casewise.archive.store import Archive
from casewise.core.records import SOURCE, State
from casewise.core.text import UNIT, pluralize
from casewise.judge.calibration.adoption import SMALL, unseen_sentence
from casewise.judge.calibration.quality import caught_sentence
from casewise.judge.certificates.split import smallest_promise
from casewise.measure.cleanup import Cleanup
from casewise.measure.metrics import METRICS
from casewise.render.ink import POINT, change_svg
from casewise.render.mask_pictures import Classes, before_after, data_uri
from casewise.report.page import render_page

NOT_NESTED = "; the weights were not tuned again"
NO_INTERVAL = "no interval is given, because in simulations no interval was reliable with so few patients"
BOUNDS = (
    "The bounds are one-sided 90 % bounds by Student's t over patients, so both together are an 80 % interval. They "
    "are not corrected for the choice of the best design, and they do not hold if a few patients lose much: with 5 "
    "patients and one case in twenty that loses much, a 95 % interval of this kind contained the true value in 55 % of "
    "simulations"
)
DESIGNS = {
    "m0": "the model's own mask",
    "consensus": "the mean of the views",
    "consensus-where-low": "the mean of the views, where the views agree little",
    "highest-agreement": "the candidate that agrees most with the others",
    "medoid": "the candidate closest to all others (medoid)",
    "merge": "pieces of the candidates that the views support",
    "choose": "the candidate that a fitted rule expects to be best",
    "tuned/1": "the prediction of the tuned weights",
    "tuned/average": "the average of the original and the tuned prediction",
}


def design_words(design: str) -> str:
    """Describe the masks of a design: ``"tuned/average+largest"`` is explained, an unknown name stays as it is."""
    name, _, cleanup = design.partition("+")
    after = ", then only the largest piece of some classes" if cleanup == "largest" else f", then {cleanup}"
    return DESIGNS.get(name, name) + (after if cleanup else "")


def summary_lines(facts: Mapping[str, Any]) -> list[str]:
    """Describe a fitted deployment in about ten lines.

    Args:
        facts: Contents of ``fit.json``, written by :func:`casewise.fit`.

    Returns:
        Plain sentences.
    """
    compared, metric = facts["preflight"]["comparison"], METRICS[facts["metric"]].title
    lines = [
        f"Fitted on {pluralize(facts['cases'], 'labelled case')} of {pluralize(facts['patients'], *UNIT)}; "
        f"candidates: {', '.join(facts['ladders'])}.",
        f"Deploys {design_words(compared['chosen'])} ({compared['chosen']}).",
        f"Why: {compared['why']}.",
    ]
    if compared["chosen"] != "m0":
        row = _chosen_row(compared)
        lines.append(
            f"On {UNIT[1]} left out of fitting: {row['helped']} cases helped, {row['hurt']} hurt, "
            f"{row['hurt_by_a_point']} of {row['cases']} by more than a point, worst {row['worst']:+.3f} {metric}."
        )
        if compared["nested"] is not None:
            lines.append(
                f"Expected change of {metric}: {compared['nested']['gain']:+.4f} (the choice was repeated without each "
                f"{UNIT[0]}{NOT_NESTED if facts.get('learned') else ''}; {SMALL}); {NO_INTERVAL}."
            )
            lines.append(f"{unseen_sentence(compared['nested']['patients'])}.".capitalize())
    lines += [*_measures(facts), *_curve(facts, metric)]
    lines += [f"Flags: {_flags(facts)}", f"Promised: {_promise(facts)}", *_price(facts)]
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in facts["steps_s"].items())
    lines.append(f"Time: {facts['seconds'] / 60:.1f} min ({took}); about {facts['case_s']:.1f} s for a new case.")
    return [*lines, *(f"Note: {note}" for note in facts["notes"]), f"Next: {facts['next']}"]


def _flags(facts: Mapping[str, Any]) -> str:
    """Return how many labelled cases are flagged, each by a fit without its patient, and how many are poor."""
    quality = facts["preflight"].get("quality")
    if not facts["flagged"] or not quality:
        why = (one for one in facts["preflight"].get("concerns", ()) if one.startswith("no case is flagged"))
        return f"{next(why, 'no case is flagged for a person')}."
    flagged = f"{quality['flagged']} of {quality['cases']} labelled cases would be flagged for a person (each by a fit "
    flagged += f"without its {UNIT[0]})"
    return f"{flagged}; {caught_sentence(quality)}."


def _measures(facts: Mapping[str, Any]) -> list[str]:
    """Name a deployed design that improves the metric and worsens a clinical measure, and other such designs."""
    found = facts.get("measures")
    if not found:
        return []
    chosen = facts["preflight"]["comparison"]["chosen"]
    own = [f"Caution: {said}." for said in found["warnings"] if said.startswith(f"{chosen} ")]
    others = sorted({said.split(" improves ")[0] for said in found["warnings"]} - {chosen})
    more = [f"Designs that improve {METRICS[facts['metric']].title} and worsen a measure: {', '.join(others)}."]
    return [*own, *(more if others else []), *(f"{said}." for said in found["intervals"])]


def _curve(facts: Mapping[str, Any], metric: str) -> list[str]:
    """Return the estimated gain of learning from half of the patients."""
    points = facts.get("learning_curve", {})
    if len(points) < 2:
        return []
    (few, less), (many, more) = points.items()
    names = {"1": "tuned weights", "average": "their average with the original model"}
    gains = "; ".join(f"{names.get(rung, rung)} {less[rung]:+.4f} and {more[rung]:+.4f}" for rung in more)
    return [f"Change of {metric} on {UNIT[1]} left out, after learning from {few} and from {many}: {gains}."]


def _chosen_row(compared: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(one for one in compared["rows"] if one["design"] == compared["chosen"])
    return found


def _promise(facts: Mapping[str, Any]) -> str:
    if facts["promise"]:
        return str(facts["promise"])
    if why := next((note for note in facts["notes"] if note.startswith("nothing is promised")), ""):
        return f"nothing{why.removeprefix('nothing is promised')}. These are estimates."
    least, patients = smallest_promise(facts["patients"]), pluralize(facts["patients"], *UNIT)
    if least is None:
        return f"nothing; these are estimates. A promise needs more than {patients}."
    return (
        f"nothing; these are estimates. fit --promise {least:g} sets patients aside for one; that is the smallest with "
        f"{patients}."
    )


def _price(facts: Mapping[str, Any]) -> list[str]:
    """Return the cost of the promise, if it rolls cases back."""
    found = facts.get("certified")
    if not found or found["kept"] >= 1:
        return []
    return [
        f"Price of the promise: {1 - found['kept']:.0%} of the {pluralize(found['cases'], 'case')} set aside go back "
        f"to the original mask, those with the largest changes; the mean change of {METRICS[facts['metric']].title} "
        f"there is {found['gain']:+.4f} with the promise and {found['gain_before']:+.4f} without."
    ]


def labelled_pictures(
    archive: Archive,
    cleanup: str,
    rows: Sequence[Mapping[str, Any]],
    image_of: Callable[[str], NDArray[Any]],
    classes: Classes,
) -> list[dict[str, Any]]:
    """Paint the labelled cases that changed most for the better and for the worse, and one in the middle.

    Args:
        archive: Candidates and labels of the labelled cases.
        cleanup: Cleanup after the choice of a candidate.
        rows: Out-of-fold results, one per case.
        image_of: Reads the image of a case.
        classes: Names of the classes.

    Returns:
        For each case its name, the change, and pictures before and after with the outline of the label.
    """
    order = sorted(rows, key=lambda row: float(row["metric"]) - float(row["source"]))
    picked = {row["case"]: row for row in (order[-1], order[len(order) // 2], order[0])} if order else {}
    read = archive.join(archive.ladders) if len(archive.ladders) > 1 else archive.only_ladder()
    made = []
    for case, row in picked.items():
        if row["gated"]:  # the mask is composed of pieces and was not stored
            continue
        ladder, _, step = str(row["state"]).rpartition(":")
        after = read.mask(case, State(int(step)).on(ladder))
        masks = [read.mask(case, SOURCE), Cleanup.parse(cleanup).apply(after) if cleanup else after]
        pictures = before_after(image_of(case), masks, read.label(case), classes)
        made.append({**row, "pictures": [data_uri(one) for one in pictures]})
    return made


def fit_page(
    facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], pictures: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return the page.

    Args:
        facts: Contents of ``fit.json``, written by :func:`casewise.fit`.
        rows: One row per labelled case: case, patient, metric of M0, metric of the deployed mask, state.
        pictures: Cases with pictures, as :func:`labelled_pictures` makes them.
    """
    compared, metric = facts["preflight"]["comparison"], METRICS[facts["metric"]].title
    changes = [(str(row["case"]), float(row["source"]), float(row["metric"])) for row in rows]
    return render_page(
        "fit.html.j2", facts=facts, metric=metric, compared=compared, row=_chosen_row(compared),
        words={one["design"]: design_words(one["design"]) for one in compared["rows"]},
        flags=_flags(facts).capitalize(), bounds=BOUNDS, unseen=f"{unseen_sentence(facts['patients'])}.".capitalize(),
        promise=_promise(facts), price=_price(facts), rows=rows,
        worse=sorted((after - before, case) for case, before, after in changes if after < before), point=POINT,
        changes=Markup(change_svg(changes, metric=metric)) if changes else "", pictures=pictures,
        lines=summary_lines(facts), unit=UNIT,
    )  # fmt: skip
