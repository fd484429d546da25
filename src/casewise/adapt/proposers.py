"""Proposers: what makes an ordered list of candidates for a case, all against the same M0.

A gradient adaptation proposes its updates, ``Views`` other readings of the frozen network, ``Members`` those of other
models. On the command line: ``--propose tent --propose views:mri --propose best=views:gamma(1.4),mirror(x)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from casewise.adapt.adaptation import ARRAYS, Adaptation
from casewise.adapt.backbones import Backbone, OwnPrediction, Pipeline, Prepared
from casewise.adapt.consensus import checked_weights
from casewise.adapt.parameters import fast_norms
from casewise.adapt.readings import Reading, Readings, logits_pipeline
from casewise.adapt.snapshot import fingerprint
from casewise.adapt.views import Drawn, View, count, drawn, inverted, lent, unmirrored, views_of
from casewise.adapt.views.source import SourceStatistics, read_source_statistics
from casewise.archive.layout import measure_words
from casewise.core.errors import BadInput, NotFinite
from casewise.core.records import Binding, Case, Mask, Trajectory, check_ladder

if TYPE_CHECKING:
    from casewise.adapt.members import Members


@dataclass(frozen=True)
class Views:
    """Readings of the same frozen network under a list of views, and their consensus as the last candidate."""

    how: Adaptation
    views: str  # as casewise.adapt.views.views_of reads it
    running: bool = False  # every step is the consensus of the readings so far

    def __post_init__(self) -> None:
        if self.running and self.how.consensus not in ("mean", "weighted"):
            raise BadInput(f"a running consensus is a mean, got {self.how.consensus!r}")
        made = views_of(self.views, statistics=self._statistics)
        checked_weights(self.how.consensus, dict(self.how.weights), [str(view) for view in made])

    @property
    def _statistics(self) -> SourceStatistics | None:
        file = self.how.source_statistics
        return None if file is None else read_source_statistics(file)

    def on(self, backbone: Backbone) -> tuple[View | Drawn, ...]:
        """The views that say something new to this backbone: without mirrors over which every reading averages."""
        known = self._statistics
        if known is not None:
            known.check(backbone.fingerprint, backbone.loader)
        made = views_of(self.views, statistics=known)
        _check_absolute(made, backbone)
        fixed = unmirrored([view for view in made if not isinstance(view, Drawn)], self._averaged(backbone))
        found: tuple[View | Drawn, ...] = (*fixed, *(view for view in made if isinstance(view, Drawn)))
        if not found:
            raise BadInput(
                f"views:{self.views} are mirrors, and with --mirrored-views every reading averages mirror images; "
                "name others, or leave --mirrored-views out"
            )
        return found

    def _averaged(self, backbone: Backbone) -> tuple[int, ...]:
        """Axes, counted from the end, over which every reading averages mirror images by itself."""
        return _mirrored(backbone) if self.how.mirrored_views else ()

    def source_weight(self, backbone: Backbone) -> int:
        """How often M0 counts in a mean of readings: where it averages mirror images and they do not, so many times."""
        return 1 if self.how.mirrored_views else 2 ** len(_mirrored(backbone))

    def steps(self, network: Backbone | nn.Module) -> int:
        """Candidates after M0: one for each reading, and the consensus."""
        readings = count(self.on(as_backbone(network)))
        return readings if self.running else readings + 1

    def binding(self, network: Backbone | nn.Module) -> Binding:
        """What a policy that was fitted with this may be used with."""
        backbone, how = as_backbone(network), self.how
        named = ", ".join(map(str, self.on(backbone)))
        words = [f"{'running' if self.running else 'views'}({named})", f"consensus={how.consensus}"]
        words += [f"weights={dict(sorted(how.weights))}"] if how.weights else []
        words += [f"seed={how.seed}"] if "random(" in named else []
        often = self.source_weight(backbone)
        words += [f"unmirrored, M0 counts {often} times"] if often > 1 else []
        words += [f"source images={self._statistics.images}"] if self._statistics is not None else []
        return bound_to(network, " ".join(words), how)

    def episode(
        self,
        network: Backbone | nn.Module,
        prepared: Prepared,
        case: Case,
        *,
        source: Callable[[], tuple[Mask, Tensor]] | None = None,
        before_forward: Callable[[], None] | None = None,
    ) -> Readings:
        """The case on loan; ``source`` gives M0 and its probabilities where they were predicted already."""
        backbone, how = as_backbone(network), self.how
        pipeline = pipeline_of(prepared, backbone)
        if not how.mirrored_views and _mirrored(backbone):
            pipeline = _without_mirroring(pipeline, backbone)
        views = unmirrored(drawn(self.on(backbone), case.id, how.seed), self._averaged(backbone))
        weights = checked_weights(how.consensus, dict(how.weights), list(dict.fromkeys(map(str, views))))
        read = _Reader(pipeline, views, how.max_slices, batched=not self.running)  # a running one may stop at any view
        readings = [Reading(str(view), partial(read, place), weights[str(view)]) for place, view in enumerate(views)]
        steps = len(readings) if self.running else len(readings) + 1
        return Readings(
            backbone.network, pipeline, readings, replace(how, steps=steps), case_id=case.id, head=backbone.head,
            running=self.running, source=source, source_weight=self.source_weight(backbone),
            before_forward=before_forward,
        )  # fmt: skip


def as_backbone(network: Backbone | nn.Module) -> Backbone:
    """A backbone as it is; a bare network as one whose images are taken as they are."""
    if not isinstance(network, nn.Module):
        return network
    from casewise.adapt.backbones.module import of_network

    made = of_network(network, intensity="as-is")
    return replace(made, head="sigmoid") if made.classes == 1 else made


def bound_to(network: Backbone | nn.Module, words: str, how: Adaptation) -> Binding:
    """The binding of a forward-only proposer."""
    measure = measure_words(min_area=how.min_area, foreground=how.foreground)
    if isinstance(network, nn.Module):
        return Binding(fingerprint(network), words, ARRAYS, measure)
    return Binding(network.fingerprint, words, network.loader, measure)


def pipeline_of(prepared: Prepared, backbone: Backbone) -> Pipeline:
    """The pipeline through which a prepared case is read."""
    if prepared.pipeline is None and prepared.forward is None and prepared.predict is None:
        return logits_pipeline(backbone.network, prepared.inputs, backbone.head)
    if prepared.pipeline is None:
        raise BadInput(f"{backbone.name} gives no pipeline for views and members; return Prepared(..., pipeline=...)")
    return prepared.pipeline


def _without_mirroring(pipeline: Pipeline, backbone: Backbone) -> Pipeline:
    """The pipeline whose views are read without the model's own mirroring; M0 stays what it is."""
    if pipeline.unmirrored is None:
        raise BadInput(
            f"{backbone.name} averages mirror images and cannot read views without; say --mirrored-views, or "
            "return Prepared(..., pipeline=Pipeline(..., unmirrored=...))"
        )
    return replace(pipeline, read=pipeline.unmirrored)


BATCHED = 1 << 17
"""The most voxels of several views in one batch; small pictures alone cost more per voxel, large ones do not."""


class _Reader:
    """How the views of one case are read: transformed, through the whole pipeline, and back.

    Small cases are read several views at a time. Which views share a batch depends on the case and the list of views
    alone, so that whoever asks for them, and however many of them, gets the same numbers.
    """

    def __init__(self, pipeline: Pipeline, views: Sequence[View], max_slices: int | None, *, batched: bool) -> None:
        self.pipeline, self.views, self.max_slices = pipeline, tuple(views), max_slices
        rows, most = len(pipeline.whole), BATCHED // max(pipeline.whole[:, 0].numel(), 1)
        most = min(most, max_slices // rows) if max_slices else most
        self.together = most if batched and pipeline.rows_alone else 1
        self._ahead: dict[int, Tensor] = {}

    def __call__(self, place: int) -> Tensor:
        """The probabilities under one of the views."""
        if place in self._ahead:
            return self._ahead.pop(place)
        view = self.views[place]
        seen = self._seen(view)
        batch = {place: seen} if self.together > 1 and self._alike(view, seen) else {}
        for other in range(place + 1, min(place + self.together, len(self.views))) if batch else ():
            with suppress(BadInput, NotFinite):  # reported when its turn comes
                transformed = self._seen(self.views[other])
                if self._alike(self.views[other], transformed):
                    batch[other] = transformed
        if len(batch) > 1:
            with suppress(BadInput, NotFinite):  # whichever it was, it is found when each is read alone
                self._ahead |= self._read_batch(batch)
                return self._ahead.pop(place)
        return self._read(view, seen)

    def _seen(self, view: View) -> Tensor:
        seen = view.apply(self.pipeline.whole)
        _check_usable(view, self.pipeline.whole, seen)
        return seen

    def _alike(self, view: View, seen: Tensor) -> bool:
        """Whether a view can share a batch: its grid is the case's, and it wants the network as it is."""
        parts: tuple[View, ...] = getattr(view, "views", (view,))
        return seen.shape == self.pipeline.whole.shape and not any(hasattr(part, "lent") for part in parts)

    def _read_batch(self, batch: Mapping[int, Tensor]) -> dict[int, Tensor]:
        def invert(maps: Tensor) -> Tensor:
            each = zip(batch, maps.chunk(len(batch)), strict=True)
            parts = [inverted(self.views[place], part) for place, part in each]
            if len({part.shape for part in parts}) > 1:
                raise BadInput("the inverses of these views have different shapes")
            return torch.cat(parts)

        with fast_norms(self.pipeline.network):
            shares = self.pipeline.read(torch.cat(list(batch.values())), invert)
        return dict(zip(batch, shares.chunk(len(batch)), strict=True))

    def _read(self, view: View, seen: Tensor) -> Tensor:
        size = self.max_slices if self.pipeline.rows_alone and self.max_slices else len(seen)
        with lent(view, self.pipeline.network), fast_norms(self.pipeline.network):
            parts = [
                self.pipeline.read(seen[first : first + size], lambda maps: inverted(view, maps))
                for first in range(0, len(seen), size)
            ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check_usable(view: View, whole: Tensor, seen: Tensor) -> None:
    if not torch.isfinite(seen.sum()):
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


def forward_proposer(how: Adaptation) -> Views | Members | None:
    """The readings that an adaptation's objective names; None where it is a gradient method."""
    kind, found, rest = str(how.objective).partition(":") if isinstance(how.objective, str) else ("", "", "")
    if found and kind in ("views", "running"):
        return Views(how, rest, running=kind == "running")
    if found and kind == "members":
        from casewise.adapt.members import Members

        return Members(how, rest)
    return None


class SharedSource:
    """M0, predicted once for all ladders of a case; every forward-only one gets its own copy of the probabilities."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._found: tuple[Mask, Tensor] | None = None

    def __call__(self) -> tuple[Mask, Tensor]:
        """M0 and its probabilities."""
        if self._found is None:
            self._found = self._pipeline.source()
        mask, shares = self._found
        return mask, shares.clone()

    def first(self, predict: Callable[[], Mask]) -> OwnPrediction:
        """A backbone's own prediction whose first call, that of M0, gives the mask that is known."""
        known = [self()[0]]
        return OwnPrediction.instead(predict, lambda: known.pop() if known else predict())


def readings_of(
    network: Backbone | nn.Module, prepared: Prepared, case: Case, how: Adaptation, source: SharedSource | None = None
) -> Trajectory:
    """Every candidate of one forward-only ladder of a case."""
    with how.forward_only.episode(network, prepared, case, source=source) as episode:
        for _ in range(episode.how.steps):
            episode.advance()
        found: Trajectory = episode.trajectory
        return found
