"""Train nnU-Net models as nnU-Net does: all settings come from the trainer class of the model.

Its preprocessing, its patch size and share of foreground patches, its augmentation (batchgeneratorsv2), its loss with
deep supervision, its regions and its ignore label. Cases are preprocessed once and kept in memory.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from casewise.adapt.backbones.nnunet import NnUNet, quiet, trainer_class
from casewise.core.errors import BadInput, MissingExtra, in_one_line
from casewise.core.records import Case, Mask
from casewise.learn.tuning import Tuning

LOCATIONS = 10_000  # largest number of stored annotated voxels per case, as in nnU-Net


class NnUNetTask:
    """Patches of labelled cases, drawn by nnU-Net's data loader.

    Args:
        backbone: The model.
        cases: The labelled cases.
        labels: Their labels.
        tuning: Batch size and augmentation ("none" for nnU-Net's validation transforms).
    """

    def __init__(self, backbone: NnUNet, cases: Sequence[Case], labels: Sequence[Mask], tuning: Tuning) -> None:
        self.backbone, self.head = backbone, backbone.head
        self.device = backbone.predictor.device
        with quiet():
            self.trainer = _trainer(backbone)
            self._loss = self.trainer._build_loss().to(self.device)
            self._loader = self._made_loader(cases, labels, tuning)

    def start(self, member: nn.Module) -> None:
        """Switch deep supervision on where the trainer uses it."""
        self.trainer.network = member
        self.trainer.set_deep_supervision_enabled(self.trainer.enable_deep_supervision)

    def draw(self) -> tuple[Tensor, Any]:
        """Draw patches, and their labels at every supervised resolution."""
        with quiet():
            made = self._loader.generate_train_batch()
        target = made["target"]
        parts = [part.to(self.device) for part in target] if isinstance(target, list) else target.to(self.device)
        return made["data"].to(self.device), parts

    def outputs(self, member: nn.Module, inputs: Tensor) -> Sequence[Tensor]:
        """Return logits at every supervised resolution, the finest first."""
        made = member(inputs)
        return [made] if isinstance(made, Tensor) else made

    def loss(self, outputs: Sequence[Tensor], target: Any) -> Tensor:
        """Return the loss of nnU-Net."""
        made: Tensor = self._loss(outputs if isinstance(target, list) else outputs[0], target)
        return made

    def _made_loader(self, cases: Sequence[Case], labels: Sequence[Mask], tuning: Tuning) -> Any:
        from nnunetv2.training.dataloading.data_loader import nnUNetDataLoader

        trainer, configuration = self.trainer, self.trainer.configuration_manager
        rotation, flat, initial, mirrors = trainer.configure_rotation_dummyDA_mirroring_and_inital_patch_size()
        scales, manager = trainer._get_deep_supervision_scales(), trainer.label_manager
        asked: dict[str, Any] = {
            "is_cascaded": False,
            "foreground_labels": manager.foreground_labels,
            "regions": manager.foreground_regions if manager.has_regions else None,
            "ignore_label": manager.ignore_label,
        }
        if tuning.augmentation == "none":
            initial, transforms = configuration.patch_size, trainer.get_validation_transforms(scales, **asked)
        else:
            transforms = trainer.get_training_transforms(
                configuration.patch_size, rotation, scales, mirrors, flat,
                use_mask_for_norm=configuration.use_mask_for_norm, **asked,
            )  # fmt: skip
        prepared = {case.id: self._preprocessed(case, label) for case, label in zip(cases, labels, strict=True)}
        return nnUNetDataLoader(
            _Dataset(prepared), tuning.batch or configuration.batch_size, initial, configuration.patch_size, manager,
            oversample_foreground_percent=trainer.oversample_foreground_percent,
            probabilistic_oversampling=trainer.probabilistic_oversampling, transforms=transforms,
        )  # fmt: skip

    def _preprocessed(self, case: Case, label: Mask) -> tuple[Any, Any, None, dict[str, Any]]:
        trainer = self.trainer
        properties: dict[str, Any] = {"spacing": list(case.spacing_mm or ())}
        preprocessor = trainer.configuration_manager.preprocessor_class(verbose=False)
        data, segmentation, properties = preprocessor.run_case_npy(
            case.image, label[None].astype(np.int16), properties, trainer.plans_manager,
            trainer.configuration_manager, trainer.dataset_json,
        )  # fmt: skip
        manager, places = trainer.label_manager, properties["class_locations"]
        annotated = (-1, *manager.all_labels)
        if manager.has_ignore_label and not len(places.get(annotated, ())):  # nnU-Net 2.6.0 finds none
            found = np.argwhere(segmentation != manager.ignore_label)
            places[annotated] = found[:: max(1, len(found) // LOCATIONS)]
        return data, segmentation, None, properties


@dataclass(frozen=True)
class _Dataset:
    """Preprocessed cases in memory, with the interface of nnU-Net's data loader."""

    cases: Mapping[str, tuple[Any, Any, None, dict[str, Any]]]

    @property
    def identifiers(self) -> list[str]:
        return sorted(self.cases)

    def load_case(self, identifier: str) -> tuple[Any, Any, None, dict[str, Any]]:
        """(image, segmentation, no previous stage, properties)."""
        return self.cases[identifier]


def _trainer(backbone: NnUNet) -> Any:
    """Build the trainer of the model with its settings; its log goes to a temporary folder."""
    try:
        from nnunetv2.training.dataloading.data_loader import nnUNetDataLoader  # noqa: F401
    except ImportError as error:
        raise MissingExtra("tuning an nnU-Net needs nnunetv2 2.6 or later; pip install -U nnunetv2") from error
    predictor, made = backbone.predictor, trainer_class(backbone.predictor.trainer_name)
    with _results_elsewhere():
        try:
            trainer = made(
                plans=predictor.plans_manager.plans, configuration=backbone.configuration, fold=0,
                dataset_json=predictor.dataset_json, device=torch.device(predictor.device),
            )  # fmt: skip
        except Exception as error:
            raise BadInput(f"trainer {made.__name__} cannot be set up for tuning: {in_one_line(error)}") from error
    trainer.print_to_log_file = lambda *_, **__: None
    return trainer


@contextlib.contextmanager
def _results_elsewhere() -> Iterator[None]:
    """Set the results folder of nnU-Net to a temporary one, because a trainer creates it."""
    module: Any = sys.modules[trainer_class("nnUNetTrainer").__module__]
    found = module.nnUNet_results, module.nnUNet_preprocessed
    with tempfile.TemporaryDirectory() as folder:
        module.nnUNet_results = module.nnUNet_preprocessed = folder
        try:
            yield
        finally:
            module.nnUNet_results, module.nnUNet_preprocessed = found
