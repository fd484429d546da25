"""Worlds whose risk is known, so that a promise can be checked by the validity tests and the tables in the docs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.polynomial import Polynomial

from casewise.core.records import Policy
from casewise.judge.certificates.certify_designs import DesignEvidence, best_certified
from casewise.judge.certificates.certify_gate import Gated, envelope, gated
from casewise.judge.certificates.certify_router import Promise, loss_table
from casewise.judge.certificates.evidence import ACCEPT, Evidence, Floats, LossTable, rollback_table
from casewise.judge.certificates.risk_control import conformal_setting, fixed_sequence, p_values

Draw = np.random.Generator
_AT_ONCE = 40  # tables whose p-values are computed together: memory, not time

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
    refused: float  # share of repetitions that certify nothing: M0 is deployed, at risk 0

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


def ltt_cuts(tables: Sequence[LossTable], alpha: float, delta: float, kind: str, orders: int = 1) -> list[float | None]:
    """The cut that learn-then-test certifies in each table; p-values of many tables of n units at once."""
    cuts: list[float | None] = []
    for start in range(0, len(tables), _AT_ONCE):
        part = tables[start : start + _AT_ONCE]
        joined = np.concatenate([table.losses for table in part], axis=1)
        p = p_values(joined, alpha, kind=kind, delta=delta, orders=orders)
        each = np.split(p, np.cumsum([len(table.settings) for table in part])[:-1])
        cuts += [_last_passed(table, own, delta) for table, own in zip(part, each, strict=True)]
    return cuts


def _last_passed(table: LossTable, p: Floats, delta: float) -> float | None:
    passed = fixed_sequence(p, np.argsort(table.kept, kind="stable"), delta)
    return float(table.settings[passed[-1]]) if len(passed) else None


def empirical_cut(table: LossTable, alpha: float) -> float | None:
    """The naive alternative: the largest cut whose *empirical* risk is at most alpha."""
    safe = np.flatnonzero(table.risks <= alpha)
    return float(table.settings[safe[-1]]) if safe.size else None


def router_outcome(
    choose: Callable[[Sequence[LossTable]], Sequence[float | None]],
    *,
    n: int,
    alpha: float,
    severity: str,
    repetitions: int,
    seed: int = 1000,
) -> Outcome:
    """Certify again and again on fresh calibration sets, and look up the true risk each time."""
    rng = np.random.default_rng(seed)
    cuts = choose([rollback_table(*router_cases(rng, n, severity)) for _ in range(repetitions)])
    risks = np.array([np.nan if cut is None else router_risk(cut, severity) for cut in cuts])
    kept = np.array([0.0 if cut is None else min(max(cut, 0.0), 1.0) for cut in cuts])
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
    """True *deployed* HA of a gate whose threshold was certified on the surrogate, the envelope, or the raw HA.

    'own' is the promise of T1 itself: the true *surrogate* risk of the threshold that the surrogate certified.
    Calibration cases are drawn from the population with replacement, so its means are the true risks exactly.
    """
    rng = np.random.default_rng(seed)
    scores, jumps = gate_jumps(gate_cases(rng, population))
    drawn = rng.integers(0, population, (repetitions, n))
    names = {"surrogate": "surrogate", "envelope": "envelope", "raw": "deployed", "own": "surrogate"}
    found = {}
    for name, certified in names.items():
        cuts = gate_cuts(scores[drawn], jumps[certified][drawn], alpha)
        paid = "surrogate" if name == "own" else "deployed"
        risks, kept = (_mean_above(scores, jumps[of], cuts) for of in (paid, "kept"))
        found[name] = _outcome(risks, np.nan_to_num(kept), alpha)
    return found


def gate_jumps(cases: Sequence[Gated]) -> tuple[Floats, dict[str, Floats]]:
    """(case, region) scores, falling, and the rise of each loss and of the kept share as the threshold passes them."""
    most = max(len(case.scores) for case in cases)
    scores = np.full((len(cases), most), -np.inf)
    jumps = {name: np.zeros((len(cases), most)) for name in ("surrogate", "deployed", "envelope", "kept")}
    for row, case in enumerate(cases):
        scores[row, : len(case.scores)] = case.scores
        curves = {name: getattr(case, name) for name in ("surrogate", "deployed", "kept")}
        for name, curve in {**curves, "envelope": envelope(case.deployed)}.items():
            jumps[name][row, : len(case.scores)] = np.diff(curve)
    return scores, jumps


def gate_cuts(scores: Floats, jumps: Floats, alpha: float) -> Floats:
    """What ``crc_cut`` certifies in each (repetition, case, region) draw, all at once; NaN where it certifies nothing.

    The bound is looked up at every score and at minus infinity, and need not be monotone; scores are distinct.
    """
    n, flat = scores.shape[1], (len(scores), -1)
    order = np.argsort(-scores.reshape(flat), axis=1)
    falling = np.take_along_axis(scores.reshape(flat), order, axis=1)
    rising = np.cumsum(np.take_along_axis(jumps.reshape(flat), order, axis=1), axis=1)
    settings = np.concatenate([falling, np.full((len(scores), 1), -np.inf)], axis=1)
    bounds = (np.concatenate([np.zeros((len(scores), 1)), rising], axis=1) + 1) / (n + 1)
    safe = bounds <= alpha + ACCEPT
    last = safe.shape[1] - 1 - np.argmax(safe[:, ::-1], axis=1)
    return np.where(safe.any(axis=1), settings[np.arange(len(settings)), last], np.nan)


def _mean_above(scores: Floats, jumps: Floats, cuts: Floats) -> Floats:
    """The population's mean at each cut: everything that jumps at a score above it."""
    order = np.argsort(-scores.ravel())
    total = np.concatenate([[0.0], np.cumsum(jumps.ravel()[order])]) / len(scores)
    above = np.searchsorted(-scores.ravel()[order], -cuts, side="left")
    return np.where(np.isnan(cuts), np.nan, total[np.minimum(above, len(total) - 1)])


RISING = {1: 0.6, 2: 0.7}
"""Depth -> slope r: that action harms with probability 0.2 + r u (HA) and 0.6 (0.2 + r u) (harmed)."""


def grid_variants(rng: Draw, n: int, severity: str) -> list[DesignEvidence]:
    """Routers of every (low, mid) depth on the same n cases; each depth harms independently, deeper ones gain more."""
    values, size = rng.random(n), SEVERITIES[severity][0](rng, n)
    ids = tuple(f"{i:04d}" for i in range(n))
    costs = {
        depth: {
            "ha": size * (rng.random(n) < 0.2 + slope * values),
            "harmed": (rng.random(n) < 0.6 * (0.2 + slope * values)).astype(float),
            "gain": np.full(n, _gain(depth)),
        }
        for depth, slope in RISING.items()
    }
    return [
        DesignEvidence(_router(low, mid), Evidence(ids, ids, values, costs[low], costs[mid], _own(values, low, mid)))
        for low in RISING
        for mid in RISING
    ]


def _router(low: int, mid: int) -> Policy:
    actions = {name: {"action": "depth", "depth": depth} for name, depth in (("low", low), ("mid", mid))}
    return Policy("simulated", "router", {**actions, "cut_high": np.inf}, steps=max(RISING))


def _own(values: Floats, low: int, mid: int) -> dict[str, Floats]:
    return {"gain": np.where(values < 0.5, _gain(low), _gain(mid))}


def _gain(depth: int) -> float:
    return 1.0 + 0.1 * depth


def grid_risk(policy: Policy, cut: float, severity: str, loss: str) -> float:
    """True risk of one configuration: a kept case loses the worse of two actions, so it is spared only by both."""
    depths = frozenset(policy.options[name]["depth"] for name in ("low", "mid"))
    c = min(max(cut, 0.0), 1.0)
    return float((SEVERITIES[severity][1] if loss == "ha" else 1.0) * (c - _spared(depths, loss)(c)))


@cache
def _spared(depths: frozenset[int], loss: str) -> Polynomial:
    """The share of cases that lie below a cut and that no action of a router harms."""
    share, spared = 1.0 if loss == "ha" else 0.6, Polynomial([1.0])
    for depth in depths:
        spared = spared * Polynomial([1.0 - share * 0.2, -share * RISING[depth]])
    return spared.integ()


def grid_outcome(family: str, asked: Promise, *, n: int, severity: str, repetitions: int, kind: str) -> Outcome:
    """What ``certify_designs`` deploys ('chains'), or a naive choice ('naive'); the worst risk counts.

    One alpha for all risks. Only the archive is left out: evidence is drawn, the search and its choice are the real.
    """
    rng = np.random.default_rng(1000)
    risks, kept = np.full(repetitions, np.nan), np.zeros(repetitions)
    for k in range(repetitions):
        found = _chosen(grid_variants(rng, n, severity), asked, family, kind)
        if found is not None:
            policy, cut = found
            risks[k] = max(grid_risk(policy, cut, severity, loss) for loss in asked.losses)
            kept[k] = min(max(cut, 0.0), 1.0)
    return _outcome(risks, kept, asked.alphas[0])


def _chosen(grid: Sequence[DesignEvidence], asked: Promise, family: str, kind: str) -> tuple[Policy, float] | None:
    found = best_certified(grid, asked, kind) if family == "chains" else _greedy(grid, asked)
    return None if found is None else (found[0].policy, found[1])


def _greedy(grid: Sequence[DesignEvidence], asked: Promise) -> tuple[DesignEvidence, float] | None:
    """The naive alternative: the greatest gain among all whose *empirical* risks are at most alpha."""
    found = []
    for one in grid:
        tables = [loss_table(one.evidence, asked, name) for name in asked.losses]
        cuts = tables[0].settings
        safe = np.all([table.risks <= alpha for table, alpha in zip(tables, asked.alphas, strict=True)], axis=0)
        found += [(gain, one, cut) for gain, cut in zip(one.gains(cuts)[safe], cuts[safe], strict=True)]
    best = max(found, key=lambda at: at[0], default=None)
    return None if best is None else (best[1], float(best[2]))


def _outcome(risks: Floats, kept: Floats, alpha: float) -> Outcome:
    """NaN is the risk of a repetition that certified nothing; what is deployed then harms nobody."""
    paid = np.nan_to_num(risks, nan=0.0)
    error = float(paid.std(ddof=1) / np.sqrt(len(paid)))
    broken, refused = float((paid > alpha + 1e-9).mean()), float(np.isnan(risks).mean())
    return Outcome(float(paid.mean()), error, broken, float(kept.mean()), len(paid), refused)
