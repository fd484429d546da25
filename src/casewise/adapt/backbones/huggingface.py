"""Backbone for Hugging Face: any ``AutoModelForSemanticSegmentation`` with its image processor.

Low-resolution logits are resized bilinearly to the image before the argmax, as
``post_process_semantic_segmentation`` does. Weights are safetensors unless the user trusts the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from casewise.adapt.backbones import Expectation, Prepared, check_image, logits_pipeline
from casewise.adapt.backbones.module import FileBackbone
from casewise.adapt.logits import at_resolution
from casewise.adapt.snapshot import fingerprint
from casewise.core.durable import text_sha256
from casewise.core.errors import BadInput, MissingExtra, UnsafeInput, in_one_line
from casewise.core.formats import json_text
from casewise.core.records import Case, Decision, Mask


@dataclass(frozen=True, eq=False)
class HuggingFace(FileBackbone):
    """A model of Hugging Face, from a local directory or the hub."""

    network: nn.Module
    processor: Any
    name: str
    fingerprint: str
    loader: str
    classes: int
    labels: Mapping[int, str]
    ignore: int | None
    device: str
    head: str = "softmax"
    ending: str | None = None
    expects: Expectation = field(default_factory=lambda: Expectation(channels=3))

    @classmethod
    def load(cls, spec: str, *, device: str = "cpu", trust: bool = False) -> HuggingFace:
        """Load a model and its processor; remote code is never run, pickled weights only with ``trust``."""
        model_class, processor_class = _transformers()
        local = Path(spec).is_dir()
        if local and not trust and not list(Path(spec).glob("*.safetensors")):
            raise UnsafeInput(f"{spec} has no safetensors; save it with save_pretrained, or pass --trust checkpoint")
        options = {"local_files_only": local, "trust_remote_code": False}
        try:
            network = model_class.from_pretrained(spec, use_safetensors=None if trust else True, **options)
            processor = processor_class.from_pretrained(spec, **options)
        except Exception as error:  # an empty or broken file can raise any exception
            taken = "" if local else " (it is no folder here, so it was taken as a hub id)"
            raise BadInput(f"{spec} cannot be loaded{taken}: {in_one_line(error)}") from error
        network.to(torch.device(device)).eval()
        labels = {int(number): str(label) for number, label in network.config.id2label.items()}
        return cls(
            network=network, processor=processor, name=spec if not local else Path(spec).name,
            fingerprint=fingerprint(network), loader=f"huggingface(processor={_digest(processor)})",
            classes=len(labels), labels=labels, ignore=255, device=device,
        )  # fmt: skip

    def prepare(self, case: Case) -> Prepared:
        """Run the image processor; ``forward`` returns logits at the size of the image."""
        check_image(case, channels=3)
        picture = np.moveaxis(np.asarray(case.image), 0, -1)
        inputs = self.processor(images=picture, return_tensors="pt")["pixel_values"].to(self.device)
        size = tuple(case.image.shape[1:])
        pipeline = logits_pipeline(self.network, inputs, self.head, self._coarse_logits, size)
        return Prepared(
            inputs, forward=lambda pixels: at_resolution(self._coarse_logits(pixels), size), pipeline=pipeline
        )

    def _coarse_logits(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.network(pixel_values=pixels).logits
        return logits


def segments(mask: Mask, labels: Mapping[int, str], decision: Decision | None = None) -> list[dict[str, Any]]:
    """Return the result in the form of the ``image-segmentation`` pipeline: label, mask and score, and the decision.

    The score is None, as in the pipeline for semantic segmentation; masks are (rows, columns) of 0 and 255.
    """
    from PIL import Image

    made = decision.as_dict() if decision else None
    pictures = {int(value): Image.fromarray((mask == value).astype(np.uint8) * 255) for value in np.unique(mask)}
    return [
        {"score": None, "label": labels.get(value, str(value)), "mask": picture, "decision": made}
        for value, picture in pictures.items()
    ]


def _digest(processor: Any) -> str:
    plain = {key: value for key, value in processor.to_dict().items() if not key.startswith("_")}
    return text_sha256(json_text(plain, sort_keys=True, default=str))[:12]


def _transformers() -> tuple[Any, Any]:
    try:
        from transformers import AutoImageProcessor, AutoModelForSemanticSegmentation
    except ImportError as error:
        raise MissingExtra(f"transformers is not installed ({error}); pip install 'casewise[segformer]'") from error
    return AutoModelForSemanticSegmentation, AutoImageProcessor
