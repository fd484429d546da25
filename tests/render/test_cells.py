"""What a cell says, in words, in LaTeX and for sorting."""

from __future__ import annotations

import math

import numpy as np
import pytest

from casewise.render.tables import (
    DASH,
    NOT_RUN,
    Estimate,
    PairCell,
    in_percent,
    number,
    sort_key,
    tex_of,
    text_of,
    undefined,
)


def test_small_shares_are_not_hidden_behind_zeros_and_small_differences_are_zero_without_a_sign():
    assert number(0.000016) == "1.6e−05"
    assert number(0.0) == "0.000"
    assert number(-0.0000016, 4, signed=True) == number(0.0000016, 4, signed=True) == "0.0000"
    assert number(-0.00006, 4, signed=True) == "−0.0001"
    gain = Estimate(-0.0000016, -0.012, 0.0000004)
    assert text_of(gain, digits=4, signed=True) == "0.0000 [−0.0120, 0.0000]"


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, "not run"),
        (NOT_RUN, "not run"),
        (undefined(3), "undefined (n=3)"),
        (DASH, "—"),
        (True, "yes"),
        (np.bool_(False), "no"),
        (np.int64(230), "230"),
        (math.inf, "∞"),
        (Estimate(-0.116, -0.152, -0.081), "−0.116 [−0.152, −0.081]"),
        (PairCell(41.3, 0.007, "{} ({})", first_digits=1, second_signed=True), "41.3 (+0.007)"),
    ],
)
def test_no_cell_is_ever_blank(cell, text):
    assert text_of(cell) == text


def test_what_has_no_value_sorts_last():
    assert sort_key(undefined(0)) is None
    assert sort_key(NOT_RUN) is None
    assert sort_key(float("nan")) is None
    assert sort_key(Estimate(0.5, 0.0, 1.0)) == 0.5


def test_shares_become_percent_and_words_stay():
    assert in_percent(0.587) == pytest.approx(58.7)
    assert in_percent("all") == "all"
    assert in_percent(True) is True


def test_latex_prints_hostile_names_as_they_are():
    assert tex_of("a_b & 50 %\\input{x}") == r"a\_b \& 50 \%\textbackslash{}input\{x\}"
