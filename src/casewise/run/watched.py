"""A run under watch: each case is decided under what the monitors had seen before it, in the order of the cases."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from casewise.core.records import Decision
from casewise.deployment import Watching
from casewise.judge.policy import is_hybrid
from casewise.run.local import Engine, Result
from casewise.run.predict import PredictCase


def decision_in(entry: Mapping[str, Any] | None) -> Decision | None:
    """The decision of an entry; None where there is none."""
    plain = (entry or {}).get("decision")
    return None if plain is None else Decision.from_dict(plain)


def watched_results(work: PredictCase, engine: Engine, waiting: Sequence[str], watch: Watching) -> Iterator[Result]:
    """Results in the order of the cases; after an alarm the rest gets M0, whatever ran ahead of it.

    Cut-points of a hybrid policy move with every case, so its cases run one after the other.
    """
    left = list(waiting)
    while left:
        policy = watch.policy(work.deployment.policy)
        adapts = policy.controller != "m0"
        together = left[:1] if is_hybrid(work.deployment.policy) and adapts else left
        now = replace(work, deployment=replace(work.deployment, policy=policy, watch=None))
        with closing(_in_order(engine, now, list(together))) as results:
            for result in results:
                watch.show(decision_in(result.value))
                left.remove(result.case_id)
                yield result
                if adapts and watch.state.suspended:
                    break
        if adapts and watch.state.suspended:
            for case_id in left:
                work.layout.forget(case_id)


def _in_order(engine: Engine, work: PredictCase, case_ids: Sequence[str]) -> Generator[Result]:
    """Results in the order that was asked for: which case ends first may depend on its coordinate."""
    early: dict[str, Result] = {}
    waiting = iter(case_ids)
    due = next(waiting, None)
    with closing(engine.map(work, case_ids)) as results:  # type: ignore[type-var]
        for result in results:
            early[result.case_id] = result
            while due in early:
                yield early.pop(due)
                due = next(waiting, None)
