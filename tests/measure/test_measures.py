"""Clinical measures: the grammar, values that can be checked by hand, and intervals by patient."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casewise.core.errors import BadInput
from casewise.measure.masks import label_volumes
from casewise.measure.measures import (
    check_names,
    conformal_interval,
    declared_measures,
    measure,
    named_volumes,
    scan_of,
)


def value(formula, **volumes):
    return measure("m", formula).value({None: volumes})


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("a + b * 2", 14.0),
        ("(a + b) * 2", 18.0),
        ("a - b - 1", -2.0),
        ("a / b / 2", 0.4),
        ("-a + b", 1.0),
        ("--a", 4.0),
        ("max(a, b, 3)", 5.0),
        ("min(volume(a), 1.5e1)", 4.0),
        ("100 * (a - b) / a", -25.0),
        ('"b" * .5', 2.5),
        ("volume(missing)", 0.0),
        ("a / missing", None),
        ("max(a, a / missing)", None),
    ],
)
def test_formulas_have_the_value_that_a_person_finds(formula, expected):
    assert value(formula, a=4.0, b=5.0) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    "formula",
    [
        "__import__('os').system('true')",
        "a.__class__()",
        "lambda: a",
        "a ** 2",
        "a[0]",
        "a; b",
        "a if b else c",
        "eval(a)",
        "open(a)",
        "a b",
        "volume(a, b, c)",
        "volume(a + b)",
        "max()",
        "(a",
        "a)",
        "a +",
        "1 + 2",
        "",
        "(" * 500 + "a" + ")" * 500,
        "-" * 500 + "a",
        "a+" * 600 + "a",
    ],
)
def test_code_and_broken_formulas_are_refused_in_one_line(formula):
    with pytest.raises(BadInput, match="measure m: ") as refused:
        measure("m", formula)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


@given(st.text(alphabet="ab1.+-*/(), maxvolue\"'_", max_size=40))
def test_any_text_is_a_formula_or_refused(text):
    try:
        found = measure("m", text).value({None: {"a": 2.0, "b": 3.0}})
    except BadInput:
        return
    assert found is None or np.isfinite(found)


def test_volumes_are_millilitres_with_a_spacing_and_voxels_without():
    mask = np.zeros((2, 10, 10), np.uint8)
    mask[0, :5] = 1
    mask[1] = 2
    assert label_volumes(mask, (10, 1, 2)) == {1: pytest.approx(1.0), 2: pytest.approx(2.0)}
    assert label_volumes(mask, None) == {1: 50.0, 2: 100.0}
    assert label_volumes(mask[0], (1, 1)) == {1: 50.0}  # a picture has no volume


def test_the_ejection_fraction_needs_both_scans_of_a_patient():
    ef = measure("ef", "100 * (volume(LV, ED) - volume(LV, ES)) / volume(LV, ED)")
    scans = {name: named_volumes({1: size}, {1: "LV"}) for name, size in (("ED", 120.0), ("ES", 48.0))}
    assert ef.per_patient
    assert ef.value(scans) == pytest.approx(60.0)
    assert ef.value({"ED": scans["ED"]}) is None
    assert ef.value({**scans, "ED": {"lv": 0.0}}) is None


def test_tables_say_formula_unit_and_decision():
    found = declared_measures(
        {"cdr": {"formula": "cup / (cup + rim)", "decision": ["cdr > 0.5", ">= 0.7"]}, "k": "cup"}
    )
    assert [str(one) for one in found[0].decisions] == ["> 0.5", ">= 0.7"]
    assert found[0].decisions[0].holds(0.51)
    assert not found[0].decisions[0].holds(0.5)
    for wrong in ({"x": {"formul": "a"}}, {"x": 3}, {"x y": "a"}, {"x": {"formula": "a", "decision": "!= 3"}}, [1]):
        with pytest.raises(BadInput):
            declared_measures(wrong)


def test_an_unknown_label_is_named_with_the_known_ones():
    with pytest.raises(BadInput, match="measure m: no label is called 'LVV'; known: lv, rv"):
        check_names([measure("m", "LVV / RV")], {1: "LV", 2: "RV"})
    check_names([measure("m", "volume(7) / RV")], {2: "RV"})


def test_a_scan_is_read_from_the_end_of_a_case_id():
    assert scan_of("p01_ES", ["ED", "ES"]) == "ES"
    assert scan_of("p01_ESX", ["ED", "ES"]) is None


def test_a_conformal_interval_takes_the_worst_scan_of_each_patient():
    errors = [1.0, 5.0, *[0.5] * 16]
    patients = [f"p{at // 2}" for at in range(18)]
    assert conformal_interval(np.zeros(18), errors, patients, 0.9) == 5.0  # nine patients: the largest
    assert conformal_interval(np.zeros(16), errors[:16], patients[:16], 0.9) is None
    assert conformal_interval(np.zeros(18), [*errors[:17], float("nan")], patients) == 5.0
    with pytest.raises(BadInput):
        conformal_interval([1.0], [1.0, 2.0], ["a", "b"])


def test_a_conformal_interval_covers_as_often_as_it_says():
    draw, covered = np.random.default_rng(0), 0
    for _ in range(600):
        patient = draw.normal(0, 1, 13).repeat(2)
        error = patient + draw.normal(0, 0.5, 26)
        half = conformal_interval(np.zeros(24), error[:24], [f"p{i // 2}" for i in range(24)], 0.8)
        covered += bool(abs(error[24]) <= half)
    assert covered / 600 >= 0.8 - 2 * np.sqrt(0.16 / 600)
