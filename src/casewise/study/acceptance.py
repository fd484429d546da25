"""May the new masks replace the old ones? Criteria from a small file, each shown at a confidence or not.

    {
      "confidence": 0.95,
      "max_mean_drop": 0.005,
      "max_harmed_share": {"limit": 0.10, "margin": 0.02},
      "max_ha": 0.20,
      "each_label": {"max_mean_drop": 0.01},
      "labels": {"3": {"max_lost_share": 0.05}},
      "each_group": {"max_mean_drop": 0.02},
      "groups": {"site B": {"max_harmed_share": {"limit": 0.2, "margin": 0.05}}}
    }

A criterion holds if the one-sided upper bound of its quantity, at the confidence and with one value per patient (the
mean over the patient's cases), is at most the limit. New masks are accepted if every criterion holds; as all of them
must, no correction for their number is needed. With ``"confidence": null`` the observed values decide.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from casewise.core.brief import UNIT
from casewise.core.errors import BadInput
from casewise.core.registry import Registry
from casewise.judge.certificates.risk_control import clopper_pearson_upper, hoeffding_bentkus
from casewise.measure.changes import Comparison, LabelChange, label_name
from casewise.study.comparison import GOOD, ComparedCase

FEWEST = 10  # patients below which the bound of a mean difference is not trusted
CONFIDENCE = 0.95
_SCOPES = ("each_label", "labels", "each_group", "groups")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Quantity:
    """What a criterion bounds: a number of one case, from the whole case or from one of its labels."""

    says: str
    of_case: Callable[[Comparison, float], float | None]  # (case, margin); None or NaN: undefined, left out, counted
    of_label: Callable[[LabelChange, float], float | None]
    margin: float = 0.0
    is_share: bool = True  # in [0, 1], so bounds are exact at any number of patients
    needs_label: bool = True


def _fell(old: float | None, new: float | None) -> float | None:
    return None if old is None or new is None else round(old - new, 12)


def _beyond(value: float | None, margin: float) -> float | None:
    return None if value is None or value != value else float(value > margin)


def _flipped(old: float | None, new: float | None, good: float) -> float | None:
    return None if old is None or new is None or old != old or new != new else float(old >= good > new)


def _drifted(row: LabelChange, margin: float) -> float:
    """Whether the volume changed by more than the margin, up or down; a label that appears always did."""
    return float(abs(row.drift) > margin if row.voxels_old else row.voxels_new > 0)


QUANTITIES: Registry[Quantity] = Registry(
    "criterion",
    {
        "max_mean_drop": Quantity(
            "mean fall of the metric",
            lambda case, _: _fell(case.metric_old, case.metric_new),
            lambda row, _: _fell(row.dice_old, row.dice_new),
            is_share=False,
        ),
        "max_harmed_share": Quantity(
            "share of cases whose metric falls by more than the margin",
            lambda case, margin: _beyond(_fell(case.metric_old, case.metric_new), margin),
            lambda row, margin: _beyond(_fell(row.dice_old, row.dice_new), margin),
        ),
        "max_flipped_share": Quantity(
            "share of cases that were at or above the margin and are below it now",
            lambda case, margin: _flipped(case.metric_old, case.metric_new, margin),
            lambda row, margin: _flipped(row.dice_old, row.dice_new, margin),
            margin=GOOD,
        ),
        "max_ha": Quantity(
            "mean share of the change in regions that became worse", lambda case, _: case.ha, lambda row, _: row.ha
        ),
        "max_changed_share": Quantity(
            "share of cases of which more than the margin of the foreground changed",
            lambda case, margin: float(case.changed_share > margin),
            lambda row, margin: _beyond(1 - row.agreement, margin),
            needs_label=False,
        ),
        "max_drifted_share": Quantity(
            "share of cases in which a label's volume changed by more than the margin",
            lambda case, margin: max((_drifted(row, margin) for row in case.labels), default=0.0),
            _drifted,
            margin=0.1,
            needs_label=False,
        ),
        "max_holed_share": Quantity(
            "share of cases with a new hole above the margin",
            lambda case, margin: float(any(row.share(row.largest_hole) > margin for row in case.labels)),
            lambda row, margin: float(row.share(row.largest_hole) > margin),
            needs_label=False,
        ),
        "max_lost_share": Quantity(
            "share of cases with a lost piece above the margin",
            lambda case, margin: float(any(row.share(row.largest_lost) > margin for row in case.labels)),
            lambda row, margin: float(row.share(row.largest_lost) > margin),
            needs_label=False,
        ),
    },
)
"""Criteria by the name that the file uses."""


@dataclass(frozen=True)
class Criterion:
    """One line of an acceptance file."""

    name: str
    limit: float
    margin: float
    scope: str = "all"  # all, each_label, each_group, "label 3", "group site B"


@dataclass(frozen=True)
class Acceptance:
    """What new masks must satisfy."""

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
    bound: float | None  # upper bound at the confidence; None where it cannot be had
    cases: int
    patients: int
    undefined: int  # cases without a value
    holds: bool
    reason: str  # one sentence

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def read_acceptance(path: Path) -> Acceptance:
    """Criteria from a JSON file, or a TOML file of the same keys (Python 3.11 and later)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read ({error}); give a JSON file of criteria") from error
    try:
        plain = _toml(path, text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise BadInput(f"{path} is not a file of criteria ({error})") from error
    return acceptance_of(plain)


def _toml(path: Path, text: str) -> Any:
    try:
        import tomllib
    except ImportError:
        raise BadInput(f"{path}: TOML needs Python 3.11; write the same keys as JSON") from None
    return tomllib.loads(text)


def acceptance_of(plain: Any) -> Acceptance:
    """Criteria from plain JSON; unknown names and numbers that make no sense are refused.

    >>> acceptance_of({"max_ha": 0.2}).criteria[0]
    Criterion(name='max_ha', limit=0.2, margin=0.0, scope='all')
    """
    if not isinstance(plain, Mapping):
        raise BadInput(f"criteria are a JSON object such as {{'max_mean_drop': 0.005}}, got {type(plain).__name__}")
    confidence = plain.get("confidence", CONFIDENCE)
    if confidence is not None and not (_is_number(confidence) and 0.5 <= confidence < 1):
        raise BadInput(f"confidence is a number from 0.5 to below 1, or null for observed values, got {confidence!r}")
    criteria = tuple(_criteria(plain))
    if not criteria:
        raise BadInput(f"there is no criterion; name at least one of {', '.join(QUANTITIES)}")
    return Acceptance(criteria, confidence)


def _criteria(plain: Mapping[str, Any]) -> Iterator[Criterion]:
    for name, given in plain.items():
        if name == "confidence":
            continue
        if name not in _SCOPES:
            yield _criterion(name, given, "all")
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
    parts = given if isinstance(given, Mapping) else {"limit": given}
    unknown = set(parts) - {"limit", "margin"}
    if unknown or "limit" not in parts or not all(_is_number(value) for value in parts.values()):
        raise BadInput(f"{name} is a number or {{'limit': ..., 'margin': ...}}, got {given!r}")
    limit, margin = float(parts["limit"]), float(parts.get("margin", quantity.margin))
    if quantity.is_share and not 0 <= limit <= 1:
        raise BadInput(f"{name} bounds a share, so its limit is from 0 to 1, got {limit}")
    return Criterion(name, limit, margin, scope)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


class _Gathered:
    """One criterion on one scope: the values of the cases, 16 bytes each."""

    def __init__(self, criterion: Criterion, scope: str) -> None:
        self.criterion, self.scope = criterion, scope
        self.quantity = QUANTITIES[criterion.name]
        self._kind, _, self._which = scope.partition(" ")
        self.values, self.patients = array("d"), array("q")
        self.undefined = 0

    def add(self, case: ComparedCase, patient: int) -> None:
        if self._kind == "group" and case.group != self._which:
            return
        for value in _values(self.quantity, self.criterion.margin, case, self._kind, self._which):
            if value is None or value != value:
                self.undefined += 1
            else:
                self.values.append(value)
                self.patients.append(patient)

    @property
    def means(self) -> Floats:
        """One value per patient, in order of appearance."""
        per_patient: dict[int, list[float]] = {}
        for patient, value in zip(self.patients, self.values, strict=True):
            per_patient.setdefault(patient, []).append(value)
        return np.array([np.mean(values) for values in per_patient.values()])


def checks_of(
    acceptance: Acceptance, cases: Iterable[ComparedCase], names: Mapping[int, str] | None = None
) -> tuple[Check, ...]:
    """Every criterion on the cases, labels and groups that it is about; ``labels`` may call labels by their names.

    The cases are gone through twice and none is held, so they may be read from a file.
    """
    present: set[int] = set()
    sites: set[str] = set()
    for case in cases:
        present.update(row.label for row in case.found.labels)
        sites.update(() if case.group is None else (case.group,))
    labels, groups = sorted(present), sorted(sites)
    called = {f"label {name}": f"label {number}" for number, name in (names or {}).items()}
    shown = {f"label {number}": label_name(number, names or {}) for number in labels}
    gathered: list[_Gathered] = []
    for criterion in acceptance.criteria:
        if criterion.scope == "each_label":
            scopes = [f"label {number}" for number in labels]
        elif criterion.scope == "each_group":
            scopes = [f"group {name}" for name in groups]
        else:
            scopes = [called.get(criterion.scope, criterion.scope)]
        gathered += [_Gathered(criterion, scope) for scope in scopes or [criterion.scope]]
    clusters: dict[str, int] = {}
    for at, case in enumerate(cases):
        patient = -1 - at if case.cluster is None else clusters.setdefault(case.cluster, len(clusters))
        for one in gathered:
            one.add(case, patient)
    checks = [_check(one, acceptance.confidence) for one in gathered]
    return tuple(replace(check, scope=shown.get(check.scope, check.scope)) for check in checks)


_NOBODY = {
    "each_group": "no case has a group (name them: --cases TABLE with the columns case and group; or drop each_group)",
    "each_label": "no mask has a label",
}


def _check(gathered: _Gathered, confidence: float | None) -> Check:
    criterion, quantity, means = gathered.criterion, gathered.quantity, gathered.means
    observed, bound, why = _bounded(means, quantity, confidence)
    if not means.size and gathered.scope in _NOBODY:
        why = f"{quantity.says}: {_NOBODY[gathered.scope]}, so it is not shown"
    decisive = observed if confidence is None else bound
    holds = decisive is not None and decisive <= criterion.limit + 1e-12
    if decisive is not None:
        what = f"observed {observed:.4g}" if confidence is None else f"at most {bound:.4g} at confidence {confidence:g}"
        why = f"{quantity.says}: {what}, {'within' if holds else 'above'} the limit {criterion.limit:g}"
    return Check(
        criterion.name,
        gathered.scope,
        quantity.says,
        criterion.limit,
        criterion.margin,
        observed,
        bound,
        len(gathered.values),
        len(means),
        gathered.undefined,
        holds,
        why,
    )


def _values(quantity: Quantity, margin: float, case: ComparedCase, kind: str, which: str) -> list[float | None]:
    if quantity.needs_label and not case.found.labelled:
        return []
    if kind == "label":
        return [quantity.of_label(row, margin) for row in case.found.labels if str(row.label) == which]
    return [] if kind.startswith("each") else [quantity.of_case(case.found, margin)]


def _bounded(means: Floats, quantity: Quantity, confidence: float | None) -> tuple[float | None, float | None, str]:
    """(observed mean, upper bound, why there is none)."""
    if not means.size:
        needs = " with a label" if quantity.needs_label else ""
        return None, None, f"{quantity.says}: no case{needs} to judge it on, so it is not shown"
    value = float(means.mean())
    if confidence is None:
        return value, None, ""
    if quantity.is_share:
        return value, share_bound(means, confidence), ""
    if means.size < FEWEST:
        few = f"a bound needs at least {FEWEST} {UNIT[1]}, got {means.size}"
        why = f"{quantity.says}: {few}, so it is not shown"
        return value, None, why
    return value, mean_bound(means, confidence), ""


def share_bound(means: Floats, confidence: float) -> float:
    """Upper bound of the mean of values in [0, 1]: Clopper-Pearson if all are 0 or 1, else Hoeffding-Bentkus.

    >>> round(share_bound(np.zeros(59), 0.95), 3)
    0.05
    """
    if np.isin(means, (0.0, 1.0)).all():
        return clopper_pearson_upper(int(means.sum()), means.size, confidence)
    risk, n = float(means.mean()), means.size

    def excess(alpha: float) -> float:
        return float(hoeffding_bentkus(risk, n, alpha)) - (1 - confidence)

    low, high = min(max(risk, 1e-9), 1 - 1e-9), 1 - 1e-9
    return 1.0 if excess(high) > 0 else float(optimize.bisect(excess, low, high, xtol=1e-6)) if excess(low) > 0 else low


def mean_bound(means: Floats, confidence: float) -> float:
    """Upper bound of a mean by Student's t, one-sided."""
    spread = float(means.std(ddof=1)) / np.sqrt(means.size)
    return float(means.mean() + stats.t.ppf(confidence, means.size - 1) * spread)
