"""Ladders of signals, written by hand."""

from __future__ import annotations

import pytest

from casewise.core.records import Observation


def _seen(case_id="c", group=None, **signals):
    """Observation from one list a signal, beginning with M0."""
    steps = len(next(iter(signals.values())))
    rows = tuple({name: values[step] for name, values in signals.items()} for step in range(steps))
    return Observation(case_id, group, rows)


def _decided(controller, seen):
    """(verdict, executed): shown step by step, as live."""
    for step in range(seen.step + 1):
        verdict = controller.decide(Observation(seen.case_id, seen.group, seen.signals[: step + 1]))
        if verdict is not None:
            return verdict, step
    return None, seen.step


@pytest.fixture
def seen():
    return _seen


@pytest.fixture
def decided():
    return _decided
