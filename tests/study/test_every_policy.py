"""A study runs for every ready policy, with flags and cleanup, on updates, views, tuned and joined ladders."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from worlds.candidates import views_archive
from worlds.cohorts import synthetic_archive

from casewise.archive.store import Archive, open_archive
from casewise.core.errors import CasewiseError, CasewiseWarning
from casewise.core.records import EVALUATION, Policy
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.policy import READY, among_candidates
from casewise.study.analyses import chosen_analyses, sections_of
from casewise.study.study import Extras, Study
from casewise.study.summary_text import advised, hero, keys, report_summary

Pair = tuple[Archive, Archive]
BY_POLICY = ("deployment", "helphurt", "quality", "routing", "controls", "accounting", "cost", "certificate", "scale")
NOT_HERE = {
    "settled",  # reads the signal of a running consensus, which these archives lack
    "fixed-candidate",  # names one candidate, so calibrate takes it with ``fixed`` only
}


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("updates")
    options = {"steps": 8, "shape": (24, 24), "min_area": 4}
    return (
        synthetic_archive(root / "held", cases=20, seed=1, prefix="held", **options),
        synthetic_archive(root / "new", cases=8, seed=2, split=EVALUATION, **options),
    )


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two ladders against one M0: views, and tuned weights."""
    root = tmp_path_factory.mktemp("views")
    sides = ({"prefix": "held", "cases": 24}, {"split": EVALUATION, "seed": 1, "cases": 8})
    for name, side in zip(("held", "new"), sides, strict=True):
        for ladder, count in (("views", 3), ("tuned", 2)):
            views_archive(root / name, ladder=ladder, views=count, size=24, **side)
    return open_archive(root / "held"), open_archive(root / "new")


def fitted(archive: Archive, name: str, flag: float | None) -> Policy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CasewiseWarning)
        return calibrate(archive, name, flag_below=flag)


def studied(
    policy: Policy, pair: Pair, extras: Extras | None = None, analyses: Sequence[str] | None = BY_POLICY
) -> Study:
    """Run analyses and the first screen; an error that is not raised on purpose ends the test."""
    held, new = pair
    study = Study.of(new, held, policy, extras=extras, resamples=20)
    sections = {one.id: one for one in sections_of(study, chosen_analyses(analyses))}
    assert sections["deployment"].tables
    assert sections["helphurt"].lead
    assert report_summary(study).headline
    assert keys(study)
    assert hero(study).figure is not None
    assert isinstance(advised(study), list)
    return study


@pytest.mark.parametrize("flag", [None, 0.7], ids=["plain", "flagged"])
@pytest.mark.parametrize("name", sorted(set(READY) - NOT_HERE))
def test_every_ready_policy_can_be_studied(name: str, flag: float | None, updates: Pair, views: Pair) -> None:
    chooses = among_candidates(READY[name])
    pair = (views[0].ladder("views"), views[1].ladder("views")) if chooses else updates
    try:
        policy = fitted(pair[0], name, flag)
    except CasewiseError as error:  # what cannot be calibrated on these archives cannot be studied on them
        pytest.skip(f"{name}: {error}")
    study = studied(policy, pair)
    flags = [one.quality is not None for one in study.decisions[study.ours]]
    assert any(flags) == bool(policy.flag)


@pytest.mark.parametrize("name", ["m0", "cardiac"])
def test_a_policy_with_cleanup_can_be_studied_and_m0_stays_m0(name: str, updates: Pair) -> None:
    study = studied(replace(fitted(updates[0], name, 0.7), cleanup="largest(1)"), updates, analyses=None)
    assert not any(one.cleanup for one in study.decisions[study.source])
    assert (study.methods[study.source]["change"] == 0).all()


@pytest.mark.parametrize("name", ["default", "choose"])
def test_joined_and_tuned_ladders_can_be_studied(name: str, views: Pair) -> None:
    held, new = views
    joined = fitted(held.join(held.ladders), name, None)
    first = joined.ladder or "views"
    others = {one: new.ladder(one) for one in new.ladders if one != first}
    study = studied(joined, (held.ladder(first), new.ladder(first)), Extras(others=others))
    assert len(study.policy_rows) == 8
    tuned = fitted(held.ladder("tuned"), name, 0.7)
    assert len(studied(tuned, (held.ladder("tuned"), new.ladder("tuned"))).policy_rows) == 8


def test_the_page_of_a_flagged_policy_on_joined_ladders_is_written(views: Pair, tmp_path: Path) -> None:
    from casewise.report.study_report import build

    held, new = views
    policy = fitted(held.join(held.ladders), "choose", 0.7)
    page = build(new.ladder("views"), held.ladder("views"), policy, tmp_path / "report", resamples=20, progress=False)
    assert "flagged" in page.read_text()
