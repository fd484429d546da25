"""Results print in one line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import casewise
from casewise.core.brief import UNIT, counted
from casewise.core.records import Case, Policy, Trajectory
from casewise.measure.regions import regions_of

SOURCE = np.zeros((64, 64), int)
ADAPTED = SOURCE.copy()
ADAPTED[10:30, 10:30] = 1


def test_harm_prints_its_numbers_and_no_arrays() -> None:
    assert repr(casewise.harm(SOURCE, ADAPTED, ADAPTED)) == (
        "Harm(ha=0, ba=1, neutral_scored=0, unscored=0, regions=1, delta=0.09766, area=400, voxel_harm=0)"
    )


def test_a_case_shows_the_shape_of_its_image() -> None:
    assert (
        repr(Case("a", np.zeros((1, 8, 8), np.float32), group="B"))
        == "Case(id='a', image=<1 x 8 x 8 float32>, group='B')"
    )


def test_results_stay_short() -> None:
    trajectory = Trajectory(
        "a", (SOURCE, ADAPTED), ({}, {"regions": 1.0}), diagnostics=tuple({"loss": 1.0} for _ in range(9))
    )
    policy = Policy("p", "router", {"cut_low": 0.1}, 4, calibration_cases=tuple(f"case-{i}" for i in range(99)))
    found = regions_of(SOURCE, ADAPTED)
    for result in (trajectory, policy, found, casewise.surface_gaps(ADAPTED, ADAPTED, spacing_mm=(1, 1))):
        assert len(repr(result)) < 400, repr(result)
        assert "\n" not in repr(result)
    assert "<99 items>" in repr(policy)


def test_one_is_not_many() -> None:
    assert counted(1, "case") == "1 case"
    assert counted(0, "case") == "0 cases"
    assert counted(2, "class", "classes") == "2 classes"
    assert counted(1, *UNIT) == "1 patient or sequence"
    assert counted(3, *UNIT) == "3 patients or sequences"


KNOWN_TO_BE_PATIENTS = ("data/datasets/fundus.py", "data/dicom")  # eyes and DICOM series are those of patients


def test_what_a_person_reads_says_patients_or_sequences() -> None:
    """A cluster may be a drive: only where it is surely a person, a message speaks of patients alone."""
    home = Path(casewise.__file__).parent
    said = [
        f"{path.relative_to(home)}: {text}"
        for path in sorted(home.rglob("*.py"))
        if not str(path.relative_to(home)).startswith(KNOWN_TO_BE_PATIENTS)
        for text in _messages(ast.parse(path.read_text()))
    ]
    alone = [text for text in said if re.search(r"\bpatients?\b(?! group)", text) and "sequence" not in text]
    assert alone == []


def _messages(tree: ast.AST) -> Iterator[str]:
    """Texts of more than one word that are no docstrings, f-strings whole."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.JoinedStr):
            yield " ".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value
        else:
            yield from _messages(node)
