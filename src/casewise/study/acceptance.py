"""The criteria of a plan: each is met, broken or undecided, and together they accept or reject the new masks.

As plain data, criteria look like this (``plan.toml`` has them under ``[protocol.criteria]``):

    {
      "confidence": 0.95,
      "max_mean_drop": 0.005,
      "max_harmed_share": {"limit": 0.10, "margin": 0.05},
      "each_label": {"max_mean_drop": 0.01},
      "labels": {"3": {"max_lost_share": 0.05}},
      "each_group": {"max_mean_drop": {"limit": 0.02, "expected": 0.0, "sd": 0.02}},
      "groups": {"site B": {"max_harmed_share": {"limit": 0.2, "margin": 0.05}}}
    }

Each patient has one value, the mean over the patient's cases. A criterion is met if the one-sided upper bound of the
mean over patients, at the confidence, is at most the limit. It is broken if the lower bound is above the limit, or if
the observed value is above the limit and there were enough patients to show the contrary. Otherwise it is undecided.
New masks are accepted if every criterion is met; because all of them must be met, their number needs no correction.
If the confidence is None, the observed values decide.

Student's t cannot see disasters that are too rare to be in the sample: where one case in forty loses half of its Dice,
the mean of 30 patients mostly looks perfect. So ``max_mean_drop`` is always tested together with a limit on the share
of harmed cases: the one of the same scope, else that for all cases, else :data:`COMPANION`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from casewise.core.errors import BadInput
from casewise.core.registry import Registry
from casewise.core.text import UNIT, pluralize
from casewise.judge.certificates.risk_control import ltt_cases, share_bound
from casewise.measure.changes import label_name
from casewise.measure.masks import Floats, Integers
from casewise.study.compared_cohort import GOOD, ComparedCohort

FEWEST = 10  # patients below which Student's t is not used for a mean difference
CONFIDENCE = 0.95
LARGEST_NUMBER = 1e9  # largest limit, margin or guess
COMPANION = (0.1, 0.05)
"""Limit and margin of the share of harmed cases that ``max_mean_drop`` is tested with where the file gives none."""
SKEW = 2.0  # factor on the observed skewness; see mean_bound
MET, BROKEN, UNDECIDED = "met", "broken", "undecided"
_SCOPES = ("each_label", "labels", "each_group", "groups", "each_size")


Columns = Mapping[str, Floats]
"""Numbers of some cases, or of one of their labels: the metric (old, new), ha, changed, drift, hole, lost."""


@dataclass(frozen=True)
class Quantity:
    """A number of each case or of one of its labels, which a criterion bounds; NaN if it is undefined."""

    says: str
    of: Callable[[Columns, float], Floats] | None  # None for a measure; study/clinical.py computes its values
    margin: float = 0.0
    is_share: bool = True  # in [0, 1], so bounds are exact at any number of patients
    needs_label: bool = True


def _fall(columns: Columns, _: float = 0.0) -> Floats:
    return np.asarray(np.round(columns["old"] - columns["new"], 12))


def _flags(columns: Columns, flags: NDArray[np.bool_]) -> Floats:
    """1 or 0; NaN where a metric is undefined."""
    return np.where(np.isnan(columns["old"] + columns["new"]), np.nan, flags.astype(float))


def _exceeds(says: str, name: str, margin: float = 0.0) -> Quantity:
    """A share of cases beyond the margin, from the masks alone."""
    return Quantity(says, lambda columns, limit: (columns[name] > limit).astype(float), margin, needs_label=False)


QUANTITIES: Registry[Quantity] = Registry(
    "criterion",
    {
        "max_mean_drop": Quantity("mean fall of the metric", _fall, is_share=False),
        "min_mean_gain": Quantity("mean gain of the metric", _fall, is_share=False),
        "max_harmed_share": Quantity(
            "share of cases whose metric falls by more than the margin",
            lambda columns, margin: _flags(columns, _fall(columns) > margin),
        ),
        "max_flipped_share": Quantity(
            "share of cases that were at or above the margin and are below it now",
            lambda columns, margin: _flags(columns, (columns["old"] >= margin) & (columns["new"] < margin)),
            GOOD,
        ),
        "max_ha": Quantity("mean share of the change in regions that became worse", lambda columns, _: columns["ha"]),
        "max_changed_share": _exceeds(
            "share of cases of which more than the margin of the foreground changed", "changed"
        ),
        "max_drifted_share": _exceeds(
            "share of cases in which a label's volume changed by more than the margin", "drift", 0.1
        ),
        "max_holed_share": _exceeds("share of cases with a new hole above the margin", "hole"),
        "max_lost_share": _exceeds("share of cases with a lost piece above the margin", "lost"),
        "max_error_rise": Quantity("mean rise of the error of the measure", None, is_share=False),
        "max_crossed_share": Quantity("share of patients whose decision was right and is wrong now", None),
    },
)
"""Criteria by the name that a plan uses."""


@dataclass(frozen=True)
class Criterion:
    """One criterion of a plan."""

    name: str
    limit: float  # the number in the plan
    margin: float
    scope: str = "all"  # all, each_label, each_group, each_size, "label 3", "group site B"
    expected: float | None = None  # what the author of a plan expects, and the spread between patients; these
    sd: float | None = None  # are used only to compute the number of patients
    added: bool = False  # the share of harmed cases that a mean is tested with

    @property
    def sign(self) -> int:
        """-1 for a gain, which is tested as a fall of at most ``-limit``."""
        return -1 if self.name == "min_mean_gain" else 1

    @property
    def highest(self) -> float:
        """The largest value that is allowed."""
        return self.sign * self.limit


@dataclass(frozen=True)
class Acceptance:
    """All criteria, and the confidence of each; None if the observed values decide."""

    criteria: tuple[Criterion, ...]
    confidence: float | None = CONFIDENCE


@dataclass(frozen=True)
class Check:
    """One criterion on one set of cases."""

    name: str
    scope: str
    says: str
    limit: float
    margin: float
    value: float | None  # observed, one value per patient
    bound: float | None  # upper bound at the confidence; None with too few patients
    cases: int
    patients: int
    undefined: int  # cases without a value
    verdict: str  # "met", "broken" or "undecided" (too few patients, or nothing to judge)
    reason: str  # one sentence
    needed: int | None = None  # patients that might decide it, where these cannot
    worst: tuple[str, ...] = ()  # cases (patients, for a measure) beyond the limit, the worst first
    added: bool = False  # not in the plan; see Criterion

    @property
    def holds(self) -> bool:
        """True if the criterion is met."""
        return self.verdict == MET

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "holds": self.holds}


def verdict_of(checks: Iterable[Check]) -> str:
    """The verdict on all criteria: "accepted", "rejected" (one is broken) or "undecided" (none is broken, not all met).

    Args:
        checks: The result of :func:`checks_of`.

    Returns:
        ``"accepted"``, ``"rejected"`` or ``"undecided"``.
    """
    found = {check.verdict for check in checks}
    return "rejected" if BROKEN in found else "undecided" if UNDECIDED in found else "accepted"


def acceptance_of(plain: Any, *, scope: str = "all") -> Acceptance:
    """Read criteria from plain data; unknown names and numbers that make no sense are refused.

    >>> acceptance_of({"max_ha": 0.2}).criteria[0].limit
    0.2
    >>> [criterion.name for criterion in acceptance_of({"max_mean_drop": 0.01}).criteria]
    ['max_mean_drop', 'max_harmed_share']
    """
    if not isinstance(plain, Mapping):
        raise BadInput(f"criteria must be a table such as {{'max_mean_drop': 0.005}}, got {type(plain).__name__}")
    confidence = plain.get("confidence", CONFIDENCE)
    if confidence is not None and not (is_number(confidence) and 0.5 <= confidence < 1):
        raise BadInput(f"confidence must be a number from 0.5 to below 1, or 'observed', got {confidence!r}")
    criteria = tuple(_criteria(plain, scope))
    if not criteria:
        raise BadInput(f"there is no criterion; name at least one of {', '.join(QUANTITIES)}")
    return Acceptance(criteria if confidence is None else (*criteria, *_companions(criteria)), confidence)


def _companions(criteria: Iterable[Criterion]) -> Iterator[Criterion]:
    """A limit on the harmed share for every scope that bounds a mean by Student's t and has no such limit."""
    given = {one.scope: (one.limit, one.margin) for one in criteria if one.name == "max_harmed_share"}
    usual = given.get("all", COMPANION)
    for one in criteria:
        if one.name in ("max_mean_drop", "min_mean_gain") and one.scope not in given:
            given[one.scope] = usual
            yield Criterion("max_harmed_share", *usual, one.scope, added=True)


def _criteria(plain: Mapping[str, Any], scope: str) -> Iterator[Criterion]:
    for name, given in plain.items():
        if name == "confidence":
            continue
        if name not in _SCOPES:
            yield _criterion(name, given, scope)
        elif not isinstance(given, Mapping):
            raise BadInput(f"{name} must have criteria by name, got {given!r}")
        elif name.startswith("each_"):
            yield from (_criterion(key, value, name) for key, value in given.items())
        else:
            word = name.removesuffix("s")
            for which, inner in given.items():
                if not isinstance(inner, Mapping):
                    raise BadInput(f"{name} {which!r} must have criteria by name, got {inner!r}")
                yield from (_criterion(key, value, f"{word} {which}") for key, value in inner.items())


def _criterion(name: str, given: Any, scope: str) -> Criterion:
    quantity = QUANTITIES[name]
    parts = dict(given) if isinstance(given, Mapping) else {"limit": given}
    known = {"limit", "margin", "expected", "sd"}
    if not {"limit"} <= set(parts) <= known or not all(is_number(value) for value in parts.values()):
        raise BadInput(f"{name} must be a number or {{limit = ..., margin = ...}}, got {str(given)[:80]}")
    if parts.get("sd", 1) <= 0:
        raise BadInput(f"{name}: sd, the spread of patients, must be above 0, got {parts['sd']}")
    limit, margin = float(parts["limit"]), float(parts.get("margin", quantity.margin))
    if quantity.is_share and not 0 <= limit < 1:  # every mask meets a limit of 1, which may be meant as 1 %
        raise BadInput(f"{name} bounds a share, so its limit must be from 0 to below 1 (0.05 is 5 %), got {limit:g}")
    if quantity.of is _fall and not -1 < limit < 1:
        raise BadInput(f"{name} must be from -1 to 1, as the metric is (0.01 is one point in 100), got {limit:g}")
    if not 0 <= margin < 1:
        raise BadInput(f"{name}: margin must be from 0 to below 1, such as 0.05, got {margin:g}")
    return Criterion(name, limit, margin, scope, parts.get("expected"), parts.get("sd"))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


def patient_means(values: Floats, patients: NDArray[Any]) -> Floats:
    """Return the mean value of each patient."""
    _, of = np.unique(patients, return_inverse=True)
    return np.asarray(np.bincount(of, values) / np.bincount(of))


def checks_of(
    acceptance: Acceptance, cohort: ComparedCohort, names: Mapping[int, str] | None = None
) -> tuple[Check, ...]:
    """Check every criterion on its cases, labels, groups or sizes; a criterion may call labels by their ``names``."""
    every = np.arange(len(cohort.ids))
    of_labels = {number: _label_columns(rows) for number, rows in sorted(cohort.labels.items())}
    whole = _case_columns(cohort, of_labels)
    shown = {f"label {number}": label_name(number, names or {}) for number in of_labels}
    called = {f"label {name}": f"label {number}" for number, name in (names or {}).items()}
    members: dict[str, tuple[Columns, Integers]] = {"all": (whole, every)}  # by scope
    for number, columns in of_labels.items():
        members[f"label {number}"] = columns, cohort.labels[number].whole("at")
    chosen = [(f"group {name}", cohort.of_group(name)) for name in cohort.groups]
    chosen += [(f"size {name}", at) for name, _, _, at in cohort.size_classes]
    members |= {name: ({key: column[at] for key, column in whole.items()}, at) for name, at in chosen}
    known = [*shown.values(), *(f"group {name}" for name in cohort.groups)]
    checks = []
    for criterion in acceptance.criteria:
        kind = criterion.scope.removeprefix("each_")
        scopes = [called.get(criterion.scope, criterion.scope)]
        if kind != criterion.scope:
            scopes = [name for name in members if name.startswith(f"{kind} ")] or scopes
        for scope in scopes:
            columns, at = members.get(scope, ({key: np.empty(0) for key in whole}, every[:0]))
            quantity = QUANTITIES[criterion.name]
            assert quantity.of is not None
            judged = cohort.labelled[at] if quantity.needs_label else np.ones(at.size, bool)
            values, patients = quantity.of(columns, criterion.margin)[judged], cohort.of_case["unit"][at][judged]
            ids = [cohort.ids[case] for case in at[judged].tolist()]
            here = replace(criterion, scope=shown.get(scope, scope))
            checks.append(check_values(here, values, patients, ids, acceptance.confidence, known=known))
    return tuple(checks)


def _label_columns(rows: Any) -> Columns:
    """The numbers of one label, one row per case that holds it; a label that is new drifts without bound."""
    old, new = rows["voxels_old"], rows["voxels_new"]
    drift = np.where(old > 0, np.abs(new - old) / np.maximum(old, 1), np.where(new > 0, np.inf, 0.0))
    named = {"old": rows["dice_old"], "new": rows["dice_new"], "changed": 1 - rows["agreement"], "drift": drift}
    return {**named, **{name: rows[name] for name in ("ha", "hole", "lost")}}


def _case_columns(cohort: ComparedCohort, of_labels: Mapping[int, Columns]) -> Columns:
    """The numbers of the cases; drift, holes and losses are the largest of the case's labels."""
    names = {"old": "metric_old", "new": "metric_new", "changed": "changed_share", "ha": "ha"}
    found = {name: cohort.of_case[column] for name, column in names.items()}
    for name in ("drift", "hole", "lost"):
        found[name] = np.zeros(len(cohort.ids))
        for number, columns in of_labels.items():
            np.maximum.at(found[name], cohort.labels[number].whole("at"), columns[name])
    return found


_NOBODY = {
    "each_label": "no mask has a label",
    "each_size": "there are fewer than six cases, or too many of the same size",
}


def check_values(
    criterion: Criterion, values: ArrayLike, patients: ArrayLike, ids: Sequence[str], confidence: float | None,
    *, known: Sequence[str] = (),
) -> Check:  # fmt: skip
    """Check a criterion on one value per case; NaN is undefined.

    ``known`` are the labels and groups that there are, for the message if the criterion is on another.
    """
    numbers, quantity = np.asarray(values, float), QUANTITIES[criterion.name]
    defined = ~np.isnan(numbers)
    means = patient_means(numbers[defined], np.asarray(patients)[defined])
    beyond = np.flatnonzero(numbers > criterion.highest + 1e-12)
    worst = beyond[np.argsort(-numbers[beyond], kind="stable")]
    cases = int(defined.sum())
    verdict, reason, bound, needed = _decided(criterion, means, cases, len(worst), confidence, known)
    value = criterion.sign * float(means.mean()) if means.size else None
    return Check(
        criterion.name, criterion.scope, quantity.says, criterion.limit, criterion.margin, value,
        None if bound is None else criterion.sign * bound, cases, len(means), len(numbers) - cases,
        verdict, f"{quantity.says}: {reason}", needed, tuple(ids[at] for at in worst.tolist()), criterion.added,
    )  # fmt: skip


def _decided(
    criterion: Criterion, means: Floats, cases: int, beyond: int, confidence: float | None, known: Sequence[str]
) -> tuple[str, str, float | None, int | None]:
    """Return the verdict, its reason, the upper bound, and how many patients are needed if these cannot decide."""
    quantity = QUANTITIES[criterion.name]
    sign, most, side = (1, "at most", "above") if criterion.sign > 0 else (-1, "at least", "below")
    if not means.size:
        needs = " with a label" if quantity.needs_label else ""
        where = "" if criterion.scope == "all" else f" in {criterion.scope} (there are: {', '.join(known) or 'none'})"
        nobody = _NOBODY.get(criterion.scope, f"no case{needs}{where}")
        return UNDECIDED, f"{nobody}, so it cannot be decided", None, None
    value, limit = float(means.mean()), criterion.highest + 1e-12
    said = f"observed {sign * value:.4g}"
    if confidence is None:
        verdict, place = (MET, "within") if value <= limit else (BROKEN, side)
        return verdict, f"{said}, {place} the limit {criterion.limit:g}", None, None
    low, high = _bounds(quantity, means, cases, confidence)
    needed = _needed(criterion, means, confidence)
    if high is not None and high <= limit:
        return MET, f"{most} {sign * high:.4g} at confidence {confidence:g}, limit {criterion.limit:g}", high, None
    if (low is not None and low > limit) or (high is not None and value > limit and means.size >= needed):
        who = pluralize(beyond, *(UNIT if quantity.of is None else ("case", "cases")))
        return BROKEN, f"{said}, {side} the limit {criterion.limit:g}, in {who}", high, None
    why = f"{said}, limit {criterion.limit:g}; a bound needs at least {FEWEST} {UNIT[1]}"
    if high is not None:
        why = f"{said}, {most} {sign * high:.4g} at confidence {confidence:g}, limit {criterion.limit:g}"
    more = f"; about {needed} are needed" if value <= limit and needed > means.size else ""
    return UNDECIDED, f"{why}: cannot be decided with {pluralize(means.size, *UNIT)}{more}", high, needed


def _bounds(quantity: Quantity, means: Floats, cases: int, confidence: float) -> tuple[float | None, float | None]:
    """One-sided lower and upper bound of the mean over patients, each at the confidence."""
    if quantity.is_share:
        alone = len(means) == cases  # one case per patient: shares are 0 or 1
        return 1 - share_bound(1 - means, confidence, binary=alone), share_bound(means, confidence, binary=alone)
    if means.size < FEWEST:
        return None, None
    return -mean_bound(-means, confidence), mean_bound(means, confidence)


def _needed(criterion: Criterion, means: Floats, confidence: float) -> int:
    """Return how many patients might meet the criterion: without any harm for a share, with this spread for a mean.

    A mean needs about (z s / (limit - mean))^2 patients, with the normal quantile z of the confidence.
    """
    limit = criterion.highest
    if QUANTITIES[criterion.name].is_share:
        return ltt_cases(limit, 1 - confidence) if limit > 0 else 1
    room = limit - float(means.mean())
    if room <= 0 or means.size < 2:
        return FEWEST
    return max(FEWEST, int(np.ceil((stats.norm.ppf(confidence) * float(means.std(ddof=1)) / room) ** 2)) + 1)


def mean_bound(means: Floats, confidence: float) -> float:
    r"""One-sided upper bound of a mean: the larger one of Student's t and Hall's transformation of it.

    If few patients lose much, a sample that misses them has a small mean and a small spread, and Student's t
    accepts too often. Hall (1992) corrects t for the skewness :math:`g`, with :math:`q = -t_{n-1} / \sqrt n`:

    .. math:: u = \bar x - s \, \frac{3}{g} \left( \sqrt[3]{1 + g (q - g / 6 n)} - 1 \right)

    The skewness of a small sample is too small; so :math:`g` is :data:`SKEW` times the observed one.
    """
    n, mean, spread = means.size, float(means.mean()), float(means.std(ddof=1))
    reach = float(stats.t.ppf(confidence, n - 1)) / math.sqrt(n)
    if spread <= 1e-12:
        return mean + reach * spread
    skewed = SKEW * float(stats.skew(means, bias=False))
    hall = reach if abs(skewed) < 1e-6 else -3 / skewed * (np.cbrt(1 - skewed * (reach + skewed / (6 * n))) - 1)
    return mean + spread * max(reach, float(hall))
