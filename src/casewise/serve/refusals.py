"""Every refusal is ``{"error": sentence}`` with a status that says whose turn it is."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from casewise.core.errors import BadInput, CasewiseError, UnsafeInput
from casewise.serve.lane import Closing, Full

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
    app.add_exception_handler(HTTPException, _as_is)
    app.add_exception_handler(RequestValidationError, _invalid)


def _handler(status: int) -> Any:
    async def answer(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": str(error) or type(error).__name__}, status)

    return answer


async def _full(request: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": str(error)}, 429, headers={"Retry-After": str(error.retry_s)})


async def _as_is(request: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": str(error.detail)}, error.status_code, headers=error.headers)


async def _invalid(request: Request, error: Any) -> JSONResponse:
    first = error.errors()[0]
    return JSONResponse({"error": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}, 422)
