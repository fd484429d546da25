"""The numbers of one method."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from casewise.study.benchmark.method_scores import summary


def test_undefined_cases_are_counted_and_few_patients_have_no_interval() -> None:
    rows = pd.DataFrame(
        {"case": ["a", "b", "c"], "cluster": ["p", "p", "q"], "change": [0.02, -0.04, np.nan],
         "metric": [0.9, 0.5, np.nan],
         "ha": [0.5, 0.25, 0.0], "ba": 0.0, "unscored": [0.0, 0.5, 0.0], "area": [10.0, 30.0, 0.0], "worse_voxels": 0.1}
    )  # fmt: skip
    found = summary(rows, oracle=0.02)
    assert found["gain"] == pytest.approx(-0.01)
    assert found["captured"] == pytest.approx(-0.5)
    assert (found["undefined"], found["helped"], found["hurt"], found["hurt_by_a_point"]) == (1, 1, 1, 1)
    assert found["judged"] == pytest.approx((10 + 15) / 40)
    assert found["low"] is None
