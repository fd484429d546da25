"""Imported masks: files in a folder, or the result of a user's function.

``imported:FOLDER`` takes FOLDER/CASE.* as the one candidate of a case, or FOLDER/CASE/step_1.* to step_K.*, on the grid
of the model's masks. A function ``(network, image) -> list of masks`` is called with the network (which it may change;
it is restored) and the prepared image, a tensor of shape (n, channel, *space).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from casewise.adapt.adaptation import Adaptation, address_of
from casewise.adapt.backbones import Backbone, pipeline_of
from casewise.adapt.backbones.module import as_backbone
from casewise.adapt.forward_episode import ForwardEpisode
from casewise.adapt.proposers import AnyMethod, PreparedCase, bind, method_of
from casewise.adapt.snapshot import restored, seed_generators
from casewise.core.errors import BadInput
from casewise.core.records import Binding, Mask, Signals
from casewise.core.seeds import seed_of
from casewise.core.text import pluralize

_STEP = re.compile(r"step_([1-9]\d*)\..+")


@dataclass(frozen=True)
class Imported:
    """Candidates that are read from a folder of masks.

    Args:
        how: Options.
        folder: Folder of the masks.
    """

    how: Adaptation
    folder: str
    name: ClassVar[str] = "imported"

    def __post_init__(self) -> None:
        if not Path(self.folder).is_dir():
            raise BadInput(f"imported:{self.folder} must name a folder with masks")

    def states(self, network: Backbone | nn.Module) -> int:
        """Return the number of masks of the first case in the folder."""
        first = next((self._files(path.name) for path in sorted(Path(self.folder).iterdir()) if path.is_dir()), None)
        return len(first) if first else 1

    def binding(self, network: Backbone | nn.Module) -> Binding:
        """Bind a policy to the name of the folder and the number of its masks."""
        return bind(self, self.how, network, {"masks": Path(self.folder).name, "steps": self.states(network)})

    def propose(self, case: PreparedCase, network: Backbone | nn.Module) -> MaskEpisode:
        """Return the episode of one case: M0 is predicted, the other masks are read."""
        backbone = as_backbone(network)
        files, steps = self._files(case.case.id), self.states(network)
        if len(files) != steps:
            raise BadInput(
                f"{self.folder} holds {len(files)} masks of case {case.case.id} and {steps} of its first case; name "
                f"them {case.case.id}.nii.gz, or {case.case.id}/step_1.nii.gz and so on"
            )
        return _mask_episode(case, network, replace(self.how, steps=steps), lambda: map(backbone.read_label, files))

    def _files(self, case_id: str) -> list[Path]:
        folder = Path(self.folder)
        if (folder / case_id).is_dir():
            found = [(found, path) for path in (folder / case_id).iterdir() if (found := _STEP.fullmatch(path.name))]
            return [path for _, path in sorted((int(match[1]), path) for match, path in found)]
        return sorted(path for path in folder.glob("*.*") if path.is_file() and path.name.split(".")[0] == case_id)


@dataclass(frozen=True)
class MethodMasks:
    """A function of the user's own that returns masks.

    Args:
        how: Options; the function must return ``how.steps`` masks.
        function: ``(network, image) -> list of masks``.
    """

    how: Adaptation
    function: AnyMethod

    @property
    def name(self) -> str:
        """Address of the function."""
        return address_of(self.function)

    def states(self, network: Backbone | nn.Module) -> int:
        """Return the number of masks that the function must return."""
        return self.how.steps

    def binding(self, network: Backbone | nn.Module) -> Binding:
        """Bind a policy to the address of the function."""
        return bind(self, self.how, network, {})

    def propose(self, case: PreparedCase, network: Backbone | nn.Module) -> MaskEpisode:
        """Return the episode of one case; the function is called once, after M0 was predicted."""

        def masks() -> Sequence[Any]:
            return self._masks(case, episode.network, episode.pipeline.whole)

        episode = _mask_episode(case, network, self.how, masks, changing=None)
        return episode

    def _masks(self, case: PreparedCase, network: nn.Module, whole: Tensor) -> Sequence[Any]:
        seed_generators(seed_of(self.how.seed, case.case.id))
        made = masks_of(self.function, network, whole, case.case.id)
        if len(made) != self.how.steps:
            raise BadInput(
                f"{self.name} returned {pluralize(len(made), 'mask')} for case {case.case.id}, expected "
                f"{self.how.steps}; return the same number of masks for every case, and set steps to it"
            )
        return made


def masks_of(function: AnyMethod, network: nn.Module, whole: Tensor, case_id: str) -> list[Any]:
    """Call a function of the user's own, with gradients switched on, and return its masks as a list."""
    with torch.inference_mode(False), torch.enable_grad():
        made = function(network, whole.clone())
        if isinstance(made, (Tensor, np.ndarray)) or not isinstance(made, Iterable) or not (masks := list(made)):
            raise BadInput(
                f"{address_of(function)} returned {'nothing in its list' if made == [] else type(made).__name__} for "
                f"case {case_id}; return a list of masks: [mask] for one"
            )
    return masks


def counted(how: Adaptation, network: nn.Module, whole: Tensor, case_id: str) -> Adaptation:
    """Set the steps to the number of masks that a function returns for a case; other proposers are unchanged."""
    if (function := method_of(how.objective)) is None:
        return how
    with restored(network):
        return replace(how, steps=len(masks_of(function, network.eval(), whole, case_id)))


class MaskEpisode(ForwardEpisode):
    """M0, then given masks."""

    masks: Callable[[], Any]
    _rest: Any = None

    @property
    def rungs(self) -> tuple[str, ...]:
        """The masks have numbers, no names."""
        return ()

    def advance(self, *, last: bool = False) -> Signals:
        """Take the next mask; the first call makes them all."""
        began = time.perf_counter()
        if self._rest is None:
            self._look()
        self._rest = iter(self.masks()) if self._rest is None else self._rest
        return self._keep_mask(self._checked(next(self._rest)), began, {})

    def _checked(self, made: Any) -> Mask:
        """Return a mask as whole numbers in the shape of M0; a batch axis of one may be there or not."""
        source = self.record.masks[0]
        found = np.asarray(made.detach().cpu().numpy() if isinstance(made, Tensor) else made)
        if found.dtype.kind not in "biu" or found.squeeze().shape != source.squeeze().shape:
            raise BadInput(
                f"candidates of case {self.case_id} must be integer masks of shape {source.shape}, got {found.dtype} "
                f"of shape {found.shape}; take the argmax of logits, and return one mask per step"
            )
        largest = self._shape[1] - (self.head == "softmax")
        if found.min() < 0 or found.max() > largest:
            raise BadInput(
                f"candidates of case {self.case_id} must hold the classes 0 to {largest} of the network, got "
                f"{found.min()} to {found.max()}"
            )
        return found.reshape(source.shape).astype(source.dtype)


def _mask_episode(
    case: PreparedCase, network: Backbone | nn.Module, how: Adaptation, masks: Callable[[], Any], **more: Any
) -> MaskEpisode:
    backbone = as_backbone(network)
    episode = MaskEpisode(case, backbone, pipeline_of(case.prepared, backbone), (), how, **more)
    episode.masks = masks
    return episode
