"""Analyses that read masks: sweeps, region geometry, distances, arms; on the synthetic archive."""

from __future__ import annotations

import numpy as np
import pytest
from worlds.cohorts import synthetic_archive

from casewise.core.records import SOURCE, State
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.controllers.router import Bucket, ByGroup, Router
from casewise.judge.outcomes import deployed, outcomes
from casewise.measure.metrics.harm import harm
from casewise.replay import replay
from casewise.study.analyses.controls import check_licence
from casewise.study.analyses.edited_area import (
    distances,
    harm_and_distance,
    min_area_sweep,
    rank_invariance,
    region_features,
    region_geometry,
    sweep_outcomes,
)
from casewise.study.assignment import arms_of


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return synthetic_archive(tmp_path_factory.mktemp("study") / "archive", cases=12, shape=(40, 40))


@pytest.fixture(scope="module")
def frame(archive):
    return outcomes(archive)


@pytest.fixture(scope="module")
def sweep(archive):
    return sweep_outcomes(archive, min_areas=(4, 16, 64), connectivities=("face", "full"))


def test_the_sweep_at_the_archives_own_setting_is_the_archives_own_outcome(frame, sweep):
    own = sweep[(sweep["min_area"] == 16) & (sweep["connectivity"] == "face")]
    both = own.merge(frame, on=["case", "step", "shrink"], suffixes=("", "_own"))
    assert len(both) == len(frame)
    for name in ("ha", "ba", "regions", "delta", "area"):
        assert both[name].tolist() == pytest.approx(both[f"{name}_own"].tolist())


def test_harm_never_rises_with_the_minimum_area(sweep):
    for _, part in sweep.groupby(["case", "step", "shrink", "connectivity"]):
        assert (np.diff(part.sort_values("min_area")["ha"]) <= 1e-15).all()


def test_full_connectivity_never_splits_what_faces_join(archive):
    frame = sweep_outcomes(archive, min_areas=(1,), connectivities=("face", "full"))
    wide = frame.pivot(index=["case", "step", "shrink"], columns="connectivity", values="regions")
    assert (wide["full"] <= wide["face"]).all()
    assert len(wide) == 12 * 6


def test_a_gate_is_left_out_of_the_sweep_and_named(archive, frame, sweep):
    methods = methods_of(archive, frame)
    methods["gate"] = methods["fixed-1"].assign(action="gate")
    found = min_area_sweep(sweep, methods, router="fixed-1", reference="fixed-4")
    assert "gate" not in set(found.table["method"])
    assert found.notes == ("gate deploys masks that were not recorded, so it is not in the sweep",)


def methods_of(archive, frame):
    fixed = {f"fixed-{step}": CONTROLLERS.build("fixed-k", step=step) for step in (1, 4)}
    return {name: deployed(frame, replay(archive, controller)) for name, controller in fixed.items()}


def test_ranks_across_the_sweep_are_those_of_the_means(archive, frame, sweep):
    found = min_area_sweep(sweep, methods_of(archive, frame), router="fixed-1", reference="fixed-4")
    for _, part in found.table.groupby(["connectivity", "min_area"]):
        low, high = part.sort_values("ha")["rank"]
        assert low <= high
    row = found.row(connectivity="face", min_area=16, method="fixed-1")
    other = found.row(connectivity="face", min_area=16, method="fixed-4")
    assert row["difference"] == pytest.approx(row["ha"] - other["ha"])
    ranks = rank_invariance(found)
    assert len(ranks.row(connectivity="face", method="fixed-1")["ranks"]) == 3


def test_region_features_are_the_regions_of_the_last_step(archive):
    features = region_features(archive)
    case = archive.ids[0]
    found = harm(archive.mask(case, SOURCE), archive.mask(case, State(4)), archive.label(case))
    assert len(features[features["case"] == case]) == found.regions
    assert features["fraction"].between(0, 1).all()


def test_planted_harm_is_smaller_than_the_repaired_dent(archive):
    found = region_geometry(region_features(archive))
    assert found.number("cliff_d", feature="area") < 0
    assert found.number("cliff_d", feature="small@5%") >= 0
    assert set(found.table["feature"]) >= {"area", "compactness", "distance", "fraction", "small@2%", "small@10%"}


def test_one_sided_regions_have_no_contrast(archive):
    features = region_features(archive)
    found = region_geometry(features[features["side"] == "harmful"])
    assert found.table["reason"].eq("one kind of region is missing").all()


def test_distances_go_with_planted_harm(archive, frame):
    measured = distances(archive)
    found = harm_and_distance(frame, measured)
    assert found.number("rho", pairing="HA, HD95") > 0.5
    assert found.made["excluded"] == 0
    assert found.n == 12


def test_an_empty_mask_has_no_distance_and_is_counted(archive, frame):
    measured = distances(archive)
    measured.loc[0, "hd95"] = np.nan
    found = harm_and_distance(frame, measured)
    assert (found.made["excluded"], found.n) == (1, 11)


@pytest.fixture
def router():
    return Router("delta", 0.005, 0.02, low=Bucket("stop", 4), mid=Bucket("depth", 2, shrink=0.5))


def test_arms_come_from_the_routers_own_actions_and_reproduce_its_row(archive, frame, router):
    row = deployed(frame, replay(archive, router))
    arms = arms_of(archive, router, frame)
    assert check_licence(arms, row)["ha"] == pytest.approx(row["ha"].mean())
    assert (arms["hard"]["rolled_back"]).all()
    assert set(arms["mid"]["shrink"]) == {0.5}


def test_routers_by_group_have_arms_too(archive, frame, router):
    by_group = ByGroup({"A": router, "B": router})
    assert arms_of(archive, by_group, frame)["mid"]["bucket"].tolist() == ["mid"] * 12
