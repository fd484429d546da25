"""Settings of a service, checked before it listens, and the access check of each request.

Every request passes the check before a byte of its body is parsed: Host, Origin, token, size.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from casewise.core.errors import Refused

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
MIB = 2**20


@dataclass(frozen=True)
class ServiceSettings:
    """Limits of a service, and who may use it."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None  # needed wherever others can connect
    hosts: tuple[str, ...] = ()  # further names that the Host header may hold
    places: int = 8  # requests inside at once: one on the model, the others uploading or waiting
    max_bytes: int = 256 * MIB  # largest body of a request
    max_unpacked_bytes: int = 2048 * MIB  # largest size of the voxels in a compressed file, by its header
    upload_s: float = 60.0  # a body that is slower loses its place
    timeout_s: float | None = 60.0  # from acceptance; then M0 is the answer

    def __post_init__(self) -> None:
        if not self.is_local and not self.token:
            raise Refused(
                f"other machines can connect to {self.host}, so a token is needed; set CASEWISE_TOKEN, or use "
                f"--host 127.0.0.1"
            )

    @property
    def is_local(self) -> bool:
        """True if only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def allowed_hosts(self) -> frozenset[str] | None:
        """Names a request may be addressed to; None for any, where the token alone decides.

        A page of another site that points its own name at 127.0.0.1 (DNS rebinding) sends its own name.
        """
        if self.is_local:
            return frozenset((*LOOPBACK_NAMES, self.host, *self.hosts))
        return frozenset(self.hosts) or None


WITHOUT_TOKEN = ("/health/live", "/health/ready")
"""Paths for the probes of a container platform, which have no token; they show nothing about cases."""


class AccessControl:
    """ASGI middleware: 400 for a foreign Host, 403 for a foreign Origin, 401 without the token, 413 for too much.

    A packed body (Content-Encoding) is a 415: its size does not limit its unpacked size.
    """

    def __init__(self, app: ASGIApp, settings: ServiceSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["path"], headers)
        expected = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        body = Body(receive, send, self._settings.max_bytes, expected=expected)
        if refusal is None:
            await self._app(scope, body.receive, body.send)
            return
        status, message = refusal
        more = (
            {"www-authenticate": 'Bearer, Basic realm="casewise: the token is the password"'} if status == 401 else None
        )
        await JSONResponse({"error": message}, status, headers=more)(scope, body.receive, body.send)

    def _refusal(self, path: str, headers: Headers) -> tuple[int, str] | None:
        settings = self._settings
        if not _named(headers.get("host", ""), settings):
            return 400, "the Host header names another machine; use the name that the service was started with"
        origin = headers.get("origin")
        if origin is not None and not _named(urlsplit(origin).netloc, settings):
            return 403, "pages of other sites may not use this service"
        if settings.token and path not in WITHOUT_TOKEN and not _bears(headers, settings.token):
            if not _in_browser(headers, settings.token):
                return 401, "send the header Authorization: Bearer TOKEN"
            if origin is not None and urlsplit(origin).netloc != headers.get("host"):
                return 403, "pages of other sites may not use this service"  # a browser sends passwords by itself
        packed = headers.get("content-encoding", "identity").lower()
        if packed != "identity":
            return 415, f"the body is compressed ({packed[:20]}); send the file itself, also if it is a .nii.gz file"
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > settings.max_bytes:
            return 413, _too_much(settings.max_bytes)
        return None


def _named(netloc: str, settings: ServiceSettings) -> bool:
    """True if a Host or Origin, with or without its port, is allowed."""
    if settings.allowed_hosts is None:
        return True
    name, colon, port = netloc.rpartition(":")
    host = name if colon and port.isdigit() else netloc
    return host.lower() in settings.allowed_hosts


def _bears(headers: Mapping[str, str], token: str) -> bool:
    kind, _, given = headers.get("authorization", "").partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


def _in_browser(headers: Mapping[str, str], token: str) -> bool:
    """True if the token was sent as the password of Basic authentication, with any user name."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return False
    try:
        _, colon, password = base64.b64decode(given.strip(), validate=True).partition(b":")
    except ValueError:
        return False
    return bool(colon) and hmac.compare_digest(password, token.encode())


def _too_much(limit: int) -> str:
    return f"the body must have at most {limit} bytes; send a smaller image, or raise --set max-body"


class Body:
    """A request's body, counted as it comes: 413 as soon as there is too much, whatever length was announced.

    A response that starts before the whole body was received closes the connection.
    """

    def __init__(self, receive: Receive, send: Send, limit: int, *, expected: bool) -> None:
        self._receive = receive
        self._send = send
        self._limit = limit
        self._seen = 0
        self._whole = not expected

    async def receive(self) -> Message:
        """The next part."""
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        if self._seen > self._limit:
            raise HTTPException(413, _too_much(self._limit))
        self._whole = self._whole or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send the response; close the connection if the body is still being sent."""
        if message["type"] == "http.response.start" and not self._whole:
            message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
        await self._send(message)
