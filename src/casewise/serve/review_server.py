"""The review page: a small server on 127.0.0.1 over a prediction folder. Standard library only.

server = review_server("OUT", images="IMAGES")
print(server.url)            # http://127.0.0.1:PORT/TOKEN/
server.serve_forever()

A request must be addressed to this machine, know the token and, to write, come from the page itself. ``Desk`` answers
it: cases, masks, images, decisions, exports.
"""

from __future__ import annotations

import hmac
import json
import secrets
import shlex
import shutil
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from email.message import Message
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from numpy.typing import NDArray

from casewise.core.errors import BadInput, CasewiseError, Refused, UnknownName
from casewise.core.formats import json_bytes, json_text
from casewise.core.text import pluralize
from casewise.data.folders import list_cases
from casewise.render.mask_pictures import color_of
from casewise.serve.review_cases import (
    WINDOWS,
    Images,
    Masks,
    Predictions,
    ReviewCase,
    Where,
    changes_by_slice,
    ending_of,
    listed_regions,
    mask_slice,
    plane,
    png,
    worst_first,
)
from casewise.serve.review_log import NEEDS_NO_MASK, REVIEWS, Overtaken, Review, ReviewLog, as_csv

ADDRESS = "127.0.0.1"
SLOW_CLIENT_S = 30


def review_server(
    path: str | Path, *, images: str | Path | None = None, reviewer: str = "", port: int = 0
) -> ReviewServer:
    """Return a server that is bound but does not answer yet; port 0 takes a free one."""
    folder = Predictions.of(Path(path))
    log = ReviewLog(folder.path / REVIEWS)
    files = {} if images is None else {files.id: files for files in list_cases(Path(images))}
    desk = Desk(folder, Images(files), log, reviewer)
    try:
        return ReviewServer(desk, port)
    except OSError as error:
        raise BadInput(f"port {port} cannot be used ({error.strerror}); leave --port out to use a free one") from error


class ReviewServer(ThreadingHTTPServer):
    """Serves one desk to one machine."""

    daemon_threads = True
    request_queue_size = 128  # connections that wait; with 5, a few idle ones make a browser wait for seconds

    def __init__(self, desk: Desk, port: int = 0) -> None:
        self.desk = desk
        self.token = secrets.token_urlsafe(24)
        super().__init__((ADDRESS, port), _Visit)

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing where a browser ended the connection, as it does with pictures that it no longer needs."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Visit(BaseHTTPRequestHandler):
    """One request: refused, or answered by the desk."""

    server: ReviewServer
    protocol_version = "HTTP/1.1"
    timeout = SLOW_CLIENT_S
    server_version, sys_version = "casewise", ""

    def do_GET(self) -> None:
        """Read a page, a case or a picture."""
        self._answer("GET")

    def do_POST(self) -> None:
        """Write a decision."""
        self._answer("POST")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing, because addresses contain the token."""

    def _answer(self, method: str) -> None:
        path, _, query = self.path.partition("?")
        closed = refusal(method, path, self.headers, port=self.server.server_port, token=self.server.token)
        if closed is not None:
            self.close_connection = True  # an unread body must not be taken for the next request
            self._send(Answer(json_bytes({"error": closed[1]}), status=closed[0]))
            return
        self._send(self._from_desk(method, unquote(path), query))

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
        return 403, "only the review page may send decisions"
    if (headers.get("Content-Type") or "").split(";")[0].strip().lower() != "application/json":
        return 415, "a decision must be sent as application/json"
    length = headers.get("Content-Length") or ""
    if not (length.isascii() and length.isdigit()):
        return 411, "a decision needs a Content-Length"
    if len(length) > 9 or int(length) > MAX_BODY:
        return 413, f"a decision must have at most {MAX_BODY} bytes"
    return None


# ---- answers ----

ASSETS = {
    "": ("casewise.serve", "assets/review.html", "text/html; charset=utf-8"),
    "style.css": ("casewise.report", "templates/style.css", "text/css; charset=utf-8"),
    "review.css": ("casewise.serve", "assets/review.css", "text/css; charset=utf-8"),
    "viewer.js": ("casewise.serve", "assets/viewer.js", "text/javascript; charset=utf-8"),
    "review.js": ("casewise.serve", "assets/review.js", "text/javascript; charset=utf-8"),
    "icon.svg": ("casewise.serve", "assets/icon.svg", "image/svg+xml"),
}
JSON = "application/json"
KEPT_CASES = 3  # masks and images in memory


@dataclass(frozen=True)
class Answer:
    """One HTTP answer."""

    body: bytes
    type: str = JSON
    status: int = 200
    name: str | None = None  # file name for saving


class Desk:
    """A folder under review."""

    def __init__(self, folder: Predictions, images: Images, log: ReviewLog, reviewer: str) -> None:
        log.check()
        self.folder, self.images, self.log, self.reviewer = folder, images, log, reviewer
        self._order = worst_first(folder.cases)
        self._masks = lru_cache(KEPT_CASES)(folder.masks)
        self._pixels = lru_cache(KEPT_CASES)(self._read_pixels)
        self._writing = threading.Lock()

    def read(self, path: str, query: Mapping[str, str]) -> Answer:
        """Answer a GET request; ``path`` does not contain the token."""
        if path in ASSETS:
            package, name, kind = ASSETS[path]
            return Answer((resources.files(package) / name).read_bytes(), kind)
        match path.split("/"):
            case ["cases"]:
                return Answer(json_bytes(self._list()))
            case ["case", case_id]:
                return Answer(json_bytes(self._detail(self._case(case_id), query)))
            case ["masks", case_id]:
                case = self._case(case_id)
                masks = self._opened(case, query)
                return Answer(mask_slice(masks, _where(masks, query)), "image/png")
            case ["image", case_id]:
                return Answer(self._image(self._case(case_id), query), "image/png")
            case ["overlay", case_id]:
                drawn = self.folder.overlay(self._case(case_id).id)
                return missing("no overlay was drawn") if drawn is None else Answer(drawn.read_bytes(), "image/png")
            case ["export", name]:
                return self._export(name)
        return missing("this address does not exist")

    def write(self, path: str, body: bytes) -> Answer:
        """Answer a POST request: store one decision, or copy files for an editor."""
        match path.split("/"):
            case ["edit", case_id]:
                return Answer(json_bytes(self._handed_over(self._case(case_id))))
            case ["decide"]:
                return self._decided(*_review(body))
        return missing("this address takes no data")

    def _handed_over(self, case: ReviewCase) -> dict[str, Any]:
        """Write image and both masks into a new folder for an editor, and return the commands."""
        if not case.has_masks:
            raise BadInput(f"case {case.id} has no output to edit")
        own = self.folder.path.resolve()
        place = own.with_name(f"{own.name}-editing") / case.id
        files = {f"{case.id}_{which}": self.folder.file_of(case.id, which) for which in ("m0", "deployed")}
        image = None if self.images.problem(case) else self.images.files[case.id].images[0]
        place.mkdir(parents=True, exist_ok=True)
        copies = {}
        for name, path in (({f"{case.id}_image": image} if image else {}) | files).items():
            copies[name.removeprefix(f"{case.id}_")] = copy = place / f"{name}{ending_of(path)}"
            shutil.copyfile(path, copy)
        return {"folder": str(place), "commands": editor_commands(copies)}

    def _decided(self, review: Review, seen: str | None) -> Answer:
        case = self._case(review.case)
        if review.decision not in NEEDS_NO_MASK and not case.has_masks:
            raise BadInput(f"case {case.id} has no output, so it can only be flagged")
        if review.decision == "keep-adapted" and review.adapted is None:
            raise BadInput("the new mask was not saved and cannot be chosen; predict with --set save-candidates=true")
        if review.adapted is not None and review.adapted not in case.states:
            raise BadInput(f"case {case.id} has no state {review.adapted!r}; it has {', '.join(case.states)}")
        with self._writing:
            if review.about != self._about_now(case.id):
                raise Refused(f"case {case.id} was replaced or removed since the page was started; start it again")
            try:
                self.log.append(review, seen=seen)
            except Overtaken as error:
                found = {"error": str(error), "review": self._latest().get(case.id)}
                return Answer(json_bytes(found), status=409)
            return Answer(json_bytes(self._latest()[case.id]))

    def _case(self, case_id: str) -> ReviewCase:
        if case_id not in self.folder.cases:
            raise UnknownName("this case is not in the folder")
        return self.folder.cases[case_id]

    def _about_now(self, case_id: str) -> str | None:
        """Return the output that a review would be about; None where the case is gone."""
        try:
            return self.folder.about(case_id)
        except (FileNotFoundError, CasewiseError):
            return None

    def _latest(self) -> dict[str, dict[str, Any]]:
        """The last decision of each case that is still here, and whether it is about the output that is here."""
        latest = self.log.latest()
        return {
            case.id: {**latest[case.id], "current": latest[case.id].get("about") == case.about}
            for case in self.folder.cases.values()
            if case.id in latest
        }

    def _list(self) -> dict[str, Any]:
        latest, classes = self._latest(), self.folder.classes
        return {
            "folder": self.folder.path.resolve().name,
            "metric": "Dice" if classes.background else "mIoU",
            "reviewer": self.reviewer,
            "problems": self.log.problems,
            "background": classes.background,
            "classes": [
                {"value": value, "name": name, "color": color_of(value, classes.names)}
                for value, name in sorted(classes.names.items())
                if value or not classes.background
            ],
            "cases": [{**_brief(self.folder.cases[one]), "review": latest.get(one)} for one in self._order],
        }

    def _detail(self, case: ReviewCase, query: Mapping[str, str]) -> dict[str, Any]:
        facts = {**_brief(case), "windows": WINDOWS, "overlay": self._has_overlay(case)}
        facts["review"] = self._latest().get(case.id)
        if not case.has_masks:
            return {**facts, "shape": None}
        state, masks = _state(case, query), self._opened(case, query)
        return {
            **facts, "shape": masks.source.shape, "spacing_mm": masks.spacing_mm, "changes": changes_by_slice(masks),
            "channels": self.images.channels(case.id), "image_problem": self.images.problem(case), "state": state,
            **listed_regions(masks, min_area=self.folder.min_area),
        }  # fmt: skip

    def _opened(self, case: ReviewCase, query: Mapping[str, str]) -> Masks:
        if not case.has_masks:
            raise BadInput(f"case {case.id} has no output to show")
        return self._masks(case.id, _state(case, query))

    def _image(self, case: ReviewCase, query: Mapping[str, str]) -> bytes:
        masks = self._opened(case, {})
        channel, window = _number(query, "channel"), query.get("window", WINDOWS[0])
        if window not in WINDOWS:
            raise BadInput(f"a window must be one of {', '.join(WINDOWS)}, got {window!r}")
        if channel >= self.images.channels(case.id):
            raise BadInput(f"case {case.id} has {pluralize(self.images.channels(case.id), 'channel')}, got {channel}")
        return png(plane(self._pixels(case.id, channel, window), _where(masks, query)))

    def _read_pixels(self, case_id: str, channel: int, window: str) -> NDArray[Any]:
        case = self.folder.cases[case_id]
        return self.images.read(case, channel, window, self._opened(case, {}))

    def _has_overlay(self, case: ReviewCase) -> bool:
        try:
            return self.folder.overlay(case.id) is not None
        except CasewiseError:
            return False

    def _export(self, name: str) -> Answer:
        if name == "reviews.jsonl":
            content = self.log.path.read_bytes() if self.log.path.is_file() else b""
            return Answer(content, "application/x-ndjson", name=name)
        if name != "reviews.csv":
            return missing("reviews are exported as reviews.csv or reviews.jsonl")
        rows = [self._exported(line) for line in self._latest().values()]
        return Answer(as_csv(rows).encode(), "text/csv; charset=utf-8", name=name)

    def _exported(self, line: Mapping[str, Any]) -> dict[str, Any]:
        case = self.folder.cases[line["case"]]
        said = {name: line.get(name) for name in ("case", "decision", "reviewer", "time", "current", "note", "adapted")}
        known = {name: getattr(case, name) for name in ("group", "status", "action", "quality_low")}
        return {**said, **known, "about": line.get("about")}


def missing(message: str) -> Answer:
    """404 with a sentence."""
    return Answer(json_bytes({"error": message}), status=404)


def editor_commands(files: Mapping[str, Path]) -> list[str]:
    """Return the commands that open an image and two masks in ITK-SNAP and in 3D Slicer.

    Args:
        files: Paths by kind: ``image`` (where it is known), ``m0`` and ``deployed``.
    """
    quoted = {name: shlex.quote(str(path)) for name, path in files.items()}
    ground = quoted.get("image", quoted["m0"])
    kinds = {"image": "Volume", "m0": "Segmentation", "deployed": "Segmentation"}
    loads = [f"slicer.util.load{kind}({json_text(str(files[at]))})" for at, kind in kinds.items() if at in files]
    return [
        f"itksnap -g {ground} -s {quoted['deployed']}",
        shlex.join(("Slicer",
                    "--python-code", "; ".join(loads))),
    ]  # fmt: skip


def _brief(case: ReviewCase) -> dict[str, Any]:
    shown = {one.name: getattr(case, one.name) for one in fields(case) if one.name not in ("edit", "inputs")}
    return {**shown, "has_masks": case.has_masks}


def _state(case: ReviewCase, query: Mapping[str, str]) -> str | None:
    state = query.get("state") or case.adapted
    if state is not None and state not in case.states:
        raise BadInput(f"case {case.id} has the adapted states {', '.join(case.states) or 'none'}, got {state!r}")
    return state


def _where(masks: Masks, query: Mapping[str, str]) -> Where:
    if masks.source.ndim == 2:
        return None
    axis, number = _number(query, "axis"), _number(query, "slice")
    if axis > 2 or number >= masks.source.shape[axis]:
        raise BadInput(f"a volume of {masks.source.shape} has no slice {number} of axis {axis}")
    return axis, number


def _number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 7):
        raise BadInput(f"{name} must be a whole number from 0 on, got {text[:20]!r}")
    return int(text)


def _review(body: bytes) -> tuple[Review, str | None]:
    """Return the decision and the hash of the decision that the page showed: "" for none, None if it was not sent."""
    try:
        plain = json.loads(body)
        known = {name: plain.get(name) for name in ("case", "decision", "reviewer", "about", "adapted", "note", "seen")}
    except (ValueError, AttributeError, RecursionError) as error:
        raise BadInput(f"a decision must be a JSON object ({type(error).__name__})") from error
    known["note"] = known["note"] or ""
    optional = [known["adapted"], known["seen"]]
    if not all(isinstance(one, str) for name, one in known.items() if name not in ("adapted", "seen")):
        raise BadInput("a decision must have case, decision, reviewer and about as text")
    if not all(isinstance(one, str | None) for one in optional):
        raise BadInput("adapted must be the name of a state and seen the hash of a decision, or both must be null")
    return Review(**{name: one for name, one in known.items() if name != "seen"}), known["seen"]
