"""Small untrained models in files, and volumes for them."""

from __future__ import annotations

import warnings
from pathlib import Path

import nibabel
import numpy as np
import torch

from casewise.adapt.backbones.checkpoints import write_safetensors
from casewise.adapt.networks import PlainUNet


def write_unet(file: Path) -> Path:
    """Write the weights of ``casewise.adapt.networks:PlainUNet``."""
    torch.manual_seed(3)
    write_safetensors(file, PlainUNet().state_dict())
    return file


def write_volumes(folder: Path, cases: int) -> Path:
    """Write ``images`` and ``labels`` of two slices each, 24 x 24: smooth noise, and where it is above its mean."""
    rng = np.random.default_rng(0)
    for kind in ("images", "labels"):
        (folder / kind).mkdir()
    for number in range(cases):
        image = rng.normal(size=(24, 24, 2)).cumsum(0).cumsum(1).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(image, np.eye(4)), folder / "images" / f"case_{number}_0000.nii.gz")
        label = (image > image.mean()).astype(np.uint8)
        nibabel.save(nibabel.Nifti1Image(label, np.eye(4)), folder / "labels" / f"case_{number}.nii.gz")
    return folder


def write_segformer(folder: Path, *classes: str) -> Path:
    """Write a SegFormer for pictures of 64 x 64 with its image processor, as Hugging Face stores them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import SegformerConfig, SegformerForSemanticSegmentation, SegformerImageProcessor

        torch.manual_seed(0)
        config = SegformerConfig(
            depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16], decoder_hidden_size=16, num_attention_heads=[1, 1, 1, 1],
            id2label=dict(enumerate(classes)), label2id={name: number for number, name in enumerate(classes)},
        )  # fmt: skip
        SegformerForSemanticSegmentation(config).save_pretrained(folder)
        SegformerImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)
    return folder
