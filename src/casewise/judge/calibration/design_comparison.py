"""Compare designs: each is fitted and scored by cross-fitting over patients, and at most one is adopted.

A design is adopted if its gain passes a test that accounts for all compared designs (:func:`chance_of_best`), more
cases are helped than hurt, and the shares of patients and of cases that lose more than a point are within the limit.
Otherwise the next best that passes is taken, or M0. The gain that is reported comes from nested cross-fitting: for
each fold of patients the whole comparison is repeated without them, and its choice is scored on them. M0 is kept unless
that gain is above 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from casewise.archive.store import Archive
from casewise.core.errors import BadInput, TooFewCases
from casewise.core.records import SOURCE, Controller
from casewise.core.text import UNIT, p_text, pluralize
from casewise.judge.calibration import adoption, quality
from casewise.judge.calibration.adoption import ALLOWED_HURT, CHANCE, HurtShare
from casewise.judge.calibration.cleaning import SUFFIX, CleanupGains, cleaned
from casewise.judge.calibration.designs import (
    FITTED,
    Deployed,
    Design,
    Known,
    Progress,
    answer,
    designs_for,
    fold_numbers,
    gather,
)
from casewise.judge.certificates.risk_control import TOGETHER, patients_needed
from casewise.judge.controllers.choose import candidate_signals
from casewise.judge.decide import Setting, setting_of


@dataclass(frozen=True)
class DesignRow:
    """One line of the table: a design, cross-fitted."""

    design: str
    cases: int
    clusters: int
    gain: float
    low: float  # one-sided, over patients
    high: float
    helped: int
    hurt: int
    hurt_by_a_point: int
    worst: float
    unchanged: int
    captured: float | None  # share of what the best candidate of each case would gain
    p: float  # chance that the best of all compared designs gains as surely, were none of them to gain
    harm: Mapping[str, Any]  # HurtShare
    fails: tuple[str, ...]  # conditions of adoption that it fails; empty if it passes

    def sentence(self) -> str:
        """Return the line as text."""
        share = "" if self.captured is None else f", {self.captured:.0%} of the best possible"
        return (
            f"{self.design:22s} {self.gain:+.4f} [{self.low:+.4f}, {self.high:+.4f}]  {self.helped} : {self.hurt}, "
            f"{self.hurt_by_a_point} by more than a point, worst {self.worst:+.3f}, {p_text(self.p)}{share}"
        )


@dataclass(frozen=True)
class Nested:
    """The gain of the whole procedure on patients that took no part in fitting or choosing."""

    gain: float
    patients: int
    choices: Mapping[str, int]  # how many folds chose each design

    def sentence(self) -> str:
        """Say the estimate in words."""
        picked = ", ".join(f"{name} in {times}" for name, times in self.choices.items())
        return (
            f"expected gain {self.gain:+.4f} (estimated from {self.patients} {UNIT[1]}, each scored by a choice "
            f"and a fit without it; chosen without it: {picked} of {sum(self.choices.values())} folds; "
            f"{adoption.SMALL}); {adoption.NO_INTERVAL}"
        )


@dataclass(frozen=True)
class DesignComparison:
    """All designs on the same cases, and the one that is taken."""

    rows: tuple[DesignRow, ...]
    chosen: str
    why: str
    allowed_hurt: float
    nested: Nested | None = None  # None with fewer than four patients
    deployed: Mapping[str, tuple[Deployed, ...]] = field(default_factory=dict, repr=False)

    def row(self, name: str) -> DesignRow:
        """The line of one design."""
        return next(row for row in self.rows if row.design == name)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, without the single cases."""
        plain = asdict(replace(self, deployed={}))
        del plain["deployed"]
        return plain


OnCompared = Callable[[Mapping[str, Sequence[Deployed]]], None]
"""Called with what every compared design deploys, by design."""


class Fits:
    """Designs fitted on sets of folds of patients; each fit is made once."""

    def __init__(self, known: Sequence[Known], setting: Setting, designs: Mapping[str, Design]) -> None:
        self.known, self.setting, self.designs = known, setting, designs
        self.fold = fold_numbers([one.cluster for one in known])
        self.folds = range(int(self.fold.max()) + 1)
        self._made: dict[tuple[str, frozenset[int]], Controller] = {}

    def controller(self, name: str, out: frozenset[int]) -> Controller:
        """Return the design, fitted on the cases of all folds but those ``out``."""
        key = name, out
        if key not in self._made:
            inside = [one for one, fold in zip(self.known, self.fold, strict=True) if int(fold) not in out]
            self._made[key] = self.designs[name](inside, self.setting)
        return self._made[key]

    def scored(self, name: str, fold: int, out: frozenset[int] = frozenset()) -> list[Deployed]:
        """The cases of a fold by the design that was fitted without it and without the folds ``out``."""
        controller = self.controller(name, out | {fold})
        return [answer(self.known[i], controller) for i in np.flatnonzero(self.fold == fold).tolist()]

    def cross_fitted(self, name: str, out: frozenset[int] = frozenset()) -> tuple[Deployed, ...]:
        """Every case outside the folds ``out`` by a controller that was fitted without its patient."""
        found = {one.case_id: one for k in self.folds if k not in out for one in self.scored(name, k, out)}
        return tuple(found[one.case_id] for one in self.known if one.case_id in found)


def compare_designs(
    known: Sequence[Known], setting: Setting, designs: Mapping[str, Design] | None = None, *,
    allowed_hurt: float = ALLOWED_HURT, nested: bool = True, progress: Progress | None = None,
) -> DesignComparison:  # fmt: skip
    """Score every design by cross-fitting, and take the best one that passes; M0 if none does.

    Args:
        known: The labelled cases (:func:`casewise.judge.calibration.designs.gather`).
        setting: Settings that all designs share.
        designs: Designs by name; all that suit the setting by default.
        allowed_hurt: Share of patients, and of cases, that may lose more than a point.
        nested: Estimate the gain of the choice by repeating it inside every fold.
        progress: Called with the progress.

    Returns:
        The table, the chosen design with the reason, and the nested estimate.
    """
    designs = designs_for(known, setting, allowed_hurt=allowed_hurt) if designs is None else designs
    fits = Fits(known, setting, designs)
    deployed = {}
    for done, name in enumerate(designs, start=1):
        deployed[name] = fits.cross_fitted(name)
        if progress is not None:
            progress("compare", done, len(designs))
    best = float(np.mean([max(one.metric.values()) - one.source for one in known]))
    rows = _rows(deployed, best, allowed_hurt)
    chosen = _best(rows)
    estimate = nested_gains(fits, allowed_hurt, progress) if nested and len(fits.folds) > 3 else None
    why = _why(rows, chosen, allowed_hurt)
    if estimate is not None and estimate.gain <= 0 and chosen != "m0":
        why = f"{chosen} passes every test, but the choice without each {UNIT[0]} gains nothing ({estimate.gain:+.4f})"
        chosen = "m0"
    return DesignComparison(rows, chosen, why, allowed_hurt, estimate, deployed)


def nested_gains(fits: Fits, allowed_hurt: float, progress: Progress | None = None) -> Nested:
    """The gain of choosing and fitting, on patients that took no part in either.

    For each fold the comparison is repeated without it, tests and limits included; the chosen design is fitted without
    the fold and scored on it. A fold whose comparison keeps M0 counts with a gain of 0. Without the test
    inside, the estimate would be as large as that of the winner: in simulations 3 times the truth for small gains.
    """
    gains: dict[str, Deployed] = {}
    choices: Counter[str] = Counter()
    every = len({one.cluster for one in fits.known})
    for fold in fits.folds:
        out = frozenset({fold})
        inner = {name: fits.cross_fitted(name, out) for name in fits.designs}
        patients = len({one.cluster for one in inner["m0"]})
        # as many hurt patients as with all, and a p that so few can reach; otherwise a design at a limit passes
        # only in the folds without the patients that it hurts, and the estimate is too low
        hurt = allowed_hurt * every / patients
        name = _best(_rows(inner, 0.0, hurt, max(CHANCE, 2.0**-patients)))
        choices[name] += 1
        gains |= {one.case_id: one for one in fits.scored(name, fold)}
        if progress is not None:
            progress("check the choice", fold + 1, len(fits.folds))
    ordered = [gains[one.case_id] for one in fits.known]
    mean = float(np.mean([one.gain for one in ordered]))
    return Nested(mean, every, dict(choices.most_common()))


def _best(rows: Sequence[DesignRow]) -> str:
    """Return the design with the largest lower bound of gain among those that pass; M0 where none does.

    The average of the tuned prediction and M0's is the careful use of learned weights. If it passes, it is taken
    before bolder designs; a design whose parameters were fitted to these patients is taken last (decision 0020).
    """
    passing = [row for row in rows if not row.fails]
    careful = [row for row in passing if row.design.removesuffix(SUFFIX).endswith(CAREFUL)]
    plain = [row for row in passing if row.design.removesuffix(SUFFIX) not in FITTED]
    return max(careful or plain or passing, key=lambda row: row.low, default=rows[0]).design


def _why(rows: Sequence[DesignRow], chosen: str, allowed_hurt: float) -> str:
    row = next(row for row in rows if row.design == chosen)
    if not row.fails:
        harm = HurtShare(**row.harm)
        better = [one for one in rows if one.low > row.low]
        passed = "".join(f". {one.design} would gain more, but {one.fails[0]}" for one in better[:1] if one.fails)
        bolder = [one for one in better if not one.fails]
        if bolder:
            most = max(bolder, key=lambda one: one.low)
            safer = (
                "the average with the original model"
                if row.design.removesuffix(SUFFIX).endswith(CAREFUL)
                else row.design
            )
            passed += (
                f". {most.design} passes too and gained more on these {UNIT[1]} ({most.gain:+.4f}); {safer} is taken "
                "as the safer one"
            )
        largest = "" if bolder else " and has the largest lower bound of gain of those that pass"
        return (
            f"it passes every test{largest} (lower bound {row.low:+.4f}, which does not allow for the choice; "
            f"{p_text(row.p)} among {pluralize(len(rows) - 1, 'design')}): {harm.sentence()}{passed}"
        )
    patients = row.clusters
    if patients < adoption.patients_for_chance(CHANCE):
        return (
            f"{patients} {UNIT[1]} cannot show a gain: their smallest possible p is {2.0**-patients:.3f}, and "
            f"{CHANCE:g} is needed; label {adoption.patients_for_chance(CHANCE)} or more{_at_more_harm(rows)}"
        )
    likely = sorted((one for one in rows if one.design != "m0"), key=lambda one: -one.low)[:3]
    said = [f"{one.design}: {' and '.join(one.fails)}" for one in likely]
    return (
        f"no design passes (p at most {CHANCE:g} among all compared, more helped than hurt, at most {allowed_hurt:.0%} "
        f"hurt by more than a point): {'; '.join(said)}{_at_more_harm(rows)}"
    )


def _at_more_harm(rows: Sequence[DesignRow]) -> str:
    """Say with which smallest ``allowed_hurt`` a design would be adopted, and which one."""
    shares = {
        row.design: max(row.hurt_by_a_point / row.cases, row.harm["hurt"] / row.harm["patients"])
        for row in rows
        if len(row.fails) == 1 and row.fails[0].startswith(HARM)
    }
    if not shares:
        return ""
    share = math.ceil(100 * min(shares.values()) - 1e-9) / 100
    name = _best([replace(row, fails=()) for row in rows if shares.get(row.design, 1) <= share])
    best = next(row for row in rows if row.design == name)
    cost = f"and costs {best.hurt_by_a_point} of {best.cases} more than a point: --set allowed-hurt={share:g} takes it"
    return f"; {best.design} gains {best.gain:+.4f} (lower bound {best.low:+.4f}) {cost}"


HARM = "too many are hurt"
CAREFUL = "/average"  # end of the name of a design that averages a learned prediction with M0's


def _rows(
    deployed: Mapping[str, Sequence[Deployed]], oracle: float, allowed_hurt: float, chance: float = CHANCE
) -> tuple[DesignRow, ...]:
    """One line for each design; ``oracle`` is the mean gain of the best candidate of every case."""
    clusters = [one.cluster for one in next(iter(deployed.values()))]
    gains = {name: np.array([one.gain for one in found]) for name, found in deployed.items()}
    moving = [name for name in gains if name != "m0"]
    found = adoption.chance_of_best(np.stack([gains[name] for name in moving], axis=1), clusters) if moving else ()
    p = dict.fromkeys(gains, 1.0) | dict(zip(moving, map(float, found), strict=True))
    return tuple(_row(name, gain, clusters, p[name], oracle, allowed_hurt, chance) for name, gain in gains.items())


def _row(
    name: str, gain: Any, clusters: Sequence[str], p: float, oracle: float, allowed_hurt: float, chance: float
) -> DesignRow:
    mean, low, high = adoption.mean_low(gain, clusters)
    harm = adoption.hurt_share(gain, clusters, limit=allowed_hurt)
    helped, hurt = int((gain > 0).sum()), int((gain < 0).sum())
    fails = []
    if name == "m0":
        fails.append("it changes nothing")
    elif not gain.any():
        fails.append("it keeps M0 for every case")
    else:
        if low <= 0:
            fails.append(f"its gain may be 0 or less (lower bound {low:+.4f} over {harm.patients} {UNIT[1]})")
        if p > chance + 1e-12:
            fails.append(f"its gain may be chance among all compared designs (p {p:.3f}, limit {chance:g})")
        if helped <= hurt:
            fails.append(f"it helps {helped} cases and hurts {hurt}")
        if not harm.within:
            fails.append(f"{HARM} ({harm.excess()})")
    return DesignRow(
        design=name, cases=len(gain), clusters=harm.patients, gain=mean, low=low, high=high, helped=helped, hurt=hurt,
        hurt_by_a_point=harm.cases_hurt, worst=float(gain.min()), unchanged=int((gain == 0).sum()),
        captured=mean / oracle if oracle > 0 else None, p=p, harm=asdict(harm), fails=tuple(fails),
    )  # fmt: skip


def fitted_choice(
    archive: Archive, design: str, *, consensus: str | None = None, ladders: Sequence[str] = (),
    fixed: Sequence[str] = (), allowed_hurt: float = ALLOWED_HURT, flag_below: float | None = None, at: float = 0.9,
    progress: Progress | None = None, on_compared: OnCompared | None = None,
) -> tuple[str, dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Fit a design, or compare all of them (``default``), on the labelled cases of an archive.

    All figures come from cases whose patient took no part in fitting.

    Args:
        archive: The calibration cases, with labels.
        design: The name of a design, or "default".
        consensus: The candidate that was made of the others, where its name does not say so.
        ladders: Named ladders that are read together.
        fixed: Candidates that are compared as separate designs, such as "tuned/average".
        allowed_hurt: Share of patients, and of cases, that may lose more than a point.
        flag_below: Flag cases whose metric may be below this.
        at: Level of the lower bound behind flags.
        progress: Called with the progress.
        on_compared: Called with the masks that every design deploys for cases that it was not fitted on.

    Returns:
        The name of the controller, its options, and the results of the comparison.

    Raises:
        TooFewCases: There are too few labelled patients.
    """
    setting = setting_of(archive, consensus=consensus, ladders=ladders)
    known = gather(archive, setting, progress)
    every = designs_for(known, setting, allowed_hurt=allowed_hurt, fixed=named_rungs(archive, setting, fixed))
    gains = CleanupGains(archive, tuple(ladders))
    if design == "default" and gains.labels:
        after = ["m0", "consensus", *named_rungs(archive, setting, fixed)]
        every |= {f"{name}{SUFFIX}": cleaned(every[name], gains) for name in after}
    if design != "default" and design not in every:
        raise BadInput(f"policy {design!r} cannot be calibrated; designs that can be: default, {', '.join(every)}")
    asked = every if design == "default" else {"m0": every["m0"], design: every[design]}
    compared = compare_designs(known, setting, asked, allowed_hurt=allowed_hurt, progress=progress)
    if on_compared is not None:
        on_compared(compared.deployed)
    name = compared.chosen if design == "default" else design
    controller = every[name](known, setting)
    plain: Any = getattr(controller, "controller", controller)
    options = {} if plain.name == "m0" else asdict(plain)
    options.pop("rule", None)
    options["cleanup"] = getattr(controller, "cleanup", "")
    made = [answer(one, controller) for one in known]
    changed = sum(one.gated or one.state != str(SOURCE) or bool(one.cleanup) for one in made)
    deploys = (
        f"deploys {name}: it changes {changed} of these {len(known)} cases" if changed else "keeps M0 for every case"
    )
    found: dict[str, Any] = {
        "cases": len(archive.ids),
        "labelled": len(known),
        "clusters": len({one.cluster for one in known}),
        "comparison": compared.as_dict(),
        "deploys": f"this policy {deploys}",
        "signals": _signal_report(known),
        "retained": _retained(compared, name),
        "concerns": _concerns(compared, name, changed),
        "out_of_fold": out_of_fold(compared.deployed[name]),
    }
    if flag_below is not None:
        deployed = [(one.signals, one.metric, one.cluster) for one in compared.deployed[name]]
        try:
            fit = quality.quality_of(deployed, level=at)
            options["flag"] = quality.flag_options(fit, flag_below, setting)
            found["quality"] = quality.flag_report(deployed, fit, flag_below)
            found["concerns"] += quality.flag_concerns(fit)
        except TooFewCases as error:
            found["concerns"].append(f"no case is flagged: {error}")
    return controller.name, options, found


def out_of_fold(deployed: Sequence[Deployed]) -> list[dict[str, Any]]:
    """Return the masks that a design deploys for cases that it was not fitted on, as rows."""
    return [{**asdict(one), "case": one.case_id, "patient": one.cluster} for one in deployed]


def named_rungs(archive: Archive, setting: Setting, names: Sequence[str]) -> dict[str, str]:
    """The state of each named candidate: "tuned/average" (ladder and rung), a rung's own name, or a state."""
    found: dict[str, str] = {}
    for ladder in setting.ladders or ("",):
        view = archive.ladder(ladder) if ladder else archive.only_ladder()
        rungs = next(iter(view.entries.values())).rungs
        for step, rung in enumerate(rungs, start=1):
            state = f"{ladder}:{step}" if ladder else str(step)
            found |= {state: state, rung: state, f"{view.ladder_name}/{rung}".lstrip("/"): state}
    lost = [name for name in names if name not in found]
    if lost:
        raise BadInput(f"there is no candidate {lost[0]!r}; the candidates are {', '.join(found)}")
    return {name: found[name] for name in names}


def _signal_report(known: Sequence[Known]) -> dict[str, Any]:
    """Return the rank correlation of M0's agreement with M0's metric on these cases."""
    own = [candidate_signals(one.seen)[SOURCE].get("agreement") for one in known]
    pairs = [(a, one.source, one.cluster) for a, one in zip(own, known, strict=True) if a is not None]
    rho, p = quality.rank_correlation([a for a, _, _ in pairs], [m for _, m, _ in pairs], [c for _, _, c in pairs])
    return {"agreement": {"rho": rho if np.isfinite(rho) else None, "p": p, "cases": len(pairs)}}


def _retained(compared: DesignComparison, name: str) -> dict[str, Any]:
    """Count the cases that a design helps and hurts; ``check_go`` reads the result."""
    row = compared.row(name)
    go = row.helped > row.hurt if row.helped + row.hurt else None
    return {"helped": row.helped, "hurt": row.hurt, "unchanged": row.unchanged, "go": go}


def _concerns(compared: DesignComparison, name: str, changed: int) -> list[str]:
    """Return the concerns about a design that changes so many of the calibration cases."""
    row = compared.row(name)
    if name == "m0":
        return [f"M0 is deployed for every case: {compared.why}"]
    if not changed:
        return [
            f"{name} keeps M0 for every case: fitted on all cases it found no candidate that surely gains; the "
            f"gain above comes from other fits, each without one {UNIT[0]}"
        ]
    if _retained(compared, name)["go"] is False:
        return [
            f"NO-GO: {row.helped} calibration cases are helped by {name} and {row.hurt} are hurt (lower bound "
            f"{row.low:+.4f} of gain over {row.clusters} {UNIT[1]})"
        ]
    return [f"{name} would not be adopted by the default: {'; '.join(row.fails)}"] if row.fails else []


def choice_sentences(found: Mapping[str, Any]) -> list[str]:
    """Return the table of designs and the choice, as lines for a terminal."""
    compared = found["comparison"]
    lines = [
        "each design, fitted without the patient that it is scored on: gain over M0 [bounds by Student's "
        "t, which do not allow for the choice], helped : hurt",
        "(a point is 0.01; p: probability that the best design gains as clearly by chance, if gains and losses "
        "of equal size are equally likely; if losses are rare and large, designs without gain pass "
        "more often; the best possible takes the best recorded candidate of every case)",
    ]
    lines += [f"  {DesignRow(**row).sentence()}" for row in compared["rows"]]
    if len(compared["rows"]) > 2:
        lines.append(f"taken: {compared['chosen']} ({compared['why']})")
    if compared["nested"] is not None and compared["chosen"] != "m0":
        nested = Nested(**compared["nested"])
        lines += [nested.sentence(), adoption.unseen_sentence(nested.patients)]
    lines.append(found["deploys"])
    if len(compared["rows"]) > 2 and compared["chosen"] != "m0":
        lines.append(
            f"nothing is promised: these {found['clusters']} {UNIT[1]} chose the design. A risk of at most 0.1 can be "
            f"promised with {patients_needed(0.1)} others (casewise certify OTHERS), or with "
            f"{patients_needed(0.1, delta=0.1, binary=False, designs=TOGETHER, halved=True)} in all that choose and "
            "certify (certify --policy default --method ltt)"
        )
    signal = found["signals"]["agreement"]
    if signal["rho"] is not None:
        lines.append(
            f"M0's agreement with the candidates has rank correlation {signal['rho']:.2f} with its metric "
            f"({p_text(signal['p'])}, {signal['cases']} cases)"
        )
    return [*lines, *quality.flag_sentences(found)]
