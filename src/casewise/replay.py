"""The heart again, from disk: the same decisions on recorded trajectories; no network, no GPU."""

from __future__ import annotations

from typing import Any


def replay(archive: Any, controller: Any) -> Any:
    """Let a controller decide again on recorded trajectories."""
    raise NotImplementedError
