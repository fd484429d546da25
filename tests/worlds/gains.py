"""Labelled cases without images: what each candidate gains is drawn, so that the true gain of every design is known.

A candidate's change is a sum over pieces, and a merge adds up the pieces that it accepts. Signals carry nothing unless
``told`` says so. The scans of one patient resemble each other by ``icc``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from casewise.core.records import SOURCE, Observation, State
from casewise.judge.calibration.designs import Edit, Known
from casewise.judge.controllers.merge import PIECE_FEATURES
from casewise.judge.decide import Setting

VIEWS, PIECES = 4, 3
SETTING = Setting(VIEWS + 1, str(VIEWS + 1))
TAILS = ("normal", "heavy", "skewed", "disasters")


@dataclass(frozen=True, eq=False)
class Summed:
    """Stands for ``Edit``: pieces whose worth adds up."""

    features: np.ndarray
    base: float
    worth: np.ndarray
    pieces = Edit.pieces

    @property
    def won(self) -> np.ndarray:
        return np.maximum(self.worth, 0)

    @property
    def lost(self) -> np.ndarray:
        return np.maximum(-self.worth, 0)

    def metric_of(self, accepted: np.ndarray) -> float:
        return self.base + float(self.worth[accepted].sum())


class SummedEdits(dict[State, Summed]):
    """Stands for ``KnownEdits``: every edit is there from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[object, object] = {}

    def need(self, states: object) -> None:
        pass


def noise(rng: np.random.Generator, shape: tuple[int, ...], tails: str) -> np.ndarray:
    """Mean 0 and of the size 1: normal, Student's t with 2.5 degrees of freedom, many small gains and few large losses
    ("skewed"), or small gains and one large loss in twenty ("disasters")."""
    if tails == "skewed":
        return 1 - rng.exponential(size=shape)
    if tails == "heavy":
        return rng.standard_t(2.5, shape) / 2.2
    if tails == "disasters":
        return np.where(rng.random(shape) < 0.05, -4.36, 0.23) + 0.2 * rng.normal(size=shape)
    return rng.normal(size=shape)


def cohort(
    rng: np.random.Generator,
    patients: int,
    *,
    scans: int = 2,
    icc: float = 0.5,
    tails: str = "normal",
    gain: float = 0.0,
    spread: float = 0.03,
) -> list[Known]:
    """Patients with ``scans`` cases each; the consensus gains ``gain`` on average, single views nothing."""
    found = []
    for patient in range(patients):
        shared = noise(rng, (VIEWS + 1,), tails)
        for scan in range(scans):
            own = noise(rng, (VIEWS + 1,), tails)
            change = spread * (np.sqrt(icc) * shared + np.sqrt(1 - icc) * own)
            change[-1] = 0.5 * change[-1] + 0.5 * change[:-1].mean() + gain  # the consensus resembles its views
            found.append(_case(rng, f"p{patient:03d}-{scan}", f"p{patient:03d}", change))
    return found


def _case(rng: np.random.Generator, case_id: str, cluster: str, change: np.ndarray) -> Known:
    signals = [
        {
            "agreement": float(rng.uniform(0.6, 0.95)),
            "likeness": float(rng.uniform(0.6, 0.95)),
            "agreement_source": 1.0 if step == 0 else float(rng.uniform(0.7, 0.98)),
            "support": float(rng.uniform(0.2, 0.8)),
        }
        for step in range(VIEWS + 2)
    ]
    metric = {SOURCE: 0.7} | {State(step): 0.7 + float(change[step - 1]) for step in range(1, VIEWS + 2)}
    edits = SummedEdits()
    for step in range(1, VIEWS + 2):
        parts = rng.normal(size=PIECES) * 0.01
        worth = parts - parts.mean() + change[step - 1] / PIECES
        edits[State(step)] = Summed(rng.normal(size=(PIECES, len(PIECE_FEATURES))), 0.7, worth)
    return Known(case_id, cluster, Observation(case_id, None, signals), metric, dict.fromkeys(metric, 0.0), edits)
