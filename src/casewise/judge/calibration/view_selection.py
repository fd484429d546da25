"""Which views enter the consensus: chosen on calibration labels, and what that choice is worth on clusters left out.

Reads ladders of views that were recorded with their ballots (``casewise record --propose views:mri --keep-ballots``).
All readings agree outside the voxels that the ballots cover, so a consensus of any subset is known exactly there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from casewise.archive.store import Archive
from casewise.core.errors import BadInput, TooFewCases
from casewise.core.records import SOURCE, State
from casewise.measure.masks import labels_of
from casewise.measure.signals.agreement import candidates_of, medoid

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
    medoid: int  # reading that the others agree with most

    def value(self, labels: Integers) -> float:
        """Dice or mIoU of M0 with these labels on the voxels, as the archive's metric is defined."""
        keep = np.ones(len(labels), bool) if self.ignore is None else self.label != self.ignore
        size = self.outside.shape[1]
        mask, label = labels[keep], self.label[keep]
        both = self.outside[0] + np.bincount(mask[mask == label], minlength=size)[:size]
        in_mask = self.outside[1] + np.bincount(mask, minlength=size)[:size]
        in_label = self.outside[2] + np.bincount(label, minlength=size)[:size]
        if self.metric == "miou":
            union = in_mask + in_label - both
            return float(np.mean(both[union > 0] / union[union > 0]))
        there = np.flatnonzero(in_label[1:]) + 1
        return float(np.mean(2 * both[there] / (in_mask + in_label)[there])) if there.size else float("nan")

    @property
    def source(self) -> float:
        """The metric of M0."""
        return self.value(self.masks[0])

    def alone(self, place: int) -> float:
        """The metric of one reading."""
        return self.value(self.masks[place])

    def consensus(self, places: Sequence[int]) -> float:
        """The metric of the mean of M0 and some readings."""
        return self.value(labels_of(self._mean((0, *places)), self.head))

    def vote(self, places: Sequence[int]) -> float:
        """The metric of the majority of M0 and some readings; M0's label where votes are even."""
        ballots = self.masks[[0, *places]]
        counts = np.stack([(ballots == value).sum(0) for value in range(self.outside.shape[1])]) * 2
        counts[self.masks[0], np.arange(ballots.shape[1])] += 1
        return self.value(np.asarray(counts.argmax(0), np.int64))

    def running(self) -> list[Integers]:
        """The labels of the consensus after M0, after the first view, after the second, ..."""
        return [labels_of(self._mean(range(size)), self.head) for size in range(1, len(self.ballots) + 1)]

    def _mean(self, places: Sequence[int]) -> NDArray[np.float32]:
        return np.asarray(self.ballots[list(places)].mean(0, dtype=np.float32))


def read_case(archive: Archive, case_id: str) -> ReadCase:
    """One case of an archive of views, with its label."""
    entry, ballots = archive.entry(case_id), archive.ballots(case_id)
    if ballots is None:
        raise BadInput(
            f"case {case_id} of {archive.path} has no ballots; record its views with --keep-ballots (a case of which a "
            f"view was left out has none)"
        )
    count = len(ballots) - 1
    masks = archive.masks(case_id)
    source, label = masks[SOURCE], archive.label(case_id)
    changed = np.any([mask != source for mask in masks.values()], axis=0)
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
        medoid=medoid(candidates_of(readings)) if count else 0,
    )


@dataclass(frozen=True)
class ChosenViews:
    """Views that were chosen on calibration cases, and what such a choice gained on clusters that it did not see."""

    places: tuple[int, ...]
    names: tuple[str, ...]
    in_sample: float  # mean gain on the cases that chose; never a promise
    left_out: float  # mean gain on clusters left out, each judged by views that the others chose
    everything: float  # mean gain of the consensus of all views, for comparison

    @property
    def proposal(self) -> str:
        """What ``casewise record --propose`` and ``--objective`` take."""
        return f"views:{','.join(self.names)}" if self.names else "m0"


def chosen_views(cases: Sequence[ReadCase], *, least: float = 0.0005, most: int = 12) -> ChosenViews:
    """Forward selection: from M0 on, add the view that raises the mean gain most, while it does so by ``least``.

    Clusters count alike. The estimate that is reported leaves one cluster out at a time; it needs three.
    """
    clusters = sorted({case.cluster for case in cases})
    if len(clusters) < 3:
        raise TooFewCases(f"views are chosen on three clusters of labelled cases or more, got {len(clusters)}")
    if len({case.names for case in cases}) > 1:
        raise BadInput("the cases have different views (random ones are drawn for each case); choose among fixed ones")
    places, gain = _selected(cases, least, most)
    left_out = []
    for cluster in clusters:
        others = [case for case in cases if case.cluster != cluster]
        without, _ = _selected(others, least, most)
        own = [case for case in cases if case.cluster == cluster]
        left_out.append(float(np.mean([case.consensus(without) - case.source for case in own])))
    everything = tuple(range(1, len(cases[0].ballots)))
    whole = _cluster_mean(cases, [case.consensus(everything) - case.source for case in cases])
    names = tuple(cases[0].names[place - 1] for place in places)
    return ChosenViews(places, names, gain, float(np.mean(left_out)), whole)


def _selected(cases: Sequence[ReadCase], least: float, most: int) -> tuple[tuple[int, ...], float]:
    sums = [case.ballots[0].astype(np.float32) for case in cases]
    before = np.array([case.source for case in cases])
    places: list[int] = []
    best = 0.0
    while len(places) < most:
        rest = [place for place in range(1, len(cases[0].ballots)) if place not in places]
        gains = {
            place: _cluster_mean(cases, [
                case.value(labels_of((total + case.ballots[place]) / (len(places) + 2), case.head)) - start
                for case, total, start in zip(cases, sums, before, strict=True)
            ])
            for place in rest
        }  # fmt: skip
        if not gains or max(gains.values()) < best + least:
            break
        place = max(gains, key=lambda one: (gains[one], -one))
        best = gains[place]
        places.append(place)
        sums = [total + case.ballots[place] for case, total in zip(cases, sums, strict=True)]
    return tuple(places), best


def _cluster_mean(cases: Sequence[ReadCase], values: Sequence[float]) -> float:
    by_cluster: dict[str, list[float]] = {}
    for case, value in zip(cases, values, strict=True):
        by_cluster.setdefault(case.cluster, []).append(value)
    return float(np.mean([np.mean(one) for one in by_cluster.values()]))


def settled_after(case: ReadCase, threshold: float, *, patience: int = 2) -> int:
    """How many views the sequential rule reads: until ``patience`` of them in a row left the consensus as it was.

    As it was: foreground agreement of at least ``threshold`` with the consensus before. No label is read.
    """
    quiet, running = 0, case.running()
    for place in range(1, len(running)):
        quiet = quiet + 1 if _agreement(case, running[place - 1], running[place]) >= threshold else 0
        if quiet == patience:
            return place
    return len(running) - 1


def _agreement(case: ReadCase, one: Integers, other: Integers) -> float:
    size = case.outside.shape[1]
    base = case.outside[1]  # all readings agree there
    both = base + np.bincount(one[one == other], minlength=size)[:size]
    total = 2 * base + np.bincount(one, minlength=size)[:size] + np.bincount(other, minlength=size)[:size]
    there = total[1:] > 0
    return float(np.mean(2 * both[1:][there] / total[1:][there])) if there.any() else 1.0
