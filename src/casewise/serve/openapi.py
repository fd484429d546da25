"""What /openapi.json and the first page show.

Bodies and refusals are spelled out because FastAPI cannot see them in functions that read raw bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from fastapi import FastAPI
from jinja2 import Environment, StrictUndefined
from pydantic import BaseModel, ConfigDict, Field

from casewise import __version__
from casewise.core.text import pluralize
from casewise.deployment import Deployment
from casewise.render.mask_pictures import legend


class ModelDescription(BaseModel):
    """The model, its policy, certificate and monitor."""

    name: str
    fingerprint: str
    channels: int | None
    labels: dict[str, str]
    policy: str
    calibration_id: str
    warnings: list[str]
    certificate: dict[str, Any] | None
    monitor: dict[str, Any] | None


class SegmentReply(BaseModel):
    """The JSON answer of /segment."""

    model_config = ConfigDict(protected_namespaces=())

    mask: str = Field(description="The mask file, base64.")
    media_type: str
    facts: dict[str, Any]
    preview: str | None = Field(default=None, description="A PNG of the decision, base64, if it was requested.")


class Refusal(BaseModel):
    """Every refusal."""

    error: str


Responses = dict[int | str, dict[str, Any]]

_BYTES: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}


def _problems(**meanings: str) -> Responses:
    return {int(code[1:]): {"model": Refusal, "description": text} for code, text in meanings.items()}


ALWAYS = _problems(
    _400="The Host header names another machine.", _401="The token is missing.", _403="A page of another site asked.",
    _415="The body is packed (Content-Encoding).",
)  # fmt: skip
READY: Responses = {**ALWAYS, **_problems(_503="Shutting down.")}
SEGMENT: Responses = {
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
        "model": Refusal,
        "description": "Every place is taken.",
        "headers": {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}},
    },
    200: {
        "model": SegmentReply,
        "description": "The mask, as a file of the image's kind or inside JSON; facts in the header Casewise-Facts.",
        "content": dict.fromkeys(("application/gzip", "application/octet-stream", "image/png"), _BYTES),
    },
}
SEGMENT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": dict.fromkeys(("application/octet-stream", "application/gzip", "image/png"), _BYTES),
    }
}


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
        expects=f"The model reads {pluralize(channels, 'channel')}." if channels else "",
        legend=legend(backbone.labels, background=deployment.adaptation.foreground),
        paths=[
            (method.upper(), path, str(said.get("description") or said.get("summary") or ""))
            for path, methods in app.openapi()["paths"].items()
            for method, said in methods.items()
        ],
    )  # fmt: skip
