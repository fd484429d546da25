"""One image file as the body of a request: recognized by its first bytes, checked by its header, then read."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from casewise.adapt.backbones import Backbone, Reading
from casewise.core.errors import BadInput, in_one_line
from casewise.core.formats import json_bytes
from casewise.core.records import Mask
from casewise.data import nifti, pictures
from casewise.data.folders import CaseFiles
from casewise.deployment import CaseResult

MEDIA_TYPES = {".nii.gz": "application/gzip", ".nii": "application/octet-stream", ".png": "image/png"}

_PNG = b"\x89PNG\r\n\x1a\n"
_GZIP = b"\x1f\x8b"
_NIFTI_STARTS = tuple(struct.pack(order, size) for size in (348, 540) for order in ("<i", ">i"))


def ending_of(body: bytes) -> str:
    """``.nii.gz``, ``.nii`` or ``.png`` from the bytes; what a client calls the file does not count."""
    if body.startswith(_PNG):
        return ".png"
    if body.startswith(_GZIP):
        return ".nii.gz"
    if body.startswith(_NIFTI_STARTS):
        return ".nii"
    raise BadInput("the body must be one NIfTI (.nii or .nii.gz) or PNG file, sent as it is: no form, no base64")


@contextmanager
def opened(
    body: bytes, backbone: Backbone, *, case_id: str, group: str | None, max_bytes: int
) -> Iterator[tuple[Reading, Path]]:
    """The image as the model's own reader sees it, and a path for a mask beside it; both gone afterwards."""
    ending = ending_of(body)
    if backbone.ending not in (None, ending):
        raise BadInput(f"this model reads {backbone.ending}, the body is a {ending}")
    with TemporaryDirectory(prefix="casewise-") as folder:
        path = Path(folder) / f"image{ending}"
        path.write_bytes(body)
        if ending == ".png":
            pictures.check_picture(path)
        else:
            nifti.check_header(path, max_bytes=max_bytes)
        yield backbone.read(CaseFiles(case_id, (path,), group=group)), path.with_name(f"mask{ending}")


def written(mask: Mask, reading: Reading, path: Path, backbone: Backbone) -> bytes:
    """The mask as a file of the image's kind, in the image's geometry."""
    backbone.write(mask, reading, path)
    return path.read_bytes()


def named_after(content: bytes) -> str:
    """Case id made of the content: equal images are one case, so equal requests get equal answers."""
    return f"case-{hashlib.sha256(content).hexdigest()[:16]}"


def facts_of(answer: CaseResult, promise: Mapping[str, Any] | None) -> dict[str, Any]:
    """Everything about an answer besides the masks, as plain JSON."""
    facts = {
        "status": answer.status,
        "error": None if answer.error is None else in_one_line(answer.error),
        "decision": answer.decision.as_dict(),
        "warnings": [*(finding.message for finding in answer.findings), *answer.notes],
        "monitor": answer.monitor,
        "certificate": promise,
        "seconds": round(answer.seconds, 4),
    }
    plain: dict[str, Any] = json.loads(json_bytes(facts))
    return plain
