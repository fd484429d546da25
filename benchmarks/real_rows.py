"""One line of a shift's table: what a method deployed on every development case, what it cost, and its cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from real_ladders import Shift

from casewise.archive.store import Archive
from casewise.judge.controllers.depth import FixedK
from casewise.judge.outcomes import deployed, outcomes
from casewise.replay import replay
from casewise.study.benchmark.method_scores import FEWEST, quota_p, summary
from casewise.study.statistics.resample import clusters_of, mean_interval

COLUMNS = (
    "gain [95 %]", "captured", "helped : hurt", "hurt by > .01", "HA (judged)", "BA", "worse-voxels",
    "forwards", "seconds as recorded", "p at its quota",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line: what a method deployed on every development case, in the columns of ``judge.outcomes``; its cost."""

    name: str
    cases: pd.DataFrame
    forwards: float
    backwards: float = 0.0
    seconds: float = float("nan")
    p: str = ""

    def cells(self, oracle: float) -> Sequence[str]:
        said = summary(self.cases, oracle)  # as casewise bench scores a method
        judged = said["judged"] is not None
        back = f" + {self.backwards:.1f}b" if self.backwards else ""
        return (
            f"{said['gain']:+.4f} {spread(self.cases)}",
            "" if said["captured"] is None else f"{said['captured']:.0%}",
            f"{said['helped']} : {said['hurt']}",
            str(said["hurt_by_a_point"]),
            f"{said['ha']:.3f} ({said['judged']:.0%})" if judged else "",
            f"{said['ba']:.3f}" if judged else "",
            f"{said['worse_voxels']:.3f}" if judged else "",
            f"{self.forwards:.1f}{back}",
            "" if np.isnan(self.seconds) else f"{self.seconds:.1f}",
            self.p,
        )


def interval_of(cases: pd.DataFrame) -> dict[str, Any]:
    """The mean gain with its interval by cluster; with fewer than five clusters the mean of each instead."""
    units, change = clusters_of(cases), cases["change"].to_numpy(float)
    if units.max() < FEWEST - 1:
        means = {str(name): float(mean) for name, mean in cases.groupby("cluster")["change"].mean().items()}
        return {"gain": float(change.mean()), "low": None, "high": None, "means": means}
    found = mean_interval(change, clusters=units)
    return {"gain": found.estimate, "low": found.low, "high": found.high}


def spread(cases: pd.DataFrame) -> str:
    """The interval of the mean gain by cluster, or the mean of each cluster, in words."""
    found = interval_of(cases)
    if found["low"] is None:
        return f"({', '.join(f'{name} {mean:+.4f}' for name, mean in found['means'].items())})"
    return f"[{found['low']:+.4f}, {found['high']:+.4f}]"


@dataclass
class Bench:
    """The two archives of a shift, and all that is measured on them."""

    shift: Shift
    calibration: Archive
    development: Archive
    kept: dict[str, Any] = field(default_factory=dict)  # for OUT/tables/SHIFT.json
    refused: list[str] = field(default_factory=list)  # what could not be calibrated or certified, and why

    @property
    def recorded(self) -> list[str]:
        """Ladders that hold every case of both splits."""
        return [name for name in self.begun if self.amount(name) == len(self.development.cases or ())]

    @property
    def begun(self) -> list[str]:
        """Ladders that hold every calibration case and at least five clusters of development, or all of them."""
        found, cases = [], self.calibration.cases or {}
        for name in self.shift.ladders:
            if name in self.calibration.ladders and name in self.development.ladders:
                there = self.development.on(name).entries.values()
                units = {entry.cluster or entry.id for entry in there}
                enough = len(units) >= FEWEST or len(there) == len(self.development.cases or ())
                if enough and len(self.calibration.on(name).ids) == len(cases):
                    found.append(name)
        return found

    def amount(self, ladder: str) -> int:
        """Development cases that have a ladder."""
        return len(self.development.on(ladder).ids)

    @property
    def views(self) -> list[str]:
        return [name for name in self.recorded if self.shift.ladders[name].forward_only is not None]

    def frame(self, ladder: str) -> pd.DataFrame:
        return outcomes(self.development.on(ladder))

    def fixed(self, ladder: str, step: int, **cost: float) -> Row:
        """One candidate of a ladder, for every case."""
        archive = self.development.on(ladder)
        cases = deployed(self.frame(ladder), replay(archive, FixedK(step)))
        return Row("", cases, seconds=seconds(archive, step), **cost)  # type: ignore[arg-type]


def seconds(archive: Archive, *places: int) -> float:
    """Median over cases of what M0 and some candidates took when they were recorded; M0 as long as a reading."""
    found = []
    for entry in archive.entries.values():
        readings = entry.seconds[1:-1] or entry.seconds
        source = max(entry.seconds[0], float(np.median(readings)))  # it is shared between ladders, so it may be free
        found.append(source + sum(entry.seconds[place] for place in places if place))
    return float(np.median(found))


def until(archive: Archive, cases: pd.DataFrame) -> float:
    """Median over cases of what M0 and the executed steps took when they were recorded."""
    executed = cases.set_index("case")["executed"]
    return float(np.median([sum(archive.entries[name].seconds[: int(k) + 1]) for name, k in executed.items()]))


def quota_cell(frame: pd.DataFrame, rows: pd.DataFrame) -> str:
    """How often dealing the deployed states to the clusters at random gains as much, and harms as little."""
    chosen = list(zip(rows["deployed"].astype(int), rows["shrink"].astype(float), strict=True))
    if (rows["action"] == "gate").any() or len(set(chosen)) < 2:
        return ""
    states = sorted(set(chosen))
    table = frame.set_index(["step", "shrink", "case"]).sort_index()
    parts = [table.loc[state].reindex(rows["case"]) for state in states]
    source = rows["metric_source"].to_numpy(float)
    dealt = {
        "given": [states.index(one) for one in chosen],
        "change": np.column_stack([part["metric"].to_numpy(float) - source for part in parts]),
        "ha": np.column_stack([part["ha"].to_numpy(float) for part in parts]),
    }
    found = quota_p(dealt, clusters_of(rows))
    return f"gain {found['p_gain']:.3f}, HA {found['p_ha']:.3f}"
