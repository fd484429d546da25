"""Splits: the paper's counts, patients whole, nothing on both sides."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casewise.core.errors import BadInput, Overlap, TooFewCases
from casewise.core.records import Case
from casewise.data.splits import Cohort, Member, check_disjoint, cluster_of, clusters_of, holdout, with_split

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
    assert with_split(made, split).ids == made.ids


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
    check_disjoint({"a": "a"}, {"b": "b"})
    with pytest.raises(Overlap, match=r"calibration and evaluation share 1 case \(a\); .* remove them"):
        check_disjoint({"a": "a", "c": "c"}, {"a": "a", "b": "b"})


def test_a_patient_on_both_sides_is_refused_by_name() -> None:
    ed, es = Member("p1_ED", cluster="p1"), Member("p1_ES", cluster="p1")
    with pytest.raises(Overlap, match=r"calibration and evaluation share 1 cluster \(p1\)"):
        check_disjoint(clusters_of([ed]), clusters_of([es]))
    with pytest.raises(Overlap, match=r"share 1 case \(p1_ED\) and 1 cluster \(p1\)"):
        check_disjoint(clusters_of([ed]), clusters_of([ed, es]))


def test_a_case_without_a_cluster_may_be_the_cluster_of_others() -> None:
    with pytest.raises(Overlap, match=r"share 1 cluster \(p1\)"):
        check_disjoint(clusters_of([Member("p1")]), clusters_of([Member("p1_ES", cluster="p1")]))


def test_a_split_is_written_into_the_members_and_into_json() -> None:
    split = holdout(prostate())
    assert with_split(prostate(), split).select(split="calibration").ids == split.calibration
    assert json.loads(json.dumps(asdict(split)))["calibration"] == list(split.calibration)
    with pytest.raises(BadInput, match="disagree about"):
        with_split(prostate(), replace(split, evaluation=split.evaluation[1:]))


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_a_share_outside_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(BadInput, match="between 0 and 1"):
        holdout(prostate(), share=share)
