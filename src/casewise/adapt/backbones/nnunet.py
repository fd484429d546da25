"""Backbone for nnU-Net v2, with its reader, preprocessing, sliding window, mirroring, export and writer.

nnU-Net loads ``list_of_parameters`` into its network before every prediction, so changes of that network are lost.
Therefore the predictor has a separate network, and before each prediction its list is set to the adapted weights. With
source weights, the output equals that of ``nnUNetv2_predict`` byte for byte. Gradients are computed on the preprocessed
patches, outside nnU-Net's inference mode.
"""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from casewise.adapt.backbones import Expectation, Invert, OwnPrediction, Pipeline, Prepared, Reading, check_image
from casewise.adapt.backbones.architectures import check_nnunet_names
from casewise.adapt.backbones.checkpoints import read_checkpoint
from casewise.adapt.backbones.module import patches
from casewise.adapt.logits import at_resolution
from casewise.adapt.snapshot import fingerprint
from casewise.core.durable import json_sha256
from casewise.core.errors import BadInput, MissingExtra, in_one_line
from casewise.core.json_records import read_json
from casewise.core.records import Case, Mask
from casewise.data import nifti, pictures
from casewise.data.folders import CaseFiles

_ABSOLUTE = ("CTNormalization", "NoNormalization", "RescaleTo01Normalization", "RGBTo01Normalization")


class Ensemble(nn.Module):
    """Several folds as one network that returns the mean of their logits; an update changes all folds."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, image: Tensor) -> Tensor:
        """Mean logits of the members."""
        return torch.stack([member(image) for member in self.members]).mean(0)


def members_of(network: nn.Module) -> list[nn.Module]:
    """Return the networks of an ensemble, or the network alone."""
    return list(network.members) if isinstance(network, Ensemble) else [network]


@dataclass(frozen=True, eq=False)
class NnUNet:
    """A trained nnU-Net model folder."""

    predictor: Any  # nnUNetPredictor, with a scratch network
    network: nn.Module  # the network that is adapted: one fold, or an Ensemble
    name: str
    fingerprint: str
    loader: str
    classes: int
    head: str
    labels: Mapping[int, str]
    regions: tuple[int | tuple[int, ...], ...]  # regions that nnU-Net evaluates: label values, or tuples of them
    ignore: int | None
    ending: str
    expects: Expectation
    configuration: str  # name in the plans: "2d", "3d_fullres", ...
    folds: tuple[int | str, ...]  # folds of the network

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        folds: Sequence[int | str] | None = None,
        checkpoint: str = "checkpoint_final.pth",
        device: str = "cpu",
        step_size: float = 0.5,
        mirroring: bool = True,
        trust: bool = False,
        trust_architectures: Sequence[str] = (),
    ) -> NnUNet:
        """Load a model folder without running code; ``folds=None`` loads every fold that has the checkpoint.

        Class names in the folder are checked first (``architectures.py``).
        """
        chosen = folds if folds is not None else _folds_with(folder, checkpoint)
        contents = [_checkpoint(folder / f"fold_{fold}" / checkpoint, trust=trust) for fold in chosen]
        plans, dataset = read_json(folder / "plans.json"), read_json(folder / "dataset.json")
        with quiet():
            _nnunet()
            for item in contents:
                check_nnunet_names(plans, dataset, trainer=item["trainer_name"], trusted=trust_architectures)
            predictor = _predictor(folder, plans, dataset, contents[0], device, step_size, mirroring)
            members = [_member(contents[0], item["network_weights"], predictor, device) for item in contents]
        network = members[0] if len(members) == 1 else Ensemble(members)
        manager, dataset = predictor.label_manager, predictor.dataset_json
        axes = predictor.allowed_mirroring_axes if mirroring else None
        plans_hash = json_sha256(predictor.plans_manager.plans)[:12]
        return cls(
            predictor=predictor,
            network=network,
            name=f"nnU-Net {predictor.plans_manager.dataset_name}, folds {' '.join(str(fold) for fold in chosen)}",
            fingerprint=fingerprint(network),
            loader=f"nnunet(plans={plans_hash}, step_size={step_size}, mirroring={axes})",
            classes=manager.num_segmentation_heads,
            head="sigmoid" if manager.has_regions else "softmax",
            labels=_label_names(dataset),
            regions=_evaluated(manager),
            ignore=manager.ignore_label,
            ending=dataset["file_ending"],
            expects=_expectation(predictor),
            configuration=str(contents[0]["init_args"]["configuration"]),
            folds=tuple(chosen),
        )

    @property
    def tiling(self) -> dict[str, Any]:
        """Options of ``load`` that set tiling and mirroring; members use the same ones."""
        return {"step_size": self.predictor.tile_step_size, "mirroring": self.predictor.use_mirroring}

    def read(self, files: CaseFiles) -> Reading:
        """Read the channels with the reader that the plans name, after the headers were checked."""
        _gate(files.images)
        reader = self.predictor.plans_manager.image_reader_writer_class()
        try:
            with quiet():
                image, properties = reader.read_images([str(path) for path in files.images])
        except Exception as error:
            raise BadInput(
                f"{type(reader).__name__} cannot read case {files.id} ({in_one_line(error)}); export it again"
            ) from error
        spacing = tuple(float(size) for size in properties["spacing"])
        case = Case(files.id, image, spacing, files.group, files.cluster, files.split)
        check_image(case, channels=self.expects.channels)
        return Reading(case, properties)

    def read_label(self, path: Path) -> Mask:
        """Read a label with the same reader: (slices, rows, columns)."""
        _gate((path,))
        reader = self.predictor.plans_manager.image_reader_writer_class()
        try:
            with quiet():
                label = reader.read_seg(str(path))[0][0]
        except Exception as error:
            raise BadInput(
                f"{type(reader).__name__} cannot read label {path.name} ({in_one_line(error)}); save it again"
            ) from error
        return np.asarray(np.rint(label), dtype=np.int32)

    def prepare(self, case: Case) -> Prepared:
        """Preprocess once; updates use patches, masks come from the whole pipeline."""
        check_image(case, channels=self.expects.channels)
        if case.spacing_mm is None:
            raise BadInput(f"case {case.id} has no voxel spacing; give a file, or Case(id, image, spacing_mm)")
        predictor = self.predictor
        properties: dict[str, Any] = {"spacing": list(case.spacing_mm)}
        preprocessor = predictor.configuration_manager.preprocessor_class(verbose=False)
        with quiet():
            data, *_ = preprocessor.run_case_npy(  # fills in the properties
                case.image, None, properties,
                predictor.plans_manager, predictor.configuration_manager, predictor.dataset_json,
            )  # fmt: skip
        volume = torch.as_tensor(data).to(dtype=torch.float32, memory_format=torch.contiguous_format)
        properties["preprocessed_shape"] = tuple(volume.shape[1:])
        inputs = patches(volume, predictor.configuration_manager.patch_size).to(predictor.device)
        pipeline = Pipeline(
            whole=volume[None],
            read=lambda whole, invert: self._probabilities(whole[0], properties, invert),
            source=lambda: self._source(volume, properties),
            mask=lambda probabilities: self._labels(probabilities[0]),
            network=self.predictor.network,
            unmirrored=lambda whole, invert: self._unmirrored(whole[0], properties, invert),
        )
        transposed = list(predictor.plans_manager.transpose_forward) != list(range(volume.ndim - 1))
        on_grid = not transposed and _is_whole(case, volume, properties) and _is_one_to_one(volume, inputs)
        predict = OwnPrediction(lambda: self._mask(volume, properties), on_grid)
        return Prepared(inputs=inputs, predict=predict, pipeline=pipeline)

    def _mask(self, volume: Tensor, properties: dict[str, Any]) -> Mask:
        """Predict with nnU-Net and the current weights; one logit volume is in memory at a time."""
        return np.asarray(self._converted(self._logits(volume), properties))

    def _logits(self, volume: Tensor) -> Tensor:
        """Return logits by the configured sliding window, mirroring and folds, with the current weights."""
        self.predictor.list_of_parameters = [member.state_dict() for member in members_of(self.network)]
        with quiet(), _to_the_last_window(self.predictor):
            logits: Tensor = self.predictor.predict_logits_from_preprocessed_data(volume).cpu()
        return logits

    def _converted(self, logits: Tensor, properties: dict[str, Any], *, probabilities: bool = False) -> Any:
        """Return the mask on the grid of the image; with ``probabilities``, the mask and its probabilities."""
        from nnunetv2.inference.export_prediction import convert_predicted_logits_to_segmentation_with_correct_shape

        with quiet():
            return convert_predicted_logits_to_segmentation_with_correct_shape(
                logits,
                self.predictor.plans_manager, self.predictor.configuration_manager, self.predictor.label_manager,
                properties, return_probabilities=probabilities,
            )  # fmt: skip

    def _probabilities(self, volume: Tensor, properties: dict[str, Any], invert: Invert) -> Tensor:
        logits = self._logits(volume.contiguous())
        space = tuple(properties["preprocessed_shape"])
        back = at_resolution(invert(logits[None].float()), space)[0]
        return torch.as_tensor(self._converted(back, properties, probabilities=True)[1])[None]

    def _unmirrored(self, volume: Tensor, properties: dict[str, Any], invert: Invert) -> Tensor:
        """Return probabilities without nnU-Net's mirroring."""
        found, self.predictor.use_mirroring = self.predictor.use_mirroring, False
        try:
            return self._probabilities(volume, properties, invert)
        finally:
            self.predictor.use_mirroring = found

    def _source(self, volume: Tensor, properties: dict[str, Any]) -> tuple[Mask, Tensor]:
        """Return M0 exactly as ``_mask`` does, and its probabilities, from one pass."""
        logits = self._logits(volume)
        mask = np.asarray(self._converted(logits.clone(), properties))
        return mask, torch.as_tensor(self._converted(logits, properties, probabilities=True)[1])[None]

    def _labels(self, probabilities: Tensor) -> Mask:
        manager = self.predictor.label_manager
        few = len(manager.foreground_labels) < 255
        chosen = np.asarray(manager.convert_probabilities_to_segmentation(probabilities))
        return chosen.astype(np.uint8 if few else np.uint16)

    @property
    def mirrored(self) -> tuple[int, ...]:
        """Axes over which mirror images are averaged, counted from the end."""
        axes = self.predictor.allowed_mirroring_axes if self.predictor.use_mirroring else None
        patch = len(self.predictor.configuration_manager.patch_size)
        return () if axes is None else tuple(axis - patch for axis in axes)

    def write(self, mask: Mask, reading: Reading, path: Path) -> None:
        """Write with nnU-Net's writer, so that an original mask equals the file of ``nnUNetv2_predict``."""
        with quiet():
            self.predictor.plans_manager.image_reader_writer_class().write_seg(mask, str(path), reading.place)


def _is_whole(case: Case, volume: Tensor, properties: Mapping[str, Any]) -> bool:
    """True if preprocessing neither cropped nor resampled (resampling can undo the size of a crop by chance)."""
    space = tuple(case.image.shape[1:])
    box = [tuple(map(int, side)) for side in properties.get("bbox_used_for_cropping", ())]  # unknown counts as cropped
    return box == [(0, size) for size in space] and tuple(volume.shape[1:]) == space


def _is_one_to_one(volume: Tensor, inputs: Tensor) -> bool:
    """True if the patches are exactly the slices or the volume: no padding, no overlap."""
    space = tuple(volume.shape[1:])
    flat = inputs.ndim == volume.ndim
    return tuple(inputs.shape[2:]) == (space[1:] if flat else space) and len(inputs) == (space[0] if flat else 1)


@contextlib.contextmanager
def _to_the_last_window(predictor: Any) -> Iterator[None]:
    """If a forward pass raises, return zeros for the remaining windows and raise the error at the end.

    A thread of nnU-Net produces the windows and would wait forever if the loop stopped early, so the process could not
    end. nnU-Net handles GPU out-of-memory errors itself; they are passed on.
    """
    forward, heads = predictor._internal_maybe_mirror_and_predict, predictor.label_manager.num_segmentation_heads
    failed: list[BaseException] = []

    def watched(window: Tensor) -> Any:
        if not failed:
            try:
                return forward(window)
            except torch.OutOfMemoryError:
                raise
            except BaseException as error:  # also KeyboardInterrupt
                failed.append(error)
        return window.new_zeros((len(window), heads, *window.shape[2:]))

    predictor._internal_maybe_mirror_and_predict = watched
    try:
        yield
    except Exception:
        if not failed:
            raise
    finally:
        del predictor._internal_maybe_mirror_and_predict  # the method of the class is used again
    if failed:
        raise failed[0]


def _checkpoint(path: Path, *, trust: bool) -> dict[str, Any]:
    contents = read_checkpoint(path, trust=trust)
    missing = [key for key in ("network_weights", "trainer_name", "init_args") if key not in contents]
    if missing or not isinstance(contents["init_args"], Mapping) or "configuration" not in contents["init_args"]:
        twin = path.with_suffix(".safetensors")  # the file that was read, if it exists
        read = twin if twin.is_file() else path
        fix = f"move it away to use {path.name}" if read != path and path.is_file() else "name another with -chk"
        raise BadInput(
            f"{read} is not an nnU-Net checkpoint: it lacks {', '.join(missing) or 'init_args.configuration'}; {fix}"
        )
    return contents


def _predictor(
    folder: Path, plain_plans: dict[str, Any], dataset: dict[str, Any], contents: Mapping[str, Any], device: str,
    step_size: float, mirroring: bool,
) -> Any:  # fmt: skip
    predictor_class, plans_class = _nnunet()
    plans = plans_class(plain_plans)
    configuration = plans.get_configuration(contents["init_args"]["configuration"])
    if configuration.previous_stage_name is not None:
        raise BadInput(f"{folder.name} is the second stage of a cascade and needs masks of the first; use the first")
    predictor = predictor_class(
        tile_step_size=step_size, use_gaussian=True, use_mirroring=mirroring, perform_everything_on_device=True,
        device=torch.device(device), verbose=False, verbose_preprocessing=False, allow_tqdm=False,
    )  # fmt: skip
    axes = contents.get("inference_allowed_mirroring_axes")
    predictor.manual_initialization(
        _architecture(contents["trainer_name"], plans, configuration, dataset), plans, configuration, [], dataset,
        contents["trainer_name"], None if axes is None else tuple(axes),
    )  # fmt: skip
    return predictor


def _member(first: Mapping[str, Any], weights: Mapping[str, Tensor], predictor: Any, device: str) -> nn.Module:
    network = _architecture(
        first["trainer_name"], predictor.plans_manager, predictor.configuration_manager, predictor.dataset_json
    )
    network.load_state_dict(weights)
    return network.to(torch.device(device)).eval()


def _architecture(trainer_name: str, plans: Any, configuration: Any, dataset: Mapping[str, Any]) -> nn.Module:
    """Build the network with the trainer; ``build_network_architecture`` has three signatures in 2.2 to 2.8."""
    from nnunetv2.utilities.label_handling.label_handling import determine_num_input_channels

    trainer = trainer_class(trainer_name)
    offered: dict[str, Callable[[], Any]] = {
        "plans_manager": lambda: plans,
        "dataset_json": lambda: dataset,
        "configuration_manager": lambda: configuration,
        "architecture_class_name": lambda: configuration.network_arch_class_name,
        "arch_init_kwargs": lambda: configuration.network_arch_init_kwargs,
        "arch_init_kwargs_req_import": lambda: configuration.network_arch_init_kwargs_req_import,
        "num_input_channels": lambda: determine_num_input_channels(plans, configuration, dataset),
        "num_output_channels": lambda: plans.get_label_manager(dataset).num_segmentation_heads,
        "enable_deep_supervision": lambda: False,
    }
    wanted = inspect.signature(trainer.build_network_architecture).parameters
    unknown = [name for name, facts in wanted.items() if name not in offered and facts.default is facts.empty]
    if unknown:
        raise BadInput(
            f"trainer {trainer_name} needs {', '.join(unknown)} to build its network, and casewise does "
            f"not know their values"
        )
    given = {name: offered[name]() for name in wanted if name in offered}
    built: nn.Module = trainer.build_network_architecture(**given)
    return built


def trainer_class(name: str) -> Any:
    """Return the trainer class of nnU-Net with a given name.

    Raises:
        BadInput: If nnU-Net has no such trainer.
    """
    import nnunetv2
    from nnunetv2.utilities.find_class_by_name import recursive_find_python_class

    home = str(Path(nnunetv2.__path__[0]) / "training" / "nnUNetTrainer")
    trainer = recursive_find_python_class(home, name, "nnunetv2.training.nnUNetTrainer")
    if not inspect.isclass(trainer) or not hasattr(trainer, "build_network_architecture"):
        raise BadInput(f"nnU-Net has no trainer called {name}; install the package that defines it")
    return trainer


def _nnunet() -> tuple[Any, Any]:
    try:
        from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
        from nnunetv2.utilities.plans_handling.plans_handler import PlansManager
    except ImportError as error:
        raise MissingExtra(f"nnU-Net is not installed ({error}); pip install 'casewise[nnunet]'") from error
    return nnUNetPredictor, PlansManager


def _folds_with(folder: Path, checkpoint: str) -> list[int | str]:
    """Return the numbered folds that have the checkpoint, as nnU-Net does; ``fold_all`` only without them."""
    names = (checkpoint, Path(checkpoint).with_suffix(".safetensors").name)
    found = [path.name[5:] for path in sorted(folder.glob("fold_*")) if any((path / name).is_file() for name in names)]
    numbered: list[int | str] = [int(name) for name in found if name.isdigit()]
    if not numbered and not found:
        raise BadInput(f"no fold of {folder} has {checkpoint}; name another with -chk")
    return numbered or list(found)


def _expectation(predictor: Any) -> Expectation:
    plans = predictor.plans_manager.plans
    backward = plans["transpose_backward"]
    spacing = plans.get("original_median_spacing_after_transp")
    intensity = plans.get("foreground_intensity_properties_per_channel", {})
    reader = str(plans.get("image_reader_writer"))
    return Expectation(
        channels=len(predictor.dataset_json["channel_names"]),
        spacing_mm=tuple(float(spacing[axis]) for axis in backward) if spacing else None,
        intensity={int(channel): facts for channel, facts in intensity.items()},
        absolute=tuple(name in _ABSOLUTE for name in predictor.configuration_manager.normalization_schemes),
        reorients=reader == "NibabelIOWithReorient",
    )


def _evaluated(manager: Any) -> tuple[int | tuple[int, ...], ...]:
    if not manager.has_regions:
        return tuple(int(label) for label in manager.foreground_labels)
    plain = [np.asarray(region).tolist() for region in manager.foreground_regions]
    return tuple(tuple(region) if isinstance(region, list) else int(region) for region in plain)


def _label_names(dataset: Mapping[str, Any]) -> dict[int, str]:
    labels = {name: value for name, value in dataset["labels"].items() if name != "ignore"}
    if any(isinstance(value, (list, tuple)) and len(value) > 1 for value in labels.values()):
        regions = [name for name in labels if name != "background"]
        return {0: "background", **dict(zip(dataset["regions_class_order"], regions, strict=False))}
    return {int(value[0] if isinstance(value, (list, tuple)) else value): name for name, value in labels.items()}


def _gate(paths: Sequence[Path]) -> None:
    for path in paths:
        if nifti.is_volume(path):
            nifti.check_header(path)
        elif pictures.is_picture(path):
            pictures.check_picture(path)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress what nnU-Net prints; only the command line prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
