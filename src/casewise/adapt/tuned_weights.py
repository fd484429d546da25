"""Weights that were tuned on labelled cases: one file with the changed tensors for each fold, in one folder.

    FOLDER/
      folds.json            for each fold the patients left out and the patients used; the tuning; the hash of the model
      fold-0.safetensors    the changed tensors, float32; the metadata name the model, the tuning and the patients
      fold-3.failed.json    a fold whose training failed, with the reason; its patients keep M0

Files of this kind are written by ``casewise.learn``; no function here takes a label.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from casewise.adapt.snapshot import swapped, tensors_of
from casewise.core.durable import file_sha256, json_sha256, replacing
from casewise.core.errors import BadInput, Mismatch
from casewise.core.formats import json_text, parsed_json
from casewise.core.json_records import from_plain, read_json

FOLDS, FAILED, ENDING = "folds.json", ".failed.json", ".safetensors"


@dataclass(frozen=True, eq=False)
class TunedWeights:
    """The tensors of a network that tuning changed.

    Args:
        values: The tuned tensors by name, float32 on the CPU.
        model: Fingerprint of the model that they belong to.
        trained_on: Patients whose labels were used.
        left_out: Patients of the fold, whose labels were not used; empty if all labels were used.
        tuning: The fields of the ``Tuning``.
        facts: Losses and seconds of the training.
        fold: Name of the fold; "mean" for a mean of several.
    """

    values: Mapping[str, Tensor]
    model: str
    trained_on: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    tuning: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    fold: str = ""

    def check(self, fingerprint: str) -> None:
        """Refuse a model other than the one that was tuned.

        Raises:
            Mismatch: The fingerprint is that of another model.
        """
        if self.model != fingerprint:
            raise Mismatch(
                f"the tuned weights belong to model {self.model[:12]}, this one is {fingerprint[:12]}; load the model "
                "that was tuned, or fit again"
            )

    def write(self, path: Path) -> None:
        """Write one safetensors file, whole or not at all."""
        from safetensors.torch import save_file

        said = {"model": self.model, "trained_on": self.trained_on, "left_out": self.left_out, "fold": self.fold}
        metadata = {"casewise": json_text({**said, "tuning": dict(self.tuning), "facts": dict(self.facts)})}
        tensors = {name: value.detach().float().cpu().contiguous() for name, value in self.values.items()}
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata=metadata)

    @classmethod
    def read(cls, path: Path) -> TunedWeights:
        """Read a file of :meth:`write`; nothing in the file is run.

        Raises:
            BadInput: The file is damaged, or holds something else.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                said = parsed_json((file.metadata() or {})["casewise"])
                values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return from_plain(cls, {**said, "values": values}, path.name)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise BadInput(f"{path.name} has no tuned weights ({error}); fit again, or restore the file") from error


def mean_weights(folds: Sequence[TunedWeights]) -> TunedWeights:
    """Return the mean of several tuned weights of one model (a model soup): (1/K) sum_k w_k.

    Args:
        folds: At least one; all of the same model and with the same tensors.

    Returns:
        The mean; it was trained on every patient that trained one of them.

    Raises:
        Mismatch: They belong to different models or hold different tensors.
    """
    if not folds:
        raise BadInput("a mean needs at least one set of tuned weights")
    first = folds[0]
    for other in folds[1:]:
        other.check(first.model)
        if {n: v.shape for n, v in other.values.items()} != {n: v.shape for n, v in first.values.items()}:
            raise Mismatch("the tuned weights hold different tensors; tune every fold in the same way")
    values = {name: torch.stack([one.values[name].double() for one in folds]).mean(0).float() for name in first.values}
    patients = tuple(sorted({patient for one in folds for patient in one.trained_on}))
    return TunedWeights(values, first.model, patients, (), first.tuning, {}, "mean")


@contextmanager
def temporary_weights(network: nn.Module, tuned: TunedWeights, share: float = 1.0) -> Iterator[None]:
    """Return a context in which the network has the weights M0 + share (tuned - M0); they are restored afterwards.

    Args:
        network: The network of the model that was tuned.
        tuned: What changed.
        share: 1 for the tuned weights, 0 for M0.
    """
    tensors = tensors_of(network)
    if lost := [name for name in tuned.values if name not in tensors]:
        raise Mismatch(f"the network has no {lost[0]}, which was tuned; load the model that was tuned")
    with torch.inference_mode(False), torch.no_grad():
        moved = {
            name: torch.lerp(tensors[name].data.float(), value.to(tensors[name].device), share)
            for name, value in tuned.values.items()
        }
    with swapped(tensors, moved):
        yield


@dataclass(frozen=True)
class FailedFold:
    """A fold whose training failed."""

    left_out: tuple[str, ...]
    reason: str


@dataclass(frozen=True, eq=False)
class TunedFolder:
    """The tuned weights of every fold, and the reasons of folds that failed."""

    folds: tuple[TunedWeights, ...]
    failed: Mapping[str, str]  # by patient: reason why the training of the fold failed
    sha256: str  # hash of all files with weights

    @property
    def model(self) -> str:
        """Fingerprint of the model that was tuned."""
        return self.folds[0].model

    @functools.cached_property
    def mean(self) -> TunedWeights:
        """The mean weights of all folds, for new cases."""
        return mean_weights(self.folds)

    def without(self, patient: str) -> TunedWeights | None:
        """Return the weights of the fold that left a patient out; None if the training of that fold failed.

        A patient that is in no fold gets the mean weights, because no fold was trained on it.
        """
        for one in self.folds:
            if patient in one.left_out:
                return one
        return None if patient in self.failed else self.mean


def read_tuned_folder(folder: str | Path) -> TunedFolder:
    """Read a folder of ``cross_fit``, or one with a single file of tuned weights.

    Args:
        folder: The folder.

    Returns:
        Its weights; kept in memory until a file changes.

    Raises:
        BadInput: No fold was finished, or a file is damaged.
    """
    place = Path(folder)
    files = tuple(sorted([*place.glob(f"*{ENDING}"), *place.glob(f"*{FAILED}")]))
    return _read(files, tuple(file.stat().st_mtime_ns for file in files), place)


@functools.lru_cache(maxsize=2)
def _read(files: tuple[Path, ...], changed: tuple[int, ...], place: Path) -> TunedFolder:
    weights = [file for file in files if file.name.endswith(ENDING)]
    reasons = [from_plain(FailedFold, read_json(file), file.name) for file in files if file.name.endswith(FAILED)]
    if not weights:
        why = f": {reasons[0].reason}" if reasons else ""
        raise BadInput(f"{place.name} holds no tuned weights{why}; tune the model first (casewise fit)")
    failed = {patient: one.reason for one in reasons for patient in one.left_out}
    sha256 = json_sha256({file.name: file_sha256(file) for file in weights})
    return TunedFolder(tuple(map(TunedWeights.read, weights)), failed, sha256)
