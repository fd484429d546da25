"""A tuned model as files that work without casewise: an nnU-Net folder, a Hugging Face folder or a state dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from casewise.adapt.backbones import Backbone
from casewise.adapt.backbones.checkpoints import write_safetensors
from casewise.adapt.backbones.merged import unmerged
from casewise.adapt.backbones.nnunet import NnUNet, members_of
from casewise.adapt.tuned_weights import TunedWeights, temporary_weights
from casewise.core.durable import replacing, write_json
from casewise.core.errors import BadInput


def export(backbone: Backbone, weights: TunedWeights, folder: Path) -> Path:
    """Write the model with its tuned weights.

    Args:
        backbone: The model that was tuned.
        weights: Changed weights, such as ``read_tuned_folder(...).mean``.
        folder: A new or empty folder. An nnU-Net gets plans.json, dataset.json and fold_*/checkpoint_final.pth, as
            ``nnUNetv2_predict_from_modelfolder`` and ``nnUNetv2_train -pretrained_weights`` read them; a Hugging Face
            model the files that ``from_pretrained`` reads; any other model.safetensors, a state dict.

    Returns:
        The folder.

    Raises:
        Mismatch: The weights belong to another model.
        BadInput: If the folder is not empty.
    """
    weights.check(backbone.fingerprint)
    if folder.exists() and any(folder.iterdir()):
        raise BadInput(f"{folder} is not empty; export into a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    plain: Any = unmerged(backbone)
    with temporary_weights(plain.network, weights):
        if isinstance(plain, NnUNet):
            _nnunet(plain, folder)
        elif hasattr(plain.network, "save_pretrained"):
            plain.network.save_pretrained(folder)
            plain.processor.save_pretrained(folder)
        else:
            write_safetensors(folder / "model.safetensors", plain.network.state_dict())
    return folder


def _nnunet(backbone: NnUNet, folder: Path) -> None:
    predictor = backbone.predictor
    write_json(folder / "plans.json", predictor.plans_manager.plans)
    write_json(folder / "dataset.json", predictor.dataset_json)
    for fold, member in zip(backbone.folds, members_of(backbone.network), strict=True):
        contents = {
            "network_weights": {name: tensor.cpu().clone() for name, tensor in member.state_dict().items()},
            "trainer_name": predictor.trainer_name,
            "init_args": {"configuration": backbone.configuration, "fold": fold},
            "inference_allowed_mirroring_axes": predictor.allowed_mirroring_axes,
        }
        with replacing(folder / f"fold_{fold}" / "checkpoint_final.pth") as temporary:
            torch.save(contents, temporary)
