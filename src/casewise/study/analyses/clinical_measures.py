"""Clinical measures of the deployed masks: volumes and declared formulas beside those of M0 and of the labels."""

from __future__ import annotations

from casewise.study.clinical import MeasureResult, mask_measures, volume_measures, worsened_sentence
from casewise.study.deployed_measures import decided_cases
from casewise.study.finding import Finding, Section, rows, sentences, show
from casewise.study.study import Study, label_names, once

COLUMNS = (
    "measure", "unit", "patients", "n", "change", "change_low", "change_high", "error_m0", "error_deployed",
    "limit_low", "limit_high", "closer", "farther", "crossed", "crossed_wrong",
)  # fmt: skip


def section(study: Study) -> Section:
    """Volumes and declared measures, by patient."""
    found = clinical(study)
    shown = show(
        "measures",
        "Clinical measures",
        found,
        caption="Change: deployed mask minus M0; error: mask minus label; one value per patient. Closer, farther: "
        "patients whose error became smaller or larger. Crossed: decisions that differ from those with M0.",
    )
    missing = {"clinical measures": found.reason} if found.reason else {}
    return Section("measures", "Clinical measures", sentences(found), (shown,), (), (found,), missing=missing)


@once
def clinical(study: Study) -> Finding:
    """One row per measure; volumes of every class first."""
    archive = study.evaluation
    names = label_names(archive)
    labels = [int(number) for number in archive.configuration.get("classes") or names if int(number)]
    spaced = all(entry.spacing_mm is not None for entry in archive.entries.values())
    volumes = volume_measures(labels, names, "ml" if spaced else "voxels")
    decided = decided_cases(archive, study.controller, study.decisions[study.ours], names)
    results = mask_measures(decided, [*volumes, *study.extras.measures])
    table = rows((_row(result) for result in results), COLUMNS)
    notes = tuple(said for result in results if (said := worsened_sentence(result)) is not None)
    reason = "" if results else "the archive does not name its classes, and no measure was given (--set measures=FILE)"
    return Finding("measures", table, len(archive.ids), "", notes=notes, reason=reason)


def _row(result: MeasureResult) -> tuple[object, ...]:
    """The cells of one measure in the order of the columns; None for an agreement that is not known."""
    change = [getattr(result.change, name, None) for name in ("bias", "bias_low", "bias_high")]
    after = [getattr(result.error_new, name, None) for name in ("bias", "limit_low", "limit_high")]
    wrong = sum(one.right == "old" for one in result.crossings)
    sizes = getattr(result.change, "patients", 0), result.units
    sides = result.closer, result.farther, len(result.crossings), wrong
    return result.name, result.unit, *sizes, *change, getattr(result.error_old, "bias", None), *after, *sides
