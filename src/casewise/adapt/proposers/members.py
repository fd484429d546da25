"""The members proposer: the predictions of other models as candidates, and their consensus.

``members:folds`` are the folds of an nnU-Net, each alone; ``members:FOLDER`` is another model folder with the same
labels; ``members:FOLDER@CHECKPOINT`` is another checkpoint of an nnU-Net. Separate several with commas. Each member
prepares the case itself and predicts on the grid of the case, in the classes of its network; merged classes are merged
after the consensus. An nnU-Net member uses the mirroring and tiling of the deployed model. Trust in a checkpoint is not
passed on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone, load_backbone, pipeline_of
from casewise.adapt.backbones.merged import unmerged
from casewise.adapt.backbones.module import as_backbone
from casewise.adapt.contract import unlike_spacings
from casewise.adapt.forward_episode import ForwardEpisode, ForwardPass
from casewise.adapt.proposers import PreparedCase, bind
from casewise.core.errors import BadInput, CasewiseError, Mismatch, Refused, in_one_line
from casewise.core.records import Binding, Case


@dataclass(frozen=True)
class Members:
    """Predictions of other models, and their consensus as the last candidate."""

    how: Adaptation
    members: str
    name: ClassVar[str] = "members"

    def __post_init__(self) -> None:
        if not self._words:
            raise BadInput("name at least one member: members:folds, or members:FOLDER with another model")

    @property
    def _words(self) -> list[str]:
        return [word.strip() for word in self.members.split(",") if word.strip()]

    def on(self, backbone: Backbone) -> dict[str, Backbone]:
        """Return the members by name, each checked against the deployed model."""
        found: dict[str, Backbone] = {}
        plain = unmerged(backbone)
        device = str(next(plain.network.parameters()).device)
        tiling = tuple(sorted(getattr(plain, "tiling", {}).items()))  # only an nnU-Net has tiling
        for word in self._words:
            found |= _folds(plain) if word == "folds" else {word: _loaded(word, device, tiling)}
        for name, member in found.items():
            _check_alike(name, member, plain)
        return found

    def states(self, network: Backbone | nn.Module) -> int:
        """Return the number of states after M0: one per member, and the consensus."""
        return len(self.on(as_backbone(network))) + 1

    def binding(self, network: Backbone | nn.Module) -> Binding:
        """Bind a policy to the weights of every member."""
        members = {name: member.fingerprint[:16] for name, member in self.on(as_backbone(network)).items()}
        return bind(self, self.how, network, {"members": members, "consensus": self.how.consensus})

    def propose(self, case: PreparedCase, network: Backbone | nn.Module) -> ForwardEpisode:
        """Return the episode of one case; a member prepares the case when its turn comes."""
        backbone, how = as_backbone(network), self.how
        members = self.on(backbone)
        passes = [ForwardPass(name, _reader(name, member, case.case)) for name, member in members.items()]
        pipeline = pipeline_of(case.prepared, backbone)
        return ForwardEpisode(case, backbone, pipeline, passes, replace(how, steps=len(passes) + 1))


def _reader(name: str, member: Backbone, case: Case) -> Callable[[], Tensor]:
    def read() -> Tensor:
        try:
            with torch.inference_mode():
                member.network.eval()
                return pipeline_of(member.prepare(case), member).source()[1]
        except CasewiseError:
            raise
        except Exception as error:  # any error of the member must name the member
            raise Refused(
                f"member {name} failed on case {case.id}: {type(error).__name__}: {in_one_line(error)}; repair "
                f"it, or record and calibrate without this member"
            ) from error

    return read


def _folds(backbone: Backbone) -> dict[str, Backbone]:
    networks = getattr(backbone.network, "members", None)
    if networks is None or len(networks) < 2:
        raise BadInput(f"members:folds needs several folds, {backbone.name} is one network; load more with -f 0,1,2")
    return {f"fold-{place}": replace(backbone, network=one) for place, one in enumerate(networks)}  # type: ignore[type-var]


@functools.lru_cache(maxsize=8)
def _loaded(word: str, device: str, tiling: tuple[tuple[str, Any], ...]) -> Backbone:
    if "@" not in word or Path(word).exists():
        return load_backbone(word, device=device, **dict(tiling))
    folder, _, checkpoint = word.rpartition("@")
    return load_backbone(folder, checkpoint=checkpoint, device=device, **dict(tiling))


def _check_alike(name: str, member: Backbone, backbone: Backbone) -> None:
    """Refuse a member with other labels, classes, channels, orientation or spacing than the model."""
    facts = {
        "other labels": (dict(member.labels), dict(backbone.labels)),
        "another number of classes": (member.classes, backbone.classes),
        "another head": (member.head, backbone.head),
        "another number of channels": (member.expects.channels, backbone.expects.channels),
        "images in another orientation": (_orientation(member), _orientation(backbone)),  # same images
    }
    for what, (theirs, ours) in facts.items():
        if theirs != ours:
            raise Mismatch(f"member {name} has {what}: {theirs}, the model has {ours}; leave it out")
    theirs, ours = member.expects.spacing_mm, backbone.expects.spacing_mm
    if unlike_spacings(theirs, ours):
        raise Mismatch(f"member {name} was trained at {theirs} mm, the model at {ours} mm spacing; leave it out")


def _orientation(backbone: Backbone) -> str:
    return "turned to one orientation by the reader" if backbone.expects.reorients else "as they are stored"
