"""Splits: the paper's counts, patients whole, nothing on both sides."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casewise.core.errors import BadInput, Overlap, TooFewCases
from casewise.core.records import Case
from casewise.data.cohort import Cohort, Member
from casewise.data.splits import check_clusters_whole, check_disjoint, cluster_of, holdout, with_split

SITES = {"A": 30, "B": 30, "C": 19, "D": 13, "E": 12, "F": 12}


def cohort(members: list[Member]) -> Cohort:
    return Cohort("made", {m.id: m for m in members}, lambda member: Case(member.id, np.zeros((1, 2, 2))))


def prostate() -> Cohort:
    return cohort([Member(f"{site}_Case{n:02d}", group=site) for site, count in SITES.items() for n in range(count)])


def test_a_fifth_of_every_prostate_site_is_the_papers_23() -> None:
    split = holdout(prostate())
    assert Counter(case_id[0] for case_id in split.calibration) == {"A": 6, "B": 6, "C": 4, "D": 3, "E": 2, "F": 2}
    assert (len(split.calibration), len(split.evaluation)) == (23, 93)


def test_the_draw_depends_on_the_seed_and_on_nothing_else() -> None:
    members = list(prostate().members.values())
    assert holdout(cohort(members[::-1])).calibration == tuple(reversed(holdout(prostate()).calibration))
    assert set(holdout(prostate(), seed=1).calibration) != set(holdout(prostate()).calibration)


def test_one_site_does_not_change_the_draw_of_another() -> None:
    alone = holdout(prostate().select(group="C")).calibration
    assert alone == tuple(case_id for case_id in holdout(prostate()).calibration if case_id[0] == "C")


@given(
    st.lists(st.tuples(st.integers(0, 8), st.sampled_from("xy")), min_size=4, max_size=30, unique_by=lambda item: item),
    st.integers(0, 5),
)
def test_cases_of_one_cluster_stay_together(cases: list[tuple[int, str]], seed: int) -> None:
    made = cohort([Member(f"{n}_{i}", group=g, cluster=f"p{n}") for i, (n, g) in enumerate(cases)])
    try:
        split = holdout(made, share=0.5, seed=seed)
    except TooFewCases:
        return
    side = {made.members[case_id].cluster for case_id in split.calibration}
    assert not side & {made.members[case_id].cluster for case_id in split.evaluation}
    assert set(split.calibration) | set(split.evaluation) == set(made.ids)
    check_clusters_whole(with_split(made, split).members.values())


def test_two_phases_of_ten_patients_are_a_fifth_by_patient() -> None:
    made = cohort([Member(f"P{n}_{phase}", "B", f"P{n}") for n in range(10) for phase in ("ED", "ES")])
    split = holdout(made)
    assert len(split.calibration) == 4
    assert len({cluster_of(made.members[case_id]) for case_id in split.calibration}) == 2


def test_a_group_that_is_too_small_is_named() -> None:
    made = cohort([Member(f"n{i}", "night", f"s{i % 2}") for i in range(46)])
    with pytest.raises(TooFewCases, match=r"group night has 2 clusters; a share of 0.2 is 0 of them"):
        holdout(made)
    assert len(holdout(made, share=0.5).calibration) == 23


def test_groups_can_be_drawn_together() -> None:
    assert len(holdout(prostate(), per_group=False).calibration) == round(0.2 * 116)


def test_overlap_is_refused_with_the_ids() -> None:
    check_disjoint(["a"], ["b"])
    with pytest.raises(Overlap, match=r"share 1 cases, such as \['a'\]"):
        check_disjoint(["a", "c"], ["a", "b"])


def test_a_torn_patient_is_refused() -> None:
    with pytest.raises(Overlap, match="cluster p lies in the splits x and y"):
        check_clusters_whole([Member("a", cluster="p", split="x"), Member("b", cluster="p", split="y")])


def test_a_split_is_written_into_the_members_and_into_json() -> None:
    split = holdout(prostate())
    assert with_split(prostate(), split).select(split="calibration").ids == split.calibration
    assert json.loads(json.dumps(split.as_dict()))["calibration"] == list(split.calibration)
    with pytest.raises(BadInput, match="disagree about"):
        with_split(prostate(), replace(split, evaluation=split.evaluation[1:]))


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(BadInput, match="between 0 and 1"):
        holdout(prostate(), share=share)
