"""The paper's own numbers as tests of the formulas: what is arithmetic must come out as printed (Q1-Q30)."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from worlds.arms import arms_at
from worlds.identities import audit

from casewise.core.records import State
from casewise.measure.signals.risk import RiskStatistics
from casewise.study.analyses.controls import attribution
from casewise.study.analyses.cost import cost, firing
from casewise.study.analyses.deployed_methods import bucket_decomposition, method_table
from casewise.study.analyses.edited_area import accounting, cliff_d
from casewise.study.analyses.elsewhere import frozen_design
from casewise.study.analyses.helphurt import help_hurt
from casewise.study.assignment import buckets_at
from casewise.study.statistics.chance import chance_moments
from casewise.study.statistics.ranks import spearman_p


def routed(low: int, mid: int, hard: int, *, depths: tuple[float, float] = (3, 2), **columns: float) -> pd.DataFrame:
    """A deployed frame with these bucket sizes and depths."""
    sizes = {"low": low, "mid": mid, "hard": hard}
    bucket = np.repeat(list(sizes), list(sizes.values()))
    depth = np.repeat([*depths, 0], list(sizes.values())).astype(float)
    frame = pd.DataFrame({"bucket": bucket, "deployed": depth, "executed": np.maximum(depth, 1)})
    frame = frame.assign(case=[f"c{number:04d}" for number in range(len(frame))], rolled_back=bucket == "hard")
    blank = {
        "metric": 0.8,
        "ha": 0.0,
        "ba": 0.0,
        "neutral_scored": 0.0,
        "unscored": 0.0,
        "change": 0.0,
        "regions": 0,
        "delta": 0.0,
        "worse_voxels": 0.0,
    }
    return frame.assign(**{**blank, "metric_source": 0.8, "area": 0, "group": None, "cluster": None, **columns})


@pytest.mark.parametrize(
    ("sizes", "depths", "steps", "executed"),
    [
        ((54, 46, 130), (3, 2), 1.104, 1.67),  # Q1: cardiac
        ((27, 24, 42), (1, 1), 0.548, 1.00),  # Q2: prostate
        ((48, 39, 39), (3, 2), 1.76, 2.07),  # Q3: Prostate158
        ((22, 41, 43), (3.23, 2.59), 1.67, 2.08),  # Q4: night, with mean depths of the stop rule
    ],
)
def test_steps_columns_follow_from_bucket_sizes(sizes, depths, steps, executed):
    frame = routed(*sizes, depths=depths)
    assert method_table({"router": frame}).number("steps", method="router") == pytest.approx(steps, abs=0.005)
    assert cost({"router": frame}).number("executed", method="router") == pytest.approx(executed, abs=0.005)


@pytest.mark.parametrize(
    ("helped", "hurt", "rolled_back", "unchanged", "n"),
    [
        (95, 135, 0, 0, 230),
        (54, 46, 130, 0, 230),
        (48, 45, 0, 0, 93),
        (20, 27, 42, 4, 93),
        (45, 61, 0, 0, 106),
        (36, 27, 43, 0, 106),
    ],
)
def test_help_and_hurt_counts_add_up_and_make_the_mean(helped, hurt, rolled_back, unchanged, n):
    change = np.repeat([0.02, -0.01, 0.0, 0.0], [helped, hurt, rolled_back, unchanged])
    frame = pd.DataFrame({"change": change, "rolled_back": np.arange(n) >= n - unchanged - rolled_back})
    frame.loc[n - unchanged :, "rolled_back"] = False
    row = help_hurt({"x": frame}).row(method="x")
    assert [row[name] for name in ("helped", "hurt", "rolled_back", "unchanged")] == [
        helped,
        hurt,
        rolled_back,
        unchanged,
    ]
    assert row["mean_change"] == pytest.approx(row["share_helped"] * 0.02 - row["share_hurt"] * 0.01)


def test_ha_of_cases_with_regions_dilutes_to_ha_of_all():
    frame = routed(230, 0, 0, ha=0.0)
    frame.loc[:166, ["ha", "regions"]] = [0.178, 1]
    row = accounting({"fixed-1": frame}).row(method="fixed-1", bucket="all")
    assert row["ha_within"] == pytest.approx(0.178)
    assert row["ha"] == pytest.approx(0.178 * 167 / 230)


def test_the_full_precision_change_is_the_sum_of_its_buckets():
    frame = routed(54, 46, 130)
    frame.loc[frame["bucket"] == "mid", "change"] = 0.000536
    frame.loc[frame["bucket"] == "low", "change"] = -0.000390
    found = bucket_decomposition(frame)
    assert found.number("contribution", bucket="all") == pytest.approx(0.0000156, abs=1e-7)


@pytest.mark.parametrize(("before", "after", "relative"), [(0.129, 0.0133, 0.90), (0.228, 0.139, 0.39)])
def test_relative_reductions_are_one_minus_the_ratio(before, after, relative):
    methods = {"fixed": routed(10, 0, 0, ha=before), "router": routed(10, 0, 0, ha=after)}
    found = frozen_design(methods, router="router", reference="fixed", resamples=20)
    assert found.number("relative", method="router") == pytest.approx(relative, abs=0.005)


@pytest.mark.parametrize(("kept", "n", "harm", "expected"), [(51, 93, 0.242, 0.1327)])
def test_chance_keeps_its_quota_of_the_harm(kept, n, harm, expected):
    values = np.column_stack([np.zeros(n), np.full(n, harm), np.full(n, harm)])
    found = chance_moments(values, np.repeat([0, 2], [n - kept, kept]))
    assert found.mean == pytest.approx(expected, abs=5e-5)


def test_the_printed_statistics_make_a_range_of_risk_that_the_paper_cannot_have_seen(outcomes):
    """R1: with the printed statistics r is never below -1.149, so the printed minimum of -2.000 came from others."""
    printed = RiskStatistics(0.70, 0.781, 0.00028, 0.00020)
    row = firing(outcomes, printed).table.iloc[0]
    assert -1.149 <= row["floor"] <= row["lowest"]


def test_native_region_cuts_empty_the_middle():
    counts = np.repeat([0.0, 1.0, 2.0], [63, 100, 67])
    assert np.bincount(buckets_at(counts, 0.0, 1.0)[0], minlength=3).tolist() == [167, 0, 63]


@pytest.mark.parametrize(
    ("d", "first", "second", "p"), [(-0.46, 218, 524, 8e-23), (0.24, 218, 524, 4e-7), (-0.14, 144, 139, 0.031)]
)
def test_mann_whitney_p_follows_from_cliffs_d(d, first, second, p):
    z = abs(d) * np.sqrt(3 * first * second / (first + second + 1))
    ours = 2 * stats.norm.sf(z)
    assert abs(np.log10(ours) - np.log10(p)) < 0.7  # d is printed with two decimals


def test_cliffs_d_of_a_binary_feature_is_a_difference_of_shares():
    first, second = np.repeat([1.0, 0.0], [172, 46]), np.repeat([1.0, 0.0], [473, 51])
    u = stats.mannwhitneyu(first, second, method="asymptotic").statistic
    assert cliff_d(u, len(first), len(second)) == pytest.approx(0.789 - 0.903, abs=0.001)


@pytest.mark.parametrize(("rho", "n", "p"), [(0.62, 34, 9e-5), (0.34, 230, 1e-7)])
def test_spearman_p_follows_from_rho_and_n(rho, n, p):
    assert spearman_p(rho, n) == pytest.approx(p, rel=0.35)


@pytest.mark.parametrize(
    "sizes", [(54, 46, 130), (27, 24, 42), (48, 39, 39), (52, 30, 18), (38, 41, 21), (31, 40, 29), (22, 41, 43)]
)
def test_the_papers_bucket_sizes_pass_the_audit_and_a_lost_case_does_not(sizes):
    frame = routed(*sizes)
    assert audit({"router": frame}) == []
    frame.loc[0, "bucket"] = "unknown"
    assert "low + mid + hard = n" in str(audit({"router": frame})[0])


def test_the_share_of_the_quota_is_what_the_v4_formula_says(outcomes, router):
    arms = arms_at(outcomes, {"low": State(3), "mid": State(2, 0.5), "hard": State(0)})
    row = attribution(arms, router, routed(60, 0, 0, ha=0.6).assign(case=router["case"])).row(control="random")
    assert row["share"] == pytest.approx((0.6 - row["ha_control"]) / (0.6 - router["ha"].mean()))
