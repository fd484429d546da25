"""Who was helped, where the area went, how deep, at what cost; and the self-audit of all of it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from worlds.identities import audit

from casewise.archive.layout import Entry
from casewise.core.errors import DegenerateStatistic
from casewise.measure.signals.risk import RiskStatistics
from casewise.study.analyses.cost import cost, firing, measured_costs, signal_costs, step_seconds
from casewise.study.analyses.cut_points import depth_dispersion
from casewise.study.analyses.deployed_methods import MethodPair, bucket_decomposition, intervals, method_table
from casewise.study.analyses.edited_area import accounting
from casewise.study.analyses.helphurt import help_hurt, net_helped, weaker_source


@pytest.fixture
def five():
    """Helped, hurt, rolled back, unchanged, undefined."""
    return pd.DataFrame(
        {
            "case": list("abcde"),
            "change": [0.03, -0.01, 0.0, 0.0, np.nan],
            "rolled_back": [False, False, True, False, False],
            "metric_source": [0.8, 0.7, 0.5, 0.9, np.nan],
        }
    )


def test_each_class_is_counted_once_and_without_tolerance(five):
    row = help_hurt({"x": five}).row(method="x")
    assert [row[name] for name in ("helped", "hurt", "rolled_back", "unchanged", "undefined")] == [1, 1, 1, 1, 1]
    assert (row["mean_helped"], row["mean_hurt"]) == (0.03, -0.01)
    assert row["mean_change"] == pytest.approx(0.005)


def test_a_rollback_is_rolled_back_even_where_recomputing_moved_the_metric():
    frame = pd.DataFrame({"change": [1e-5], "rolled_back": [True], "case": ["a"]})
    assert help_hurt({"x": frame}).row(method="x")["rolled_back"] == 1


def test_nobody_hurt_has_no_mean_loss(five):
    assert np.isnan(help_hurt({"x": five.iloc[:1]}).number("mean_hurt", method="x"))


def test_weaker_sources_are_shown_side_by_side(five):
    found = weaker_source(five)
    assert found.number("metric_source", side="rolled back") == 0.5
    assert found.number("metric_source", side="kept") == pytest.approx(0.8)


def test_a_router_that_kept_nothing_says_so(five):
    found = weaker_source(five[five["rolled_back"]])
    assert found.row(side="kept")["reason"] == "no case was kept"


def test_go_needs_more_helped_than_hurt(five):
    assert not net_helped(five).table["go"].iloc[0]
    assert net_helped(five.iloc[[0]]).table["go"].iloc[0]
    assert net_helped(five.iloc[[2]]).reason.startswith("every case was rolled back")


def test_ha_within_times_cases_with_regions_is_ha(methods):
    row = accounting(methods).row(method="fixed-1", bucket="all")
    assert row["ha"] == pytest.approx(row["ha_within"] * row["scored"] / row["n"])
    assert row["coverage"] == pytest.approx(methods["fixed-1"]["delta"].mean())


def test_the_ratio_is_of_means_and_a_dash_for_the_source(methods):
    found = accounting(methods)
    assert np.isnan(found.number("ratio", method="m0", bucket="all"))
    row = found.row(method="fixed-2", bucket="all")
    assert row["ratio"] == pytest.approx(methods["fixed-2"]["ba"].mean() / methods["fixed-2"]["ha"].mean())


def test_harm_of_the_retained_leaves_rollbacks_out(methods, router):
    row = accounting(methods).row(method="router", bucket="all")
    kept = router[~router["rolled_back"]]
    assert (row["retained"], row["ha_retained"]) == (len(kept), pytest.approx(kept["ha"].mean()))


def test_bucket_means_are_refused_for_all_when_one_is_empty(router):
    found = accounting({"router": router[router["bucket"] != "mid"]}, buckets_of=["router"])
    inner = found.table[found.table["bucket"] != "all"]
    assert inner["ha"].isna().all()
    assert inner["reason"].str.contains("bucket mid is empty").all()
    assert inner["n"].sum() == (router["bucket"] != "mid").sum()


def test_fixed_depths_do_not_spread_and_an_empty_bucket_is_undefined(router):
    found = depth_dispersion(router[router["bucket"] != "low"])
    assert found.number("std", bucket="mid") == 0
    assert found.row(bucket="low")["reason"] == "the bucket is empty"


def test_a_rollback_wastes_its_probe(methods, router):
    row = cost(methods).row(method="router")
    assert row["wasted"] == pytest.approx((router["bucket"] == "hard").mean())


def test_risk_has_the_floor_of_a_case_that_did_not_change(outcomes):
    row = firing(outcomes, RiskStatistics(0.70, 0.781, 0.00028, 0.00020)).table.iloc[0]
    assert row["floor"] == pytest.approx(-1.148, abs=0.001)
    assert row["lowest"] >= row["floor"]
    assert row["rows"] == 240


def test_no_spread_is_refused(outcomes):
    with pytest.raises(DegenerateStatistic, match="need a deviation"):
        firing(outcomes, RiskStatistics(0, 0, 0, 1))


def test_unmeasured_time_is_not_reported_as_zero():
    found = signal_costs({"fragmentation": (37.0, 0.0, 5), "augmentation_disagreement": (900.0, 64.0, 5)})
    assert found.number("milliseconds", signal="delta") == found.number("milliseconds", signal="entropy") == 37
    assert (
        found.number("milliseconds", signal="augmentation_disagreement"),
        found.number("megabytes", signal="augmentation_disagreement"),
    ) == (900, 64)
    assert found.row(signal="dropout_disagreement")["reason"] == "not measured"
    assert np.isnan(found.number("milliseconds", signal="dropout_disagreement"))


def test_the_middle_time_and_the_largest_memory_of_the_cases_are_told():
    entries = [
        Entry(name, (1,), spent={"augmentation_disagreement": pair})
        for name, pair in (("a", (9.0, 1.0)), ("b", (5.0, 8.0)))
    ]
    assert measured_costs([*entries, Entry("c", (1,), spent={"augmentation_disagreement": (6.0, 0.0)})]) == {
        "augmentation_disagreement": (6.0, 8.0, 3)
    }


def test_the_first_time_is_the_source_and_the_others_are_updates():
    found = step_seconds({"a": (9.0, 1.0, 2.0), "b": (7.0, 3.0, 10.0), "no clock": ()})
    assert found.n == 2
    assert found.number("median", part="m0") == 8
    row = found.row(part="update")
    assert (row["n"], row["steps"], row["mean"], row["median"], row["slowest"]) == (2, 4, 4.0, 2.5, 10.0)


def test_an_archive_without_a_clock_says_so():
    found = step_seconds({"a": (), "b": ()})
    assert found.table.empty
    assert found.reason == "the time of the steps was not recorded"


def findings(methods):
    return {
        "deployment": method_table(methods),
        "accounting": accounting(methods, buckets_of=["router"]),
        "helphurt": help_hurt(methods),
        "decomposition": bucket_decomposition(methods["router"]),
        "intervals": intervals(methods, [MethodPair("router", "fixed-4")], resamples=20),
    }


def test_a_report_agrees_with_itself(methods):
    assert audit(methods, **findings(methods)) == []


@pytest.mark.parametrize(
    ("finding", "column", "identity"),
    [
        ("deployment", "steps", "steps = sum over depths"),
        ("deployment", "ha", "HA x n = sum of HA"),
        ("accounting", "ha_within", "HA = HA within"),
        ("accounting", "coverage", "coverage = mean delta"),
        ("helphurt", "mean_hurt", "mean change = helped part"),
        ("helphurt", "helped", "helped + hurt"),
        ("decomposition", "contribution", "bucket contributions"),
        ("intervals", "estimate", "estimate = difference of means"),
    ],
)
def test_one_wrong_number_fails_the_report(methods, finding, column, identity):
    made = findings(methods)
    table = made[finding].table
    table.loc[table.index[1], column] += 1
    assert any(one.identity.startswith(identity) for one in audit(methods, **made))


def test_a_rollback_with_harm_fails_the_report(methods):
    wrong = methods["router"].copy()
    wrong.loc[wrong["bucket"] == "hard", "ha"] = 0.1
    assert any("rollback has HA 0" in str(one) for one in audit({"router": wrong}))
