"""The heart, live: adapt one case step by step, and keep only as much of it as the controller trusts."""

from __future__ import annotations

from typing import Any


def guard(case: Any, network: Any, objective: Any, controller: Any, *, steps: int, seed: int = 0) -> Any:
    """Segment one case with adaptation, keeping only as much of it as the controller trusts."""
    raise NotImplementedError
