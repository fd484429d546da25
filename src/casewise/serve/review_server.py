"""The review page: a small server on 127.0.0.1 over a prediction folder. Standard library only.

server = review_server("OUT", images="IMAGES")
print(server.url)            # http://127.0.0.1:PORT/TOKEN/
server.serve_forever()

A request must be addressed to this machine, know the token and, to write, come from the page itself.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from casewise.core.errors import BadInput, CasewiseError, Refused, UnknownName
from casewise.core.formats import json_bytes
from casewise.serve.review_api import Answer, Desk, missing
from casewise.serve.review_cases import Images
from casewise.serve.review_log import REVIEWS, ReviewLog
from casewise.serve.review_sources import Predictions

ADDRESS = "127.0.0.1"
SLOW_CLIENT_S = 30


def review_server(
    path: str | Path, *, images: str | Path | None = None, reviewer: str = "", port: int = 0
) -> ReviewServer:
    """Return a server that is bound but does not answer yet; port 0 takes a free one."""
    folder = Predictions(Path(path))
    if not folder.audit.is_file():
        raise BadInput(f"{path} is not what casewise predict wrote; give the folder after -o")
    if not folder.cases:
        raise BadInput(f"{path} holds no case to review")
    log = ReviewLog(folder.path / REVIEWS)
    desk = Desk(folder, Images.of(None if images is None else Path(images)), log, reviewer=reviewer)
    try:
        return ReviewServer(desk, port)
    except OSError as error:
        raise BadInput(f"port {port} cannot be used ({error.strerror}); leave --port out to take a free one") from error


class ReviewServer(ThreadingHTTPServer):
    """Serves one desk to one machine."""

    daemon_threads = True

    def __init__(self, desk: Desk, port: int = 0) -> None:
        self.desk = desk
        self.token = secrets.token_urlsafe(24)
        super().__init__((ADDRESS, port), _Visit)

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"


class _Visit(BaseHTTPRequestHandler):
    """One request: refused, or answered by the desk."""

    server: ReviewServer
    protocol_version = "HTTP/1.1"
    timeout = SLOW_CLIENT_S
    server_version, sys_version = "casewise", ""

    def do_GET(self) -> None:
        """Read something."""
        self._answer("GET")

    def do_POST(self) -> None:
        """Decide something."""
        self._answer("POST")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing: addresses hold the token."""

    def _answer(self, method: str) -> None:
        parts = urlsplit(self.path)
        closed = refusal(method, parts.path, self.headers, port=self.server.server_port, token=self.server.token)
        if closed is not None:
            self.close_connection = True  # an unread body must not be taken for the next request
            self._send(Answer(json_bytes({"error": closed[1]}), status=closed[0]))
            return
        self._send(self._from_desk(method, unquote(parts.path), parts.query))

    def _from_desk(self, method: str, path: str, query: str) -> Answer:
        _, _, rest = path.lstrip("/").partition("/")
        try:
            if method == "POST":
                return self.server.desk.write(rest, self.rfile.read(int(self.headers["Content-Length"])))
            return self.server.desk.read(rest, dict(parse_qsl(query, max_num_fields=8)))
        except UnknownName as error:
            return missing(str(error))
        except (CasewiseError, OSError, ValueError) as error:
            return Answer(json_bytes({"error": str(error)}), status=409 if isinstance(error, Refused) else 400)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.type)
        self.send_header("Content-Length", str(len(answer.body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if answer.name is not None:
            self.send_header("Content-Disposition", f'attachment; filename="{answer.name}"')
        self.end_headers()
        self.wfile.write(answer.body)


MAX_BODY = 8192

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""With every answer: no script, style or picture from elsewhere, in no frame, and the token in no Referer."""


def refusal(
    method: str, path: str, headers: Mapping[str, str] | Message, *, port: int, token: str
) -> tuple[int, str] | None:
    """Status and message for a request that may not pass; None for one that may.

    A page of another site that points its own name at 127.0.0.1 (DNS rebinding) sends its own name as Host. One that
    posts here blindly sends its own Origin, cannot send JSON without asking first, and does not know the token.
    """
    names = (f"127.0.0.1:{port}", f"localhost:{port}")
    if (headers.get("Host") or "").lower() not in names:
        return 400, "this page is only served to this machine; open the address that casewise review printed"
    given = path.lstrip("/").split("/", 1)[0]
    if not hmac.compare_digest(given.encode(), token.encode()):
        return 404, "not found; open the address that casewise review printed, with its token"
    if method == "POST":
        return _written(headers, names)
    return None


def _written(headers: Mapping[str, str] | Message, names: tuple[str, ...]) -> tuple[int, str] | None:
    if (headers.get("Origin") or "").lower() not in [f"http://{name}" for name in names]:
        return 403, "only the page itself may write"
    if (headers.get("Content-Type") or "").split(";")[0].strip().lower() != "application/json":
        return 415, "a decision is sent as application/json"
    length = headers.get("Content-Length") or ""
    if not (length.isascii() and length.isdigit()):
        return 411, "a decision needs a Content-Length"
    if len(length) > 9 or int(length) > MAX_BODY:
        return 413, f"a decision has at most {MAX_BODY} bytes"
    return None
