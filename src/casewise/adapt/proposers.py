"""Proposers: what makes an ordered list of candidates for a case, all against the same M0.

A gradient adaptation proposes its updates, ``Views`` other readings of the frozen network, ``Members`` those of other
models. On the command line: ``--propose tent --propose views:mri --propose best=views:gamma(1.4),mirror(x)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from casewise.adapt.backbones import Backbone, Pipeline, Prepared
from casewise.adapt.consensus import checked_weights
from casewise.adapt.readings import Reading, Readings
from casewise.adapt.views import Drawn, View, drawn, inverted, lent, unmirrored, views_of
from casewise.adapt.views.source import SourceStatistics, read_source_statistics
from casewise.archive.layout import measure_words
from casewise.core.errors import BadInput, NotFinite
from casewise.core.records import Binding, Mask, Trajectory, check_ladder


@dataclass(frozen=True)
class Views:
    """Readings of the same frozen network under a list of views, and their consensus as the last candidate."""

    views: str = "mri"  # as casewise.adapt.views.views_of reads it
    consensus: str = "mean"  # mean, weighted, vote, medoid or intent
    weights: Mapping[str, float] = field(default_factory=dict)  # for "weighted": by the name of a view, M0 has 1
    source_statistics: Path | None = None
    running: bool = False  # every step is the consensus of the readings so far
    keep_ballots: bool = False  # keep all probabilities where readings differ, so that consensuses can be compared
    seed: int = 0
    min_area: int = 16
    foreground: bool = True
    max_slices: int | None = None

    def __post_init__(self) -> None:
        made = views_of(self.views, statistics=self._statistics)
        checked_weights(self.consensus, self.weights, [str(view) for view in made])

    @property
    def _statistics(self) -> SourceStatistics | None:
        return None if self.source_statistics is None else read_source_statistics(self.source_statistics)

    def on(self, backbone: Backbone) -> tuple[View | Drawn, ...]:
        """The views that say something new to this backbone: without mirrors over which it averages anyway."""
        known = self._statistics
        if known is not None:
            known.check(backbone.fingerprint, backbone.loader)
        made = views_of(self.views, statistics=known)
        _check_absolute(made, backbone)
        fixed = unmirrored([view for view in made if not isinstance(view, Drawn)], _mirrored(backbone))
        found: tuple[View | Drawn, ...] = (*fixed, *(view for view in made if isinstance(view, Drawn)))
        if not found:
            raise BadInput(f"views:{self.views} are mirrors, and the model averages mirror images itself; name others")
        return found

    def steps(self, backbone: Backbone) -> int:
        """Candidates after M0: one for each reading, and the consensus."""
        readings = sum(view.count if isinstance(view, Drawn) else 1 for view in self.on(backbone))
        return readings if self.running else readings + 1

    def binding(self, backbone: Backbone) -> Binding:
        """What a policy that was fitted with this may be used with."""
        named = ", ".join(map(str, self.on(backbone)))
        words = [f"views({named})", f"consensus={self.consensus}"]
        words += [f"weights={dict(sorted(self.weights.items()))}"] if self.weights else []
        words += ["running"] if self.running else []
        words += [f"seed={self.seed}"] if "random" in named else []
        if self._statistics is not None:
            words.append(f"source images={self._statistics.images}")
        measure = measure_words(min_area=self.min_area, foreground=self.foreground, connectivity="1")
        return Binding(backbone.fingerprint, " ".join(words), backbone.loader, measure)

    def episode(
        self,
        backbone: Backbone,
        prepared: Prepared,
        case_id: str,
        *,
        source: Callable[[], tuple[Mask, Tensor]] | None = None,
        before_forward: Callable[[], None] | None = None,
    ) -> Readings:
        """The case on loan; ``source`` gives M0 and its probabilities where they were predicted already."""
        pipeline = pipeline_of(prepared, backbone)
        views = unmirrored(drawn(self.on(backbone), case_id, self.seed), _mirrored(backbone))
        weights = checked_weights(self.consensus, self.weights, list(dict.fromkeys(map(str, views))))
        readings = [Reading(str(view), _reader(pipeline, view, self.max_slices), weights[str(view)]) for view in views]
        return Readings(
            backbone.network, pipeline, readings, case_id=case_id, head=backbone.head, consensus=self.consensus,
            running=self.running, keep_ballots=self.keep_ballots, min_area=self.min_area, foreground=self.foreground,
            made_by=repr(self), seed=self.seed, source=source, before_forward=before_forward,
        )  # fmt: skip


def pipeline_of(prepared: Prepared, backbone: Backbone) -> Pipeline:
    """The pipeline through which a prepared case is read."""
    if prepared.pipeline is None:
        raise BadInput(f"{backbone.name} gives no pipeline for views and members; return Prepared(..., pipeline=...)")
    return prepared.pipeline


def _reader(pipeline: Pipeline, view: View, max_slices: int | None) -> Callable[[], Tensor]:
    """How one view is read: transformed, through the whole pipeline, and back."""

    def read() -> Tensor:
        whole = pipeline.whole
        seen = view.apply(whole)
        _check_usable(view, whole, seen)
        size = max_slices if pipeline.rows_alone and max_slices else len(seen)
        with lent(view, pipeline.network):
            parts = [
                pipeline.read(seen[first : first + size], lambda maps: inverted(view, maps))
                for first in range(0, len(seen), size)
            ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return read


def _check_usable(view: View, whole: Tensor, seen: Tensor) -> None:
    if not torch.isfinite(seen).all():
        raise NotFinite(f"view {view} gave NaN or infinite values")
    if seen is not whole and seen.min() == seen.max() and whole.min() < whole.max():
        raise BadInput(f"view {view} gave a constant image")


def _mirrored(backbone: Backbone) -> tuple[int, ...]:
    axes: tuple[int, ...] = getattr(backbone, "mirrored", ())
    return axes


def _check_absolute(views: tuple[View | Drawn, ...], backbone: Backbone) -> None:
    """Where intensities have a fixed meaning (CT), views that renormalize an image would destroy it."""
    if not any(backbone.expects.absolute):
        return
    wrong = [str(view) for view in views if "moments" in repr(view) or "Bias(" in repr(view)]
    wrong += [str(view) for view in views if isinstance(view, Drawn) and not view.photos]
    if wrong:
        raise BadInput(
            f"{backbone.name} reads absolute intensities, and {', '.join(wrong[:3])} would renormalize them; use "
            f"views:ct, views:photo, or views that keep the range, such as gamma(1.2,range)"
        )


def named_proposal(text: str) -> tuple[str, str]:
    """(ladder, proposal) from "tent", "views:mri" or "best=views:gamma(1.4),mirror(x)".

    >>> named_proposal("views:mri"), named_proposal("best=views:gamma(1.4)")
    (('views-mri', 'views:mri'), ('best', 'views:gamma(1.4)'))
    """
    name, found, proposal = text.partition("=")
    if found and re.fullmatch(r"[\w.+-]+", name):
        return check_ladder(name), proposal
    made = re.sub(r"[^a-z0-9_+.-]+", "-", text.lower()).strip("-.+_")[:64]
    return check_ladder(made), text


def forward_proposer(proposal: str, **options: Any) -> Views | None:
    """The proposer of forward passes that a text names; None where it names a gradient objective."""
    kind, found, rest = proposal.partition(":")
    if found and kind in ("views", "running"):
        made = Views(views=rest, **options)
        return replace(made, running=True) if kind == "running" else made
    return None


class SharedSource:
    """M0 and its probabilities, predicted once for all forward-only ladders of a case; each gets a copy of its own."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._found: tuple[Mask, Tensor] | None = None

    def __call__(self) -> tuple[Mask, Tensor]:
        """M0 and its probabilities."""
        if self._found is None:
            self._found = self._pipeline.source()
        mask, shares = self._found
        return mask, shares.clone()


def readings_of(
    backbone: Backbone, prepared: Prepared, case_id: str, proposer: Views, source: SharedSource | None = None
) -> Trajectory:
    """Every candidate of one forward-only ladder of a case."""
    with proposer.episode(backbone, prepared, case_id, source=source) as episode:
        for _ in range(proposer.steps(backbone)):
            episode.advance()
        return episode.trajectory
