"""Paths of the service: ``POST /segment`` for one image file, ``/model``, ``/health`` and a page.

A request takes a place before its body is read (429 if there is none). One thread owns the model: it reads, segments
and encodes one case at a time, so the event loop stays free. A refusal is ``{"error": sentence}``.
"""

from __future__ import annotations

import asyncio
import base64
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from casewise import __version__
from casewise.core.errors import BadInput, CasewiseError, UnsafeInput
from casewise.core.formats import json_text
from casewise.core.records import Case, Decision, Policy
from casewise.deployment import CaseResult, Deployment
from casewise.judge.monitors.quota import BUCKETS, Quota, quota_drift
from casewise.render.mask_pictures import overlay_png
from casewise.run.predict_case import preview_of
from casewise.serve import openapi
from casewise.serve.access import AccessControl, ServiceSettings
from casewise.serve.image_upload import MEDIA_TYPES, ending_of, facts_of, named_after, opened, written
from casewise.serve.openapi import ModelDescription, SegmentReply

Result = TypeVar("Result")

SMOOTHING = 0.2  # weight of the newest case in the estimate of a case's time


class Full(Exception):
    """Every place is taken; ``retry_s`` says when to come again."""

    def __init__(self, retry_s: int) -> None:
        super().__init__(f"every place is taken; try again in {retry_s} s")
        self.retry_s = retry_s


class Closing(Exception):
    """The service is shutting down."""


class Lane:
    """One thread owns the model, so no two cases ever meet adapted weights. Used from one event loop."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.taken = 0
        self.open = True
        self._case_s = 1.0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="casewise-model")

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place in the house, before the body is read: memory is bounded by places times the largest body."""
        if not self.open:
            raise Closing("the service is shutting down")
        if self.taken >= self.places:
            raise Full(max(1, math.ceil(self._case_s * self.taken)))
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1

    async def run(self, job: Callable[[], Result]) -> Result:
        """The job's result, after those that came before it. A caller that goes away does not stop the job."""
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


FACTS = "Casewise-Facts"


def create_app(deployment: Deployment, settings: ServiceSettings) -> FastAPI:
    """An ASGI application that serves one model."""
    return _Service(deployment, settings).app


class QuotaWatch:
    """Whether the buckets of the patients served so far are those of calibration; nothing where no bucket is known."""

    def __init__(self, policy: Policy) -> None:
        calibrated = policy.preflight.get("quota") or {}
        self.policy = policy
        self.monitor = Quota(calibrated) if sum(calibrated.values()) else None
        self.patients: set[str] = set()

    def seen(self, decision: Decision) -> None:
        """Count a patient once, by its first case."""
        patient = decision.cluster or decision.case_id
        if self.monitor is not None and decision.bucket in BUCKETS and patient not in self.patients:
            self.patients.add(patient)
            self.monitor = self.monitor.seen(str(decision.bucket))

    @property
    def alarm(self) -> str | None:
        """That the quotas do not travel, as a sentence; it stays."""
        if self.monitor is None or not self.monitor.alarm:
            return None
        return quota_drift(self.policy, self.monitor.seen_in, level=1.0)


class _Service:
    def __init__(self, deployment: Deployment, settings: ServiceSettings) -> None:
        self.deployment = deployment
        self.settings = settings
        self.name = deployment.backbone.name
        self.lane = Lane(settings.places)
        self.quota = QuotaWatch(deployment.policy)
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
        get("/health/live", responses=openapi.ALWAYS)(self.live)
        get("/health/ready", responses=openapi.READY)(self.ready)
        get("/model", responses=openapi.ALWAYS)(self.model)
        post("/segment", responses=openapi.SEGMENT, openapi_extra=openapi.SEGMENT_BODY)(self.segment)
        for path in ("/", "/docs"):
            get(path, include_in_schema=False, response_class=Response)(self.page)

    async def page(self) -> Response:
        """A form to try an image and what can be asked here, as a page that loads nothing from elsewhere."""
        void = self._promise() or {}
        said = dict.fromkeys([*self.deployment.warnings, *self._drift(), *filter(None, [void.get("why_void")])])
        text = openapi.page(self.app, self.name, self.deployment, self._promise(), tuple(said))
        return Response(text, media_type="text/html; charset=utf-8")

    async def live(self) -> dict[str, bool]:
        """The process answers."""
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
            name=self.name,
            fingerprint=backbone.fingerprint,
            channels=backbone.expects.channels,
            labels={str(value): name for value, name in backbone.labels.items()},
            policy=policy.name,
            calibration_id=policy.calibration_id,
            warnings=[*self.deployment.warnings, *self._drift()],
            certificate=self._promise(),
            monitor=self.deployment.monitor,
        )

    async def segment(
        self,
        request: Request,
        answer: Annotated[Literal["file", "json"], Query(description="The mask as a file, or inside JSON.")] = "file",
        case_id: Annotated[str | None, Query(description="Default: named after the content.")] = None,
        group: Annotated[str | None, Query(description="For policies that differ by group.")] = None,
        preview: Annotated[bool, Query(description="With answer=json: a picture of what was decided, too.")] = False,
    ) -> Response:
        """Segment one NIfTI or PNG file, sent as the body; the mask comes back as a file of the same kind."""

        def job(body: bytes, deadline: float | None) -> Response:
            limit = self.settings.max_unpacked_bytes
            backbone, name = self.deployment.backbone, case_id or named_after(body)
            with opened(body, backbone, case_id=name, group=group, max_bytes=limit) as (reading, place):
                found = self._answered(reading.case, deadline)
                content = written(found.mask, reading, place, backbone)
                drawn = self._drawn(reading.case, found) if preview and answer == "json" else None
            facts = facts_of(found, self._promise())
            return _file(content, MEDIA_TYPES[ending_of(body)], facts, answer, drawn)

        return await self._on_lane(request, job)

    def _drawn(self, case: Case, found: CaseResult) -> bytes | None:
        """The picture for a person; one that cannot be drawn never costs the mask."""
        names, background = self.deployment.backbone.labels, self.deployment.adaptation.foreground
        try:
            return overlay_png(preview_of(case, found, names=names, background=background))
        except (CasewiseError, ValueError, IndexError):
            return None

    def _answered(self, case: Any, deadline: float | None) -> CaseResult:
        answer = self.deployment.predict(case, deadline=deadline)
        self.quota.seen(answer.decision)
        return replace(answer, notes=(*answer.notes, *self._drift()))

    def _drift(self) -> tuple[str, ...]:
        """The quota alarm, for every answer from then on."""
        alarm = self.quota.alarm
        return () if alarm is None else (alarm,)

    def _promise(self) -> dict[str, Any] | None:
        """The certificate in short; void once any alarm was raised, the quota's too."""
        promise = self.deployment.promise
        if promise is None or promise["void"] or not self._drift():
            return promise
        why = "the certificate is void: the quota alarm was raised; recalibrate and certify again"
        return {**promise, "void": True, "why_void": why}

    async def _on_lane(self, request: Request, job: Callable[[bytes, float | None], Response]) -> Response:
        with self.lane.place():
            limit = self.settings.timeout_s
            deadline = None if limit is None else time.monotonic() + limit
            try:
                body = await asyncio.wait_for(request.body(), self.settings.upload_s)
            except asyncio.TimeoutError:
                raise HTTPException(408, f"the body took longer than {self.settings.upload_s:g} s") from None
            if not body:
                raise BadInput("the body is empty")
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
    Closing: 503,
    ClientDisconnect: 400,
}


def add_refusals(app: FastAPI) -> None:
    """Handlers for everything that is refused on purpose; the rest is a bug and answers 500."""
    for kind, status in STATUS.items():
        app.add_exception_handler(kind, _handler(status))
    app.add_exception_handler(Full, _full)
    app.add_exception_handler(OSError, _disk)
    app.add_exception_handler(HTTPException, _as_is)
    app.add_exception_handler(RequestValidationError, _invalid)


def _handler(status: int) -> Any:
    async def answer(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": str(error) or type(error).__name__}, status)

    return answer


async def _disk(request: Request, error: Any) -> JSONResponse:
    """A full disk, a watch that cannot be written: an unwatched mask is not handed out, and no path leaves."""
    why = error.strerror or type(error).__name__
    return JSONResponse(
        {"error": f"the service cannot read or write its files ({why}); mend that and send it again"}, 503
    )


async def _full(request: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": str(error)}, 429, headers={"Retry-After": str(error.retry_s)})


async def _as_is(request: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": str(error.detail)}, error.status_code, headers=error.headers)


async def _invalid(request: Request, error: Any) -> JSONResponse:
    first = error.errors()[0]
    return JSONResponse({"error": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}, 422)
