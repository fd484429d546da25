"""The views proposer: forward passes of the frozen network under transformed inputs, and their consensus."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone, Pipeline, Prepared, pipeline_of
from casewise.adapt.backbones.module import as_backbone
from casewise.adapt.forward_episode import ForwardEpisode, ForwardPass
from casewise.adapt.parameters import fast_norms
from casewise.adapt.proposers import PreparedCase, bind
from casewise.adapt.views import Drawn, View, count, drawn, inverted, renormalizes, unmirrored, views_of
from casewise.core.errors import BadInput, NotFinite
from casewise.core.records import Binding, Case


@dataclass(frozen=True)
class Views:
    """Forward passes of the frozen network under a list of views, and their consensus as the last candidate.

    Args:
        how: Options.
        views: The views, as :func:`casewise.adapt.views.views_of` reads them.
        running: Every state is the consensus of the views so far.
    """

    how: Adaptation
    views: str
    running: bool = False

    def __post_init__(self) -> None:
        if self.running and self.how.consensus != "mean":
            raise BadInput(f"a running consensus must be a mean, got {self.how.consensus!r}")
        views_of(self.views)  # raises an error for views that do not exist

    def on(self, backbone: Backbone) -> tuple[View | Drawn, ...]:
        """Return the views for a backbone, without mirrors over which every forward pass averages anyway."""
        made = views_of(self.views)
        _check_absolute(made, backbone)
        fixed = unmirrored([view for view in made if not isinstance(view, Drawn)], self._averaged(backbone))
        found: tuple[View | Drawn, ...] = (*fixed, *(view for view in made if isinstance(view, Drawn)))
        if not found:
            raise BadInput(
                f"views:{self.views} are mirrors, and with mirrored-views every forward pass averages mirror "
                "images; name others, or leave mirrored-views out"
            )
        return found

    def _averaged(self, backbone: Backbone) -> tuple[int, ...]:
        """Return the axes, counted from the end, over which every forward pass averages mirror images."""
        return _mirrored(backbone) if self.how.mirrored_views else ()

    def source_weight(self, backbone: Backbone) -> int:
        """Return the weight of M0 in a mean: the number of mirror images that M0 averages and the views do not."""
        return 1 if self.how.mirrored_views else 2 ** len(_mirrored(backbone))

    @property
    def name(self) -> str:
        """Name of the proposer."""
        return "running" if self.running else "views"

    def states(self, network: Backbone | nn.Module) -> int:
        """Return the number of states after M0: one per view, and the consensus."""
        views = count(self.on(as_backbone(network)))
        return views if self.running else views + 1

    def binding(self, network: Backbone | nn.Module) -> Binding:
        """Bind a policy to the views and their consensus."""
        return bind(self, self.how, network, self.options(network))

    def options(self, network: Backbone | nn.Module) -> dict[str, Any]:
        """Return the options on which the candidates depend, by name."""
        backbone, how = as_backbone(network), self.how
        views = self.on(backbone)
        return {
            "views": [str(view) for view in views],
            "consensus": how.consensus,
            "seed": how.seed if any(isinstance(view, Drawn) for view in views) else None,
            "mirrored_views": how.mirrored_views and bool(_mirrored(backbone)),
            "source_weight": self.source_weight(backbone),
        }

    def pipeline(self, prepared: Prepared, backbone: Backbone) -> Pipeline:
        """Return the pipeline of a prepared case, without the model's mirroring unless the options ask for it."""
        found = pipeline_of(prepared, backbone)
        if self.how.mirrored_views or not _mirrored(backbone):
            return found
        if found.unmirrored is None:
            raise BadInput(
                f"{backbone.name} averages mirror images and cannot predict views without them; pass --set "
                "mirrored-views=true, or return Prepared(..., pipeline=Pipeline(..., unmirrored=...))"
            )
        return replace(found, read=found.unmirrored)

    def drawn(self, backbone: Backbone, case: Case) -> tuple[View, ...]:
        """Return the views of one case, with random views drawn."""
        return unmirrored(drawn(self.on(backbone), case.id, self.how.seed), self._averaged(backbone))

    def propose(self, case: PreparedCase, network: Backbone | nn.Module) -> ForwardEpisode:
        """Return the episode of one case."""
        backbone, how = as_backbone(network), self.how
        pipeline, views = self.pipeline(case.prepared, backbone), self.drawn(backbone, case.case)
        passes = [ForwardPass(str(view), partial(read_view, pipeline, view, how.max_slices)) for view in views]
        how, weight = replace(how, steps=len(passes) + (not self.running)), self.source_weight(backbone)
        return ForwardEpisode(case, backbone, pipeline, passes, how, running=self.running, source_weight=weight)


def read_view(pipeline: Pipeline, view: View, max_slices: int | None) -> Tensor:
    """Return the probabilities under one view: transform, whole pipeline, inverse transform."""
    seen = _transformed(view, pipeline.whole)
    size = max_slices if pipeline.rows_alone and max_slices else len(seen)
    with fast_norms(pipeline.network):
        parts = [
            pipeline.read(seen[first : first + size], lambda maps: inverted(view, maps))
            for first in range(0, len(seen), size)
        ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _transformed(view: View, whole: Tensor) -> Tensor:
    seen = view.apply(whole)
    if not torch.isfinite(seen.sum()):
        raise NotFinite(f"view {view} gave NaN or infinite values")
    if seen is not whole and seen.min() == seen.max() and whole.min() < whole.max():
        raise BadInput(f"view {view} gave a constant image")
    return seen


def _mirrored(backbone: Backbone) -> tuple[int, ...]:
    axes: tuple[int, ...] = getattr(backbone, "mirrored", ())
    return axes


def _check_absolute(views: tuple[View | Drawn, ...], backbone: Backbone) -> None:
    """Refuse views that renormalize an image where intensities have a fixed meaning (CT)."""
    if not any(backbone.expects.absolute):
        return
    wrong = [str(view) for view in views if renormalizes(view)]
    if wrong:
        raise BadInput(
            f"{backbone.name} reads absolute intensities, and {', '.join(wrong[:3])} would change them; use "
            f"views:ct, views:photo, or views that keep the range, such as gamma(1.2,range)"
        )
