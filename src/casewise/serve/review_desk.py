"""What the page asks for and what it gets: cases, masks, images, decisions, exports. No sockets here."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import resources
from typing import Any

from casewise.core.brief import counted
from casewise.core.errors import BadInput, CasewiseError, Refused, UnknownName
from casewise.core.formats import json_bytes
from casewise.measure.signals import SIGNALS
from casewise.render.masks import color_of
from casewise.serve.review_cases import (
    WINDOWS,
    Images,
    Masks,
    Reviewable,
    ReviewCase,
    Where,
    changes_by_slice,
    listed_regions,
    mask_slice,
    plane,
    png,
    risks,
    worst_first,
)
from casewise.serve.review_log import Overtaken, Review, ReviewLog, as_csv

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
    name: str | None = None  # of the file that it is saved as


@dataclass
class Recent:
    """The last few results of slow readings; one reading at a time, so that memory stays bounded."""

    size: int
    kept: OrderedDict[Any, Any] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """The kept result, or a new one."""
        with self.lock:
            if key not in self.kept:
                self.kept[key] = make()
            self.kept.move_to_end(key)
            while len(self.kept) > self.size:
                self.kept.popitem(last=False)
            return self.kept[key]


class Desk:
    """A folder under review."""

    def __init__(self, folder: Reviewable, images: Images, log: ReviewLog, *, reviewer: str = "") -> None:
        log.check()
        self.said_at_start = log.settle()
        self.folder, self.images, self.log, self.reviewer = folder, images, log, reviewer
        self._risks = risks(folder.cases.values())
        self._order = worst_first(folder.cases)
        self._masks, self._pixels = Recent(KEPT_CASES), Recent(KEPT_CASES)
        self._writing = threading.Lock()

    def read(self, path: str, query: Mapping[str, str]) -> Answer:
        """The answer to a GET; ``path`` without the token."""
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
                return self._overlay(self._case(case_id))
            case ["export", name]:
                return self._export(name)
        return missing("there is nothing at this address")

    def write(self, path: str, body: bytes) -> Answer:
        """The answer to a POST: one decision."""
        if path != "decide":
            return missing("there is nothing to write at this address")
        review, seen = _review(body)
        case = self._case(review.case)
        if review.decision != "flag" and not case.has_masks:
            raise BadInput(f"case {case.id} has no output, so it can only be flagged")
        if review.decision == "keep-adapted" and review.adapted is None:
            raise BadInput("the adapted mask was not saved, so nobody saw it; predict with --save-candidates")
        if review.adapted is not None and review.adapted not in case.states:
            raise BadInput(f"case {case.id} has no state {review.adapted!r}; it has {', '.join(case.states)}")
        with self._writing:
            if review.about != self._about_now(case.id):
                raise Refused(f"case {case.id} was written anew or removed since this page was started; start it again")
            try:
                self.log.append(review, seen=seen)
            except Overtaken as error:
                found = {"error": str(error), "review": self._latest().get(case.id)}
                return Answer(json_bytes(found), status=409)
            return Answer(json_bytes(self._latest()[case.id]))

    def _case(self, case_id: str) -> ReviewCase:
        if case_id not in self.folder.cases:
            raise UnknownName("there is no such case in this folder")
        return self.folder.cases[case_id]

    def _about_now(self, case_id: str) -> str | None:
        """What a review would be about; None where the case is gone."""
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
        latest = self._latest()
        rows = []
        for case_id in self._order:
            case = self.folder.cases[case_id]
            rows.append({**_brief(case), "risk": self._risks[case_id], "review": latest.get(case_id)})
        return {
            "folder": self.folder.path.resolve().name,
            "kind": self.folder.kind,
            "reviewer": self.reviewer,
            "problems": list(dict.fromkeys([*self.said_at_start, *self.log.problems])),
            "background": self.folder.classes.background,
            "classes": [
                {"value": value, "name": name, "color": color_of(value, self.folder.classes.names)}
                for value, name in sorted(self.folder.classes.names.items())
                if value or not self.folder.classes.background
            ],
            "cases": rows,
        }

    def _detail(self, case: ReviewCase, query: Mapping[str, str]) -> dict[str, Any]:
        facts = {**_brief(case), "signals": _signals(case), "windows": WINDOWS, "overlay": self._has_overlay(case)}
        facts["review"] = self._latest().get(case.id)
        if not case.has_masks:
            return {**facts, "shape": None}
        state, masks = _state(case, query), self._opened(case, query)
        drops = None if state is None else self.folder.drops(case.id, state)
        return {
            **facts,
            "shape": masks.source.shape,
            "spacing_mm": masks.spacing_mm,
            "changes": changes_by_slice(masks),
            "channels": self.images.channels(case.id),
            "image_problem": self.images.problem(case),
            "state": state,
            **listed_regions(masks, min_area=self.folder.min_area, drops=drops),
        }

    def _opened(self, case: ReviewCase, query: Mapping[str, str]) -> Masks:
        if not case.has_masks:
            raise BadInput(f"case {case.id} has no output to show")
        state = _state(case, query)
        opened: Masks = self._masks.get((case.id, state), lambda: self.folder.masks(case.id, state))
        return opened

    def _image(self, case: ReviewCase, query: Mapping[str, str]) -> bytes:
        masks = self._opened(case, {})
        channel, window = _number(query, "channel"), query.get("window", WINDOWS[0])
        if channel >= self.images.channels(case.id):
            raise BadInput(
                f"case {case.id} has {counted(self.images.channels(case.id), 'channel')}, {channel} was asked for"
            )
        key = (case.id, channel, window)
        pixels = self._pixels.get(key, lambda: self.images.read(case, channel, window, masks))
        return png(plane(pixels, _where(masks, query)))

    def _has_overlay(self, case: ReviewCase) -> bool:
        try:
            return self.folder.overlay(case.id) is not None
        except CasewiseError:
            return False

    def _overlay(self, case: ReviewCase) -> Answer:
        path = self.folder.overlay(case.id)
        return missing("no overlay was drawn") if path is None else Answer(path.read_bytes(), "image/png")

    def _export(self, name: str) -> Answer:
        if name == "reviews.jsonl":
            content = self.log.path.read_bytes() if self.log.path.is_file() else b""
            return Answer(content, "application/x-ndjson", name=name)
        rows = [self._exported(line) for line in self._latest().values()]
        if name == "reviews.csv":
            return Answer(as_csv(rows).encode(), "text/csv; charset=utf-8", name=name)
        if name != "reviews.json":
            return missing("reviews are exported as reviews.json, reviews.csv or reviews.jsonl")
        document = {
            "tool": "casewise review",
            "folder": self.folder.path.resolve().name,
            "exported": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "cases": len(self.folder.cases),
            "problems": self.log.problems,
            "reviews": rows,
        }
        return Answer(json_bytes(document), name=name)

    def _exported(self, line: Mapping[str, Any]) -> dict[str, Any]:
        case = self.folder.cases[line["case"]]
        said = {name: line.get(name) for name in ("case", "decision", "reviewer", "time", "current", "note", "adapted")}
        known = {name: getattr(case, name) for name in ("group", "status", "action", "coordinate", "value")}
        return {**said, **known, "risk": self._risks[case.id], "about": line.get("about")}


def missing(message: str) -> Answer:
    """404 with a sentence."""
    return Answer(json_bytes({"error": message}), status=404)


def _brief(case: ReviewCase) -> dict[str, Any]:
    names = (
        "id", "about", "status", "group", "action", "reason", "error", "warnings", "coordinate", "value", "cut_low",
        "cut_high", "states", "adapted", "has_deployed", "has_masks", "flagged", "quality", "quality_low",
    )  # fmt: skip
    return {name: getattr(case, name) for name in names}


def _signals(case: ReviewCase) -> list[dict[str, Any]]:
    """Those of the adapted state that are known, in the order of every other table, with their meaning."""
    known = [name for name in SIGNALS if case.signals.get(name) is not None]
    return [{"name": name, "value": case.signals[name], "meaning": SIGNALS[name].meaning} for name in known]


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
        raise BadInput(f"{name} is a whole number from 0 on, got {text[:20]!r}")
    return int(text)


def _review(body: bytes) -> tuple[Review, str | None]:
    """The decision, and the hash of the one that the page showed: "" for none, None where the client does not say."""
    try:
        plain = json.loads(body)
        seen = plain.get("seen")
        known = {name: plain.get(name) for name in ("case", "decision", "reviewer", "about", "adapted", "note")}
    except (ValueError, AttributeError, RecursionError) as error:
        raise BadInput(f"a decision is a JSON object ({type(error).__name__})") from error
    optional = {"adapted": known.pop("adapted"), "note": known.pop("note") or ""}
    if not all(isinstance(value, str) for value in (*known.values(), optional["note"])):
        raise BadInput("a decision holds case, decision, reviewer and about as text")
    if not isinstance(optional["adapted"], (str, type(None))):
        raise BadInput("adapted is the name of a state, or null")
    if not isinstance(seen, (str, type(None))):
        raise BadInput("seen is the hash of the decision that was shown, or empty")
    return Review(**{**known, **optional}), seen
