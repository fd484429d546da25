"""The service: ``POST /segment`` for one image file, ``/model``, ``/health`` and a page.

A request takes a place before its body is read (429 if there is none). One thread owns the model: it reads, segments
and encodes one case at a time, so the event loop stays free. A refusal is ``{"error": sentence}``.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from jinja2 import Environment, StrictUndefined
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from casewise import __version__
from casewise.adapt.backbones import Backbone, Reading
from casewise.core.errors import BadInput, CasewiseError, UnsafeInput, in_one_line
from casewise.core.formats import json_bytes, json_text
from casewise.core.records import Case
from casewise.core.text import pluralize
from casewise.data import nifti, pictures
from casewise.data.folders import CaseFiles
from casewise.deployment import CaseResult, Deployment
from casewise.render.mask_pictures import legend, overlay_png
from casewise.run.predict_case import preview_of
from casewise.serve.access import AccessControl, ServiceSettings

Result = TypeVar("Result")

SMOOTHING = 0.2  # weight of the newest case in the estimate of a case's time


class Lane:
    """Runs the model in one thread, so that two cases never share adapted weights. Used from one event loop."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.taken = 0
        self.open = True
        self._case_s = 1.0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="casewise-model")

    @contextmanager
    def place(self) -> Iterator[None]:
        """Reserve a place before the body is read, so that memory is at most places times the largest body."""
        if not self.open:
            raise HTTPException(503, "the service is shutting down")
        if self.taken >= self.places:
            retry_s = str(max(1, math.ceil(self._case_s * self.taken)))
            raise HTTPException(429, f"the queue is full; try again in {retry_s} s", {"Retry-After": retry_s})
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1

    async def run(self, job: Callable[[], Result]) -> Result:
        """Run a job after the ones before it; it also finishes if the caller disconnects."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, self._timed, job))

    def _timed(self, job: Callable[[], Result]) -> Result:
        began = time.monotonic()
        try:
            return job()
        finally:
            self._case_s += SMOOTHING * (time.monotonic() - began - self._case_s)

    def close(self) -> None:
        """Stop accepting requests and finish the queue."""
        self.open = False
        self._thread.shutdown(wait=True)


# ---- requests and answers ----


MEDIA_TYPES = {".nii.gz": "application/gzip", ".nii": "application/octet-stream", ".png": "image/png"}

_PNG = b"\x89PNG\r\n\x1a\n"
_GZIP = b"\x1f\x8b"
_NIFTI_STARTS = tuple(struct.pack(order, size) for size in (348, 540) for order in ("<i", ">i"))


def ending_of(body: bytes) -> str:
    """``.nii.gz``, ``.nii`` or ``.png`` from the bytes; the file name of the client is ignored."""
    if body.startswith(_PNG):
        return ".png"
    if body.startswith(_GZIP):
        return ".nii.gz"
    if body.startswith(_NIFTI_STARTS):
        return ".nii"
    raise BadInput("the body must be one NIfTI (.nii or .nii.gz) or PNG file itself, not a form and not base64")


@contextmanager
def opened(
    body: bytes, backbone: Backbone, *, case_id: str, group: str | None, max_bytes: int
) -> Iterator[tuple[Reading, Path]]:
    """Read the image with the model's own reader; also return a path for its mask; both are deleted afterwards."""
    ending = ending_of(body)
    if backbone.ending not in (None, ending):
        raise BadInput(f"this model reads {backbone.ending}, but the body is {ending}; convert the image")
    with TemporaryDirectory(prefix="casewise-") as folder:
        path = Path(folder) / f"image{ending}"
        path.write_bytes(body)
        if ending == ".png":
            pictures.check_picture(path)
        else:
            nifti.check_header(path, max_bytes=max_bytes)
        yield backbone.read(CaseFiles(case_id, (path,), group=group)), path.with_name(f"mask{ending}")


def facts_of(answer: CaseResult, promise: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return all facts of an answer besides the masks, as plain JSON."""
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
    _400="The Host header names another machine.", _401="The token is missing.",
    _403="The request comes from a page of another site.", _415="The body is compressed (Content-Encoding).",
)  # fmt: skip
READY: Responses = {**ALWAYS, **_problems(_503="Shutting down.")}
SEGMENT: Responses = {
    **READY,
    **_problems(
        _400="The body cannot be understood.",
        _408="The body arrived too slowly.",
        _413="The body is too large.",
        _422="The file is valid, but not an image for this model.",
    ),
    429: {
        "model": Refusal,
        "description": "The queue is full.",
        "headers": {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}},
    },
    200: {
        "model": SegmentReply,
        "description": "The mask, as a file of the image's kind or inside JSON; facts in the header Casewise-Facts.",
        "content": dict.fromkeys(MEDIA_TYPES.values(), _BYTES),
    },
}
SEGMENT_BODY = {"requestBody": {"required": True, "content": dict.fromkeys(MEDIA_TYPES.values(), _BYTES)}}


# ---- the application ----

FACTS = "Casewise-Facts"


def create_app(deployment: Deployment, settings: ServiceSettings) -> FastAPI:
    """An ASGI application that serves one model."""
    return _Service(deployment, settings).app


class _Service:
    def __init__(self, deployment: Deployment, settings: ServiceSettings) -> None:
        self.deployment = deployment
        self.settings = settings
        self.name = deployment.backbone.name
        self.lane = Lane(settings.places)
        self.app = FastAPI(title="casewise", version=__version__, lifespan=self._life, docs_url=None, redoc_url=None)
        self._add_paths()
        add_refusals(self.app)
        self.app.add_middleware(AccessControl, settings=settings)

    @asynccontextmanager
    async def _life(self, app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(self.lane.close)

    def _add_paths(self) -> None:
        get, post = self.app.get, self.app.post
        get("/health/live", responses=ALWAYS)(self.live)
        get("/health/ready", responses=READY)(self.ready)
        get("/model", responses=ALWAYS)(self.model)
        post("/segment", responses=SEGMENT, openapi_extra=SEGMENT_BODY)(self.segment)
        for path in ("/", "/docs"):
            get(path, include_in_schema=False, response_class=Response)(self.page)

    async def page(self) -> Response:
        """Return a page with a form to try an image and the list of paths; it loads nothing from other hosts."""
        text = service_page(self.app, self.name, self.deployment)
        return Response(text, media_type="text/html; charset=utf-8")

    async def live(self) -> dict[str, bool]:
        """Return 200 while the process runs."""
        return {"live": True}

    async def ready(self) -> dict[str, bool | int]:
        """The model is loaded and requests are accepted: places, and how many are taken; 503 while shutting down."""
        if not self.lane.open:
            raise HTTPException(503, "the service is shutting down")
        return {"ready": True, "places": self.lane.places, "taken": self.lane.taken}

    async def model(self) -> ModelDescription:
        """The model, its policy, certificate and monitor."""
        backbone, policy = self.deployment.backbone, self.deployment.policy
        return ModelDescription(
            name=self.name, fingerprint=backbone.fingerprint, channels=backbone.expects.channels,
            labels={str(value): name for value, name in backbone.labels.items()}, policy=policy.name,
            calibration_id=policy.calibration_id, warnings=list(self.deployment.warnings),
            certificate=self.deployment.promise, monitor=self.deployment.monitor,
        )  # fmt: skip

    async def segment(
        self,
        request: Request,
        answer: Annotated[Literal["file", "json"], Query(description="The mask as a file, or inside JSON.")] = "file",
        case_id: Annotated[str | None, Query(description="Default: a hash of the content.")] = None,
        group: Annotated[str | None, Query(description="Needed by policies with cut-points for each group.")] = None,
        preview: Annotated[bool, Query(description="With answer=json: also a picture of the decision.")] = False,
    ) -> Response:
        """Segment one NIfTI or PNG file, sent as the body; the answer is a mask file of the same kind."""

        def job(body: bytes, deadline: float | None) -> Response:
            limit = self.settings.max_unpacked_bytes
            # equal images get one case id, so equal requests get equal answers
            backbone, name = self.deployment.backbone, case_id or f"case-{hashlib.sha256(body).hexdigest()[:16]}"
            with opened(body, backbone, case_id=name, group=group, max_bytes=limit) as (reading, place):
                found = self.deployment.predict(reading.case, deadline=deadline)
                backbone.write(found.mask, reading, place)
                content = place.read_bytes()
                drawn = self._drawn(reading.case, found) if preview and answer == "json" else None
            facts = facts_of(found, self.deployment.promise)
            return _file(content, MEDIA_TYPES[ending_of(body)], facts, answer, drawn)

        return await self._on_lane(request, job)

    def _drawn(self, case: Case, found: CaseResult) -> bytes | None:
        """Draw the picture; None if that fails, which never affects the mask."""
        names, background = self.deployment.backbone.labels, self.deployment.adaptation.foreground
        try:
            return overlay_png(preview_of(case, found, names=names, background=background))
        except (CasewiseError, ValueError, IndexError):
            return None

    async def _on_lane(self, request: Request, job: Callable[[bytes, float | None], Response]) -> Response:
        with self.lane.place():
            limit = self.settings.timeout_s
            deadline = None if limit is None else time.monotonic() + limit
            try:
                body = await asyncio.wait_for(request.body(), self.settings.upload_s)
            except asyncio.TimeoutError:
                raise HTTPException(
                    408, f"the body took longer than {self.settings.upload_s:g} s; send it compressed (.nii.gz)"
                ) from None
            if not body:
                raise BadInput("the body is empty; send one image file")
            return await self.lane.run(lambda: job(body, deadline))


def _file(content: bytes, media_type: str, facts: dict[str, Any], answer: str, drawn: bytes | None) -> Response:
    if answer == "file":
        return Response(content, media_type=media_type, headers={FACTS: json_text(facts)})
    picture = None if drawn is None else base64.b64encode(drawn).decode()
    plain = SegmentReply(mask=base64.b64encode(content).decode(), media_type=media_type, facts=facts, preview=picture)
    return Response(plain.model_dump_json(), media_type="application/json")


STATUS: dict[type[Exception], int] = {
    BadInput: 400,
    UnsafeInput: 400,
    CasewiseError: 422,  # understood, but not for this model
    ClientDisconnect: 400,
}


def add_refusals(app: FastAPI) -> None:
    """Handlers for everything that is refused on purpose; the rest is a bug and answers 500."""
    for kind, status in STATUS.items():
        app.add_exception_handler(kind, _handler(status))
    app.add_exception_handler(OSError, _disk)
    app.add_exception_handler(HTTPException, _as_is)
    app.add_exception_handler(RequestValidationError, _invalid)


def _handler(status: int) -> Any:
    async def answer(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": str(error) or type(error).__name__}, status)

    return answer


async def _disk(request: Request, error: Any) -> JSONResponse:
    """Answer 503 if a file cannot be written (full disk, watch); the answer contains no path."""
    why = error.strerror or type(error).__name__
    return JSONResponse(
        {"error": f"the service cannot read or write its files ({why}); correct that and send the image again"}, 503
    )


async def _as_is(request: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": str(error.detail)}, error.status_code, headers=error.headers)


async def _invalid(request: Request, error: Any) -> JSONResponse:
    first = error.errors()[0]
    return JSONResponse({"error": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}, 422)


def service_page(app: FastAPI, model: str, deployment: Deployment) -> str:
    """Return the first page: a form to try an image, examples for programs, and every path; it loads nothing from
    other hosts."""
    backbone = deployment.backbone
    kinds = [backbone.ending] if backbone.ending else [".nii.gz", ".nii", ".png"]
    channels = backbone.expects.channels
    text = (resources.files("casewise.serve") / "assets" / "service.html").read_text(encoding="utf-8")
    promise = deployment.promise or {}
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(text).render(
        model=model,
        version=__version__,
        policy=deployment.policy.name,
        promise="" if promise.get("void") else promise.get("statement", ""),
        warnings=list(dict.fromkeys([*deployment.warnings, *filter(None, [promise.get("why_void")])])),
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
