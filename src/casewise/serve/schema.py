"""The Open Inference Protocol's messages, as far as JSON says them; also what /openapi.json shows."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

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


class Problem(_Message):
    """Every refusal."""

    error: str


class Live(_Message):
    """Health."""

    live: bool


class Ready(_Message):
    """Health."""

    ready: bool
