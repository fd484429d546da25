"""Clinical measures of a mask: volumes per label, and formulas over them that a user declares.

    [measures]
    total_kidney = "volume(left_kidney) + volume(right_kidney)"

    [measures.ef]
    formula = "100 * (volume(LV, ED) - volume(LV, ES)) / volume(LV, ED)"
    unit = "%"
    decision = "< 40"

A formula holds numbers, label names, ``volume(label)``, ``volume(label, scan)``, ``+ - * /``, ``max``, ``min`` and
parentheses. It has the grammar below, is read by Python's parser and never run:

    sum     = product (("+" | "-") product)*
    product = factor (("*" | "/") factor)*
    factor  = number | "-" factor | "(" sum ")" | ("max" | "min") "(" sum ("," sum)* ")"
            | "volume" "(" label ["," scan] ")" | label

A label is a word, or any text in quotation marks. A label name alone means its volume. ``scan`` names one of a
patient's scans, such as ED or ES; a measure that names scans has one value per patient, any other has one value per
case. A division by zero, or a scan that is missing, gives None: not computable.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from casewise.core.errors import BadInput

Volumes = Mapping[str, float]
"""Volume by label name: millilitres where the spacing is known, voxels (pixels) otherwise."""

UNIT_SPACING = "every header has a spacing of 1 x 1 x 1 mm; if a converter made that up, volumes in ml are wrong"
LONGEST, DEEPEST = 1000, 200  # characters and nested parts of a formula
_DECISION = re.compile(r"\s*(<=|>=|<|>)\s*(-?\d+\.?\d*(?:[eE][+-]?\d+)?)\s*")
_COMPARE: dict[str, Callable[[Any, float], Any]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True)
class LabelVolume:
    """The volume of a label, in one named scan of the patient or in the case itself."""

    label: str
    scan: str | None = None


@dataclass(frozen=True)
class Operation:
    """One of ``+ - * / max min``, or ``neg``, on two or more parts (one for ``neg``)."""

    sign: str
    parts: tuple[Expression, ...]


Expression = float | LabelVolume | Operation


@dataclass(frozen=True)
class DecisionRule:
    """A clinical decision by a threshold: ``< 40``."""

    sign: str
    threshold: float

    def __str__(self) -> str:
        return f"{self.sign} {self.threshold:g}"

    def holds(self, value: Any) -> Any:
        """Return True for each value that meets the condition, such as ``< 40``."""
        return _COMPARE[self.sign](value, self.threshold)


@dataclass(frozen=True)
class Measure:
    """A measure that a user declared."""

    name: str
    formula: str
    expression: Expression
    unit: str = ""
    decisions: tuple[DecisionRule, ...] = ()

    @property
    def volumes(self) -> tuple[LabelVolume, ...]:
        """The volumes that the formula reads."""
        return tuple(_volumes(self.expression))

    @property
    def per_patient(self) -> bool:
        """True if the formula names scans, so that a patient has one value."""
        return any(one.scan is not None for one in self.volumes)

    @property
    def scans(self) -> frozenset[str]:
        """The scans that the formula names."""
        return frozenset(one.scan for one in self.volumes if one.scan is not None)

    def value(self, volumes: Mapping[Any, Volumes]) -> float | None:
        """The value from volumes by scan and label; None is the scan of a measure that names none.

        Example:
            >>> ef = measure("ef", "100 * (volume(LV, ED) - volume(LV, ES)) / volume(LV, ED)")
            >>> ef.value({"ED": {"lv": 120.0}, "ES": {"lv": 60.0}})
            50.0
        """

        def looked_up(one: LabelVolume) -> float | None:
            there = volumes.get(one.scan)
            return None if there is None else there.get(plain_name(one.label), 0.0)

        found = _evaluated(self.expression, looked_up)
        return found if found is not None and math.isfinite(found) else None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        decisions = [str(one) for one in self.decisions]
        return {"name": self.name, "formula": self.formula, "unit": self.unit, "decisions": decisions}


def plain_name(label: str) -> str:
    """A label's name as formulas compare it: small letters, underscores for spaces and dashes.

    >>> plain_name("Left Kidney")
    'left_kidney'
    """
    return re.sub(r"[\s-]+", "_", label.strip()).lower()


def measure(name: str, formula: Any, *, unit: str = "", decision: Any = ()) -> Measure:
    """A measure from its name and formula.

    Args:
        name: Name of the measure, such as ``ef``.
        formula: The formula, by the grammar of this module.
        unit: Unit of the values; only printed.
        decision: A threshold such as ``"< 40"``, or several.

    Returns:
        The parsed measure.

    Raises:
        BadInput: The formula, the decision or the name is not one; the message says where.

    Example:
        >>> measure("cdr", "cup / (cup + rim)", decision="> 0.5").volumes[0]
        LabelVolume(label='cup', scan=None)
    """
    if not re.fullmatch(r"[A-Za-z]\w{0,39}", name):
        raise BadInput(f"the name of a measure must be letters, digits and underscores, such as ef; got {name!r}")
    if not isinstance(formula, str):
        raise BadInput(f"measure {name}: the formula must be a text such as 'volume(LV) / volume(RV)', got {formula!r}")
    texts = [decision] if isinstance(decision, str) else decision
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise BadInput(f"measure {name}: a decision must be a text such as '< 40', got {decision!r}")
    decisions = tuple(_decision(name, text) for text in texts)
    return Measure(name, formula, _parsed(name, formula), str(unit), decisions)


def declared_measures(plain: Any) -> tuple[Measure, ...]:
    """Measures from the ``[measures]`` table of a plan or of ``measures.toml``: a formula or a table for each name.

    Raises:
        BadInput: The table is not one of measures; the message names the measure.
    """
    if not isinstance(plain, Mapping):
        raise BadInput(f"[measures] must have a formula for each name, got {plain!r}")
    found = []
    for name, given in plain.items():
        parts = dict(given) if isinstance(given, Mapping) else {"formula": given}
        unknown = sorted(set(parts) - {"formula", "unit", "decision"})
        if unknown or "formula" not in parts or not isinstance(parts.get("unit", ""), str):
            raise BadInput(f"measure {name} takes formula, unit and decision as texts; got {str(parts)[:80]}")
        found.append(
            measure(str(name), parts["formula"], unit=parts.get("unit", ""), decision=parts.get("decision", ()))
        )
    return tuple(found)


def check_names(declared: Iterable[Measure], labels: Mapping[int, str]) -> None:
    """Refuse measures of unknown label names; ``volume(3)`` needs no name."""
    known = {plain_name(name) for name in labels.values()}
    for one in declared:
        for volume in one.volumes:
            if plain_name(volume.label) not in known and not volume.label.isdecimal():
                raise BadInput(
                    f"measure {one.name}: no label is called {volume.label!r}; known: "
                    f"{', '.join(sorted(known)) or 'none'}; write the number, such as volume(1), or give compare the "
                    f"names: --label-names 1=LV,2=MYO"
                )


def named_volumes(volumes: Mapping[int, float], labels: Mapping[int, str]) -> dict[str, float]:
    """Volumes by label number as formulas read them: by name, and by the number as a text."""
    by_number = {str(label): volume for label, volume in volumes.items()}
    return by_number | {plain_name(name): float(volumes.get(label, 0.0)) for label, name in labels.items()}


def all_unit_spacing(spacings_mm: Iterable[Sequence[float] | None]) -> bool:
    """True if every volume has a spacing of 1 x 1 x 1 mm, which converters also write if they know none."""
    given = list(spacings_mm)
    return bool(given) and all(one is not None and len(one) == 3 and set(one) == {1.0} for one in given)


def scan_of(case_id: str, scans: Iterable[str]) -> str | None:
    """Return the scan that the name of a case contains: ``A0S9V9_ED`` is ED if a formula names ED.

    >>> scan_of("A0S9V9_ED", ["ED", "ES"]), scan_of("A0S9V9", ["ED", "ES"])
    ('ED', None)
    """
    return next((scan for scan in scans if re.search(rf"[_.-]{re.escape(scan)}$", case_id)), None)


def conformal_interval(
    values_pred: ArrayLike, values_true: ArrayLike, patients: Sequence[str], level: float = 0.9
) -> float | None:
    r"""Return half the width of an interval around a predicted value that contains the true one with probability
    ``level``.

    Split conformal with the patient as the unit: a patient's score is the largest error of the patient's scans,
    :math:`s_p = \max_i |y_i - \hat y_i|`, and the half-width is the
    :math:`\lceil (n + 1) \cdot \mathrm{level} \rceil`-th smallest of the n scores.

    Args:
        values_pred: Values from the masks of labelled cases.
        values_true: Values from their labels.
        patients: The patient of each value.
        level: The chance, over new patients, that the interval holds the true value.

    Returns:
        The half-width; None where there are too few patients (fewer than 9 at level 0.9).

    Raises:
        BadInput: The three sequences differ in length, or the level is not between 0 and 1.

    Example:
        >>> conformal_interval(range(9), [value + 1 for value in range(9)], [f"p{i}" for i in range(9)])
        1.0
    """
    pred, true = np.asarray(values_pred, float), np.asarray(values_true, float)
    if pred.shape != true.shape or len(patients) != pred.size or not 0 < level < 1:
        raise BadInput(
            f"an interval needs as many predicted values, true values and patients, and a level between 0 and 1; got "
            f"{pred.size}, {true.size}, {len(patients)} and {level}"
        )
    scores: dict[str, float] = {}
    for patient, error in zip(patients, np.abs(true - pred).tolist(), strict=True):
        if not math.isnan(error):
            scores[patient] = max(error, scores.get(patient, 0.0))
    rank = math.ceil((len(scores) + 1) * level - 1e-9)
    return sorted(scores.values())[rank - 1] if 0 < rank <= len(scores) else None


def _decision(name: str, text: str) -> DecisionRule:
    found = _DECISION.fullmatch(text.strip().removeprefix(name))
    if found is None or not math.isfinite(float(found[2])):
        raise BadInput(f"measure {name}: a decision must be a sign and a number such as '< 40', got {text!r}")
    return DecisionRule(found[1], float(found[2]))


def _volumes(expression: Expression) -> Iterable[LabelVolume]:
    if isinstance(expression, LabelVolume):
        yield expression
    elif isinstance(expression, Operation):
        for part in expression.parts:
            yield from _volumes(part)


def _evaluated(expression: Expression, looked_up: Callable[[LabelVolume], float | None]) -> float | None:
    if isinstance(expression, LabelVolume):
        return looked_up(expression)
    if not isinstance(expression, Operation):
        return expression
    parts = [_evaluated(part, looked_up) for part in expression.parts]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if expression.sign in ("max", "min"):
        return max(known) if expression.sign == "max" else min(known)
    if expression.sign == "neg":
        return -known[0]
    first, second = known
    if expression.sign == "/":
        return first / second if second else None
    return first + second if expression.sign == "+" else first - second if expression.sign == "-" else first * second


_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def _parsed(name: str, text: str) -> Expression:
    """Read a formula; Python syntax outside the grammar of this module is refused."""
    try:
        if len(text) > LONGEST:
            raise ValueError(f"a formula must have at most {LONGEST} characters, got {len(text):,}")
        found = _converted(ast.parse(" ".join(text.split()), mode="eval").body)
        if not any(True for _ in _volumes(found)):
            raise ValueError("no label is named")
    except (SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError) as error:
        what = error.msg if isinstance(error, SyntaxError) else str(error) or "too many nested parentheses"
        raise BadInput(
            f"measure {name}: {what}; a formula may have numbers, label names, volume(label, scan), + - * /, max, min "
            "and parentheses"
        ) from None
    return found


def _converted(node: ast.expr, depth: int = 0) -> Expression:
    """Return a node of Python's syntax tree as a part of a formula."""
    if depth > DEEPEST:
        raise ValueError(f"more than {DEEPEST} nested parts")
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        return Operation(_SIGNS[type(node.op)], tuple(_converted(one, depth + 1) for one in (node.left, node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return Operation("neg", (_converted(node.operand, depth + 1),))
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if not isinstance(node, ast.Call):
        return LabelVolume(_label(node))
    function, given = ast.unparse(node.func), node.args
    if function == "volume" and 1 <= len(given) <= 2 and not node.keywords:
        return LabelVolume(*map(_label, given))
    if function not in ("max", "min") or not given or node.keywords:
        raise ValueError(f"{ast.unparse(node)[:40]!r} is not expected there")
    parts = tuple(_converted(one, depth + 1) for one in given)
    return Operation(function, parts) if len(parts) > 1 else parts[0]


def _label(node: ast.expr) -> str:
    """Return the name of a label or scan: a word, a number inside volume(), or a text in quotation marks."""
    if isinstance(node, ast.Constant) and type(node.value) in (str, int):
        return str(node.value)
    name = ast.unparse(node)
    if not isinstance(node, ast.Name | ast.Attribute) or not re.fullmatch(r"[\w.]+", name):
        raise ValueError(f"{name[:40]!r} is not expected there")
    return name
