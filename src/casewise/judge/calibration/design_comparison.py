"""Which design helps here: each is fitted and scored by cross-fitting over clusters, and one of them is taken."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from casewise.archive.store import Archive
from casewise.core.records import SOURCE
from casewise.judge.calibration.designs import (
    ALLOWED_HURT,
    Deployed,
    Design,
    Known,
    answer,
    designs_at,
    folds,
    gather,
    mean_low,
)
from casewise.judge.calibration.quality import (
    carries,
    flag_concerns,
    flag_options,
    flag_report,
    flag_sentences,
    quality_of,
)
from casewise.judge.controllers.choose import board
from casewise.judge.deciding import Setting, setting_of
from casewise.judge.outcomes import POINT


@dataclass(frozen=True)
class DesignRow:
    """One line of the table: a design, cross-fitted."""

    design: str
    cases: int
    clusters: int
    gain: float
    low: float  # one-sided, over clusters
    high: float
    helped: int
    hurt: int
    hurt_by_a_point: int
    worst: float
    unchanged: int
    captured: float | None  # share of what the best candidate of each case would gain

    @property
    def helps(self) -> bool:
        """Whether more cases are helped than hurt: what ``check_go`` asks for at certify and predict."""
        return self.helped > self.hurt

    def sentence(self) -> str:
        """For a person."""
        share = "" if self.captured is None else f", {self.captured:.0%} of the best possible"
        return (
            f"{self.design:22s} {self.gain:+.4f} [{self.low:+.4f}, {self.high:+.4f}]  {self.helped} : {self.hurt}, "
            f"{self.hurt_by_a_point} by more than a point, worst {self.worst:+.3f}{share}"
        )


@dataclass(frozen=True)
class Comparison:
    """All designs on the same cases, and the one that is taken."""

    rows: tuple[DesignRow, ...]
    chosen: str
    why: str
    allowed_hurt: float
    deployed: Mapping[str, tuple[Deployed, ...]] = field(default_factory=dict, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, without the single cases."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "chosen": self.chosen,
            "why": self.why,
            "allowed_hurt": self.allowed_hurt,
        }


def cross_fitted(known: Sequence[Known], setting: Setting, design: Design) -> tuple[Deployed, ...]:
    """Every case by a controller that was fitted without its cluster."""
    found: dict[str, Deployed] = {}
    for inside, out in folds([one.cluster for one in known]):
        controller = design([known[i] for i in inside], setting)
        found |= {known[i].case_id: answer(known[i], controller) for i in out}
    return tuple(found[one.case_id] for one in known)


def compare_designs(
    known: Sequence[Known],
    setting: Setting,
    designs: Mapping[str, Design] | None = None,
    *,
    allowed_hurt: float = ALLOWED_HURT,
    level: float = 0.9,
) -> Comparison:
    """Score every design by cross-fitting; take the one with the largest lower bound of gain at the allowed harm.

    ``allowed_hurt`` is the share of cases that may lose more than a point. A design must help more cases than it hurts,
    or it would be a NO-GO. M0 where no such design has a lower bound above 0.
    """
    designs = designs_at(allowed_hurt) if designs is None else designs
    deployed = {name: cross_fitted(known, setting, design) for name, design in designs.items()}
    best = [max(one.metric.values()) - one.source for one in known]
    rows = tuple(_row(name, found, float(np.mean(best)), level) for name, found in deployed.items())
    fit = [row for row in rows if row.low > 0 and row.helps and row.hurt_by_a_point <= allowed_hurt * row.cases + 1e-9]
    if not fit:
        why = (
            f"no design surely gains (lower bound over clusters, level {level:g}), helps more cases than it hurts, and "
            f"costs at most {allowed_hurt:.0%} of them more than a point{_at_more_harm(rows)}"
        )
        return Comparison(rows, "m0", why, allowed_hurt, deployed)
    chosen = max(fit, key=lambda row: row.low)
    hurt = f"{chosen.hurt_by_a_point} of {chosen.cases} hurt by more than a point"
    why = f"the largest lower bound of gain, {chosen.low:+.4f}, with {hurt}"
    return Comparison(rows, chosen.design, why, allowed_hurt, deployed)


def _at_more_harm(rows: Sequence[DesignRow]) -> str:
    """Which design would be taken if more cases may be hurt: that is for a person to weigh."""
    sure = [row for row in rows if row.low > 0 and row.helps]
    if not sure:
        return ""
    best = max(sure, key=lambda row: row.low)
    share = math.ceil(100 * best.hurt_by_a_point / best.cases - 1e-9) / 100
    return (
        f"; {best.design} gains {best.gain:+.4f} (at least {best.low:+.4f}) and costs {best.hurt_by_a_point} of "
        f"{best.cases} more than a point: --allowed-hurt {share:g} would take it"
    )


def _row(name: str, found: Sequence[Deployed], oracle: float, level: float) -> DesignRow:
    gain = np.array([one.gain for one in found])
    mean, low, high = mean_low(gain, [one.cluster for one in found], level=level)
    return DesignRow(
        name,
        len(gain),
        len({one.cluster for one in found}),
        mean,
        low,
        high,
        int((gain > 0).sum()),
        int((gain < 0).sum()),
        int((gain < -POINT).sum()),
        float(gain.min()),
        int((gain == 0).sum()),
        mean / oracle if oracle > 0 else None,
    )


def fitted_choice(
    archive: Archive,
    design: str,
    *,
    consensus: str | None = None,
    ladders: Sequence[str] = (),
    allowed_hurt: float = ALLOWED_HURT,
    flag_below: float | None = None,
    at: float = 0.9,
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(design, options of its controller, what was found on the way); ``default`` is the design that compares best.

    Every figure in what was found comes from cases whose cluster had no part in fitting.
    """
    setting = setting_of(archive, consensus=consensus, ladders=ladders)
    known = gather(archive, setting)
    every = designs_at(allowed_hurt)
    asked = every if design == "default" else {"m0": every["m0"], design: every[design]}
    compared = compare_designs(known, setting, asked, allowed_hurt=allowed_hurt)
    name = compared.chosen if design == "default" else design
    controller = every[name](known, setting)
    options = {} if name == "m0" else asdict(controller)  # type: ignore[call-overload]
    options.pop("rule", None)
    found: dict[str, Any] = {
        "cases": len(archive.ids),
        "labelled": len(known),
        "clusters": len({one.cluster for one in known}),
        "comparison": compared.as_dict(),
        "signals": _signal_report(known),
        "retained": _retained(compared, name),
        "concerns": _concerns(compared, name),
    }
    if flag_below is not None:
        deployed = [(one.agreement, one.metric, one.cluster) for one in compared.deployed[name]]
        fit = quality_of(deployed, level=at)
        options["flag"] = flag_options(fit, flag_below, setting)
        found["quality"] = flag_report(deployed, fit, flag_below)
        found["concerns"] += flag_concerns(fit)
    return name, options, found


def _signal_report(known: Sequence[Known]) -> dict[str, Any]:
    """Does M0's agreement say how good M0 is, on these cases?"""
    own = [board(one.seen)[SOURCE].get("agreement") for one in known]
    pairs = [(a, one.source, one.cluster) for a, one in zip(own, known, strict=True) if a is not None]
    rho, p = carries([a for a, _, _ in pairs], [m for _, m, _ in pairs], [c for _, _, c in pairs])
    return {"agreement": {"rho": rho if np.isfinite(rho) else None, "p": p, "cases": len(pairs)}}


def _retained(compared: Comparison, name: str) -> dict[str, Any]:
    """Whether the cases that a design changes are helped more often than hurt: what ``check_go`` acts on."""
    row = next(row for row in compared.rows if row.design == name)
    go = row.helps if row.helped + row.hurt else None
    return {"helped": row.helped, "hurt": row.hurt, "unchanged": row.unchanged, "go": go}


def _concerns(compared: Comparison, name: str) -> list[str]:
    row = next(row for row in compared.rows if row.design == name)
    if name == "m0":
        return [f"M0 is deployed for every case: {compared.why}"]
    bound = f"lower bound {row.low:+.4f} over {row.clusters} clusters"
    if _retained(compared, name)["go"] is False:
        return [f"NO-GO: {row.helped} calibration cases are helped by {name} and {row.hurt} are hurt ({bound} of gain)"]
    if row.low <= 0:
        return [f"{name} does not surely gain here ({bound})"]
    return []


def choice_sentences(found: Mapping[str, Any]) -> list[str]:
    """The table of designs and what was taken, for a terminal."""
    compared = found["comparison"]
    lines = [
        "each design, fitted without the patient or sequence that it is scored on: gain over M0 [lower, upper bound], "
        "helped : hurt",
        "(a point is 0.01; the best possible takes the best recorded candidate of every case)",
    ]
    lines += [f"  {DesignRow(**row).sentence()}" for row in compared["rows"]]
    if len(compared["rows"]) > 2:
        lines.append(f"taken: {compared['chosen']} ({compared['why']})")
    signal = found["signals"]["agreement"]
    if signal["rho"] is not None:
        lines.append(
            f"M0's agreement with the candidates has rank correlation {signal['rho']:.2f} with its metric "
            f"(p {signal['p']:.3f}, {signal['cases']} cases)"
        )
    return [*lines, *flag_sentences(found)]
