"""What every section reads: two archives, their outcomes, and what each method would have deployed. Made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pandas as pd

from casewise.archive.store import Archive
from casewise.core.errors import CasewiseError, Overlap
from casewise.core.records import Controller, Decision, Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.outcomes import deployed, outcomes
from casewise.judge.policy import check_binding, controller_of
from casewise.replay import replay
from casewise.study.budget import ladder, selection
from casewise.study.controls import arms_of, selector_scores
from casewise.study.deployment import Comparison, intervals, method_table, tiers
from casewise.study.finding import Finding

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
}
_STOPS = ("frag-stop", "entropy-stop", "msp-stop", "gradient-stop")
_OURS = frozenset({"frag-stop", "tau-stop", "router", "stop-router", "region-gate"})

Frames = Mapping[str, pd.DataFrame]
Progress = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Extras:
    """Further archives that some tables need; each is optional, and what needs a missing one says so."""

    others: Mapping[str, Archive] = field(default_factory=dict)  # MEMO, CoTTA, ... on the same cases
    rerun: Archive | None = None
    sweep: Mapping[float, tuple[Archive, Archive | None]] = field(default_factory=dict)  # rate: evaluation, calibration
    backbones: Mapping[str, Archive] = field(default_factory=dict)
    away: Archive | None = None  # another modality, for the scale probe (O13)
    frozen: Policy | None = None  # the policy whose design was frozen (E14)
    criteria: Any = None  # a prereg.Declaration
    certificate: Mapping[str, Any] | None = None  # certificate.json of the calibration archive


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
        return arms_of(self.evaluation, next(iter(self.routers.values())), self.outcomes)

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
    def calibration_size(self) -> int:
        """The number of cases that the policy was fitted on."""
        return len(self.policy.calibration_cases) or len(self.calibration.ids)

    def interval(self, method: str, reference: str, quantity: str) -> Mapping[str, Any] | None:
        """One interval of the single list, or None when that comparison is not in it."""
        table = self.intervals.table
        found = table[table["id"] == f"{method}~{reference}:{quantity}"]
        return None if found.empty else dict(found.iloc[0])


def gather(
    evaluation: Archive,
    calibration: Archive,
    policy: Policy,
    *,
    extras: Extras | None = None,
    resamples: int = 5000,
    seed: int = RESAMPLING_SEED,
    progress: Progress = lambda _: None,
) -> Material:
    """Check that the three belong together, read the outcomes, and replay every method."""
    check_disjoint(evaluation, calibration)
    check_binding(policy, evaluation.binding)
    progress("outcomes of the evaluation cases")
    scored = outcomes(evaluation)
    progress("outcomes of the calibration cases")
    holdout = outcomes(calibration)
    controller = controller_of(policy)
    progress("replaying every method")
    decisions: dict[str, tuple[Decision, ...]] = {}
    skipped: dict[str, str] = {}
    for name, method in _methods(controller, evaluation.steps):
        try:
            decisions[name] = tuple(replay(evaluation, method))
        except CasewiseError as error:
            skipped[name] = str(error)
    methods = {name: deployed(scored, made) for name, made in decisions.items()}
    material = Material(
        evaluation, calibration, policy, controller, scored, holdout, decisions, methods, skipped, extras or Extras(),
        resamples, seed,
    )  # fmt: skip
    return with_others(material)


def _methods(controller: Controller, steps: int) -> Iterator[tuple[str, Controller]]:
    """Methods in the order of the paper's tables: M0, the ladder, the stop rules, the policy."""
    yield "m0", CONTROLLERS.build("m0")
    for step in range(1, steps + 1):
        yield f"fixed-{step}", CONTROLLERS.build("fixed-k", step=step)
    for name in _STOPS:
        if name != controller.name:
            yield name, CONTROLLERS.build(name, cap=steps)
    yield ("router" if "router" in controller.name else controller.name), controller


def with_others(material: Material) -> Material:
    """Add the fixed horizon of other objectives on the same cases (MEMO and CoTTA in the paper's tables)."""
    methods = dict(material.methods)
    for name, archive in material.extras.others.items():
        fixed = CONTROLLERS.build("fixed-k", step=archive.steps)
        methods[name] = deployed(outcomes(archive), replay(archive, fixed))
    return replace(material, methods=methods)


def check_disjoint(evaluation: Archive, calibration: Archive) -> None:
    """Refuse calibration cases among the evaluation cases (A3)."""
    shared = sorted(set(evaluation.ids) & set(calibration.ids))
    if shared:
        raise Overlap(
            f"calibration and evaluation share {len(shared)} cases ({', '.join(shared[:5])}); "
            f"select disjoint splits before studying"
        )
