"""Criteria written down before the run and reconciled after it, whether or not they hold (J10, O6-O10)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from casewise.core.errors import BadInput, Refused
from casewise.core.formats import json_text
from casewise.core.registry import Registry
from casewise.study.finding import Finding, rows
from casewise.study.statistics.resample import Interval

Fact = float | bool | Interval
SCHEMA = 1


@dataclass(frozen=True)
class Criterion:
    """One expectation about one quantity; margins smaller than ``resolution`` stay unresolved (H9, R14)."""

    id: str
    expectation: str
    quantity: str  # key of the facts
    test: str  # name in TESTS
    bound: float | tuple[float, float] | None = None
    resolution: float = 0.0

    def __post_init__(self) -> None:
        TESTS[self.test]
        if (self.test == "between") != isinstance(self.bound, tuple):
            raise BadInput(f"criterion {self.id}: 'between' takes two bounds and the other tests one, got {self.bound}")


def _value(fact: Fact) -> float:
    return fact.estimate if isinstance(fact, Interval) else float(fact)


def _upper(fact: Fact) -> float:
    if not isinstance(fact, Interval):
        raise BadInput(f"an upper bound can only be tested on an interval, got {fact!r}")
    return fact.high


TESTS: Registry[Callable[[Fact, Any], tuple[bool, float]]] = Registry(
    "test",
    {
        "at least": lambda fact, bound: (_value(fact) >= bound, _value(fact) - bound),
        "at most": lambda fact, bound: (_value(fact) <= bound, bound - _value(fact)),
        "above": lambda fact, bound: (_value(fact) > bound, _value(fact) - bound),
        "below": lambda fact, bound: (_value(fact) < bound, bound - _value(fact)),
        "between": lambda fact, bound: (
            bound[0] <= _value(fact) <= bound[1],
            min(_value(fact) - bound[0], bound[1] - _value(fact)),
        ),
        "upper at most": lambda fact, bound: (_upper(fact) <= bound, bound - _upper(fact)),
        "is true": lambda fact, bound: (bool(_value(fact)), float("inf")),
        "report": lambda fact, bound: (True, float("inf")),
    },
)
"""What a criterion may ask, each giving (held, margin)."""

PAPER_CRITERIA = (
    Criterion("V0a", "the objective's first step is at least TENT's", "metric.first_minus_tent", "at least", 0.0),
    Criterion("V0b", "and at most 0.01 below the source", "metric.first_minus_source", "at least", -0.01),
    Criterion("V1a", "pooled rho of delta with HA lies in [0.4, 0.6]", "rho.delta", "between", (0.4, 0.6)),
    Criterion("V1b", "pooled rho of regions with HA lies in [0.4, 0.6]", "rho.regions", "between", (0.4, 0.6)),
    Criterion("V2a", "cohort HA is non-monotone in the budget", "ladder.non_monotone", "is true"),
    Criterion("V2b", "and ends above its minimum", "ladder.last_minus_best", "above", 0.0, 0.02),
    Criterion("V3a", "the router's HA is lower than the full budget's", "ha.router_minus_default", "below", 0.0),
    Criterion(
        "V3b", "at a metric cost of at most 0.005 (upper bound)", "metric.default_minus_router", "upper at most", 0.005
    ),
    Criterion("V4", "share of the HA cut that the quota alone makes", "share.random", "report"),
    Criterion("matched-random", "random at the matched rate is worse", "p.random", "at most", 0.05),
    Criterion(
        "matched-entropy", "entropy at the matched rate is not better", "ha.entropy_minus_router", "at least", 0.0
    ),
    Criterion(
        "matched-oracle", "the metric oracle at the matched rate is a bound", "ha.oracle_minus_router", "at most", 0.0
    ),
)
"""The paper's own criteria: V0-V4 of its objective section, and the expectations of its matched controls."""


@dataclass(frozen=True)
class Declaration:
    """Criteria with the moment at which they were declared."""

    criteria: tuple[Criterion, ...]
    declared_at: str  # ISO 8601 with time zone
    sha256: str = ""


def declare(path: str | Path, criteria: Iterable[Criterion] = PAPER_CRITERIA, *, declared_at: datetime) -> Declaration:
    """Write criteria to a file, once; a declaration is never overwritten."""
    target = Path(path)
    if target.exists():
        raise Refused(f"{target} already holds a declaration; declare changes in a new file so that both can be read")
    if declared_at.tzinfo is None:
        raise BadInput("declared_at needs a time zone, such as datetime.now(timezone.utc)")
    plain = {
        "schema": SCHEMA,
        "declared_at": declared_at.astimezone(timezone.utc).isoformat(),
        "criteria": [asdict(criterion) for criterion in criteria],
    }
    target.write_text(json_text(plain, indent=1) + "\n")
    return read_criteria(target)


def read_criteria(path: str | Path) -> Declaration:
    """The declaration of a file, with its hash."""
    try:
        content = Path(path).read_bytes()
        plain = json.loads(content)
        criteria = tuple(_criterion(one) for one in plain["criteria"])
        declared_at = datetime.fromisoformat(plain["declared_at"])
    except FileNotFoundError:
        raise BadInput(f"there is no declaration at {path}; write one with declare() before the run") from None
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path} is not a declaration ({error}); see docs/reference/analyses.md") from error
    return Declaration(criteria, declared_at.isoformat(), hashlib.sha256(content).hexdigest())


def _criterion(plain: Mapping[str, Any]) -> Criterion:
    bound = plain.get("bound")
    return Criterion(**{**plain, "bound": tuple(bound) if isinstance(bound, list) else bound})


def reconcile(
    declaration: Declaration,
    facts: Mapping[str, Fact],
    *,
    results_at: datetime | None = None,
    event: str = "the results",
    needs: Mapping[str, str] | None = None,
) -> Finding:
    """Every criterion with what was observed: held, failed, unresolved, reported or not run (J10).

    Criteria that were declared after ``results_at``, the time of ``event``, are reconciled too, and marked as declared
    too late. ``needs`` says what a quantity that was not computed would have needed.
    """
    late = results_at is not None and datetime.fromisoformat(declaration.declared_at) > results_at
    timing = f"declared too late: after {event}" if late else ""
    records = [_reconciled(one, facts.get(one.quantity), timing, needs or {}) for one in declaration.criteria]
    columns = ("id", "expectation", "quantity", "observed", "low", "high", "n", "verdict", "reason")
    counts = {name: sum(record["verdict"] == name for record in records) for name in ("held", "failed", "unresolved")}
    made = {
        "declared_at": declaration.declared_at,
        "sha256": declaration.sha256,
        "results_at": results_at.isoformat() if results_at else None,
        "event": event if results_at else None,
        "in_time": not late,
    }
    note = ", ".join(f"{count} {name}" for name, count in counts.items())
    n = max((fact.n for fact in facts.values() if isinstance(fact, Interval)), default=0)
    return Finding("prereg", rows(records, columns), n, "J10, O6-O10", made, (note,))


def _reconciled(criterion: Criterion, fact: Fact | None, timing: str, needs: Mapping[str, str]) -> dict[str, Any]:
    record = {"id": criterion.id, "expectation": criterion.expectation, "quantity": criterion.quantity}
    if fact is None or _value(fact) != _value(fact):
        missing = needs.get(criterion.quantity, f"{criterion.quantity} was not computed")
        why = missing if fact is None else f"{criterion.quantity} is undefined"
        return {**record, "observed": float("nan"), "verdict": "not run", "reason": _joined(why, timing)}
    held, margin = TESTS[criterion.test](fact, criterion.bound)
    limits = {"low": fact.low, "high": fact.high, "n": fact.n} if isinstance(fact, Interval) else {}
    verdict, reason = "held" if held else "failed", timing
    if criterion.test == "report":
        verdict = "reported"
    elif abs(margin) < criterion.resolution:
        small = f"margin {margin:+.4f} is below the resolution {criterion.resolution:g}"
        verdict, reason = "unresolved", _joined(small, timing)
    return {**record, "observed": _value(fact), **limits, "verdict": verdict, "reason": reason}


def _joined(*reasons: str) -> str:
    return "; ".join(reason for reason in reasons if reason)
