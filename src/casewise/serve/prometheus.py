"""Prometheus' text format, which needs no library: counters, gauges and one histogram."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

TEXT = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

MEANINGS = {
    "casewise_requests_total": ("counter", "Requests by path and status code."),
    "casewise_cases_total": ("counter", "Cases by action and status: done, or fallback where M0 replaced a failure."),
    "casewise_places_taken": ("gauge", "Requests inside: uploading, waiting or on the model."),
    "casewise_places": ("gauge", "Requests that may be inside at once."),
    "casewise_quota_alarm": (
        "gauge",
        "1 once the buckets of the patients or sequences are evidently not those of calibration.",
    ),
    "casewise_monitor_suspended": ("gauge", "1 once the exchangeability alarm was raised, so that M0 is deployed."),
    "casewise_case_seconds": ("histogram", "Seconds a case spent on the model."),
}


class ServiceCounts:
    """What a service counts. Any thread may count; labels are few, so memory is bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], float] = {}
        self._seconds = [0] * (len(BUCKETS_S) + 1)
        self._seconds_sum = 0.0

    def count(self, name: str, **labels: str | int) -> None:
        """One more of ``name``."""
        key = (name, ",".join(f'{label}="{_escaped(str(value))}"' for label, value in sorted(labels.items())))
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + 1

    def case_took(self, seconds: float) -> None:
        """One more case in the histogram."""
        bucket = sum(seconds > edge for edge in BUCKETS_S)
        with self._lock:
            self._seconds[bucket] += 1
            self._seconds_sum += seconds

    def text(self, gauges: Mapping[str, float]) -> str:
        """The page that Prometheus reads."""
        with self._lock:
            counts, seconds, total = dict(self._counts), list(self._seconds), self._seconds_sum
        samples = [(name, labels, value) for (name, labels), value in sorted(counts.items())]
        samples += [(name, "", value) for name, value in gauges.items()]
        lines: list[str] = []
        for name, (kind, meaning) in MEANINGS.items():
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
            if kind == "histogram":
                lines += _histogram(name, seconds, total)
            lines += [_sample(name, labels, value) for found, labels, value in samples if found == name]
        return "\n".join(lines) + "\n"


def _histogram(name: str, counts: list[int], total: float) -> list[str]:
    edges = [*(f"{edge:g}" for edge in BUCKETS_S), "+Inf"]
    lines = [_sample(f"{name}_bucket", f'le="{edge}"', sum(counts[: i + 1])) for i, edge in enumerate(edges)]
    return [*lines, _sample(f"{name}_sum", "", total), _sample(f"{name}_count", "", sum(counts))]


def _sample(name: str, labels: str, value: float) -> str:
    return f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Counting:
    """ASGI middleware: every response by the path's pattern and its status; unknown paths share one name."""

    def __init__(self, app: ASGIApp, numbers: ServiceCounts) -> None:
        self._app = app
        self._numbers = numbers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on, and look at the status."""

        async def seen(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")
                self._numbers.count("casewise_requests_total", path=path, status=message["status"])
            await send(message)

        await self._app(scope, receive, seen if scope["type"] == "http" else send)
