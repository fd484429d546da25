"""Open Inference Protocol v2 with the binary tensor extension: bytes to a case, an answer to bytes.

A request is JSON, or JSON followed by raw little-endian tensors where the header ``Inference-Header-Content-Length``
says how long the JSON is. Nothing is ever unpickled.

One image file as a request's body: told apart by its first bytes, judged by its header, then read.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from casewise.adapt.backbones import Backbone, Reading
from casewise.core.errors import BadInput, in_one_line
from casewise.core.formats import json_bytes, json_text
from casewise.core.records import Case, Mask
from casewise.data import nifti, pictures
from casewise.data.folders import CaseFiles
from casewise.deployment import Segmented
from casewise.serve.openapi import InferRequest, InferResponse, InputTensor, OutputTensor

HEADER = "Inference-Header-Content-Length"
VERSION = "1"
DTYPES = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Asked:
    """A request, understood."""

    case: Case
    request_id: str | None
    outputs: Mapping[str, bool]  # name -> whether as bytes


def parsed(body: bytes, header_length: str | None, *, max_json_bytes: int) -> Asked:
    """A case from a request's body; BadInput says what is wrong with it."""
    text, rest = _halves(body, header_length)
    if len(text) > max_json_bytes:
        raise BadInput(f"JSON may have {max_json_bytes} bytes, got {len(text)}; send tensors as bytes, see {HEADER}")
    try:
        request = InferRequest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise BadInput(f"{'.'.join(map(str, first['loc'])) or 'request'}: {first['msg']}") from error
    _check_parameters(request)
    tensors = _tensors(request, rest)
    if "image" not in tensors:
        raise BadInput("an input called image is needed, (channel, rows, columns) or (channel, slices, rows, columns)")
    return Asked(_case(request, tensors), request.id, _wanted(request))


def _check_parameters(request: InferRequest) -> None:
    """Refuse a parameter that nothing here reads: whoever sends it expects something."""
    own = ("case_id", "group", "binary_data_output")
    given: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [("parameters", request.parameters, own)]
    given += [(f"inputs.{one.name}.parameters", one.parameters, ("binary_data_size",)) for one in request.inputs]
    given += [(f"outputs.{one.name}.parameters", one.parameters, ("binary_data",)) for one in request.outputs or ()]
    for where, found, known in given:
        unknown = [name for name in found if name not in known]
        if unknown:
            raise BadInput(f"{where} holds {unknown[0][:40]!r}; known are {', '.join(known)}")


def _halves(body: bytes, header_length: str | None) -> tuple[bytes, memoryview]:
    if header_length is None:
        return body, memoryview(b"")
    plain = header_length.isascii() and header_length.isdigit() and len(header_length) < 20  # int() refuses thousands
    if not plain or int(header_length) > len(body):
        raise BadInput(f"{HEADER} must be a number up to the body's {len(body)} bytes, got {header_length[:20]!r}")
    length = int(header_length)
    return body[:length], memoryview(body)[length:]


def _tensors(request: InferRequest, rest: memoryview) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for tensor in request.inputs:
        if tensor.name in found:
            raise BadInput(f"input {tensor.name} was given twice")
        if any(side < 1 for side in tensor.shape):
            raise BadInput(f"every side of {tensor.name} must be at least 1, got {tensor.shape}")
        size = tensor.parameters.get("binary_data_size")
        if size is None:
            found[tensor.name] = _from_json(tensor)
        else:
            found[tensor.name], rest = _from_bytes(tensor, size, rest)
    if len(rest):
        raise BadInput(f"{len(rest)} bytes follow the last tensor; binary_data_size and the body disagree")
    return found


def _from_bytes(tensor: InputTensor, size: Any, rest: memoryview) -> tuple[NDArray[Any], memoryview]:
    dtype = np.dtype(DTYPES[tensor.datatype])
    needed = math.prod(tensor.shape) * dtype.itemsize
    if tensor.data is not None or isinstance(size, bool) or size != needed or needed > len(rest):
        raise BadInput(
            f"{tensor.name} of shape {tensor.shape} and type {tensor.datatype} takes {needed} bytes and no data; "
            f"binary_data_size is {size!r}, {len(rest)} bytes are there"
        )
    values = np.frombuffer(rest[:needed], dtype).reshape(tensor.shape)
    return values, rest[needed:]


def _from_json(tensor: InputTensor) -> NDArray[Any]:
    if tensor.data is None:
        raise BadInput(f"{tensor.name} has neither data nor parameters.binary_data_size")
    try:
        values = np.asarray(tensor.data)
        if values.dtype.kind not in "biuf" or values.size != math.prod(tensor.shape):
            raise ValueError(f"it holds {values.size} values of kind {values.dtype}")
        return _whole(values, np.dtype(DTYPES[tensor.datatype])).reshape(tensor.shape)
    except (ValueError, OverflowError, RecursionError) as error:
        raise BadInput(f"data of {tensor.name} is not a {tensor.datatype} of shape {tensor.shape}: {error}") from error


def _whole(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Converted without loss of anything but float precision: 300 is no UINT8, 1.5 is no integer."""
    with np.errstate(all="ignore"):
        converted = values.astype(dtype)
    if dtype.kind != "f" and not np.array_equal(converted, values):
        raise ValueError(f"some values do not fit into {dtype}")
    return converted


def _case(request: InferRequest, tensors: Mapping[str, NDArray[Any]]) -> Case:
    image = tensors["image"]
    if image.ndim not in (3, 4):
        raise BadInput(f"image has 3 or 4 axes, channel first and no batch axis, got shape {image.shape}")
    spacing = tensors.get("spacing_mm")
    if spacing is not None and (spacing.shape != (image.ndim - 1,) or not _positive(spacing)):
        raise BadInput(f"spacing_mm needs {image.ndim - 1} positive values, one a spatial axis")
    case_id, group = request.parameters.get("case_id"), request.parameters.get("group")
    for name, value in (("case_id", case_id), ("group", group)):
        if value is not None and not isinstance(value, str):
            raise BadInput(f"parameters.{name} is a text, got {type(value).__name__}")
    millimetres = None if spacing is None else tuple(float(value) for value in spacing)
    return Case(case_id or named_after(image.tobytes()), image.astype(np.float32), millimetres, group)


def _positive(values: NDArray[Any]) -> bool:
    return bool(((values.astype(float) > 0) & np.isfinite(values)).all())


def named_after(content: bytes) -> str:
    """A case id for who gives none: equal images are one case, so equal requests get equal answers."""
    return f"case-{hashlib.sha256(content).hexdigest()[:16]}"


def _wanted(request: InferRequest) -> dict[str, bool]:
    default = request.parameters.get("binary_data_output") is True
    if not request.outputs:
        return {"mask": default}
    return {one.name: one.parameters.get("binary_data", default) is True for one in request.outputs}


def datatype_of(backbone: Backbone) -> str:
    """UINT8 unless a label needs more."""
    largest = max((*backbone.labels, backbone.classes - 1, backbone.ignore or 0))
    return "UINT8" if largest < 256 else "UINT16"


def encoded(
    asked: Asked, answer: Segmented, facts: Mapping[str, Any], *, model: str, datatype: str
) -> tuple[bytes, dict[str, str]]:
    """The response's body and headers."""
    masks = {"mask": answer.mask, "source": answer.source}
    tensors, tail = [], b""
    for name, binary in asked.outputs.items():
        mask = masks[name]
        if mask is None:
            continue
        tensor, content = _output(name, mask, datatype, binary=binary)
        tensors.append(tensor)
        tail += content
    response = InferResponse(
        model_name=model, model_version=VERSION, id=asked.request_id, parameters=scalars(facts), outputs=tensors
    )
    head = response.model_dump_json(exclude_none=True).encode()
    if not any(asked.outputs.values()):
        return head, {"content-type": "application/json"}
    return head + tail, {"content-type": "application/octet-stream", HEADER: str(len(head))}


def _output(name: str, mask: Mask, datatype: str, *, binary: bool) -> tuple[OutputTensor, bytes]:
    values = np.ascontiguousarray(mask.astype(DTYPES[datatype]))
    shape = list(values.shape)
    if not binary:
        return OutputTensor(name=name, shape=shape, datatype=datatype, data=values.ravel().tolist()), b""
    size = {"binary_data_size": values.nbytes}
    return OutputTensor(name=name, shape=shape, datatype=datatype, parameters=size), values.tobytes()


def facts_of(answer: Segmented, promise: Mapping[str, Any] | None) -> dict[str, Any]:
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


def scalars(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The protocol's parameters are numbers, texts and booleans; what has parts goes in as JSON."""
    decision = facts["decision"]
    short = {name: decision[name] for name in ("action", "deployed", "executed", "bucket", "value", "reason")}
    plain = {**short, **facts}
    texts = {name: json_text(value) if isinstance(value, dict | list) else value for name, value in plain.items()}
    return {name: value for name, value in texts.items() if value is not None}


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
