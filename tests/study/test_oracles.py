"""Oracles: reference rows that need labels."""

from __future__ import annotations

import pandas as pd
import pytest
from worlds.cohorts import synthetic_archive

from casewise.core.errors import BadInput
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.outcomes import outcomes
from casewise.study.assignment import change_oracle_scores, ha_oracle_scores, oracle_steps


def frame_of(**metrics):
    rows = [
        {"case": case, "group": None, "step": step, "shrink": 0.0, "metric": value, "ha": step / 10}
        for case, values in metrics.items()
        for step, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_the_oracle_steps_takes_the_highest_metric_and_the_smallest_step_of_a_tie():
    frame = frame_of(a=[0.5, 0.7, 0.7], b=[0.9, 0.1, 0.2], c=[0.5, 0.5, 0.5])
    best = oracle_steps(frame)
    assert list(zip(best["case"], best["step"], strict=True)) == [("a", 1), ("b", 0), ("c", 0)]
    assert oracle_steps(frame, include_source=False)["step"].tolist() == [1, 2, 1]


def test_oracle_scores_rank_the_worst_first():
    frame = frame_of(a=[0.5, 0.6, 0.9], b=[0.5, 0.4, 0.1])
    assert change_oracle_scores(frame).to_dict() == {"a": pytest.approx(-0.4), "b": pytest.approx(0.4)}
    first = frame[frame["step"] <= 1]
    assert change_oracle_scores(first).to_dict() == {"a": pytest.approx(-0.1), "b": pytest.approx(0.1)}
    assert ha_oracle_scores(frame).to_dict() == {"a": 0.1, "b": 0.1}


def test_no_fixed_budget_beats_the_oracle_in_what_it_optimizes(tmp_path):
    frame = outcomes(synthetic_archive(tmp_path, cases=10))
    best = oracle_steps(frame)["metric"].mean()
    assert all(best >= rows["metric"].mean() for _, rows in frame.loc[frame["shrink"] == 0].groupby("step"))


def test_without_labels_there_is_no_oracle(tmp_path):
    frame = outcomes(synthetic_archive(tmp_path, cases=2, labelled=False))
    for oracle in (oracle_steps, ha_oracle_scores, change_oracle_scores):
        with pytest.raises(BadInput, match="needs labels"):
            oracle(frame)


def test_oracles_are_no_controllers():
    assert not any("oracle" in name for name in CONTROLLERS)
