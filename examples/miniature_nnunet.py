"""A miniature nnU-Net: a small model folder and a handful of scans, made in seconds, for tests and the tutorial.

The scans hold a bright disc inside a grey one (labels 1 and 2). ``shift`` moves the contrast of the target scans away
from the source's, so that there is something to adapt to. Everything follows from the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from casewise.core.formats import json_text

CONFIGURATIONS = {2: "2d", 3: "3d_fullres"}
FEATURES = (8, 12, 16)  # of the stages


def scan(seed: int, *, shape: Sequence[int] = (4, 40, 36), shift: float = 0.0) -> tuple[NDArray[Any], NDArray[Any]]:
    """One scan and its label, both (slices, rows, columns)."""
    rng = np.random.default_rng(seed)
    rows, columns = np.meshgrid(np.arange(shape[1]), np.arange(shape[2]), indexing="ij")
    center = np.array(shape[1:]) / 2 + rng.uniform(-4, 4, 2)
    radius = rng.uniform(9, 12)
    distance = np.hypot(rows - center[0], columns - center[1])[None] + 0.5 * np.arange(shape[0])[:, None, None]
    label = (distance < radius).astype(np.uint8) + (distance < radius * 0.55)
    contrast = np.array([0.0, 60.0 * (1 - 0.6 * shift), 140.0 * (1 - 0.5 * shift)])
    noise = rng.normal(0, 12 * (1 + 2 * shift), label.shape)
    ramp = shift * 60 * (columns / shape[2])[None]
    return np.asarray(contrast[label] + noise + ramp + 100, np.float32), label.astype(np.uint8)


def write_scans(
    folder: Path, seeds: Sequence[int], *, shift: float = 0.0, spacing: Sequence[float] = (1.0, 1.0, 2.0), **more: Any
) -> list[str]:
    """Write ``images/CASE_0000.nii.gz`` and ``labels/CASE.nii.gz``; spacing is (x, y, z) as in the file."""
    affine = np.diag([*spacing, 1.0])
    names = [f"case_{seed:03d}" for seed in seeds]
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for seed, name in zip(seeds, names, strict=True):
        image, label = scan(seed, shift=shift, **more)
        nibabel.save(nibabel.Nifti1Image(image.T, affine), folder / "images" / f"{name}_0000.nii.gz")
        nibabel.save(nibabel.Nifti1Image(label.T, affine), folder / "labels" / f"{name}.nii.gz")
    return names


def write_model(
    folder: Path,
    *,
    dimensions: int = 2,
    regions: bool = False,
    ignore: bool = False,
    folds: Sequence[int] = (0,),
    steps: int = 40,
    reader: str = "NibabelIO",
    mirroring: tuple[int, ...] | None = None,
    features: Sequence[int] = FEATURES,
    patch: int = 32,
) -> Path:
    """Write and train a miniature model folder in nnU-Net's layout; ``steps=0`` leaves the weights random."""
    plans, dataset = _plans(dimensions, reader, features, patch), _dataset(regions, ignore, reader)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plans.json").write_text(json_text(plans, indent=1))
    (folder / "dataset.json").write_text(json_text(dataset, indent=1))
    for fold in folds:
        with torch.random.fork_rng():
            torch.manual_seed(fold)
            network = _trained(dimensions, regions, steps, features)
        (folder / f"fold_{fold}").mkdir(exist_ok=True)
        torch.save(
            _checkpoint(network, plans, dataset, dimensions, mirroring),
            folder / f"fold_{fold}" / "checkpoint_final.pth",
        )
    return folder


def _network(dimensions: int, outputs: int, features: Sequence[int]) -> nn.Module:
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    named = ("conv_op", "norm_op", "dropout_op", "dropout_op_kwargs", "nonlin")
    kwargs = {key: value for key, value in _architecture(dimensions, features).items() if key not in named}
    network: nn.Module = PlainConvUNet(
        input_channels=1, num_classes=outputs, deep_supervision=False,
        conv_op=(nn.Conv2d, nn.Conv3d)[dimensions - 2], norm_op=(nn.InstanceNorm2d, nn.InstanceNorm3d)[dimensions - 2],
        nonlin=nn.LeakyReLU, dropout_op=None, dropout_op_kwargs=None, **kwargs,
    )  # fmt: skip
    return network


def _trained(dimensions: int, regions: bool, steps: int, features: Sequence[int]) -> nn.Module:
    network = _network(dimensions, 2 if regions else 3, features)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for step in range(steps):
        image, label = scan(1000 + step, shape=(4, 40, 40))
        x = torch.as_tensor((image - image.mean()) / image.std())[:, None, 4:36, 4:36]
        y = torch.as_tensor(label.astype(np.int64))[:, 4:36, 4:36]
        if dimensions == 3:
            x, y = x.transpose(0, 1)[None], y[None]
        logits = network(x)
        if regions:
            truth = torch.stack([y > 0, y > 1], 1).float()
            loss = nn.functional.binary_cross_entropy_with_logits(logits, truth)
        else:
            loss = nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return network


def _patch(dimensions: int, size: int) -> list[int]:
    return [size, size] if dimensions == 2 else [4, size, size]


def _architecture(dimensions: int, features: Sequence[int]) -> dict[str, Any]:
    stride = [2] * dimensions if dimensions == 2 else [1, 2, 2]
    return {
        "n_stages": len(features),
        "features_per_stage": list(features),
        "conv_op": f"torch.nn.modules.conv.Conv{dimensions}d",
        "kernel_sizes": [[3] * dimensions] * len(features),
        "strides": [[1] * dimensions, *[stride] * (len(features) - 1)],
        "n_conv_per_stage": [1] * len(features),
        "n_conv_per_stage_decoder": [1] * (len(features) - 1),
        "conv_bias": True,
        "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{dimensions}d",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }


def _plans(dimensions: int, reader: str, features: Sequence[int], patch: int) -> dict[str, Any]:
    resampling = {"is_seg": False, "order": 1, "order_z": 0, "force_separate_z": None}
    configuration = {
        "data_identifier": f"nnUNetPlans_{CONFIGURATIONS[dimensions]}",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": _patch(dimensions, patch),
        "median_image_size_in_voxels": [40.0, 36.0] if dimensions == 2 else [4.0, 40.0, 36.0],
        "spacing": [1.0, 1.0] if dimensions == 2 else [2.0, 1.0, 1.0],
        "normalization_schemes": ["ZScoreNormalization"],
        "use_mask_for_norm": [False],
        "resampling_fn_data": "resample_data_or_seg_to_shape",
        "resampling_fn_seg": "resample_data_or_seg_to_shape",
        "resampling_fn_data_kwargs": resampling,
        "resampling_fn_seg_kwargs": {**resampling, "is_seg": True},
        "resampling_fn_probabilities": "resample_data_or_seg_to_shape",
        "resampling_fn_probabilities_kwargs": resampling,
        "architecture": {
            "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
            "arch_kwargs": _architecture(dimensions, features),
            "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
        },
        "batch_dice": True,
    }
    return {
        "dataset_name": "Dataset999_Miniature",
        "plans_name": "nnUNetPlans",
        "original_median_spacing_after_transp": [2.0, 1.0, 1.0],
        "original_median_shape_after_transp": [4, 40, 36],
        "image_reader_writer": reader,
        "transpose_forward": [0, 1, 2],
        "transpose_backward": [0, 1, 2],
        "configurations": {CONFIGURATIONS[dimensions]: configuration},
        "experiment_planner_used": "ExperimentPlanner",
        "label_manager": "LabelManager",
        "foreground_intensity_properties_per_channel": {
            "0": {"max": 300.0, "mean": 180.0, "median": 170.0, "min": 60.0, "percentile_00_5": 90.0,
                  "percentile_99_5": 270.0, "std": 45.0}
        },
    }  # fmt: skip


def _dataset(regions: bool, ignore: bool, reader: str) -> dict[str, Any]:
    labels: dict[str, Any] = {"background": 0, "disc": 1, "core": 2}
    more: dict[str, Any] = {}
    if regions:
        labels = {"background": 0, "whole": [1, 2], "core": 2}
        more["regions_class_order"] = [1, 2]
    if ignore:
        labels["ignore"] = 3
    return {
        "channel_names": {"0": "scan"},
        "labels": labels,
        "numTraining": 40,
        "file_ending": ".nii.gz",
        "overwrite_image_reader_writer": reader,
        **more,
    }


def _checkpoint(
    network: nn.Module,
    plans: dict[str, Any],
    dataset: dict[str, Any],
    dimensions: int,
    mirroring: tuple[int, ...] | None,
) -> dict[str, Any]:
    return {
        "network_weights": network.state_dict(),
        "optimizer_state": None,
        "grad_scaler_state": None,
        "logging": {"train_losses": [np.float64(0.5)]},
        "_best_ema": np.float32(0.9),
        "current_epoch": 1,
        "init_args": {"plans": plans, "configuration": CONFIGURATIONS[dimensions], "fold": 0, "dataset_json": dataset,
                      "device": torch.device("cpu")},
        "trainer_name": "nnUNetTrainer",
        "inference_allowed_mirroring_axes": tuple(range(dimensions)) if mirroring is None else mirroring,
    }  # fmt: skip


def main(out: Path) -> None:
    """Write ``model/``, ``calibration/`` and ``target/`` into a folder: the material of the tutorial."""
    write_model(out / "model")
    write_scans(out / "calibration", range(24), shift=0.6)
    write_scans(out / "target", range(100, 104), shift=0.6)


if __name__ == "__main__":
    import sys

    main(Path(sys.argv[1]))
