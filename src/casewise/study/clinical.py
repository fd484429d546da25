"""Clinical measures of old masks, new masks and labels: agreement by patient, and decisions that change.

The volume of every label is a measure; a user can declare formulas over volumes (``measure/measures.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from casewise.core.text import pluralize
from casewise.measure.changes import label_name
from casewise.measure.masks import label_volumes
from casewise.measure.measures import LabelVolume, Measure, named_volumes, plain_name, scan_of
from casewise.study.acceptance import Acceptance, Check, check_values, patient_means
from casewise.study.compared_cohort import ComparedCase, ComparedCohort

SIDES = ("old", "new", "label")
VOLUME = "volume "  # beginning of the name of a label's volume as a measure


@dataclass(frozen=True)
class Agreement:
    r"""Bland-Altman with one value per patient, the mean over the patient's differences.

    .. math:: \bar d = \frac{1}{n} \sum_p d_p, \qquad \bar d \pm 1.96 \, s_d
    """

    bias: float
    bias_low: float | None  # 95 % interval of the bias by Student's t; None with one patient
    bias_high: float | None
    limit_low: float | None  # limits of agreement
    limit_high: float | None
    patients: int
    values: int


@dataclass(frozen=True)
class Crossing:
    """A case or patient whose decision differs between the old and the new masks."""

    measure: str
    decision: str
    unit: str  # case or patient
    cases: tuple[str, ...]
    old: float
    new: float
    label: float | None
    right: str | None  # old or new: the side with the decision of the label; None without a label


@dataclass(frozen=True)
class MeasureResult:
    """One measure over all cases or patients."""

    name: str
    unit: str
    formula: str
    decisions: tuple[str, ...]
    units: int  # cases or patients with a value in old and new
    not_computable: int
    change: Agreement | None  # new - old
    error_old: Agreement | None  # old - label
    error_new: Agreement | None
    closer: int | None  # patients whose mean error became smaller, larger
    farther: int | None
    rise: float | None = None  # mean rise of the error without its sign, one value per patient
    crossings: tuple[Crossing, ...] = ()


class MeasuredValues:
    """One measure: (unit, patient, old, new, label) of every case or patient."""

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.declared = not measure.name.startswith(VOLUME)  # only then are the names of the cases kept
        self.units: list[str] = []
        self.cases: list[tuple[str, ...]] = []
        self.patients = array("q")
        self.sides = {side: array("d") for side in SIDES}

    def add(self, unit: str, cases: tuple[str, ...], patient: int, values: Mapping[str, float | None]) -> None:
        if self.declared:
            self.units.append(unit)
            self.cases.append(cases)
        self.patients.append(patient)
        for side in SIDES:
            value = values.get(side)
            self.sides[side].append(float("nan") if value is None else value)

    def __getitem__(self, side: str) -> NDArray[np.float64]:
        return np.array(self.sides[side], float)


@dataclass(frozen=True)
class MeasuredCase:
    """The volumes of one case by side (old, new, label), each as formulas read them."""

    id: str
    patient: str | None
    scan: str | None
    volumes: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(
        cls, case_id: str, masks: Mapping[str, ArrayLike], *, spacing_mm: Sequence[float] | None = None,
        patient: str | None = None, scan: str | None = None, names: Mapping[int, str] | None = None,
    ) -> MeasuredCase:  # fmt: skip
        """A case from its masks: ``{"old": M0, "new": deployed, "label": label}``, without the label where none is."""
        volumes = {side: named_volumes(label_volumes(mask, spacing_mm), names or {}) for side, mask in masks.items()}
        return cls(case_id, patient, scan, volumes)


def measured_values(cases: Iterable[MeasuredCase], declared: Sequence[Measure]) -> dict[str, MeasuredValues]:
    """Compute every declared measure of every case or patient; the cases are read once and not kept."""
    found = {one.name: MeasuredValues(one) for one in declared}
    scans = sorted({scan for one in declared for scan in one.scans})
    read = {plain_name(volume.label) for one in declared for volume in one.volumes if volume.scan is not None}
    patients: dict[str, int] = {}
    by_patient: dict[str, dict[str, dict[str, dict[str, float] | None]]] = {}
    members: dict[str, list[str]] = {}
    for case in cases:
        scan = case.scan or scan_of(case.id, scans)
        patient = case.patient or (case.id if scan is None else case.id[: -len(scan)].rstrip("_.-"))
        number = patients.setdefault(patient, len(patients))
        for one in declared:
            if not one.per_patient:
                values = {side: one.value({None: volume}) for side, volume in case.volumes.items()}
                found[one.name].add(case.id, (case.id,), number, values)
        if scan is not None and scan in scans:
            members.setdefault(patient, []).append(case.id)
            for side, volume in case.volumes.items():
                kept = {name: value for name, value in volume.items() if name in read}
                there = by_patient.setdefault(patient, {}).setdefault(side, {})
                there[scan] = None if scan in there else kept  # two scans of one name: neither is used
    for patient, sides in by_patient.items():
        whole = {
            side: {name: volume for name, volume in of.items() if volume is not None} for side, of in sides.items()
        }
        for one in declared:
            if one.per_patient:
                values = {side: one.value(volumes) for side, volumes in whole.items()}
                found[one.name].add(patient, tuple(members[patient]), patients[patient], values)
    return found


def _measured(case: ComparedCase, names: Mapping[int, str]) -> MeasuredCase:
    ml = case.found.voxel_ml or 1.0
    sides = SIDES if case.found.labelled else SIDES[:2]
    rows = case.found.labels
    counts = {side: {row.label: (getattr(row, f"voxels_{side}") or 0) * ml for row in rows} for side in sides}
    volumes = {side: named_volumes(found, names) for side, found in counts.items()}
    return MeasuredCase(case.id, case.cluster, case.scan, volumes)


def volume_measures(labels: Iterable[int], names: Mapping[int, str], unit: str) -> list[Measure]:
    """The volume of every label as a measure."""
    return [
        Measure(f"{VOLUME}{label_name(label, names)}", f"volume({label})", LabelVolume(str(label)), unit)
        for label in labels
    ]


def measure_results(
    cases: Iterable[ComparedCase], declared: Sequence[Measure], names: Mapping[int, str]
) -> tuple[dict[str, MeasuredValues], list[MeasureResult]]:
    """Return the values of the declared measures and their results; without a measure no case is read."""
    if not declared:
        return {}, []
    values = measured_values((_measured(case, names) for case in cases), declared)
    return values, [_result(one) for one in values.values()]


def volume_results(cohort: ComparedCohort, labels: Sequence[int], names: Mapping[int, str]) -> list[MeasureResult]:
    """The volume of every label as a measure, over the cases that hold the label in any mask."""
    found = []
    for one, label in zip(volume_measures(labels, names, "ml" if cohort.in_ml else "voxels"), labels, strict=True):
        values = MeasuredValues(one)
        patients, sides = cohort.volumes(label)
        values.patients = array("q", patients.tolist())
        values.sides = {side: array("d", volumes.tolist()) for side, volumes in sides.items()}
        found.append(_result(values))
    return found


def mask_measures(cases: Iterable[MeasuredCase], declared: Sequence[Measure]) -> list[MeasureResult]:
    """Compute the declared measures of old masks, new masks and labels: agreement by patient, decisions that change.

    Args:
        cases: One by one; see :meth:`MeasuredCase.of`.
        declared: The measures.

    Returns:
        One result per measure, in order.
    """
    return [_result(one) for one in measured_values(cases, declared).values()]


def worsened_sentence(result: MeasureResult) -> str | None:
    """Return a sentence if the new masks move a measure away from the labels on average, and for more patients than
    toward them."""
    worse = (result.rise or 0) > 0 and (result.farther or 0) > (result.closer or 0)
    if not worse or result.error_old is None or result.error_new is None:
        return None
    unit = f" {result.unit}" if result.unit else ""
    return (
        f"{result.name} moves away from the label in {result.farther} and toward it in {result.closer} of "
        f"{pluralize(result.error_new.patients, 'patient')}, by {result.rise:.3g}{unit} on average (mean error "
        f"{result.error_old.bias:+.3g}{unit} before, {result.error_new.bias:+.3g}{unit} now)"
    )


def _result(values: MeasuredValues) -> MeasureResult:
    old, new, label = (values[side] for side in SIDES)
    patients = np.array(values.patients, np.int64)
    both = np.isfinite(old) & np.isfinite(new)
    three = both & np.isfinite(label)
    closer = farther = rise = None
    if three.any():
        gain = patient_means(np.abs(old - label)[three] - np.abs(new - label)[three], patients[three])
        closer, farther, rise = int((gain > 1e-12).sum()), int((gain < -1e-12).sum()), -float(gain.mean())
    compared = ((new - old, both), (old - label, three), (new - label, three))
    change, before, after = (agreement(differences[which], patients[which]) for differences, which in compared)
    measure, crossings = values.measure, tuple(_crossings(values))
    named = (measure.name, measure.unit, measure.formula, tuple(str(one) for one in measure.decisions))
    counts = int(both.sum()), int((~both).sum())
    return MeasureResult(*named, *counts, change, before, after, closer, farther, rise, crossings)


def agreement(differences: NDArray[np.float64], patients: NDArray[np.int64]) -> Agreement | None:
    """Bland-Altman bias and limits with one value per patient; None without a value.

    Example:
        >>> found = agreement(np.array([1.0, 3.0, 2.0, 2.0]), np.array([0, 0, 1, 2]))
        >>> found.bias, found.patients, found.values
        (2.0, 3, 4)
    """
    if not differences.size:
        return None
    means = patient_means(differences, patients)
    bias, n = float(means.mean()), len(means)
    if n < 2:
        return Agreement(bias, None, None, None, None, n, differences.size)
    spread = float(means.std(ddof=1))
    reach = float(stats.t.ppf(0.975, n - 1)) * spread / np.sqrt(n)
    wide = 1.96 * spread
    return Agreement(bias, bias - reach, bias + reach, bias - wide, bias + wide, n, differences.size)


def _crossings(values: MeasuredValues) -> Iterable[Crossing]:
    old, new, label = (values[side] for side in SIDES)
    for decision in values.measure.decisions:
        for at in np.flatnonzero(np.isfinite(old) & np.isfinite(new)).tolist():
            before, now = decision.holds(old[at]), decision.holds(new[at])
            if before == now:
                continue
            known = bool(np.isfinite(label[at]))
            right = ("new" if decision.holds(label[at]) == now else "old") if known else None
            sides = float(old[at]), float(new[at]), float(label[at]) if known else None
            yield Crossing(values.measure.name, str(decision), values.units[at], values.cases[at], *sides, right)


def measure_checks(values: Mapping[str, MeasuredValues], criteria: Mapping[str, Acceptance]) -> list[Check]:
    """The criteria of a plan on its measures."""
    found = []
    for name, acceptance in criteria.items():
        given = values[name]
        old, new, label = (given[side] for side in SIDES)
        crossed = np.zeros(len(old), bool)
        for decision in given.measure.decisions:
            was, now, truth = (decision.holds(side) for side in (old, new, label))
            crossed |= (was == truth) & (now != truth)
        share = np.where(np.isfinite(old + new + label), crossed.astype(float), np.nan)
        quantities = {"max_error_rise": np.abs(new - label) - np.abs(old - label), "max_crossed_share": share}
        for criterion in acceptance.criteria:
            named = quantities[criterion.name], given.patients, given.units
            found.append(check_values(criterion, *named, acceptance.confidence))
    return found
