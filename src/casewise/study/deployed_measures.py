"""Clinical measures of a deployment: the effect of each design on them at ``fit``, and their values at ``predict``.

At ``fit`` every compared design is scored on patients that it was not fitted on. The errors of the chosen design on
these patients give each measure a conformal interval by patient:

    value ± q,    q = the ceil((n + 1) * level)-th smallest of the n patients' largest errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from casewise.archive.store import Archive
from casewise.core.durable import json_sha256
from casewise.core.records import DONE, SOURCE, Controller, Decision, Mask, Policy, State
from casewise.core.text import pluralize
from casewise.judge.calibration.designs import Deployed
from casewise.judge.controllers.choose import state_of
from casewise.judge.controllers.merge import merged
from casewise.judge.decide import candidate_masks, deployed_mask, replay_case
from casewise.judge.policy import judge_of
from casewise.measure.cleanup import Cleanup
from casewise.measure.masks import label_volumes
from casewise.measure.measures import Measure, conformal_interval, declared_measures, named_volumes
from casewise.study.clinical import MeasuredCase, mask_measures, measured_values, worsened_sentence

LEVEL = 0.9
LEFT_OUT, SET_ASIDE = "left out while fitting", "set aside for the promise"

Values = dict[str, dict[str, Any]]
"""By measure: value, low, high, level, unit, why (why there is no value or no interval), cases."""


@dataclass(frozen=True)
class DeployedMeasures:
    """The measures that a deployment reports for new cases, with an interval where enough labelled patients allow it.

    Attributes:
        declared: The measures.
        half_widths: Half the width of each measure's interval; None where there are too few patients.
        patients: Labelled patients with a value of each measure.
        basis: Description of these patients.
        policy: Hash of the policy that the intervals are about.
        level: Chance, over new patients like these, that an interval holds the value of the label.
    """

    declared: tuple[Measure, ...]
    half_widths: Mapping[str, float | None] = field(default_factory=dict)
    patients: Mapping[str, int] = field(default_factory=dict)
    basis: str = LEFT_OUT
    policy: str = ""
    level: float = LEVEL

    @classmethod
    def fitted(
        cls, declared: Sequence[Measure], cases: Iterable[MeasuredCase], policy: Policy, basis: str = LEFT_OUT
    ) -> DeployedMeasures:
        """Calibrate the intervals on labelled cases, each with the mask that would be deployed as ``new``."""
        halves, patients = {}, {}
        for name, values in measured_values(cases, declared).items():
            who = [str(patient) for patient in values.patients]
            errors = values["new"] - values["label"]
            halves[name] = conformal_interval(values["new"], values["label"], who, LEVEL)
            patients[name] = len({one for one, error in zip(who, errors, strict=True) if error == error})
        return cls(tuple(declared), halves, patients, basis, policy_sha256(policy))

    def no_interval(self, policy: Policy, status: str, uncovered: str | None) -> str:
        """Say why a case has no interval; empty where it has one."""
        if status != DONE:
            return "the case failed and got the original mask"
        if uncovered:
            return uncovered
        return "" if policy_sha256(policy) == self.policy else "another policy than the fitted one decided"

    def of_cases(self, cases: Sequence[MeasuredCase], no_interval: Mapping[str, str]) -> dict[str, Values]:
        """Compute the measures of new masks.

        Args:
            cases: New cases; the volumes of the deployed mask are those of the side ``new``.
            no_interval: By case id, why it has no interval.

        Returns:
            By case id, every measure; each case of the patient has the value of a measure over several scans.
        """
        found: dict[str, Values] = {case.id: {} for case in cases}
        for name, values in measured_values(cases, self.declared).items():
            for members, value in zip(values.cases, values["new"].tolist(), strict=True):
                why = next((no_interval[one] for one in members if no_interval.get(one)), "")
                row = self._value(values.measure, None if value != value else value, why)
                for one in members:
                    found[one][name] = {**row, "cases": list(members)}
        return found

    def _value(self, measure: Measure, value: float | None, why: str) -> dict[str, Any]:
        row: dict[str, Any] = {"value": value, "low": None, "high": None, "level": self.level, "unit": measure.unit}
        half = self.half_widths.get(measure.name)
        if value is None:
            scans = ", ".join(sorted(measure.scans))
            missing = f", or a scan of the patient is missing ({scans})" if scans else ""
            return {**row, "why": f"not computable: a volume is 0{missing}"}
        if half is None:
            many = pluralize(self.patients.get(measure.name, 0), "labelled patient")
            why = why or f"{many} had a value, an interval at {self.level:.0%} needs 9"
        if why or half is None:
            return {**row, "why": f"no interval: {why}"}
        return {**row, "low": value - half, "high": value + half, "why": ""}

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        declared = {
            one.name: {"formula": one.formula, "unit": one.unit, "decision": [str(rule) for rule in one.decisions]}
            for one in self.declared
        }
        return {**vars(self), "declared": declared}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> DeployedMeasures:
        """Read a dict of :meth:`as_dict`; formulas are parsed again."""
        return cls(**{**plain, "declared": declared_measures(plain["declared"])})


def policy_sha256(policy: Policy) -> str:
    """Hash of the policy: controller, options and cleanup."""
    return json_sha256([policy.controller, policy.options, policy.groups, policy.cleanup])


def measure_text(name: str, found: Mapping[str, Any]) -> str:
    """One measure of one case in words: ``ef 52.1 % (90 % interval 44.0 to 60.2)``."""
    if found["value"] is None:
        return f"{name}: {found['why']}"
    unit = f" {found['unit']}" if found["unit"] else ""
    if found["low"] is None:
        return f"{name} {found['value']:.4g}{unit} ({found['why']})"
    return (
        f"{name} {found['value']:.4g}{unit} ({found['level']:.0%} interval {found['low']:.4g} to {found['high']:.4g})"
    )


# ---- at fit ----


def design_cases(
    archive: Archive, deployed: Mapping[str, Sequence[Deployed]], names: Mapping[int, str], ladders: Sequence[str] = ()
) -> dict[str, list[MeasuredCase]]:
    """Return the volumes of M0, of the mask of each design and of the label, for every case, by design.

    Args:
        archive: The labelled cases.
        deployed: The masks that each design deploys for patients that it was not fitted on.
        names: Names of the labels.
        ladders: Ladders that are read together.
    """
    found: dict[str, list[MeasuredCase]] = {name: [] for name in deployed}
    by_case = {name: {one.case_id: one for one in ones} for name, ones in deployed.items()}
    for case_id in next(iter(by_case.values())):
        entry = archive.entries[case_id]
        masks = candidate_masks(archive, case_id, ladders)

        def volumes(mask: Mask, spacing: Any = entry.spacing_mm) -> Mapping[str, float]:
            return named_volumes(label_volumes(mask, spacing), names)

        known = {"old": volumes(masks[SOURCE]), "label": volumes(archive.label(case_id))}
        made: dict[tuple[Any, ...], Mapping[str, float]] = {}
        for name, ones in by_case.items():
            one = ones[case_id]
            key = (one.state, one.accepted, one.cleanup)
            if key not in made:
                made[key] = volumes(design_mask(one, masks.__getitem__))
            found[name].append(MeasuredCase(case_id, entry.cluster, None, {**known, "new": made[key]}))
    return found


def design_mask(one: Deployed, mask: Callable[[State], Mask]) -> Mask:
    """Return the mask that a design deploys: a candidate, or M0 with accepted pieces of it, after cleanup."""
    chosen = mask(state_of(one.state))
    if one.gated:
        chosen = merged(mask(SOURCE), chosen, one.accepted)
    return Cleanup.parse(one.cleanup).apply(chosen) if one.cleanup else chosen


def decided_cases(
    archive: Archive, controller: Controller, decisions: Iterable[Decision], names: Mapping[int, str]
) -> Iterator[MeasuredCase]:
    """Yield the volumes of M0, of the deployed mask and of the label, where there is one, for every decision."""
    for decision in decisions:
        entry = archive.entries[decision.case_id]
        masks = {"old": archive.mask(entry.id, SOURCE), "new": deployed_mask(archive, controller, decision)}
        if entry.labelled:
            masks["label"] = archive.label(entry.id)
        yield MeasuredCase.of(entry.id, masks, spacing_mm=entry.spacing_mm, patient=entry.cluster, names=names)


def policy_cases(archive: Archive, policy: Policy, names: Mapping[int, str]) -> list[MeasuredCase]:
    """Return the volumes of M0, of the mask that a policy deploys and of the label, for every recorded case."""
    judge = judge_of(policy)
    decisions = (replay_case(archive, judge, case_id) for case_id in archive.ids)
    return list(decided_cases(archive, judge.controller, decisions, names))


def fit_report(
    cases: Mapping[str, Sequence[MeasuredCase]], gains: Mapping[str, float], chosen: str, fitted: DeployedMeasures
) -> dict[str, Any]:
    """Text about the measures for the page and the summary of ``fit``.

    Args:
        cases: The cases of each design (:func:`design_cases`).
        gains: Change of the metric by design.
        chosen: The design that is deployed.
        fitted: The measures with their intervals.

    Returns:
        ``rows`` (one per design and measure), ``warnings`` (designs that improve the metric and worsen a measure, the
        deployed one first) and ``intervals`` (a sentence per measure).
    """
    rows, warnings = [], []
    for design in sorted(cases, key=lambda name: (name != chosen, name)):
        for result in mask_measures(cases[design], fitted.declared):
            said = worsened_sentence(result)
            if said is not None and gains[design] > 0:
                warnings.append(f"{design} improves the metric by {gains[design]:+.4f}, but {said}")
            rows.append(
                {
                    "design": design, "measure": result.name, "unit": result.unit, "closer": result.closer,
                    "farther": result.farther, "error_m0": result.error_old and result.error_old.bias,
                    "error": result.error_new and result.error_new.bias,
                    "patients": result.error_new.patients if result.error_new else 0, "worse": said is not None,
                }
            )  # fmt: skip
    return {
        "rows": rows,
        "warnings": warnings,
        "intervals": [_interval_sentence(fitted, one) for one in fitted.declared],
    }


def _interval_sentence(fitted: DeployedMeasures, measure: Measure) -> str:
    half, many = fitted.half_widths[measure.name], fitted.patients[measure.name]
    if half is None:
        return f"{measure.name}: no interval, because {pluralize(many, 'patient')} had a value and 9 are needed"
    unit = f" {measure.unit}" if measure.unit else ""
    return (
        f"{measure.name}: the value of the label is expected within ± {half:.3g}{unit} for {fitted.level:.0%} of new "
        f"patients (estimated from {many} patients {fitted.basis})"
    )
