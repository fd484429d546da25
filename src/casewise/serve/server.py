"""The server that listens: started from settings, stopped by a signal once every accepted request is answered."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Mapping

import uvicorn

from casewise.deployment import Deployment
from casewise.serve.access import LOOPBACK_NAMES, ServiceSettings
from casewise.serve.app import create_app

TOKEN = "CASEWISE_TOKEN"
MANY = 1024  # connections; more are answered 503 at once


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
            create_app(deployment, settings), host=settings.host, port=settings.port, log_level="warning",
            access_log=False, server_header=False, proxy_headers=False, http="h11", ws="none", lifespan="on",
            limit_concurrency=MANY, timeout_graceful_shutdown=None,
        )
    )  # fmt: skip
