"""Worlds whose risk is known, so that a promise can be checked by the validity tests and the tables in the docs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from casewise.judge.certificates.crc import conformal_setting
from casewise.judge.certificates.gate import Gated, gate_table, gated
from casewise.judge.certificates.ltt import by_kept_share, fixed_sequence, p_values
from casewise.judge.certificates.rollback import rollback_table
from casewise.judge.certificates.table import Floats, LossTable

Draw = np.random.Generator

SEVERITIES: dict[str, tuple[Callable[[Draw, int], Floats], float]] = {
    "binary": (lambda rng, n: np.ones(n), 1.0),
    "discrete": (lambda rng, n: rng.choice([0.25, 0.5, 1.0], n), 7 / 12),
    "continuous": (lambda rng, n: rng.beta(1, 2, n), 1 / 3),
}
"""Loss of a harmed case, and its mean; a case that is not harmed loses exactly 0."""


@dataclass(frozen=True)
class Outcome:
    """What a promise came to over many repetitions."""

    risk: float  # mean true risk of what was certified
    error: float  # standard error of that mean
    violated: float  # share of repetitions whose true risk exceeds alpha
    kept: float  # mean share of cases kept
    repetitions: int

    def holds_in_expectation(self, alpha: float) -> bool:
        """Within three standard errors."""
        return self.risk <= alpha + 3 * self.error

    def holds_with_probability(self, delta: float) -> bool:
        """Within three standard errors of a share of delta."""
        return bool(self.violated <= delta + 3 * np.sqrt(delta * (1 - delta) / self.repetitions))


def router_cases(rng: Draw, n: int, severity: str) -> tuple[Floats, Floats]:
    """Coordinates u ~ U(0, 1) and losses: harmed with probability 0.2 + 0.5 u."""
    values = rng.random(n)
    harmed = rng.random(n) < 0.2 + 0.5 * values
    return values, harmed * SEVERITIES[severity][0](rng, n)


def router_risk(cut: float | None, severity: str) -> float:
    """True risk of a rollback cut: the integral of (0.2 + 0.5 u) times the mean severity up to the cut."""
    c = 0.0 if cut is None else min(max(cut, 0.0), 1.0)
    return SEVERITIES[severity][1] * (0.2 * c + 0.25 * c * c)


def crc_cut(table: LossTable, alpha: float) -> float | None:
    """The cut that CRC certifies."""
    at = conformal_setting(table, alpha)
    return None if at is None else float(table.settings[at])


def ltt_cut(table: LossTable, alpha: float, delta: float, kind: str, orders: int = 1) -> float | None:
    """The cut that learn-then-test certifies."""
    p = p_values(table.losses, alpha, kind=kind, delta=delta, orders=orders)
    passed = fixed_sequence(p, by_kept_share(table.kept), delta)
    return float(table.settings[passed[-1]]) if len(passed) else None


def empirical_cut(table: LossTable, alpha: float) -> float | None:
    """The naive alternative: the largest cut whose *empirical* risk is at most alpha."""
    safe = np.flatnonzero(table.risks <= alpha)
    return float(table.settings[safe[-1]]) if safe.size else None


def router_outcome(
    choose: Callable[[LossTable], float | None],
    *,
    n: int,
    alpha: float,
    severity: str,
    repetitions: int,
    seed: int = 1000,
) -> Outcome:
    """Certify again and again on fresh calibration sets, and look up the true risk each time."""
    rng = np.random.default_rng(seed)
    risks, kept = np.empty(repetitions), np.empty(repetitions)
    for k in range(repetitions):
        cut = choose(rollback_table(*router_cases(rng, n, severity)))
        risks[k], kept[k] = router_risk(cut, severity), 0.0 if cut is None else min(max(cut, 0.0), 1.0)
    return _outcome(risks, kept, alpha)


def gate_cases(rng: Draw, n: int) -> list[Gated]:
    """Cases of 1 to 4 regions; higher scores are less often harmful, and some of the edit lies in no region."""
    cases = []
    for count in rng.integers(1, 5, n):
        scores = rng.random(count)
        sizes = 16 + np.floor(rng.exponential(40, count))
        harmful = (rng.random(count) < 0.65 - 0.6 * scores).astype(float)
        cases.append(gated(scores, sizes, harmful, int(sizes.sum() + rng.integers(0, 60))))
    return cases


def gate_outcomes(
    *, n: int, alpha: float, repetitions: int, seed: int = 1000, population: int = 20_000
) -> dict[str, Outcome]:
    """True *deployed* HA of a gate whose threshold was certified on the surrogate, the envelope, or the raw HA."""
    rng = np.random.default_rng(seed)
    at = np.linspace(-0.0025, 1.0025, 202)
    truth = gate_table(gate_cases(rng, population), "deployed", at=at)
    risks = {name: np.zeros(repetitions) for name in ("surrogate", "envelope", "raw")}
    kept = {name: np.zeros(repetitions) for name in risks}
    for k in range(repetitions):
        cases = gate_cases(rng, n)
        for name in risks:
            cut = _gate_cut(cases, name, alpha)
            if cut is not None:
                column = int(np.argmin(np.abs(truth.settings - np.clip(cut, -0.0025, 1.0025))))
                risks[name][k], kept[name][k] = truth.risks[column], truth.kept[column]
    return {name: _outcome(risks[name], kept[name], alpha) for name in risks}


def _gate_cut(cases: list[Gated], name: str, alpha: float) -> float | None:
    if name != "raw":
        return crc_cut(gate_table(cases, name), alpha)
    table = gate_table(cases, "deployed")
    bounds = (table.losses.sum(axis=0) + 1) / (table.units + 1)
    safe = np.flatnonzero(bounds <= alpha + 1e-12)
    return float(table.settings[safe[-1]]) if safe.size else None


def _outcome(risks: Floats, kept: Floats, alpha: float) -> Outcome:
    error = float(risks.std(ddof=1) / np.sqrt(len(risks)))
    return Outcome(float(risks.mean()), error, float((risks > alpha + 1e-9).mean()), float(kept.mean()), len(risks))
