"""Halves of whole patients, another coordinate in the router's place, and classes that binarizing hides."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from casewise.archive.store import create_archive
from casewise.core.records import Binding, Case, Trajectory
from casewise.study.analyses import ANALYSES
from casewise.study.analyses.classes import _has_classes
from casewise.study.analyses.controls import substitutions_of
from casewise.study.analyses.search import halves
from casewise.study.assignment import buckets_at
from casewise.study.trajectories import step_one


def test_halves_keep_patients_together():
    holdout = pd.DataFrame({"case": list("aabbccdd"), "cluster": list("11112222"), "step": [0, 1] * 4})
    first, second = halves(holdout)
    assert (set(first["case"]), set(second["case"])) == ({"a", "b"}, {"c", "d"})


def test_halves_without_clusters_are_every_other_case():
    holdout = pd.DataFrame({"case": list("bcaedf"), "cluster": None})
    assert [sorted(half["case"]) for half in halves(holdout)] == [["a", "c", "e"], ["b", "d", "f"]]


def test_the_search_runs_where_cases_share_patients(study):
    section = ANALYSES["search"](study)
    assert section.findings[0].made["designs"] >= 2


def test_another_coordinate_gets_cut_points_of_its_own(study):
    found = substitutions_of(study)
    native = found.row(coordinate="regions", kind="native")
    values = step_one(study.outcomes, "regions").to_numpy()
    rolled_back = int((buckets_at(values, native["cut_low"], native["cut_high"])[0] == 0).sum())
    assert native["hard"] == rolled_back
    assert native["cut_high"] == np.percentile(step_one(study.holdout, "regions"), 66.67)
    assert "delta" not in set(found.table["coordinate"])  # the router's own


@pytest.mark.parametrize(("label", "several"), [([0, 1, 1], False), ([0, 1, 2], True), ([0, 1, 255], False)])
def test_only_labels_with_several_classes_can_hide_a_swap(tmp_path, label, several):
    truth = np.array([label], np.uint8)
    made = {"binding": Binding("m", "o", "l", "s"), "steps": 1, "configuration": {"ignore": 255}}
    archive = create_archive(tmp_path / "a", **made)
    archive.add(Case("x", np.zeros((1, 1, 3))), Trajectory("x", (truth, truth), ({"delta": 0.0},) * 2), truth)
    assert _has_classes(archive.seal()) is several


def test_one_class_says_that_nothing_is_hidden(study):
    assert "one foreground class" in str(ANALYSES["classes"](study).missing)
