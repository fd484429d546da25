"""Cohorts and their splits.

A cohort loads a case or a label when it is requested. Splits are drawn by cluster within each group, recorded by id,
and checked to be disjoint (A3, A4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import BadInput, Overlap, TooFewCases
from casewise.core.records import CALIBRATION, EVALUATION, Case, Mask, check_case_id
from casewise.core.seeds import RESAMPLING_SEED, seed_of
from casewise.core.text import pluralize


@dataclass(frozen=True)
class Member:
    """Facts about a case that are known without opening it."""

    id: str
    group: str | None = None
    cluster: str | None = None
    split: str | None = None
    labelled: bool = False

    def __post_init__(self) -> None:
        check_case_id(self.id)


@dataclass(frozen=True)
class Cohort:
    """Members in a fixed order; ``case(id)`` reads an image and ``label(id)`` a label when they are called."""

    name: str
    members: Mapping[str, Member]
    read_case: Callable[[Member], Case]
    read_label: Callable[[Member], Mask] | None = None
    classes: tuple[str, ...] = ()  # names of the labels 0, 1, 2, ...
    ignore: int | None = None  # label value that is not scored
    notice: str = ""  # a sentence that every report about this cohort shows
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def ids(self) -> tuple[str, ...]:
        """Case ids in order."""
        return tuple(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Case]:
        return (self.case(case_id) for case_id in self.members)

    def case(self, case_id: str) -> Case:
        """The image of a case, without its label."""
        return self.read_case(self._member(case_id))

    def label(self, case_id: str) -> Mask:
        """Return the label of a case."""
        member = self._member(case_id)
        if self.read_label is None or not member.labelled:
            raise BadInput(f"case {case_id} of {self.name} has no label; score only labelled cases")
        return self.read_label(member)

    def select(self, *, split: str | None = None, group: str | None = None) -> Cohort:
        """The members of a split, a group, or both."""
        kept = {
            case_id: member
            for case_id, member in self.members.items()
            if (split is None or member.split == split) and (group is None or member.group == group)
        }
        if not kept:
            splits = sorted({str(member.split) for member in self.members.values()})
            groups = sorted({str(member.group) for member in self.members.values()})
            raise BadInput(
                f"{self.name} has no case with split={split!r} and group={group!r}; splits: {splits}, groups: {groups}"
            )
        return replace(self, members=kept)

    def _member(self, case_id: str) -> Member:
        if case_id not in self.members:
            raise BadInput(f"{self.name} has no case {case_id!r}; it has {len(self)}, such as {self.ids[:3]}")
        return self.members[case_id]


class Clustered(Protocol):
    """A case with its cluster: a member of a cohort, an entry of an archive or a row of a folder."""

    @property
    def id(self) -> str: ...

    @property
    def cluster(self) -> str | None: ...


@dataclass(frozen=True)
class Split:
    """Ids of the calibration and evaluation cases, and how they were drawn."""

    calibration: tuple[str, ...]
    evaluation: tuple[str, ...]
    share: float
    seed: int
    per_group: bool

    def __post_init__(self) -> None:
        check_disjoint({one: one for one in self.calibration}, {one: one for one in self.evaluation})


def holdout(cohort: Cohort, *, share: float = 0.2, seed: int = RESAMPLING_SEED, per_group: bool = True) -> Split:
    r"""Hold out :math:`\mathrm{round}(0.2\, n)` of the n clusters of every group for calibration (A4).

    A cluster is a patient or a sequence; all its cases go the same way. A case without a cluster is its own, so for
    one volume per patient this is round(0.2 n) cases per site: 6 + 6 + 4 + 3 + 2 + 2 = 23 of the six prostate sites.
    Clusters are drawn from their sorted names with a seed of (seed, group), so one site does not change another's
    draw. A cluster that spans groups is drawn with the group of its first case. ``round`` takes halves to even.
    """
    if not 0 < share < 1:
        raise BadInput(f"the share of the holdout must be between 0 and 1, got {share}")
    drawn: set[str] = set()
    for group, clusters in _clusters(cohort.members, per_group).items():
        count = round(share * len(clusters))
        if not 0 < count < len(clusters):
            raise TooFewCases(
                f"group {group or '(none)'} has {pluralize(len(clusters), 'cluster')}; a share of {share:g} is {count} "
                "of them, and both sides need at least one: choose another share, or draw from all groups together"
            )
        generator = np.random.default_rng(seed_of(seed, group))
        drawn.update(str(name) for name in generator.choice(sorted(clusters), size=count, replace=False))
    calibration = tuple(case_id for case_id, member in cohort.members.items() if cluster_of(member) in drawn)
    evaluation = tuple(case_id for case_id, member in cohort.members.items() if cluster_of(member) not in drawn)
    return Split(calibration, evaluation, share, seed, per_group)


def cluster_of(case: Clustered) -> str:
    """Return the cluster of a case; a case without a cluster is its own cluster."""
    return case.cluster or case.id


def clusters_of(cases: Iterable[Clustered]) -> dict[str, str]:
    """Return the cluster of each case by its id."""
    return {case.id: cluster_of(case) for case in cases}


def count_patients(cases: Iterable[Clustered]) -> int:
    """Return the number of patients; a case without one counts as one."""
    return len({*clusters_of(cases).values()})


def fold_of(clusters: Sequence[Any], folds: int, *, seed: int = RESAMPLING_SEED) -> NDArray[np.int64]:
    """Divide patients into folds: return the fold of each case; cases of one cluster are together.

    Args:
        clusters: The cluster (patient or sequence) of each case.
        folds: Number of folds; they differ by at most one cluster.
        seed: Seed of the order in which clusters get their folds.

    Returns:
        A number from 0 for every case.

    Raises:
        TooFewCases: There are fewer clusters than folds, or fewer than two folds.

    Example:
        >>> fold_of([0, 0, 1, 2, 2, 3], 2, seed=0).tolist()
        [1, 1, 0, 0, 0, 1]
    """
    names, number = np.unique(np.asarray(clusters), return_inverse=True)
    if len(names) < folds or folds < 2:
        raise TooFewCases(f"{folds} folds need 2 or more and as many clusters, got {pluralize(len(names), 'cluster')}")
    fold = np.empty(len(names), np.int64)
    fold[np.random.default_rng(seed).permutation(len(names))] = np.arange(len(names)) % folds
    return np.asarray(fold[number])


def _clusters(members: Mapping[str, Member], per_group: bool) -> dict[str, set[str]]:
    group_of: dict[str, str] = {}
    for case_id in sorted(members):
        member = members[case_id]
        group_of.setdefault(cluster_of(member), (member.group or "") if per_group else "")
    groups: dict[str, set[str]] = {}
    for cluster, group in group_of.items():
        groups.setdefault(group, set()).add(cluster)
    return dict(sorted(groups.items()))


def with_split(cohort: Cohort, split: Split) -> Cohort:
    """Return the cohort with the split of each member; both sides must name exactly its cases and divide no cluster."""
    named = {**dict.fromkeys(split.calibration, CALIBRATION), **dict.fromkeys(split.evaluation, EVALUATION)}
    if set(named) != set(cohort.members):
        strange = sorted(set(named) ^ set(cohort.members))
        raise BadInput(f"the split and {cohort.name} disagree about {strange[:5]} ({pluralize(len(strange), 'case')})")
    sides = [clusters_of(cohort.members[case_id] for case_id in ids) for ids in (split.calibration, split.evaluation)]
    check_disjoint(*sides)
    members = {case_id: replace(member, split=named[case_id]) for case_id, member in cohort.members.items()}
    return replace(cohort, members=members)


def check_disjoint(
    calibration: Mapping[str, str], evaluation: Mapping[str, str], *, names: tuple[str, str] = (CALIBRATION, EVALUATION)
) -> None:
    """Refuse when a case, or cases of one patient or sequence, would both calibrate and evaluate (A3).

    Both map case ids to clusters (:func:`clusters_of`). All code that keeps two sets of cases apart uses this function.
    """
    cases = sorted(calibration.keys() & evaluation.keys())
    clusters = sorted({*calibration.values()} & {*evaluation.values()} - {*cases})
    if cases or clusters:
        both = [("case", cases), ("cluster", clusters)]
        shared = [f"{pluralize(len(found), kind)} ({', '.join(found[:5])})" for kind, found in both if found]
        raise Overlap(
            f"{names[0]} and {names[1]} share {' and '.join(shared)}; cases of one patient must be on one side: "
            f"remove them from one of the two"
        )
