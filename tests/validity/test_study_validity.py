"""By simulation: planted effects are found, and where nothing is planted the study says so at the nominal rate."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from worlds.arms import arms_at, deployed_at

from casewise.core.records import State
from casewise.measure.metrics.selective import auroc, risk_coverage
from casewise.study.analyses.controls import attribution, random_control
from casewise.study.analyses.deployed_methods import MethodPair, intervals
from casewise.study.quality_control import area_interval
from casewise.study.statistics.chance import chance_draws
from casewise.study.statistics.ranks import auroc_interval, shuffle_p, spearman, spearman_draws
from casewise.study.statistics.resample import draws, mean_interval, wilcoxon

STATES = {"low": State(3), "mid": State(2), "hard": State(0)}


def at_most(rate: float, repetitions: int, nominal: float) -> bool:
    """The rate is not above nominal by more than three standard errors."""
    return rate <= nominal + 3 * sqrt(nominal * (1 - nominal) / repetitions)


def harm(rng: np.random.Generator, shape: tuple[int, ...] | int) -> np.ndarray:
    """Half zeros, the rest skewed: what HA looks like."""
    return np.where(rng.random(shape) < 0.5, 0.0, rng.beta(1, 4, shape))


def cohort(rng: np.random.Generator, cases: int, *, effect: float, prefix: str = "c") -> pd.DataFrame:
    """Ladders of four steps; ``effect`` is how much of a case's harm its step-1 delta knows."""
    delta, toll = rng.random(cases), rng.random(cases)
    fate = effect * delta + (1 - effect) * toll
    parts = []
    for step in range(5):
        on = float(step > 0)
        ha = np.clip(on * (0.1 * rng.random(cases) + 0.4 * fate), 0, 1)
        parts.append(
            pd.DataFrame(
                {
                    "case": [f"{prefix}{number:04d}" for number in range(cases)],
                    "group": None,
                    "cluster": None,
                    "step": step,
                    "shrink": 0.0,
                    "metric": 0.8 + on * (0.01 * rng.standard_normal(cases) + 0.03 * (0.5 - fate)),
                    "ha": ha,
                    "ba": on * (1 - ha),
                    "neutral_scored": 0.0,
                    "unscored": 0.0,
                    "regions": (10 * delta).astype(int) * on,
                    "delta": delta * on,
                    "area": 100 * on,
                    "msp": rng.random(cases),
                    "entropy": rng.random(cases),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def routed(frame: pd.DataFrame) -> tuple[dict[str, pd.DataFrame], pd.DataFrame]:
    """The tertile router on delta, and its arms."""
    arms = arms_at(frame, STATES)
    first = frame[frame["step"] == 1].set_index("case")["delta"].sort_index()
    low, high = np.percentile(first, [33.33, 66.67])
    bucket = pd.Series(np.where(first >= high, "hard", np.where(first > low, "mid", "low")), index=first.index)
    parts = [arms[name][arms[name]["case"].map(bucket) == name] for name in STATES]
    return arms, pd.concat(parts).sort_values("case").reset_index(drop=True)


def false_verdicts(repetitions: int, cases: int, resamples: int) -> tuple[float, float]:
    """How often two methods that do the same are told apart: by the report's verdict, and by the interval alone."""
    rng = np.random.default_rng([1, cases])
    found = [mean_interval(harm(rng, cases) - harm(rng, cases), resamples=resamples) for _ in range(repetitions)]
    return float(np.mean([one.shown for one in found])), float(np.mean([one.separated for one in found]))


@pytest.mark.parametrize("area", [0.5, 0.75, 0.9, 0.97])
def test_an_interval_of_an_auroc_holds_with_ten_patients_of_two_cases(area):
    """A percentile bootstrap has the width 0 where all cases are in order; with .97 and ten cases that is usual."""
    rng, missed = np.random.default_rng(int(100 * area)), 0
    poor = np.repeat(np.arange(10) < 4, 2)
    for _ in range(400):
        scores = 0.8 * np.repeat(rng.normal(size=10), 2) + 0.6 * rng.normal(size=20)
        low, high = auroc_interval(auroc(scores + np.sqrt(2) * stats.norm.ppf(area) * poor, poor), 4, 6)
        missed += not low <= area <= high
    assert at_most(missed / 400, 400, 0.05)


@pytest.mark.parametrize(("patients", "nominal"), [(5, 0.1), (10, 0.05)])
def test_an_interval_of_the_area_under_the_risk_coverage_curve_holds(patients, nominal):
    rng = np.random.default_rng(patients)
    names = pd.DataFrame({"case": range(2 * patients), "cluster": np.repeat(np.arange(patients), 2).astype(str)})

    def drawn() -> tuple[np.ndarray, np.ndarray]:
        quality = 0.7 * np.repeat(rng.normal(size=patients), 2) + 0.7 * rng.normal(size=2 * patients)
        return 0.7 * rng.normal(size=2 * patients) - quality, 1 / (1 + np.exp(1.5 - quality))

    truth = np.mean([risk_coverage(*drawn()).aurc for _ in range(1500)])
    ends = np.array([area_interval(names, *drawn()) for _ in range(300)])
    assert at_most(1 - ((ends[:, 0] <= truth) & (truth <= ends[:, 1])).mean(), 300, nominal)


@pytest.mark.parametrize("cases", [8, 20, 60])
def test_the_verdict_calls_a_null_difference_at_no_more_than_the_nominal_rate(cases):
    assert at_most(false_verdicts(400, cases, 300)[0], 400, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [20, 60])
def test_the_verdict_is_at_the_nominal_rate_over_many_draws(cases):
    verdict, interval = false_verdicts(3000, cases, 1000)
    assert verdict == pytest.approx(0.05, abs=3 * sqrt(0.05 * 0.95 / 3000))
    assert interval >= verdict


@pytest.mark.slow
def test_with_eight_cases_verdict_and_interval_keep_their_level():
    verdict, interval = false_verdicts(3000, 8, 1000)
    assert 0.01 < verdict <= 0.05  # few sign patterns: below the nominal rate
    assert interval > 0.02
    assert at_most(interval, 3000, 0.05)  # Student's t


def cluster_false_verdicts(repetitions: int, *, clustered: bool, patients: int = 25) -> float:
    """Eight alike cases a patient: a shared effect of mean zero."""
    rng = np.random.default_rng([2, patients])
    units = np.repeat(np.arange(patients), 8)
    wrong = 0
    for _ in range(repetitions):
        values = rng.normal(size=patients)[units] + 0.3 * rng.normal(size=len(units))
        wrong += mean_interval(values, clusters=units if clustered else None, resamples=400).shown
    return wrong / repetitions


@pytest.mark.parametrize("patients", [8, 25])
def test_drawing_clusters_keeps_the_level_that_drawing_cases_loses(patients):
    assert at_most(cluster_false_verdicts(300, clustered=True, patients=patients), 300, 0.05)
    assert cluster_false_verdicts(150, clustered=False, patients=patients) > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("patients", [8, 25])
def test_the_verdict_on_clusters_is_at_the_nominal_rate_over_many_draws(patients):
    rate = cluster_false_verdicts(3000, clustered=True, patients=patients)
    assert rate == pytest.approx(0.05, abs=3 * sqrt(0.05 * 0.95 / 3000))


def null_correlation(rng: np.random.Generator, cases: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signal and harm are unrelated, but each case's four steps are alike."""
    units = np.repeat(np.arange(cases), 4)
    signal, target = (rng.normal(size=cases)[units] + 0.1 * rng.normal(size=len(units)) for _ in range(2))
    return signal, target, units


def spearman_false_positives(repetitions: int, cases: int, *, by_case: bool) -> float:
    rng = np.random.default_rng([3, cases])
    wrong = 0
    for _ in range(repetitions):
        signal, target, units = null_correlation(rng, cases)
        rows = units if by_case else np.arange(len(units))
        seed = int(rng.integers(1 << 30))
        wrong += shuffle_p(signal[:, None], target, rows, shuffles=199, seed=seed)[0] <= 0.05
    return wrong / repetitions


@pytest.mark.parametrize("cases", [8, 50])
def test_shuffling_whole_cases_keeps_the_level_that_shuffling_rows_loses(cases):
    assert at_most(spearman_false_positives(300, cases, by_case=True), 300, 0.05)
    assert spearman_false_positives(100, cases, by_case=False) > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("cases", [8, 50])
def test_shuffled_correlations_are_at_the_nominal_rate_over_many_draws(cases):
    rate = spearman_false_positives(2000, cases, by_case=True)
    assert rate == pytest.approx(0.05, abs=3 * sqrt(0.05 * 0.95 / 2000))


def test_case_clustered_intervals_are_wrong_far_less_often_than_pooled_rows():
    rng = np.random.default_rng(3)
    wrong = np.zeros(2)
    for _ in range(150):
        signal, target, units = null_correlation(rng, 50)
        for way, rows in enumerate((units, np.arange(len(units)))):
            counts = draws(int(rows.max()) + 1, 300, 1000).counts
            low, high = np.percentile(spearman_draws(signal[:, None], target, rows, counts)[:, 0], [2.5, 97.5])
            wrong[way] += low > 0 or high < 0
    assert wrong[0] / 150 < 0.15
    assert wrong[1] / 150 > 0.2


def test_the_signed_rank_test_rejects_a_null_at_the_nominal_rate():
    rng = np.random.default_rng(4)
    p = [wilcoxon(harm(rng, 40), harm(rng, 40))[0] for _ in range(500)]
    assert at_most(float(np.mean(np.array(p) <= 0.05)), 500, 0.05)


def matched_p(repetitions: int, effect: float) -> np.ndarray:
    rng = np.random.default_rng(5)
    found = []
    for _ in range(repetitions):
        arms, router = routed(cohort(rng, 45, effect=effect))
        row = random_control(arms, router, draws=200, seed=int(rng.integers(1 << 30))).row(scope="all", quantity="ha")
        found.append((row["p_draws_corrected"], row["p_normal"]))
    return np.array(found)


def unskilled_p(patients: int, scans: int, repetitions: int, *, by_patient: bool, icc: float = 0.8) -> np.ndarray:
    """p-values of a router that knows nothing, on patients whose scans are alike in coordinate and in harm."""
    rng = np.random.default_rng(6)
    units = np.repeat(np.arange(patients), scans)
    alone = np.arange(len(units))
    found = []
    for _ in range(repetitions):
        copied = rng.random((2, len(units))) < sqrt(icc)
        fate, coordinate = np.where(copied, rng.random((2, patients))[:, units], rng.random((2, len(units))))
        values = np.column_stack([np.zeros(len(units)), 0.5 * fate, fate])
        buckets = np.searchsorted(np.quantile(-coordinate, [1 / 3, 2 / 3]), -coordinate)
        dealt = chance_draws(values, buckets, 199, int(rng.integers(1 << 30)), units if by_patient else alone)
        observed = values[alone, buckets].mean()
        found.append((1 + (dealt <= observed + 1e-12).sum()) / 200)
    return np.array(found)


@pytest.mark.parametrize(("patients", "scans"), [(20, 3), (12, 8)])
def test_similar_scans_give_a_router_without_skill_no_advantage_over_chance(patients, scans):
    assert at_most((unskilled_p(patients, scans, 300, by_patient=True) <= 0.05).mean(), 300, 0.05)


def test_dealing_scans_instead_of_patients_finds_skill_where_there_is_none():
    # what 0.1 did
    assert (unskilled_p(12, 8, 200, by_patient=False) <= 0.05).mean() > 0.15


@pytest.mark.slow
@pytest.mark.parametrize("icc", [0.0, 0.25, 0.5, 0.8])
@pytest.mark.parametrize(("patients", "scans"), [(20, 3), (12, 8)])
def test_however_alike_scans_are_chance_is_at_its_nominal_rate(patients, scans, icc):
    rate = (unskilled_p(patients, scans, 1500, by_patient=True, icc=icc) <= 0.05).mean()
    assert rate == pytest.approx(0.05, abs=3 * sqrt(0.05 * 0.95 / 1500))


def test_matched_quota_finds_the_planted_router_every_time():
    assert (matched_p(8, effect=1.0) < 0.01).all()


def test_matched_quota_rejects_at_the_nominal_rate_when_the_coordinate_knows_nothing():
    rates = (matched_p(60, effect=0.0) <= 0.05).mean(axis=0)
    assert at_most(rates[0], 60, 0.05)
    assert at_most(rates[1], 60, 0.05)


@pytest.mark.slow
def test_matched_quota_p_values_are_uniform_under_the_null():
    p = matched_p(600, effect=0.0)
    for level in (0.05, 0.2, 0.5):
        rates = (p <= level).mean(axis=0)
        assert rates == pytest.approx(level, abs=3 * sqrt(level * (1 - level) / 600) + 0.01)


def test_a_planted_gain_is_separated_and_its_attribution_is_below_one():
    rng = np.random.default_rng(6)
    frame = cohort(rng, 120, effect=1.0)
    arms, router = routed(frame)
    methods = {"router": router, "fixed-4": deployed_at(frame, State(4))}
    found = intervals(methods, [MethodPair("router", "fixed-4")], resamples=1000)
    assert found.row(id="router~fixed-4:ha")["shown"]
    assert attribution(arms, router, methods["fixed-4"]).number("share", control="random") < 0.9


def test_without_a_planted_link_the_quota_explains_the_whole_cut():
    rng = np.random.default_rng(7)
    shares = []
    for _ in range(12):
        frame = cohort(rng, 90, effect=0.0)
        arms, router = routed(frame)
        shares.append(attribution(arms, router, deployed_at(frame, State(4))).number("share", control="random"))
    assert np.mean(shares) == pytest.approx(1.0, abs=0.05)


def test_spearman_of_independent_columns_centers_on_zero():
    rng = np.random.default_rng(12)
    found = [spearman(harm(rng, 100), rng.random(100)) for _ in range(300)]
    assert np.mean(found) == pytest.approx(0, abs=0.02)
