"""Plans: criteria that are fixed before the new masks are opened (``casewise compare --plan plan.toml``).

The file has the three parts of a predetermined change control plan (FDA guidance, December 2024): the description of
the modifications, the modification protocol and the impact assessment. :data:`TEMPLATE` is a commented example.

A plan is sealed before the new masks are opened: its sha256 and the date go into a hash-chained log beside it
(``plan.log.jsonl``). A plan that was changed or sealed later is still used, and :attr:`Seal.notes` says so.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from casewise.core.chain import Chain
from casewise.core.durable import json_sha256, text_sha256
from casewise.core.errors import BadInput
from casewise.core.formats import read_toml
from casewise.data.pairs import Pair
from casewise.judge.certificates.risk_control import clopper_pearson_upper, hoeffding_bentkus, ltt_cases
from casewise.measure.measures import Measure, declared_measures, scan_of
from casewise.study.acceptance import CONFIDENCE, FEWEST, QUANTITIES, Acceptance, Criterion, acceptance_of

TO_BEGIN = "casewise compare --new-plan writes one"
POWER = 0.8
MOST_PATIENTS = 20_000
SEALED, OPENED, JUDGED = "plan-sealed", "new-opened", "judged"
ADDED = " (added because a mean does not show rare large losses; set max_harmed_share there to change it)"

TEMPLATE = Path(__file__).with_name("plan_template.toml").read_text(encoding="utf-8")
"""A commented plan, as ``casewise compare --new-plan`` writes it."""

_PARTS: dict[str, tuple[str, ...] | None] = {
    "description": ("change", "old_version", "new_version", "written_by"),
    "protocol": ("confidence", "patients", "scans", "subgroups", "criteria", "data"),
    "impact": ("benefits", "risks", "mitigation"),
    "measures": None,
}


@dataclass(frozen=True)
class ChangePlan:
    """A plan that was read and checked."""

    path: Path
    sha256: str
    acceptance: Acceptance
    patients: int | None = None
    scans: int = 1
    subgroups: tuple[str, ...] = ()
    measures: tuple[Measure, ...] = ()
    measure_criteria: Mapping[str, Acceptance] = field(default_factory=dict)  # criteria by the name of the measure
    data: Mapping[str, str] = field(default_factory=dict)  # sha256 of old, new, labels
    description: Mapping[str, str] = field(default_factory=dict)
    impact: Mapping[str, str] = field(default_factory=dict)

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """Every criterion, those on measures too."""
        return (*self.acceptance.criteria, *(one for each in self.measure_criteria.values() for one in each.criteria))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "file": self.path.name, "sha256": self.sha256, "description": dict(self.description),
            "impact": dict(self.impact), "confidence": self.acceptance.confidence, "patients": self.patients,
            "subgroups": list(self.subgroups), "measures": [one.as_dict() for one in self.measures],
            "data": dict(self.data), "criteria": [vars(one) for one in self.criteria],
        }  # fmt: skip


def read_plan(path: Path) -> ChangePlan:
    """Read and check a plan.

    Args:
        path: A TOML file.

    Returns:
        The plan.

    Raises:
        BadInput: If the file is not a plan; the message names the error and its place.
    """
    plain, text = read_toml(path, TO_BEGIN)
    try:
        return _plan(path, plain, text_sha256(text))
    except BadInput as error:
        raise BadInput(f"{path.name}: {error}") from None


def read_measures(path: Path) -> tuple[Measure, ...]:
    """Read ``measures.toml``: its ``[measures]`` table, or the whole file."""
    plain, _ = read_toml(path, TO_BEGIN)
    try:
        return declared_measures(plain.get("measures", plain))
    except BadInput as error:
        raise BadInput(f"{path.name}: {error}") from None


def _plan(path: Path, plain: Mapping[str, Any], sha256: str) -> ChangePlan:
    tables = {name: _table(name, plain.get(name, {})) for name in _PARTS}
    for name, keys in [("", tuple(_PARTS)), *_PARTS.items()]:
        unknown = [key for key in (tables[name] if name else plain) if keys is not None and key not in keys]
        if unknown:
            raise BadInput(f"{f'[{name}]' if name else 'a plan'} has no {unknown[0]!r}; it has {', '.join(keys or ())}")
    protocol = tables["protocol"]
    measures = declared_measures(tables["measures"])
    criteria = _table("protocol.criteria", protocol.get("criteria", {}))
    on_measures = _table("protocol.criteria.measures", criteria.pop("measures", {}))
    subgroups = _names("protocol.subgroups", protocol.get("subgroups", []))
    everywhere = {name: given for name, given in criteria.items() if name in QUANTITIES}
    groups = dict(_table("protocol.criteria.groups", criteria.get("groups", {})))
    for name in subgroups:
        groups[name] = {**everywhere, **_table(f"groups.{name}", groups.get(name, {}))}
    if groups:
        criteria["groups"] = groups
    given_confidence = protocol.get("confidence", CONFIDENCE)
    confidence = {"confidence": None if given_confidence == "observed" else given_confidence}
    if not criteria and not on_measures:
        raise BadInput(f"[protocol.criteria] has no criterion; name at least one of {', '.join(QUANTITIES)}")
    of_measures = {}
    for name, given in on_measures.items():
        if name not in {one.name for one in measures}:
            known = ", ".join(one.name for one in measures) or "none; declare it under [measures]"
            raise BadInput(f"criteria on the measure {name!r}, which the plan does not declare; declared: {known}")
        inner = _table(f"measures.{name}", given)
        allowed = [one for one, quantity in QUANTITIES.items() if quantity.of is None]
        wrong = next((key for key in inner if key not in allowed), None)
        if wrong is not None:
            raise BadInput(f"{wrong} is not a criterion on a measure; these are {', '.join(allowed)}")
        if "max_crossed_share" in inner and not next(one for one in measures if one.name == name).decisions:
            raise BadInput(f'max_crossed_share on {name} needs a decision: [measures.{name}] decision = "< 40"')
        of_measures[name] = acceptance_of({**confidence, **inner}, scope=f"measure {name}")
    if criteria:
        acceptance = acceptance_of({**confidence, **criteria})
    else:
        acceptance = Acceptance((), next(iter(of_measures.values())).confidence)
    wrong = next((one.name for one in acceptance.criteria if QUANTITIES[one.name].of is None), None)
    if wrong is not None:
        raise BadInput(f"{wrong} is a criterion on a measure; put it under [protocol.criteria.measures.NAME]")
    data = _texts("protocol.data", protocol.get("data", {}), ("old", "new", "labels"))
    wrong = next((name for name, value in data.items() if not re.fullmatch("[0-9a-f]{64}", value)), None)
    if wrong is not None:
        raise BadInput(f"protocol.data.{wrong} must be a sha256, 64 of 0-9 and a-f, got {data[wrong][:60]!r}")
    plan = ChangePlan(
        path, sha256, acceptance, _count("protocol.patients", protocol.get("patients")),
        _count("protocol.scans", protocol.get("scans")) or 1, subgroups, measures, of_measures, data,
        _texts("description", tables["description"]), _texts("impact", tables["impact"]),
    )  # fmt: skip
    _check_consistent(plan)
    return plan


def _table(name: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise BadInput(f"[{name}] must be a table, got {str(given)[:60]!r}")
    return dict(given)


def _names(name: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(one, str) and one for one in given):
        raise BadInput(f'{name} must be a list of names such as ["site B"], got {str(given)[:60]!r}')
    return tuple(given)


def _texts(name: str, given: Any, known: Iterable[str] | None = None) -> dict[str, str]:
    table = _table(name, given)
    for key, value in table.items():
        if known is not None and key not in known:
            raise BadInput(f"[{name}] has no {key!r}; it has {', '.join(known)}")
        if not isinstance(value, str):
            raise BadInput(f"{name}.{key} must be a text in quotation marks, got {str(value)[:60]}")
    return {key: value for key, value in table.items() if value}


def _count(name: str, given: Any) -> int | None:
    if given is None:
        return None
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= 10**6:
        raise BadInput(f"{name} must be a whole number of at least 1, got {str(given)[:60]!r}")
    return given


def _check_consistent(plan: ChangePlan) -> None:
    """Refuse criteria that contradict each other, or that the planned number of patients can never show."""
    by_scope: dict[str, dict[str, Criterion]] = {}
    for one in plan.criteria:
        held = by_scope.setdefault(one.scope, {})
        if one.name in held:
            raise BadInput(f"{one.name} on {one.scope} is given twice")
        held[one.name] = one
    for scope, held in by_scope.items():
        gain, still = held.get("min_mean_gain"), held.get("max_changed_share")
        if gain is not None and gain.limit >= 0 and still is not None and still.limit == still.margin == 0:
            raise BadInput(f"on {scope}, min_mean_gain asks for a gain and max_changed_share lets no case change")
        drop = held.get("max_mean_drop")
        if gain is not None and drop is not None and drop.highest < gain.highest:  # both bound the fall
            raise BadInput(
                f"on {scope}, max_mean_drop = {drop.limit:g} asks for a larger gain than min_mean_gain = "
                f"{gain.limit:g}; leave one of them out"
            )
    if plan.acceptance.confidence is None:
        return
    for one in plan.criteria:
        if QUANTITIES[one.name].is_share:
            fewest = ltt_cases(one.limit, 1 - plan.acceptance.confidence) if one.limit > 0 else MOST_PATIENTS
            if fewest >= MOST_PATIENTS:
                raise BadInput(f"no sample can show {one.name} <= {one.limit:g}; allow more, such as 0.05")
            if plan.patients is not None and plan.patients < fewest:
                raise BadInput(
                    f"{plan.patients} patients can never show {one.name} <= {one.limit:g} on {one.scope} at confidence "
                    f"{plan.acceptance.confidence:g}: {fewest} are needed, all without harm{ADDED * one.added}"
                )


def check_fits(plan: ChangePlan, pairs: Iterable[Pair], names: Mapping[int, str], *, labelled: bool) -> None:
    """Refuse a plan on a label, group or scan that there is not, before the new masks are opened.

    Args:
        plan: The plan.
        pairs: The files of the cases, with groups and scans.
        names: The names of the labels by number.
        labelled: Whether labels are given.

    Raises:
        BadInput: The message names the criterion or the measure, and what there is.
    """
    given = list(pairs)
    groups = sorted({pair.group for pair in given if pair.group is not None})
    known = {
        "label": (sorted(names.values()), "name them: --label-names 1=LV,2=MYO"),
        "group": (groups, "name them: --cases TABLE with the columns case and group"),
    }
    for one in plan.criteria:
        kind, _, which = one.scope.partition(" ")
        there, remedy = known.get("group" if kind == "each_group" else kind, ([which], ""))
        if (not there if kind == "each_group" else which not in there) and not (kind == "label" and which.isdecimal()):
            said = ", ".join(there) or f"none; {remedy}"
            raise BadInput(f"{plan.path.name}: {one.name} on {one.scope}, which no case has; there are: {said}")
        if not labelled and QUANTITIES[one.name].needs_label:
            raise BadInput(f"{plan.path.name}: {one.name} on {one.scope} needs labels; give them with -l LABELS")
    for each in plan.measures:
        scans = {pair.scan or scan_of(pair.id, each.scans) for pair in given}
        for scan in sorted(each.scans - scans):
            raise BadInput(
                f"{plan.path.name}: measure {each.name}: no case is a scan {scan}; end its name in _{scan}, or say so: "
                f"--cases TABLE with the columns case, cluster and scan"
            )


# How many patients


@dataclass(frozen=True)
class Needed:
    """Patients that one criterion needs."""

    criterion: str
    scope: str
    patients: int | None
    why: str = ""


def how_many(plan: ChangePlan, *, power: float = POWER) -> tuple[Needed, ...]:
    """Compute how many labelled patients each criterion needs to hold, together with all others, with this chance.

    Shares: exact binomial, with Clopper-Pearson's bound for one scan per patient and that of Hoeffding and Bentkus for
    several. Means: Student's t. The allowed chance to miss is divided by the number of criteria.

    Args:
        plan: A plan whose criteria have ``expected`` and, for means, ``sd``.
        power: The wanted chance that a version as good as expected is accepted.

    Returns:
        One row per criterion; ``patients`` is None where no number is enough or a guess is missing.
    """
    target = 1 - (1 - power) / len(plan.criteria)
    found = []
    for one in plan.criteria:
        patients, why = _needed(plan, one, target)
        found.append(Needed(one.name, one.scope, patients, why + ADDED * one.added))
    return tuple(found)


def _needed(plan: ChangePlan, criterion: Criterion, power: float) -> tuple[int | None, str]:
    """Return the number of patients that a criterion needs, or why there is no number."""
    name, limit = criterion.name, criterion.limit
    same = [one for one in plan.criteria if one.name == name and one.scope == "all"]
    guess = next((one for one in (criterion, *same) if one.expected is not None or one.sd is not None), criterion)
    expected = guess.expected or 0.0
    confidence = plan.acceptance.confidence
    if confidence is None:
        return plan.patients or 1, "observed values decide"
    if QUANTITIES[name].is_share:
        if expected >= limit:
            return None, f"the expected share {expected:g} is not below the limit {limit:g}"
        count = _share_patients(limit, expected, confidence, power, plan.scans)
    else:
        room = criterion.sign * (limit - expected)
        if room <= 0:
            return None, f"expected {expected:g} leaves no room to the limit {limit:g}"
        if guess.sd is None:
            return None, f"give sd, the spread of patients: {name} = {{limit = {limit:g}, sd = ...}}"
        effect, t = room / guess.sd, stats.t.ppf  # Student's one-sided bound must stay within the limit
        within = (n for n in _counts(FEWEST) if stats.nct.sf(t(confidence, n - 1), n - 1, effect * np.sqrt(n)) >= power)
        count = next(within, None)
    return count, "" if count else f"more than {MOST_PATIENTS:,}"


def _counts(first: int) -> Iterable[int]:
    """Every number up to 500, then larger steps."""
    n = first
    while n <= MOST_PATIENTS:
        yield n
        n += 1 if n < 500 else n // 100


def _most_harmed(n: int, limit: float, confidence: float, scans: int) -> int:
    """The most harmed patients of n with which the criterion still holds; -1 where it never does."""

    def fails(harmed: int) -> bool:
        if scans == 1:
            return clopper_pearson_upper(harmed, n, confidence) > limit
        return harmed / n >= limit or float(hoeffding_bentkus(harmed / n, n, limit)) > 1 - confidence

    return bisect_left(range(n + 1), True, key=fails) - 1


def _share_patients(limit: float, expected: float, confidence: float, power: float, scans: int) -> int | None:
    for n in _counts(1):
        most = _most_harmed(n, limit, confidence, scans)
        if most >= 0 and stats.binom.cdf(most, n, expected) >= power:
            return n
    return None


# The seal


@dataclass(frozen=True)
class Seal:
    """The time when a plan was sealed, and sentences to print before the verdict."""

    sha256: str
    time: str
    log: str  # name of the file
    lines: int
    tip: str  # last hash of the log
    new: str  # hash of the names and sizes of the new masks
    notes: tuple[str, ...] = ()
    compared_before: bool = False  # the new masks, before the plan was sealed


def log_of(plan: Path) -> Path:
    """The log of a plan: plan.log.jsonl beside plan.toml."""
    return plan.with_suffix(".log.jsonl")


def seal_plan(plan: ChangePlan, new: Sequence[Path | None], *, compared_before: bool = False) -> Seal:
    """Seal a plan before the new masks are opened; :func:`log_opened` follows when they are.

    Args:
        plan: The plan.
        new: The files with the new masks; only their names and sizes are read.
        compared_before: True if the output folder already has a comparison of these masks.

    Returns:
        The seal; its notes say whether the plan was changed or sealed after the masks were first opened.
    """
    chain = Chain(log_of(plan.path))
    lines = chain.lines()
    notes = [f"the log of the plan was edited ({problem})" for problem in chain.problems[:1]]
    files = [path for path in new if path is not None]  # the files are not opened
    listing = json_sha256(sorted((path.name, path.stat().st_size if path.is_file() else -1) for path in files))
    first_look = next(
        (at for at, line in enumerate(lines) if line.get("event") == OPENED and line.get("new") == listing), None
    )
    sealed = next(
        (at for at, line in enumerate(lines) if line.get("event") == SEALED and line.get("sha256") == plan.sha256), None
    )
    when = str((lines[sealed] if sealed is not None else chain.append(SEALED, {"sha256": plan.sha256}))["time"])
    late = compared_before if first_look is None else bool(lines[first_look].get("compared_before"))
    if first_look is not None and (sealed is None or sealed > first_look):
        opened = str(lines[first_look].get("time"))
        notes.append(f"the plan was changed after the new masks were first opened ({opened}); sealed again {when}")
    if late:
        notes.append(f"the new masks were compared before the plan was sealed ({when})")
    return Seal(plan.sha256, when, chain.path.name, *chain.tip, listing, tuple(notes), late)


def log_opened(plan: ChangePlan, seal: Seal) -> Seal:
    """Write down that the new masks are opened now; a run that stops at a wrong option before has not seen them."""
    chain = Chain(log_of(plan.path))
    chain.append(OPENED, {"new": seal.new, "sha256": plan.sha256, "compared_before": seal.compared_before})
    lines, tip = chain.tip
    return replace(seal, lines=lines, tip=tip)


def log_verdict(plan: ChangePlan, verdict: str, hashes: Mapping[str, str]) -> None:
    """Write the verdict and the hashes of the compared masks into the log of the plan."""
    Chain(log_of(plan.path)).append(JUDGED, {"sha256": plan.sha256, "verdict": verdict, "data": dict(hashes)})
