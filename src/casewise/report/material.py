"""What every section reads: two archives, their outcomes, and what each method would have deployed. Made once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from casewise.archive.store import Archive
from casewise.core.records import Controller, Decision, Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.data.folders import CaseFiles
from casewise.judge.certificates.certificate import Certificate
from casewise.study.assignment import arms_of, selector_scores
from casewise.study.association import association
from casewise.study.budget import ladder, ladder_shape, selection
from casewise.study.controls import attribution, matched_controls, random_control
from casewise.study.deployment import Comparison, intervals, method_table, tiers
from casewise.study.finding import Finding
from casewise.study.micro import micro_ladder
from casewise.study.prereg import Declaration
from casewise.study.ranking import auroc_table
from casewise.study.sensitivity import DRIVING, MEDICAL, calibration_sensitivity
from casewise.study.trajectories import mean_or_nan

TITLES = {
    "m0": "M0 (no adaptation)",
    "frag-stop": "FragStop",
    "entropy-stop": "entropy stop",
    "msp-stop": "MSP stop",
    "gradient-stop": "gradient stop",
    "tau-stop": "τ-stop",
    "router": "COQR router",
    "stop-router": "stop router",
    "region-gate": "region gate",
    "fixed-k": "fixed budget",
}
PERCENTILES = {"medical": MEDICAL, "driving": DRIVING}
_OURS = frozenset({"frag-stop", "tau-stop", "router", "stop-router", "region-gate"})

Frames = Mapping[str, pd.DataFrame]


@dataclass(frozen=True, eq=False)
class Extras:
    """Further archives that some tables need; each is optional, and what needs a missing one says so."""

    others: Mapping[str, Archive] = field(default_factory=dict)  # MEMO, CoTTA, ... on the same cases
    holdouts: Mapping[str, Archive] = field(default_factory=dict)  # calibration archives of the others, by name
    rerun: Archive | None = None
    sweep: Mapping[float, tuple[Archive, Archive | None]] = field(default_factory=dict)  # rate: evaluation, calibration
    backbones: Mapping[str, Archive] = field(default_factory=dict)
    away: Archive | None = None  # another modality, for the scale probe (O13)
    frozen: Policy | None = None  # the policy whose design was frozen (E14)
    criteria: Declaration | None = None
    certificate: Certificate | None = None  # certificate.json of the calibration archive
    images: Mapping[str, CaseFiles] | None = None  # what was segmented, by case, for the pictures' input column


@dataclass(frozen=True, eq=False)
class Material:
    """The evaluation archive, the calibration archive, the policy, and everything that was derived from them."""

    evaluation: Archive
    calibration: Archive
    policy: Policy
    controller: Controller
    outcomes: pd.DataFrame
    holdout: pd.DataFrame
    decisions: Mapping[str, tuple[Decision, ...]]
    methods: Frames
    skipped: Mapping[str, str]  # methods that were not run, and why
    extras: Extras = field(default_factory=Extras)
    resamples: int = 5000
    seed: int = RESAMPLING_SEED

    @property
    def metric(self) -> str:
        """Dice or mIoU, as people write it."""
        return {"dice": "Dice", "miou": "mIoU"}.get(str(self.configuration.get("metric", "dice")), "metric")

    @property
    def configuration(self) -> Mapping[str, Any]:
        """How the evaluation archive was made."""
        return self.evaluation.configuration

    @property
    def measure(self) -> dict[str, Any]:
        """What decides which regions count."""
        made = self.configuration
        return {
            "min_area": int(made.get("min_area", 16)),
            "foreground": bool(made.get("foreground", True)),
            "ignore": made.get("ignore"),
        }

    @property
    def ours(self) -> str:
        """The name of the policy's own method."""
        return "router" if self.is_router else self.controller.name

    @property
    def is_router(self) -> bool:
        """Whether the policy puts cases into buckets."""
        return "router" in self.controller.name

    @property
    def router(self) -> pd.DataFrame:
        """What the policy deployed, one row per case."""
        return self.methods[self.ours]

    @property
    def reference(self) -> str:
        """The fixed budget at the full horizon: what runs without control."""
        return f"fixed-{self.evaluation.steps}"

    @property
    def uncontrolled(self) -> pd.DataFrame:
        """What the full horizon deployed."""
        return self.methods[self.reference]

    @property
    def marked(self) -> frozenset[str]:
        """Methods of the paper, colored in figures; the others are baselines."""
        return frozenset(self.title(name) for name in self.methods if name in _OURS)

    @property
    def groups(self) -> list[str]:
        """The groups of the evaluation cases, when there is more than one."""
        found = sorted({entry.group for entry in self.evaluation.entries.values() if entry.group is not None})
        return found if len(found) > 1 else []

    def title(self, name: str) -> str:
        """A method as a table prints it."""
        return TITLES.get(name, name)

    def of_group(self, group: str) -> dict[str, pd.DataFrame]:
        """Every method on the cases of one group."""
        return {name: frame[frame["group"] == group].reset_index(drop=True) for name, frame in self.methods.items()}

    @cached_property
    def ladder(self) -> Finding:
        """Cohort HA and metric by step (G1)."""
        return ladder(self.outcomes, by_group=bool(self.groups))

    @cached_property
    def micro(self) -> Finding | None:
        """mIoU over all voxels by step, for the teaser only (A11); None where the metric is Dice."""
        return micro_ladder(self.evaluation, by_group=bool(self.groups)) if self.metric == "mIoU" else None

    @cached_property
    def selection(self) -> Finding:
        """Which budget a labelled holdout chooses (G2)."""
        return selection(self.holdout, self.outcomes)

    @cached_property
    def deployable(self) -> str:
        """The budget that the holdout chooses by lowest HA."""
        return f"fixed-{int(self.selection.table['k_holdout'].iloc[0])}"

    @cached_property
    def retrospective(self) -> str:
        """The budget that is best in hindsight; nobody could have deployed it."""
        return f"fixed-{int(self.selection.table['k_best'].iloc[0])}"

    @cached_property
    def method_table(self) -> Finding:
        """Metric, HA, BA and steps of every method (H)."""
        return method_table(self.methods)

    @cached_property
    def intervals(self) -> Finding:
        """Every interval between a controller and a budget: produced here, once, and cited by id (H8)."""
        ours = [name for name in self.methods if name in _OURS or name == self.ours]
        against = {"deployable": self.deployable, "default": self.reference, "retrospective": self.retrospective}
        asked = tiers(self.methods, ours=ours, source="m0", **against)
        others = [Comparison(self.ours, name) for name in self.methods if name not in {*ours, "m0", *against.values()}]
        budget = [Comparison(self.reference, "m0")]
        return intervals(self.methods, [*asked, *others, *budget], resamples=self.resamples, seed=self.seed)

    @cached_property
    def arms(self) -> Frames:
        """What every case would have become in each bucket."""
        return arms_of(self.evaluation, self.controller, self.outcomes)

    @cached_property
    def shape(self) -> Finding:
        """Whether the ladder dips before it rises (G6)."""
        return ladder_shape(self.outcomes, by_group=bool(self.groups))

    @cached_property
    def association(self) -> Finding:
        """Correlation of every signal with HA (I1-I3)."""
        return association(self.outcomes, by_group=bool(self.groups), resamples=self.resamples, seed=self.seed)

    @cached_property
    def ranking(self) -> Finding:
        """How well each signal ranks the cases (I8)."""
        return auroc_table(self.outcomes, resamples=self.resamples, seed=self.seed)

    @cached_property
    def matched(self) -> Finding:
        """Every selector at the router's quota (J2)."""
        return matched_controls(self.arms, self.router, self.scores, by_group=bool(self.groups), seed=self.seed)

    @cached_property
    def chance(self) -> Finding:
        """Random assignment at the router's quota (J4)."""
        return random_control(self.arms, self.router, by_group=bool(self.groups), seed=self.seed)

    @cached_property
    def attribution(self) -> Finding:
        """What the HA cut is due to (P2)."""
        return attribution(self.arms, self.router, self.uncontrolled, self.scores)

    @cached_property
    def refit(self) -> Finding:
        """The router with cut-points from fewer calibration cases (K)."""
        pool, values = (step_one(frame, self.coordinate) for frame in (self.holdout, self.outcomes))
        found = calibration_sensitivity(
            pool,
            values,
            self.arms,
            reference=self.methods[self.retrospective],
            sizes=tuple(size for size in (5, 10, 15) if size < len(pool)),
            percentiles=self.percentiles,
            seed=self.seed,
        )
        refitted, deployed = float(found.table["ha"].iloc[0]), mean_or_nan(self.methods[self.ours]["ha"])
        if np.isclose(refitted, deployed, rtol=0, atol=1e-12):
            return found
        note = (
            f"One pair of tertiles is refitted for all cases here: HA {refitted:.3f} with all calibration cases. The "
            f"deployed policy has other cut-points (of each group, or closed by its guard): HA {deployed:.3f}."
        )
        return replace(found, notes=(*found.notes, note))

    @cached_property
    def scores(self) -> pd.DataFrame:
        """Every selector's score of every case (J3)."""
        return selector_scores(self.outcomes, coordinate=self.coordinate)

    @property
    def coordinate(self) -> str:
        """The signal that the router reads."""
        return str(self.policy.options.get("coordinate", "delta"))

    @property
    def routers(self) -> dict[str, Any]:
        """The router, or the router of each group: they share coordinate and actions and differ in cut-points (S2)."""
        by_group = getattr(self.controller, "controllers", None)
        return dict(by_group) if by_group else {self.policy.name: self.controller}

    @property
    def percentiles(self) -> tuple[float, float]:
        """The convention that the policy's cut-points were fitted with (F1)."""
        return PERCENTILES[str(self.policy.preflight.get("convention", "medical"))]

    @property
    def calibration_size(self) -> int:
        """The number of cases that the policy was fitted on."""
        return len(self.policy.calibration_cases) or len(self.calibration.ids)

    def interval(self, method: str, reference: str, quantity: str) -> Mapping[str, Any] | None:
        """One interval of the single list, or None when that comparison is not in it."""
        table = self.intervals.table
        found = table[table["id"] == f"{method}~{reference}:{quantity}"]
        return None if found.empty else dict(found.iloc[0])


def step_one(outcomes: pd.DataFrame, coordinate: str) -> pd.Series:
    """The coordinate after the probe, by case."""
    first = outcomes[(outcomes["step"] == 1) & (outcomes["shrink"] == 0)].sort_values("case")
    return first.set_index("case")[coordinate].astype(float)
