"""What /openapi.json shows: the Open Inference Protocol's messages, as far as JSON says them, and every refusal.

Bodies and refusals are spelled out because FastAPI cannot see them in functions that read raw bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Literal

from fastapi import FastAPI
from jinja2 import Environment, StrictUndefined
from pydantic import BaseModel, ConfigDict, Field

from casewise import __version__
from casewise.core.brief import counted
from casewise.deployment import Deployment
from casewise.render.masks import legend

Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"
]


class _Message(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class _Request(_Message):
    """What a client sends: a field that is not known is a mistake of the client, and it is told so."""

    model_config = ConfigDict(protected_namespaces=(), extra="forbid")


class InputTensor(_Request):
    """One input: ``data`` here, or ``parameters.binary_data_size`` bytes after the JSON."""

    name: Literal["image", "spacing_mm"]
    shape: list[int] = Field(min_length=1, max_length=5)
    datatype: Datatype
    parameters: dict[str, Any] = Field(default_factory=dict)
    data: list[Any] | None = None


class WantedOutput(_Request):
    """An output to send back; ``parameters.binary_data`` asks for bytes after the JSON."""

    name: Literal["mask", "source"]
    parameters: dict[str, Any] = Field(default_factory=dict)


class InferRequest(_Request):
    """``parameters``: case_id, group, binary_data_output."""

    id: str | None = Field(default=None, max_length=256)
    parameters: dict[str, Any] = Field(default_factory=dict)
    inputs: list[InputTensor] = Field(min_length=1, max_length=2)
    outputs: list[WantedOutput] | None = Field(default=None, max_length=2)


class OutputTensor(_Message):
    """One output; without ``data`` its bytes follow the JSON."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class InferResponse(_Message):
    """``parameters`` hold the decision: action, deployed, executed, status, reason; decision and monitor as JSON."""

    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, Any]
    outputs: list[OutputTensor]


class TensorKind(_Message):
    """A tensor that the model takes or gives."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(_Message):
    """What the model is."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorKind]
    outputs: list[TensorKind]
    parameters: dict[str, Any]


class ServerMetadata(_Message):
    """What the server is."""

    name: str
    version: str
    extensions: list[str]


class Segmented(_Message):
    """The JSON answer of /segment."""

    mask: str = Field(description="The mask file, base64.")
    media_type: str
    facts: dict[str, Any]
    preview: str | None = Field(default=None, description="A PNG of what was decided, base64, where it was asked for.")


class Problem(_Message):
    """Every refusal."""

    error: str


class Live(_Message):
    """Health."""

    live: bool


class Ready(_Message):
    """Health."""

    ready: bool


Responses = dict[int | str, dict[str, Any]]

_BYTES: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
_REFERENCE = "#/components/schemas/{model}"


def _problems(**meanings: str) -> Responses:
    return {int(code[1:]): {"model": Problem, "description": text} for code, text in meanings.items()}


ALWAYS = _problems(
    _400="The Host header names another machine.", _401="The token is missing.", _403="A page of another site asked.",
    _415="The body is packed (Content-Encoding).",
)  # fmt: skip
READY: Responses = {**ALWAYS, **_problems(_503="Shutting down.")}
MODEL: Responses = {**READY, **_problems(_404="There is no such model.", _422="A parameter is not valid.")}
_WORK: Responses = {
    **_problems(
        _400="The body cannot be understood.",
        _401="The token is missing.",
        _403="A page of another site asked.",
        _408="The body came too slowly.",
        _413="The body is too large.",
        _422="Understood, but not an image for this model.",
        _503="Shutting down.",
    ),
    429: {
        "model": Problem,
        "description": "Every place is taken.",
        "headers": {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}},
    },
}
INFER: Responses = {
    **_WORK,
    **_problems(_404="There is no such model."),
    200: {"model": InferResponse, "description": "Mask and decision.", "content": {"application/octet-stream": _BYTES}},
}
SEGMENT: Responses = {
    **_WORK,
    200: {
        "model": Segmented,
        "description": "The mask, as a file of the image's kind or inside JSON; facts in the header Casewise-Facts.",
        "content": dict.fromkeys(("application/gzip", "application/octet-stream", "image/png"), _BYTES),
    },
}
METRICS: Responses = {**ALWAYS, 200: {"description": "Prometheus text.", "content": {"text/plain": {}}}}

INFER_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": _REFERENCE.format(model="InferRequest")}},
            "application/octet-stream": _BYTES,
        },
    }
}
SEGMENT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": dict.fromkeys(("application/octet-stream", "application/gzip", "image/png"), _BYTES),
    }
}


def add_request_schema(app: FastAPI) -> None:
    """Put InferRequest and its parts where INFER_BODY points."""
    schema = app.openapi()
    plain = InferRequest.model_json_schema(ref_template=_REFERENCE)
    parts = plain.pop("$defs", {})
    schema["components"]["schemas"] |= {**parts, "InferRequest": plain}


def page(
    app: FastAPI, model: str, deployment: Deployment, promise: Mapping[str, Any] | None, warnings: Sequence[str]
) -> str:
    """The first page: a form to try an image, how a program asks, and every path; it loads nothing from elsewhere."""
    backbone = deployment.backbone
    kinds = [backbone.ending] if backbone.ending else [".nii.gz", ".nii", ".png"]
    channels = backbone.expects.channels
    text = (resources.files("casewise.serve") / "assets" / "service.html").read_text(encoding="utf-8")
    held = "" if promise is None or promise["void"] else str(promise["statement"])
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(text).render(
        model=model,
        version=__version__,
        policy=deployment.policy.name,
        promise=held,
        warnings=warnings,
        kinds=", ".join(kinds),
        accept=",".join(dict.fromkeys(f".{kind.rpartition('.')[2]}" for kind in kinds)),
        expects=f"The model reads {counted(channels, 'channel')}." if channels else "",
        legend=legend(backbone.labels, background=deployment.adaptation.foreground),
        paths=[
            (method.upper(), path, str(said.get("description") or said.get("summary") or ""))
            for path, methods in app.openapi()["paths"].items()
            for method, said in methods.items()
        ],
    )  # fmt: skip
