"""Each statistic against the library that has it: SciPy, statsmodels, scikit-learn; or against an honest loop."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from casewise.measure.metrics.selective import auroc
from casewise.study.analyses.edited_area import region_geometry
from casewise.study.statistics.chance import chance_draws, chance_moments
from casewise.study.statistics.ranks import spearman, spearman_draws, spearman_p
from casewise.study.statistics.resample import draws, mean_interval, paired_interval, wilcoxon


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def tied(rng: np.random.Generator, n: int) -> np.ndarray:
    """Half zeros, half numbers, as HA is."""
    return np.where(rng.random(n) < 0.5, 0.0, np.round(rng.random(n), 2))


@pytest.mark.parametrize(("method", "name"), [("percentile", "percentile")])
def test_the_paired_bootstrap_is_scipys_on_the_same_stream(rng, method, name):
    first, second = rng.normal(0.3, 1, 80), rng.normal(0, 1, 80)
    ours = paired_interval(first, second, resamples=2000, seed=1000, method=method)
    theirs = stats.bootstrap(
        (first, second),
        lambda a, b, axis: (a - b).mean(axis=axis),
        paired=True,
        n_resamples=2000,
        vectorized=True,
        method=name,
        rng=np.random.default_rng(1000),
    )
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=1e-12)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=1e-12)
    assert ours.p_below == np.mean(theirs.bootstrap_distribution < 0)


def test_the_cluster_bootstrap_is_a_loop_over_drawn_clusters(rng):
    units = np.array([0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 4, 5])
    values = rng.normal(size=len(units))
    drawn = draws(6, 300, 1000)
    means = [np.mean(np.concatenate([values[units == unit] for unit in row])) for row in drawn.index]
    found = mean_interval(values, clusters=units, resamples=300, seed=1000, method="percentile")
    assert [found.low, found.high] == pytest.approx(np.percentile(means, [2.5, 97.5]))
    assert (found.n, found.clusters) == (12, 6)


def test_spearman_is_scipys_with_ties(rng):
    x, y = tied(rng, 200), rng.integers(0, 6, 200).astype(float)
    theirs = stats.spearmanr(x, y)
    assert spearman(x, y) == pytest.approx(theirs.statistic, abs=1e-14)
    assert spearman_p(spearman(x, y), 200) == pytest.approx(theirs.pvalue, rel=1e-9)


def test_resampled_spearman_is_scipys_on_every_resample(rng):
    cases, steps = 15, 3
    units = np.repeat(np.arange(cases), steps)
    columns = np.column_stack([tied(rng, 45), rng.integers(0, 3, 45), rng.normal(size=45)])
    target = tied(rng, 45)
    drawn = draws(cases, 60, 1000)
    ours = spearman_draws(columns, target, units, drawn.counts)
    for number, row in enumerate(drawn.index):
        chosen = np.concatenate([np.flatnonzero(units == unit) for unit in row])
        for column in range(3):
            theirs = stats.spearmanr(columns[chosen, column], target[chosen]).statistic
            assert ours[number, column] == pytest.approx(theirs, abs=1e-12)


def test_resampled_spearman_of_a_constant_draw_has_no_value():
    units = np.arange(3)
    counts = np.array([[3, 0, 0], [1, 1, 1]], np.int32)
    found = spearman_draws(np.array([[1.0], [2.0], [3.0]]), np.array([1.0, 2.0, 3.0]), units, counts)
    assert np.isnan(found[0, 0])
    assert found[1, 0] == pytest.approx(1.0)


def test_auroc_is_scikit_learns(rng):
    scores, positive = rng.integers(0, 8, 60).astype(float), rng.random(60) < 0.4
    assert auroc(scores, positive) == pytest.approx(roc_auc_score(positive, scores), abs=1e-14)


@pytest.mark.parametrize("n", [12, 60])
def test_the_signed_rank_test_is_scipys_without_zeros(rng, n):
    first, second = np.round(rng.random(n), 3), np.round(rng.random(n), 3)
    second[:3] = first[:3]
    difference = np.round(first - second, 12)
    p, method = wilcoxon(first, second)
    how = "exact" if method == "exact" else "approx"
    theirs = (
        stats.wilcoxon(difference, zero_method="wilcox", method=how, correction=False)
        if how == "approx"
        else (stats.wilcoxon(difference[difference != 0], method="exact"))
    )
    assert p == pytest.approx(theirs.pvalue, abs=1e-12)


def test_region_contrasts_are_scipys_mann_whitney(rng):
    n = 70
    frame = pd.DataFrame(
        {
            "case": [f"c{number % 9}" for number in range(n)],
            "side": np.where(rng.random(n) < 0.4, "harmful", "beneficial"),
            "area": rng.integers(16, 40, n).astype(float),
            "compactness": rng.random(n),
            "distance": rng.random(n) * 50,
            "fraction": rng.random(n) * 0.2,
        }
    )
    found = region_geometry(frame)
    harmful, beneficial = (frame.loc[frame["side"] == side, "area"] for side in ("harmful", "beneficial"))
    theirs = stats.mannwhitneyu(harmful, beneficial, alternative="two-sided", method="asymptotic")
    assert found.number("p", feature="area") == pytest.approx(theirs.pvalue)
    pairs = np.sign(harmful.to_numpy()[:, None] - beneficial.to_numpy()[None, :])
    assert found.number("cliff_d", feature="area") == pytest.approx(pairs.mean())
    small = (frame["fraction"] < 0.05).groupby(frame["side"]).mean()
    assert found.number("cliff_d", feature="small@5%") == pytest.approx(small["harmful"] - small["beneficial"])


def test_chance_moments_are_those_of_all_permutations():
    from itertools import permutations

    values = np.array([[0.0, 0.3, 0.9], [0.0, 0.1, 0.2], [0.0, 0.8, 0.4], [0.0, 0.5, 0.6], [0.0, 0.2, 0.7]])
    buckets = np.array([0, 0, 1, 2, 2])
    means = [np.mean([values[i, b] for i, b in enumerate(order)]) for order in permutations(buckets)]
    found = chance_moments(values, buckets)
    assert found.mean == pytest.approx(np.mean(means), abs=1e-14)
    assert found.sd == pytest.approx(np.std(means), abs=1e-14)


def test_chance_moments_stay_exact_when_a_case_is_undefined():
    from itertools import permutations

    values = np.array([[0.0, 0.3, 0.9], [np.nan, np.nan, np.nan], [0.0, 0.8, 0.4], [0.0, 0.5, 0.6]])
    buckets = np.array([0, 1, 2, 2])
    means = [np.nanmean([values[i, b] for i, b in enumerate(order)]) for order in permutations(buckets)]
    found = chance_moments(values, buckets)
    assert (found.mean, found.sd, found.n) == (pytest.approx(np.mean(means)), pytest.approx(np.std(means)), 3)


def test_whole_patients_are_dealt():
    values = np.array([[0.0, 1.0]] * 4)  # two patients of two scans: one all hard, one all low
    buckets, units = np.array([0, 0, 1, 1]), np.array([7, 7, 3, 3])
    split = np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])  # only the first patient's scans can lose
    drawn = chance_draws(split, buckets, 400, 0, units)
    assert set(np.unique(drawn)) == {0.0, 0.5}  # both scans or none; never one of them
    assert set(np.unique(chance_draws(split, buckets, 400, 0))) == {0.0, 0.25, 0.5}
    assert np.unique(chance_draws(values, buckets, 50, 0, units)).tolist() == [0.5]


def test_with_patients_of_different_size_the_quota_stays(rng):
    units = np.array([0, 0, 0, 1, 2, 2, 3])
    buckets = np.array([0, 1, 1, 2, 2, 2, 0])
    values = np.tile(np.array([0.0, 1.0, 10.0]), (7, 1))  # the mean tells the quota
    assert np.allclose(chance_draws(values, buckets, 50, 0, units), (2 * 0 + 2 * 1 + 3 * 10) / 7)


def test_chance_draws_have_the_exact_moments(rng):
    values, buckets = rng.random((40, 3)), rng.integers(0, 3, 40)
    drawn, exact = chance_draws(values, buckets, 20_000, 1000), chance_moments(values, buckets)
    assert drawn.mean() == pytest.approx(exact.mean, abs=4 * exact.sd / np.sqrt(20_000))
    assert drawn.std() == pytest.approx(exact.sd, rel=0.03)
