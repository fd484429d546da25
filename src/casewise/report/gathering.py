"""From two archives and a policy to the material of a report: check that they belong together, replay every method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pandas as pd

from casewise.archive.store import Archive
from casewise.core.errors import CasewiseError
from casewise.core.records import CALIBRATION, EVALUATION, Controller, Decision, Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.data.splits import check_disjoint, clusters_of
from casewise.judge.calibration.fit import calibrate, coordinate_values
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.ledger import unlock
from casewise.judge.outcomes import deployed, outcomes
from casewise.judge.policy import controller_of
from casewise.replay import replay
from casewise.report.material import Extras, Material

_STOPS = ("frag-stop", "entropy-stop", "msp-stop", "gradient-stop")

Progress = Callable[[str], None]


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
    evaluation, calibration = evaluation.marked(EVALUATION), calibration.marked(CALIBRATION)
    check_disjoint(clusters_of(calibration.entries.values()), clusters_of(evaluation.entries.values()))
    evaluation = unlock(evaluation, purpose="study", policy=policy)
    progress("outcomes of the evaluation cases")
    scored = _with_coordinate(outcomes(evaluation), policy)
    progress("outcomes of the calibration cases")
    holdout = _with_coordinate(outcomes(calibration), policy)
    controller = controller_of(policy)
    progress("replaying every method")
    decisions: dict[str, tuple[Decision, ...]] = {}
    skipped: dict[str, str] = {}
    for name, build in _methods(controller, evaluation.steps, calibration):
        try:
            decisions[name] = tuple(replay(evaluation, build()))
        except CasewiseError as error:
            if name in ("m0", "router", controller.name, f"fixed-{evaluation.steps}"):
                raise
            skipped[name] = str(error)
    methods = {name: deployed(scored, made, archive=evaluation) for name, made in decisions.items()}
    material = Material(
        evaluation, calibration, policy, controller, scored, holdout, decisions, methods, skipped,
        unlocked(extras or Extras()), resamples, seed,
    )  # fmt: skip
    return with_others(material)


def _methods(
    controller: Controller, steps: int, calibration: Archive
) -> Iterator[tuple[str, Callable[[], Controller]]]:
    """Methods in the order of the paper's tables: M0, the ladder, the stop rules, the policy."""
    yield "m0", partial(CONTROLLERS.build, "m0")
    for step in range(1, steps + 1):
        yield f"fixed-{step}", partial(CONTROLLERS.build, "fixed-k", step=step)
    for name in _STOPS:
        if name != controller.name:
            yield name, partial(CONTROLLERS.build, name, cap=steps)
    if controller.name != "tau-stop":
        yield "tau-stop", lambda: controller_of(calibrate(calibration, "tau-stop"))
    yield ("router" if "router" in controller.name else controller.name), lambda: controller


def _with_coordinate(frame: pd.DataFrame, policy: Policy) -> pd.DataFrame:
    """Outcomes with the router's coordinate as a column, also where it is made of signals (risk, -msp)."""
    coordinate = policy.options.get("coordinate")
    if coordinate is None or coordinate in frame.columns:
        return frame
    adapted = frame["step"] > 0
    values = pd.Series(coordinate_values(frame[adapted], coordinate, policy.options), index=frame.index[adapted])
    return frame.assign(**{coordinate: values})


def with_others(material: Material) -> Material:
    """Add the fixed horizon of other objectives on the same cases (MEMO and CoTTA in the paper's tables)."""
    methods = dict(material.methods)
    for name, archive in material.extras.others.items():
        fixed = CONTROLLERS.build("fixed-k", step=archive.steps)
        shared = unlock(
            archive.select(ids=material.evaluation.ids), purpose=f"study of {material.evaluation.path.name}"
        )
        methods[name] = deployed(outcomes(shared), replay(shared, fixed))
    return replace(material, methods=methods)


def unlocked(extras: Extras) -> Extras:
    """Further archives whose labels a study reads, each through its own exposure ledger (F12)."""
    read = partial(unlock, purpose="study")
    return replace(
        extras,
        others={name: read(archive) for name, archive in extras.others.items()},
        rerun=extras.rerun and read(extras.rerun),
        sweep={rate: (read(judged), holdout) for rate, (judged, holdout) in extras.sweep.items()},
        backbones={name: read(archive) for name, archive in extras.backbones.items()},
        away=extras.away and read(extras.away),
    )
