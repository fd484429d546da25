"""Views and kinds of consensus: their lines in a shift's table, and gain against forwards of the sequential rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from real_rows import Bench, Row, seconds

from casewise.adapt.views import SETS, views_of
from casewise.archive.store import Archive
from casewise.core.records import SOURCE, Mask
from casewise.judge.calibration.view_selection import ReadCase, chosen_views, read_case, settled_after
from casewise.judge.outcomes import edit_shares
from casewise.measure.metrics import METRICS
from casewise.measure.metrics.harm import harm

SETTLED = (0.97, 0.98, 0.985, 0.99, 0.995)


@dataclass(frozen=True)
class Reader:
    """One development case of a ladder of views, whose consensuses become whole masks."""

    case: ReadCase
    source: Mask
    label: Mask
    changed: np.ndarray

    def row(self, labels: np.ndarray, archive: Archive) -> dict[str, Any]:
        """What deploying these labels costs, in the columns of ``judge.outcomes``."""
        mask = self.source.copy()
        mask[self.changed] = labels
        made, entry = archive.configuration, archive.entry(self.case.id)
        ignore = made.get("ignore")
        judged = harm(self.source, mask, self.label, min_area=made["min_area"], foreground=made["foreground"],
                      ignore=ignore)  # fmt: skip
        metric, source = (
            METRICS[made["metric"]].of(one, self.label, ignore=ignore, spacing_mm=entry.spacing_mm)
            for one in (mask, self.source)
        )
        return {
            "case": self.case.id, "cluster": entry.cluster, "metric": metric, "change": metric - source,
            "ha": judged.ha, "ba": judged.ba, "unscored": judged.unscored, "area": judged.area,
            **edit_shares(self.source, mask, self.label, ignore),
        }  # fmt: skip


def reader(archive: Archive, case_id: str) -> Reader:
    masks = archive.masks(case_id)
    source = masks[SOURCE]
    changed = np.any([mask != source for mask in masks.values()], axis=0)
    return Reader(read_case(archive, case_id), source, archive.label(case_id), changed)


def vote_of(case: ReadCase) -> np.ndarray:
    """The majority of all readings; M0's label where votes are even."""
    counts = np.stack([(case.masks == value).sum(0) for value in range(case.outside.shape[1])]) * 2
    counts[case.masks[0], np.arange(case.masks.shape[1])] += 1
    return np.asarray(counts.argmax(0))


def ordered(case: ReadCase, places: Sequence[int]) -> ReadCase:
    """The case as if only these views had been read, in this order."""
    rows = [0, *places]
    names = tuple(case.names[place - 1] for place in places)
    return replace(case, ballots=case.ballots[rows], masks=case.masks[rows], names=names)


def slim(case: ReadCase, names: tuple[str, ...]) -> ReadCase:
    """What a choice of views reads, so that all calibration cases fit into memory."""
    return replace(case, names=names, masks=case.masks[:1].astype(np.uint8), label=case.label.astype(np.uint8))


def rungs_of(archive: Archive) -> tuple[str, ...]:
    """The views of a ladder by place; one that is drawn for each case is called "random view"."""
    each = zip(*(entry.rungs[:-1] for entry in archive.entries.values()), strict=True)
    return tuple(names[0] if len(set(names)) == 1 else f"random view {k}" for k, names in enumerate(each, start=1))


def places_of(names: Sequence[str], wanted: Sequence[str]) -> tuple[int, ...]:
    return tuple(names.index(name) + 1 for name in wanted if name in names)


def kinds(bench: Bench, ladder: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """The consensuses of one ladder: name -> (places of the views, how they are joined)."""
    archive = bench.calibration.on(ladder)
    names = rungs_of(archive)
    everything = tuple(range(1, len(names) + 1))
    found = {"mean of all": (everything, "mean"), "vote of all": (everything, "vote")}
    shipped = places_of(names, [str(view) for view in views_of(ladder)]) if ladder in SETS else ()
    if shipped and len(shipped) == len(views_of(ladder)):
        found[f"set `{ladder}`, uniform"] = (shipped, "mean")
        found[f"set `{ladder}`, sequential"] = (shipped, "sequential")
    else:
        found |= {f"first {size}, mean": (tuple(range(1, size + 1)), "mean") for size in (4, 8) if size < len(names)}
        found["all, sequential"] = (everything, "sequential")
    if not all("random" in name for name in names):
        mirrors = tuple(k for k, name in enumerate(names, start=1) if name.startswith("mirror("))
        if len(mirrors) > 1:
            found["mirror mean (what nnU-Net's mirroring is)"] = (mirrors, "mean")
        chosen = chosen_views([slim(read_case(archive, name), names) for name in archive.ids])
        words = ", ".join(chosen.names) or "M0 alone"
        found[f"calibrated: {words} (left-out estimate {chosen.left_out:+.4f})"] = (chosen.places, "mean")
    return found


def consensus_rows(bench: Bench, ladder: str) -> Iterator[Row]:
    """Every view alone, then every kind of consensus; cases are read one at a time."""
    archive = bench.development.on(ladder)
    for step, name in enumerate(rungs_of(archive), start=1):
        if "random" not in name:
            yield replace(bench.fixed(ladder, step, forwards=2), name=f"{name} alone")
    wanted = kinds(bench, ladder)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    read: dict[str, list[int]] = {name: [] for name in wanted}
    curve: dict[str, dict[float, list[tuple[int, float]]]] = {}
    for case_id in archive.ids:
        one = reader(archive, case_id)
        for name, (places, how) in wanted.items():
            part, amount = ordered(one.case, places), len(places)
            if how == "sequential":
                points = curve.setdefault(name, {at: [] for at in (*SETTLED, 1.01)})
                for at in points:
                    stop = settled_after(part, at)
                    row = one.row(part.mean(range(stop + 1)), archive) if at == 0.985 else None
                    value = part.consensus(range(1, stop + 1)) if row is None else row["metric"]
                    points[at].append((stop, value - part.source))
                    if row is not None:
                        rows[name].append(row)
                        amount = stop
            else:
                labels = part.mean(range(amount + 1)) if how == "mean" else vote_of(one.case)
                rows[name].append(one.row(labels, archive))
            read[name].append(amount)
    for name, (places, how) in wanted.items():
        forwards = 1 + float(np.mean(read[name]))
        took = seconds(archive, *places) * (forwards / (1 + len(places)) if how == "sequential" else 1)
        yield Row(name, pd.DataFrame(rows[name]), forwards, seconds=took)
    bench.kept.setdefault("curves", {}).update(
        {f"{ladder}: {name}": {str(at): [[k, round(gain, 5)] for k, gain in points[at]] for at in points}
         for name, points in curve.items()}
    )  # fmt: skip


def curve_lines(bench: Bench) -> Iterator[str]:
    """Gain against forwards of the sequential rule."""
    yield f"\n| reading stops when the consensus has settled at | {' | '.join(map(str, SETTLED))} | never |"
    yield "|---|" + "---|" * (len(SETTLED) + 1)
    for name, points in bench.kept.get("curves", {}).items():
        whole = np.array(points["1.01"], float)
        cells = []
        for at in (*SETTLED, 1.01):
            read = np.array(points[str(at)], float)
            saved, gain = 1 - read[:, 0].sum() / whole[:, 0].sum(), read[:, 1].mean()
            full = whole[:, 1].mean()
            kept = f", keeps {gain / full:.0%}" if full > 0.001 else ""
            cells.append(f"{gain:+.4f}; saves {saved:.0%}{kept}")
        yield f"| {name} | {' | '.join(cells)} |"
