"""The criteria of a plan: each is met, broken or undecided, and together they accept or reject the new masks.

As plain data, criteria look like this (``plan.toml`` has them under ``[protocol.criteria]``):

    {
      "confidence": 0.95,
      "max_mean_drop": 0.005,
      "max_harmed_share": {"limit": 0.10, "margin": 0.05},
      "each_label": {"max_mean_drop": 0.01},
      "labels": {"3": {"max_lost_share": 0.05}},
      "each_group": {"max_mean_drop": {"limit": 0.02, "bounded": true}},
      "groups": {"site B": {"max_harmed_share": {"limit": 0.2, "margin": 0.05}}}
    }

Each patient has one value, the mean over the patient's cases. A criterion is met if the one-sided upper bound of the
mean over patients, at the confidence, is at most the limit. It is broken if the lower bound is above the limit, or if
the observed value is above the limit and there were enough patients to show the contrary. Otherwise it is undecided.
New masks are accepted if every criterion is met; because all of them must be met, their number needs no correction.
If the confidence is None, the observed values decide.

Student's t cannot see disasters that are too rare to be in the sample: where one case in forty loses half of its Dice,
the mean of 30 patients mostly looks perfect. So ``max_mean_drop`` is always tested together with a limit on the share
of harmed cases: the one of the same scope, else that for all cases, else :data:`COMPANION`. With ``"bounded": true``
the mean is bounded without any assumption on its distribution, which needs hundreds of patients for small limits.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from casewise.core.errors import BadInput
from casewise.core.registry import Registry
from casewise.core.text import UNIT, pluralize
from casewise.judge.certificates.risk_control import ltt_cases, share_bound
from casewise.measure.changes import Comparison, LabelChange, label_name
from casewise.study.compared_cohort import GOOD, SIZES, ComparedCase, size_class, size_cuts

FEWEST = 10  # patients below which Student's t is not used for a mean difference
CONFIDENCE = 0.95
LARGEST_NUMBER = 1e9  # of a limit, a margin or a guess
COMPANION = (0.1, 0.05)
"""Limit and margin of the share of harmed cases that ``max_mean_drop`` is tested with where the file gives none."""
SKEW = 2.0  # factor on the observed skewness; see mean_bound
MET, BROKEN, UNDECIDED = "met", "broken", "undecided"
_SCOPES = ("each_label", "labels", "each_group", "groups", "each_size")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Quantity:
    """A number of one case or of one of its labels, which a criterion bounds; None or NaN if it is undefined."""

    says: str
    of_case: Callable[[Comparison, float], float | None]  # (case, margin)
    of_label: Callable[[LabelChange, float], float | None]
    margin: float = 0.0
    is_share: bool = True  # in [0, 1], so bounds are exact at any number of patients
    needs_label: bool = True
    of_measure: bool = False  # of a declared measure; study/clinical.py computes the values


def _of_metric(says: str, of: Callable[[float, float, float], float], **options: Any) -> Quantity:
    """A quantity of the old and the new metric: (old, new, margin)."""

    def known(old: float | None, new: float | None, margin: float) -> float | None:
        return None if old is None or new is None or old != old or new != new else of(old, new, margin)

    return Quantity(
        says,
        lambda case, margin: known(case.metric_old, case.metric_new, margin),
        lambda row, margin: known(row.dice_old, row.dice_new, margin),
        **options,
    )


def _of_masks(says: str, of: Callable[[LabelChange, float], float], margin: float = 0.0) -> Quantity:
    """A quantity of one label's masks, which needs no true label; of a case, the largest over its labels."""

    def of_case(case: Comparison, margin: float) -> float:
        return max((of(row, margin) for row in case.labels), default=0.0)

    return Quantity(says, of_case, of, margin, needs_label=False)


def _of_measure(says: str, *, is_share: bool) -> Quantity:
    return Quantity(says, lambda *_: None, lambda *_: None, is_share=is_share, of_measure=True)


def _fall(old: float, new: float, _: float = 0.0) -> float:
    return round(old - new, 12)


def _drifted(row: LabelChange, margin: float) -> float:
    """1 if the volume changed by more than the margin, up or down, or if the label is new."""
    return float(abs(row.drift) > margin if row.voxels_old else row.voxels_new > 0)


QUANTITIES: Registry[Quantity] = Registry(
    "criterion",
    {
        "max_mean_drop": _of_metric("mean fall of the metric", _fall, is_share=False),
        "min_mean_gain": _of_metric("mean gain of the metric", _fall, is_share=False),
        "max_harmed_share": _of_metric(
            "share of cases whose metric falls by more than the margin",
            lambda old, new, margin: float(_fall(old, new) > margin),
        ),
        "max_flipped_share": _of_metric(
            "share of cases that were at or above the margin and are below it now",
            lambda old, new, margin: float(old >= margin > new),
            margin=GOOD,
        ),
        "max_ha": Quantity(
            "mean share of the change in regions that became worse", lambda case, _: case.ha, lambda row, _: row.ha
        ),
        "max_changed_share": Quantity(
            "share of cases of which more than the margin of the foreground changed",
            lambda case, margin: float(case.changed_share > margin),
            lambda row, margin: float(1 - row.agreement > margin),
            needs_label=False,
        ),
        "max_drifted_share": _of_masks(
            "share of cases in which a label's volume changed by more than the margin", _drifted, 0.1
        ),
        "max_holed_share": _of_masks(
            "share of cases with a new hole above the margin",
            lambda row, margin: float(row.share(row.largest_hole) > margin),
        ),
        "max_lost_share": _of_masks(
            "share of cases with a lost piece above the margin",
            lambda row, margin: float(row.share(row.largest_lost) > margin),
        ),
        "max_error_rise": _of_measure("mean rise of the error of the measure", is_share=False),
        "max_crossed_share": _of_measure("share of patients whose decision was right and is wrong now", is_share=True),
    },
)
"""Criteria by the name that a plan uses."""


@dataclass(frozen=True)
class Criterion:
    """One criterion of a plan."""

    name: str
    limit: float  # as the plan says it
    margin: float
    scope: str = "all"  # all, each_label, each_group, each_size, "label 3", "group site B"
    bounded: bool = False  # bound a mean without any assumption on its distribution
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

    @property
    def holds(self) -> bool:
        """Whether the criterion is met."""
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
        raise BadInput(f"criteria are a table such as {{'max_mean_drop': 0.005}}, got {type(plain).__name__}")
    confidence = plain.get("confidence", CONFIDENCE)
    if confidence is not None and not (is_number(confidence) and 0.5 <= confidence < 1):
        raise BadInput(f"confidence is a number from 0.5 to below 1, or 'observed', got {confidence!r}")
    criteria = tuple(_criteria(plain, scope))
    if not criteria:
        raise BadInput(f"there is no criterion; name at least one of {', '.join(QUANTITIES)}")
    return Acceptance(criteria if confidence is None else (*criteria, *_companions(criteria)), confidence)


def _companions(criteria: Iterable[Criterion]) -> Iterator[Criterion]:
    """A limit on the harmed share for every scope that bounds a mean by Student's t and has no such limit."""
    given = {one.scope: (one.limit, one.margin) for one in criteria if one.name == "max_harmed_share"}
    usual = given.get("all", COMPANION)
    for one in criteria:
        if one.name in ("max_mean_drop", "min_mean_gain") and not one.bounded and one.scope not in given:
            given[one.scope] = usual
            yield Criterion("max_harmed_share", *usual, one.scope, added=True)


def _criteria(plain: Mapping[str, Any], scope: str) -> Iterator[Criterion]:
    for name, given in plain.items():
        if name == "confidence":
            continue
        if name not in _SCOPES:
            yield _criterion(name, given, scope)
        elif not isinstance(given, Mapping):
            raise BadInput(f"{name} holds criteria by name, got {given!r}")
        elif name.startswith("each_"):
            yield from (_criterion(key, value, name) for key, value in given.items())
        else:
            word = name.removesuffix("s")
            for which, inner in given.items():
                if not isinstance(inner, Mapping):
                    raise BadInput(f"{name} {which!r} holds criteria by name, got {inner!r}")
                yield from (_criterion(key, value, f"{word} {which}") for key, value in inner.items())


def _criterion(name: str, given: Any, scope: str) -> Criterion:
    quantity = QUANTITIES[name]
    parts = dict(given) if isinstance(given, Mapping) else {"limit": given}
    bounded = parts.pop("bounded", False)
    unknown = set(parts) - {"limit", "margin"}
    if unknown or "limit" not in parts or not all(is_number(value) for value in parts.values()):
        raise BadInput(f"{name} is a number or {{limit = ..., margin = ...}}, got {str(given)[:80]}")
    if not isinstance(bounded, bool) or (bounded and quantity.is_share):
        raise BadInput(f"'bounded' is true or false, and only for max_mean_drop (shares always are); got {given!r}")
    limit, margin = float(parts["limit"]), float(parts.get("margin", quantity.margin))
    if quantity.is_share and not 0 <= limit <= 1:
        raise BadInput(f"{name} bounds a share, so its limit is from 0 to 1, got {limit}")
    return Criterion(name, limit, margin, scope, bounded)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


class _Gathered:
    """One criterion on one scope: the values of the cases, 16 bytes each."""

    def __init__(self, criterion: Criterion, scope: str) -> None:
        self.criterion, self.scope = criterion, scope
        self.quantity = QUANTITIES[criterion.name]
        self._kind, _, self._which = scope.partition(" ")
        self.values, self.patients = array("d"), array("q")
        self.undefined = 0
        self.beyond, self.beyond_ids = array("d"), list[str]()  # the cases beyond the limit

    def add(self, case: ComparedCase, patient: int, size: str | None = None) -> None:
        if (self._kind == "group" and case.group != self._which) or (self._kind == "size" and size != self._which):
            return
        for value in _values(self.quantity, self.criterion.margin, case, self._kind, self._which):
            self.add_value(value, patient, case.id)

    def add_value(self, value: float | None, patient: int, case_id: str) -> None:
        if value is None or value != value:
            self.undefined += 1
            return
        self.values.append(value)
        self.patients.append(patient)
        if value > self.criterion.highest + 1e-12:
            self.beyond.append(value)
            self.beyond_ids.append(case_id)

    @property
    def means(self) -> Floats:
        """One value per patient."""
        return patient_means(np.array(self.values, float), np.array(self.patients, np.int64))


def patient_means(values: Floats, patients: NDArray[np.int64]) -> Floats:
    """Return the mean value of each patient."""
    _, of = np.unique(patients, return_inverse=True)
    return np.asarray(np.bincount(of, values) / np.bincount(of))


def checks_of(
    acceptance: Acceptance, cases: Iterable[ComparedCase], names: Mapping[int, str] | None = None
) -> tuple[Check, ...]:
    """Check every criterion on its cases, labels, groups or sizes; a criterion may call labels by their ``names``.

    The cases are read twice, one by one, so they may lie in a file.
    """
    present: set[int] = set()
    sites: set[str] = set()
    sizes = array("d")
    for case in cases:
        sizes.append(case.size)
        present.update(row.label for row in case.found.labels)
        sites.update(() if case.group is None else (case.group,))
    labels, groups, cuts = sorted(present), sorted(sites), size_cuts(np.array(sizes))
    called = {f"label {name}": f"label {number}" for number, name in (names or {}).items()}
    shown = {f"label {number}": label_name(number, names or {}) for number in labels}
    gathered: list[_Gathered] = []
    for criterion in acceptance.criteria:
        if criterion.scope == "each_label":
            scopes = [f"label {number}" for number in labels]
        elif criterion.scope == "each_group":
            scopes = [f"group {name}" for name in groups]
        elif criterion.scope == "each_size":
            scopes = [] if cuts is None else [f"size {name}" for name in SIZES]
        else:
            scopes = [called.get(criterion.scope, criterion.scope)]
        gathered += [_Gathered(criterion, scope) for scope in scopes or [criterion.scope]]
    clusters: dict[str, int] = {}
    for at, case in enumerate(cases):
        patient = -1 - at if case.cluster is None else clusters.setdefault(case.cluster, len(clusters))
        size = None if cuts is None else size_class(case.size, cuts)
        for one in gathered:
            one.add(case, patient, size)
    checks = [_check(one, acceptance.confidence) for one in gathered]
    return tuple(replace(check, scope=shown.get(check.scope, check.scope)) for check in checks)


def check_values(
    criterion: Criterion, values: Iterable[float], patients: Iterable[int], ids: Iterable[str], confidence: float | None
) -> Check:
    """A criterion on values that were computed elsewhere, such as those of a declared measure; NaN is undefined."""
    gathered = _Gathered(criterion, criterion.scope)
    for value, patient, case_id in zip(values, patients, ids, strict=True):
        gathered.add_value(value, patient, case_id)
    return _check(gathered, confidence)


_NOBODY = {
    "each_label": "no mask has a label",
    "each_size": "the cases do not differ in size, or are fewer than six",
}


def _check(gathered: _Gathered, confidence: float | None) -> Check:
    """Check one criterion."""
    criterion, quantity, means = gathered.criterion, gathered.quantity, gathered.means
    verdict, reason, bound, needed = _decided(gathered, means, confidence)
    value = criterion.sign * float(means.mean()) if means.size else None
    worst = sorted(zip(gathered.beyond, gathered.beyond_ids, strict=True), key=lambda one: -one[0])
    return Check(
        criterion.name, gathered.scope, quantity.says, criterion.limit, criterion.margin, value,
        None if bound is None else criterion.sign * bound, len(gathered.values), len(means), gathered.undefined,
        verdict, f"{quantity.says}: {reason}", needed, tuple(case_id for _, case_id in worst),
    )  # fmt: skip


def _decided(gathered: _Gathered, means: Floats, confidence: float | None) -> tuple[str, str, float | None, int | None]:
    """Return the verdict, its reason, the upper bound, and how many patients are needed if these cannot decide."""
    criterion, quantity = gathered.criterion, gathered.quantity
    sign, most, beyond = (1, "at most", "above") if criterion.sign > 0 else (-1, "at least", "below")
    if not means.size:
        needs = " with a label" if quantity.needs_label else ""
        nobody = _NOBODY.get(gathered.scope, f"no case{needs} in {gathered.scope}")
        return UNDECIDED, f"{nobody}, so it is not shown", None, None
    value, limit = float(means.mean()), criterion.highest + 1e-12
    said = f"observed {sign * value:.4g}"
    if confidence is None:
        verdict, side = (MET, "within") if value <= limit else (BROKEN, beyond)
        return verdict, f"{said}, {side} the limit {criterion.limit:g}", None, None
    low, high = _bounds(gathered, means, confidence)
    needed = _needed(gathered, means, confidence)
    if high is not None and high <= limit:
        return MET, f"{most} {sign * high:.4g} at confidence {confidence:g}, limit {criterion.limit:g}", high, None
    if (low is not None and low > limit) or (high is not None and value > limit and means.size >= needed):
        who = pluralize(len(gathered.beyond), *(UNIT if quantity.of_measure else ("case", "cases")))
        return BROKEN, f"{said}, {beyond} the limit {criterion.limit:g}, in {who}", high, None
    why = f"{said}, limit {criterion.limit:g}; a bound needs at least {FEWEST} {UNIT[1]}"
    if high is not None:
        why = f"{said}, {most} {sign * high:.4g} at confidence {confidence:g}, limit {criterion.limit:g}"
    more = f"; about {needed} are needed" if value <= limit and needed > means.size else ""
    return UNDECIDED, f"{why}: cannot be decided with {pluralize(means.size, *UNIT)}{more}", high, needed


def _bounds(gathered: _Gathered, means: Floats, confidence: float) -> tuple[float | None, float | None]:
    """One-sided lower and upper bound of the mean over patients, each at the confidence."""
    if gathered.quantity.is_share:
        alone = len(means) == len(gathered.values)  # one case per patient: shares are 0 or 1
        return 1 - share_bound(1 - means, confidence, binary=alone), share_bound(means, confidence, binary=alone)
    if gathered.criterion.bounded:  # mean fall <= mean of max(fall, 0)
        return None, share_bound(np.clip(means, 0, 1), confidence, binary=False)
    if means.size < FEWEST:
        return None, None
    return -mean_bound(-means, confidence), mean_bound(means, confidence)


def _needed(gathered: _Gathered, means: Floats, confidence: float) -> int:
    """Return how many patients might meet the criterion: without any harm for a share, with this spread for a mean.

    A mean needs about (z s / (limit - mean))^2 patients, with the normal quantile z of the confidence.
    """
    limit = gathered.criterion.highest
    if gathered.quantity.is_share or gathered.criterion.bounded:
        return ltt_cases(limit, 1 - confidence) if 0 < limit < 1 else 1
    room = limit - float(means.mean())
    if room <= 0 or means.size < 2:
        return FEWEST
    return max(FEWEST, int(np.ceil((stats.norm.ppf(confidence) * float(means.std(ddof=1)) / room) ** 2)) + 1)


def _values(quantity: Quantity, margin: float, case: ComparedCase, kind: str, which: str) -> list[float | None]:
    if quantity.needs_label and not case.found.labelled:
        return []
    if kind == "label":
        return [quantity.of_label(row, margin) for row in case.found.labels if str(row.label) == which]
    return [] if kind.startswith("each") else [quantity.of_case(case.found, margin)]


def mean_bound(means: Floats, confidence: float) -> float:
    r"""One-sided upper bound of a mean: the larger one of Student's t and Hall's transformation of it.

    Where few patients lose much, a sample that misses them has a small mean and a small spread, and Student's t
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
