"""The server that listens: started from settings, stopped by a signal once every accepted request is answered."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Mapping
from typing import ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from casewise.deployment import Deployment
from casewise.serve.access import LOOPBACK_NAMES, ServiceSettings
from casewise.serve.app import create_app

TOKEN = "CASEWISE_TOKEN"
MANY = 1024  # connections; more are answered 503 at once
WAITING = 128  # connections without a complete header; the oldest is closed for a new one
HEADER_S = 10.0  # for a header; slower connections are closed


def token_for(host: str, environment: Mapping[str, str]) -> tuple[str | None, bool]:
    """The token from the environment, or a fresh one where others can connect; and whether it is fresh."""
    given = environment.get(TOKEN) or None
    if given is not None or host in LOOPBACK_NAMES:
        return given, False
    return secrets.token_urlsafe(32), True


def run(deployment: Deployment, settings: ServiceSettings) -> None:
    """Serve until SIGINT or SIGTERM, then until the last accepted request is answered; for the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn raises the signal again once it is done: that is no failure
    server(deployment, settings).run()


def server(deployment: Deployment, settings: ServiceSettings) -> uvicorn.Server:
    """A uvicorn server; ``run()`` blocks until SIGINT or SIGTERM and then until the last accepted request is done."""
    return uvicorn.Server(
        uvicorn.Config(
            create_app(deployment, settings),
            host=settings.host,
            port=settings.port,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            http=_TimedProtocol,
            ws="none",
            lifespan="on",
            limit_concurrency=MANY,
            timeout_graceful_shutdown=None,
        )
    )


class _TimedProtocol(H11Protocol):
    """uvicorn's protocol with a time limit for the header, which is read before the token is checked."""

    waiting: ClassVar[dict[_TimedProtocol, asyncio.TimerHandle]] = {}  # oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._wait()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self not in self.waiting:
            self.waiting[self] = self.loop.call_later(HEADER_S, self._refuse)
        if len(self.waiting) > WAITING:
            next(iter(self.waiting))._refuse()

    def _stop_waiting(self) -> None:
        timer = self.waiting.pop(self, None)
        if timer is not None:
            timer.cancel()

    def _refuse(self) -> None:
        self._stop_waiting()
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()
