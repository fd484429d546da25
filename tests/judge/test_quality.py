"""Conformal quality: quantiles with clusters as the unit, by hand and by simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from casewise.core.errors import TooFewCases
from casewise.judge.calibration.quality import (
    cluster_quantile,
    clusters_needed,
    fit_quality,
    flag_concerns,
    rank_correlation,
)
from casewise.judge.controllers.flag import Quality


def test_one_case_in_each_cluster_is_the_usual_quantile() -> None:
    scores = np.arange(1.0, 20.0)
    for level in (0.5, 0.8, 0.9, 0.95):
        place = int(np.ceil(round(20 * level, 9)))  # the ceil((n + 1) level)-th smallest
        assert cluster_quantile(scores, range(19), level) == scores[place - 1]


def test_a_cluster_counts_once_however_many_cases_it_has() -> None:
    scores, clusters = [1, 2, 3, 4, 9, 9, 9, 9, 9, 9], ["a", "b", "c", "d", *"eeeeee"]
    assert cluster_quantile(scores, clusters, 0.6) == 4.0  # 4/6 of the mass lies at or below 4
    assert cluster_quantile(scores, clusters, 0.8) == 9.0


def test_too_few_clusters_are_refused_with_a_number() -> None:
    assert clusters_needed(0.9) == 9
    with pytest.raises(
        TooFewCases, match=r"level 0.9 needs at least 9 patients, got 8; label more, .*--confidence 0.8"
    ):
        cluster_quantile(range(16), [k // 2 for k in range(16)], 0.9)


def test_a_quality_is_a_line_from_one_down() -> None:
    quality = Quality(middle=1.0, ratio=2.0, level=0.9, softening=0.02)
    assert quality.of(0.9) == pytest.approx((0.88, 0.76))
    assert quality.of(0.0) == pytest.approx((0.0, 0.0))  # never below 0
    assert quality.of(None) is None
    assert Quality(1.0, 2.0, 0.9, signal=None).of(0.3) == pytest.approx((0.98, 0.96))


def test_a_signal_that_says_nothing_is_not_used() -> None:
    rng = np.random.default_rng(1)
    truth, clusters = rng.uniform(0.5, 0.9, 40), np.arange(40) // 2
    good = fit_quality({"agreement": 1 - 0.5 * (1 - truth)}, truth, clusters.tolist(), level=0.8)
    assert good.quality.signal == "agreement"
    assert good.rho == pytest.approx(1.0)
    bad = fit_quality({"agreement": rng.uniform(0.5, 0.9, 40)}, truth, clusters.tolist(), level=0.8)
    assert bad.quality.signal is None
    constant = bad.quality.of(None)
    assert constant is not None
    assert constant[1] == pytest.approx(np.sort(truth)[int(0.16 * 40)], abs=0.05)
    (weak,) = flag_concerns(bad)
    assert f"rank correlation {bad.rho:.2f}" in weak
    (few,) = flag_concerns(replace(bad, rho=0.93, p=0.0, clusters=3))  # the number of patients is the reason
    assert "patients" in few
    assert "there are 3" in few
    assert "correlation" not in few
    assert rank_correlation([1, 1, 1, 1], [1, 2, 3, 4], "abcd")[1] == 1.0
    from scipy import stats

    some, other = rng.integers(0, 5, 40), rng.integers(0, 5, 40)
    assert rank_correlation(some, other, range(40))[0] == pytest.approx(stats.spearmanr(some, other).statistic)


def simulated_miss(clusters: int, draws: int, level: float) -> float:
    """How often the metric of a new case lies below its bound, in a world with clusters and ties."""
    rng = np.random.default_rng(7)
    missed = 0
    for _ in range(draws):
        of = np.repeat(np.arange(clusters + 1), rng.integers(1, 5, clusters + 1))
        hard = rng.beta(1, 3, clusters + 1)[of] + rng.normal(0, 0.03, len(of))
        agreement = np.round(np.clip(1 - hard, 0, 1), 1)  # ties
        metric = np.clip(1 - 0.8 * hard - rng.exponential(0.05, clusters + 1)[of] + rng.normal(0, 0.03, len(of)), 0, 1)
        old = of < clusters
        new = np.flatnonzero(~old)[:1]
        ratios = (1 - metric[old]) / (1 - agreement[old] + 0.02)
        low = 1 - cluster_quantile(ratios, of[old].tolist(), level) * (1 - agreement[new][0] + 0.02)
        missed += int(metric[new][0] < low - 1e-12)
    return missed / draws


def test_a_new_case_lies_below_its_bound_as_seldom_as_promised() -> None:
    for clusters, level in ((10, 0.9), (20, 0.8)):
        draws = 400
        slack = 3 * np.sqrt((1 - level) * level / draws)
        assert simulated_miss(clusters, draws, level) <= 1 - level + slack
