"""Choose the views of a consensus on calibration labels, and estimate the gain on left-out clusters.

Reads ladders of views that were recorded with their ballots (``record --propose views:mri --save-probabilities``).
All readings agree outside the voxels that the ballots cover, so a consensus of any subset is known exactly there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from casewise.archive.layout import changed_anywhere
from casewise.archive.store import Archive
from casewise.core.errors import BadInput, TooFewCases
from casewise.core.records import SOURCE, State
from casewise.core.text import pluralize
from casewise.judge.outcomes import POINT
from casewise.measure.masks import labels_of
from casewise.measure.metrics import METRICS

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ReadCase:
    """One labelled case of a ladder of views: what any consensus of its readings would score."""

    id: str
    cluster: str
    names: tuple[str, ...]  # of the views, without M0 and the consensus
    ballots: NDArray[np.uint8]  # (reading, class, voxel); reading 0 is M0
    masks: NDArray[np.int64]  # (reading, voxel): the labels of each reading
    label: Integers  # (voxel,)
    outside: NDArray[np.int64]  # (3, class): both, mask and label, where all readings agree
    metric: str
    ignore: int | None
    head: str
    source_weight: float = 1.0  # of M0 in a mean

    def value(self, labels: Integers) -> float:
        """Dice or mIoU of M0 with these labels on the voxels, as the archive's metric is defined."""
        keep = np.ones(len(labels), bool) if self.ignore is None else self.label != self.ignore
        size = self.outside.shape[1]
        mask, label = labels[keep], self.label[keep]
        parts = (mask[mask == label], mask, label)
        of_counts = METRICS[self.metric].of_counts
        if of_counts is None:
            raise BadInput(
                f"views are chosen by a metric of voxel counts (dice, miou), the archive has {self.metric!r}"
            )
        return of_counts(*(self.outside + [np.bincount(part, minlength=size)[:size] for part in parts]))

    @property
    def source(self) -> float:
        """The metric of M0."""
        return self.value(self.masks[0])

    def consensus(self, places: Sequence[int]) -> float:
        """The metric of the mean of M0 and some readings."""
        return self.value(self.mean((0, *places)))

    def mean(self, places: Sequence[int]) -> Integers:
        """The labels of the mean of some readings, M0 (reading 0) with the weight that it was recorded with."""
        total = self.ballots[list(places)].sum(0, dtype=np.float32)
        more = (self.source_weight - 1) * list(places).count(0)
        return labels_of((total + np.float32(more) * self.ballots[0]) / np.float32(len(places) + more), self.head)


def read_case(archive: Archive, case_id: str) -> ReadCase:
    """One case of an archive of views, with its label."""
    entry, ballots = archive.entry(case_id), archive.ballots(case_id)
    if ballots is None:
        raise BadInput(
            f"case {case_id} of {archive.path} has no ballots; record its views with --save-probabilities (a case "
            f"of which a view was left out has none)"
        )
    count = len(ballots) - 1
    masks = archive.masks(case_id)
    source, label = masks[SOURCE], archive.label(case_id)
    changed = changed_anywhere(masks)
    readings = [masks[State(step)] for step in range(count + 1)]
    configuration = archive.configuration
    ignore, metric = configuration.get("ignore"), str(configuration.get("metric", "dice"))
    scored = ~changed if ignore is None else ~changed & (label != ignore)
    classes = (
        int(max(label[label != ignore].max(initial=0), *(mask.max() for mask in readings), ballots.shape[1] - 1)) + 1
    )
    one, other = source[scored].astype(np.int64), label[scored].astype(np.int64)
    outside = [np.bincount(part, minlength=classes) for part in (one[one == other], one, other)]
    return ReadCase(
        id=case_id,
        cluster=entry.cluster or case_id,
        names=entry.rungs[:count],
        ballots=ballots,
        masks=np.stack([mask[changed].astype(np.int64) for mask in readings]),
        label=label[changed].astype(np.int64),
        outside=np.stack(outside),
        metric=metric,
        ignore=ignore,
        head="softmax" if ballots.shape[1] > 1 else "sigmoid",
        source_weight=float(configuration.get("source_weight", 1)),
    )


@dataclass(frozen=True)
class ChosenViews:
    """Views that were chosen on calibration cases, and what such a choice gained on clusters that it did not see."""

    places: tuple[int, ...]
    names: tuple[str, ...]
    in_sample: float  # mean gain on the cases that chose; never a promise
    left_out: float  # mean gain on clusters left out, each judged by views that the others chose
    hurt: float  # share of the cases left out that lost more than ``POINT``
    everything: float  # mean gain of the consensus of all views, those set aside included, for comparison
    set_aside: int = 0  # random views: drawn anew for each case, so no name makes them again

    @property
    def proposal(self) -> str:
        """What ``casewise record --propose`` takes."""
        return f"views:{','.join(self.names)}" if self.names else "m0"


def chosen_views(cases: Sequence[ReadCase], *, most: int = 12, slack: float = 1.0) -> ChosenViews:
    r"""The largest set of views that is not surely worse than the best one; averaging more views hurts fewer cases.

    From M0 on, the view is added that raises the mean gain most: sets of 1, 2, ..., ``most`` views. With
    :math:`g_{c,m}` the gain on cluster c of the set of size m that the other clusters make, :math:`m^*` the size with
    the largest mean and :math:`d_{c,m} = g_{c,m^*} - g_{c,m}`, the size is

    .. math:: \max\{m : \bar g_m > 0,\ \bar d_m \le \mathrm{slack} \cdot s(d_m) / \sqrt{C}\}

    and nothing where no mean is positive. ``slack=0`` takes the best. Clusters count alike. What is reported leaves a
    cluster out of all of this, the choice of the size included. Random views, which have another name in each case,
    are set aside where two fixed ones remain.
    """
    clusters = sorted({case.cluster for case in cases})
    if len(clusters) < 3:
        raise TooFewCases(f"views are chosen on three clusters of labelled cases or more, got {len(clusters)}")
    fixed = _fixed(cases)
    gains = _Gains(cases, fixed, min(most, len(fixed)))
    places = gains.chosen(frozenset(clusters), slack)
    alone = [gains.own(one, gains.chosen(frozenset(clusters) - {one}, slack)) for one in clusters]
    return ChosenViews(
        places=places,
        names=tuple(cases[0].names[place - 1] for place in places),
        in_sample=gains.mean(clusters, places),
        left_out=float(np.mean([np.mean(own) for own in alone])),
        hurt=float(np.mean(np.concatenate(alone) < -POINT)),
        everything=gains.mean(clusters, range(1, len(cases[0].ballots))),
        set_aside=len(cases[0].names) - len(fixed),
    )


def _fixed(cases: Sequence[ReadCase]) -> tuple[int, ...]:
    """The places of the views that are the same ones in every case; refused where fewer than two are beside others."""
    if len({len(case.names) for case in cases}) > 1:
        raise BadInput("the cases have different numbers of views; record all of them with one --propose")
    columns = list(zip(*(case.names for case in cases), strict=True))
    fixed = tuple(place for place, names in enumerate(columns, start=1) if len(set(names)) == 1)
    drawn = len(columns) - len(fixed)
    if drawn and len(fixed) < 2:
        raise BadInput(
            f"{drawn} of {pluralize(len(columns), 'view')} differ from case to case (random ones are drawn for each), "
            "so "
            "no name makes them again; record two fixed views or more beside them, or deploy all views together"
        )
    return fixed


class _Gains:
    """Gains of sets of views on clusters; each set is scored once per case."""

    def __init__(self, cases: Sequence[ReadCase], places: Sequence[int], most: int) -> None:
        self.most, self.views = most, places
        self._cases: dict[str, list[ReadCase]] = {}
        for case in cases:
            self._cases.setdefault(case.cluster, []).append(case)
        self._sources = {name: np.array([case.source for case in held]) for name, held in self._cases.items()}
        self._known: dict[tuple[str, frozenset[int]], Floats] = {}
        self._paths: dict[frozenset[str], tuple[int, ...]] = {}

    def own(self, cluster: str, places: Iterable[int]) -> Floats:
        """The gain of each case of a cluster."""
        key = cluster, frozenset(places)
        if key not in self._known:
            scores = [case.consensus(sorted(key[1])) for case in self._cases[cluster]]
            self._known[key] = np.array(scores) - self._sources[cluster]
        return self._known[key]

    def mean(self, clusters: Iterable[str], places: Iterable[int]) -> float:
        """The mean gain; clusters count alike."""
        wanted = frozenset(places)
        return float(np.mean([self.own(cluster, wanted).mean() for cluster in clusters]))

    def path(self, clusters: frozenset[str]) -> tuple[int, ...]:
        """The views in the order in which they are added; its first m are the set of size m."""
        if clusters not in self._paths:
            order, places = sorted(clusters), list[int]()
            while len(places) < self.most:
                rest = [place for place in self.views if place not in places]
                places.append(max(rest, key=lambda one: (round(self.mean(order, (*places, one)), 9), -one)))
            self._paths[clusters] = tuple(places)
        return self._paths[clusters]

    def chosen(self, clusters: frozenset[str], slack: float) -> tuple[int, ...]:
        """Apply the rule of :func:`chosen_views` to some clusters."""
        order = sorted(clusters)
        paths = [self.path(clusters - {one}) for one in order]
        gains = np.array([  # (cluster, size)
            [self.own(one, path[:size]).mean() for size in range(1, self.most + 1)]
            for one, path in zip(order, paths, strict=True)
        ])  # fmt: skip
        means = gains.mean(0)
        behind = gains[:, [int(means.argmax())]] - gains
        error = behind.std(0, ddof=1) / np.sqrt(len(order))
        fit = np.flatnonzero((means > 0) & (behind.mean(0) <= slack * error + 1e-9))
        return self.path(clusters)[: int(fit[-1]) + 1] if fit.size else ()
