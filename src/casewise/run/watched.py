"""A run under watch: each case is decided under what the monitors had seen before it, in the order of the cases."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from casewise.core.records import Policy
from casewise.judge.monitors.watch import active_policy, read_watch, write_watch
from casewise.judge.policy import controller_of, is_hybrid
from casewise.run.local import Engine, Result
from casewise.run.predict import PredictCase


class Watching:
    """The watch while a run goes on; written after every case, so that a run that is killed goes on from there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = read_watch(path)

    def policy(self, policy: Policy) -> Policy:
        """What decides the next case."""
        return active_policy(policy, self.state)

    def show(self, entry: Mapping[str, Any] | None) -> None:
        """Show the decision of a case; one that was seen before, or that read no coordinate, does not count."""
        decision = (entry or {}).get("decision") or {}
        if entry is None or decision.get("value") is None:
            return
        after = self.state.decision(str(entry["case"]), float(decision["value"]), decision.get("cluster"))
        if after is not self.state:
            write_watch(self.path, after)
            self.state = after


def watching(path: Path | None, policy: Policy) -> Watching | None:
    """The watch of a run, checked against its policy; without one a hybrid policy is refused."""
    if path is None:
        controller_of(policy)
        return None
    found = Watching(path)
    found.policy(policy)
    return found


def watched_results(work: PredictCase, engine: Engine, waiting: Sequence[str], watch: Watching) -> Iterator[Result]:
    """Results in the order of the cases; after an alarm the rest gets M0, whatever ran ahead of it.

    Cut-points of a hybrid policy move with every case, so its cases run one after the other.
    """
    left = list(waiting)
    while left:
        policy = watch.policy(work.policy)
        adapts = policy.controller != "m0"
        together = left[:1] if is_hybrid(work.policy) and adapts else left
        with closing(_in_order(engine, replace(work, policy=policy), list(together))) as results:
            for result in results:
                watch.show(result.value)
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
