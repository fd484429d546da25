"""Who may ask: a request is addressed to this machine, knows the token and, to write, comes from the page itself."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from email.message import Message

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
    if not length.isdigit():
        return 411, "a decision needs a Content-Length"
    if int(length) > MAX_BODY:
        return 413, f"a decision has at most {MAX_BODY} bytes"
    return None
