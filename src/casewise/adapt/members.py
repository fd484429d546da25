"""Members: the same case read by other models, against the M0 of the deployed one.

``members:folds`` are the folds of an nnU-Net, each alone; ``members:FOLDER`` is another model folder with the same
labels, ``members:FOLDER@CHECKPOINT`` another checkpoint of an nnU-Net; several with commas. Each member prepares the
case in its own way and answers on the case's own grid, in the classes of its network: where classes are merged, that
comes after the consensus. An nnU-Net is mirrored and tiled as the deployed one; trust in a checkpoint is not passed on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone, Prepared, load_backbone
from casewise.adapt.backbones.merged import unmerged
from casewise.adapt.consensus import checked_weights
from casewise.adapt.contract import unlike_spacings
from casewise.adapt.proposers import as_backbone, bound_to, pipeline_of
from casewise.adapt.readings import Reading, Readings
from casewise.core.errors import BadInput, CasewiseError, Mismatch, Refused, in_one_line
from casewise.core.records import Binding, Case, Mask


@dataclass(frozen=True)
class Members:
    """Readings by other models, and their consensus as the last candidate."""

    how: Adaptation
    members: str

    def __post_init__(self) -> None:
        if not self._words:
            raise BadInput("name at least one member: members:folds, or members:FOLDER with another model")

    @property
    def _words(self) -> list[str]:
        return [word.strip() for word in self.members.split(",") if word.strip()]

    def on(self, backbone: Backbone) -> dict[str, Backbone]:
        """The members by name, each checked against the deployed model."""
        found: dict[str, Backbone] = {}
        plain = unmerged(backbone)
        for word in self._words:
            found |= _folds(plain) if word == "folds" else {word: _loaded(word, _device(plain), _tiling(plain))}
        for name, member in found.items():
            _check_alike(name, member, plain)
        return found

    def steps(self, network: Backbone | nn.Module) -> int:
        """Candidates after M0: one for each member, and the consensus."""
        return len(self.on(as_backbone(network))) + 1

    def binding(self, network: Backbone | nn.Module) -> Binding:
        """What a policy that was fitted with this may be used with: these very weights."""
        members = self.on(as_backbone(network))
        named = ", ".join(f"{name} {member.fingerprint[:12]}" for name, member in members.items())
        weights = f" weights={dict(sorted(self.how.weights))}" if self.how.weights else ""
        return bound_to(network, f"members({named}) consensus={self.how.consensus}{weights}", self.how)

    def episode(
        self,
        network: Backbone | nn.Module,
        prepared: Prepared,
        case: Case,
        *,
        source: Callable[[], tuple[Mask, Tensor]] | None = None,
        before_forward: Callable[[], None] | None = None,
    ) -> Readings:
        """The case on loan; a member is prepared when its turn comes."""
        backbone, how = as_backbone(network), self.how
        members = self.on(backbone)
        weights = checked_weights(how.consensus, dict(how.weights), list(members))
        readings = [Reading(name, _reader(name, member, case), weights[name]) for name, member in members.items()]
        return Readings(
            backbone.network, pipeline_of(prepared, backbone), readings, replace(how, steps=len(readings) + 1),
            case_id=case.id, head=backbone.head, source=source, before_forward=before_forward,
        )  # fmt: skip


def _reader(name: str, member: Backbone, case: Case) -> Callable[[], Tensor]:
    def read() -> Tensor:
        try:
            with torch.inference_mode():
                member.network.eval()
                return pipeline_of(member.prepare(case), member).source()[1]
        except CasewiseError:
            raise
        except Exception as error:  # whatever code of its own raises, its name must be said
            raise Refused(
                f"member {name} failed on case {case.id}: {type(error).__name__}: {in_one_line(error)}; repair it, or "
                "record and calibrate without it"
            ) from error

    return read


def _folds(backbone: Backbone) -> dict[str, Backbone]:
    networks = getattr(backbone.network, "members", None)
    if networks is None or len(networks) < 2:
        raise BadInput(
            f"members:folds needs an nnU-Net of several folds, {backbone.name} is one network; load more with -f 0,1,2"
        )
    return {f"fold-{place}": replace(backbone, network=one) for place, one in enumerate(networks)}  # type: ignore[type-var]


@functools.lru_cache(maxsize=8)
def _loaded(word: str, device: str, tiling: tuple[tuple[str, Any], ...]) -> Backbone:
    if "@" not in word or Path(word).exists():
        return load_backbone(word, device=device, **dict(tiling))
    folder, _, checkpoint = word.rpartition("@")
    return load_backbone(folder, checkpoint=checkpoint, device=device, **dict(tiling))


def _tiling(backbone: Backbone) -> tuple[tuple[str, Any], ...]:
    """How an nnU-Net is run; other backbones have no such options, and a member of theirs ignores them."""
    return tuple(sorted(getattr(backbone, "tiling", {}).items()))


def _device(backbone: Backbone) -> str:
    return str(next(backbone.network.parameters()).device)


def _check_alike(name: str, member: Backbone, backbone: Backbone) -> None:
    """Refuse, by name, a member that means other things with its labels or takes other images."""
    facts = {
        "other labels": (dict(member.labels), dict(backbone.labels)),
        "another number of classes": (member.classes, backbone.classes),
        "another head": (member.head, backbone.head),
        "another number of channels": (member.expects.channels, backbone.expects.channels),
        "images in another orientation": (_orientation(member), _orientation(backbone)),  # both get the model's images
    }
    for what, (theirs, ours) in facts.items():
        if theirs != ours:
            raise Mismatch(
                f"member {name} has {what}: {theirs}, the model has {ours}; members must agree, so leave it out"
            )
    theirs, ours = member.expects.spacing_mm, backbone.expects.spacing_mm
    if unlike_spacings(theirs, ours):
        raise Mismatch(
            f"member {name} was trained at another spacing: {theirs} mm, the model at {ours} mm; leave it out"
        )


def _orientation(backbone: Backbone) -> str:
    return "turned to one orientation by the reader" if backbone.expects.reorients else "as they are stored"
