"""What a reviewer decided, as labels of helped and hurt where there is no other truth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from casewise.core.errors import BadInput

_HELPED = frozenset({"adapted", "adaptation"})
_HURT = frozenset({"m0", "source"})


def read_reviews(path: str | Path) -> dict[str, float]:
    """+1 for cases whose adaptation was kept, -1 where M0 was kept, 0 for flagged ones; the last decision counts.

    One JSON object a line with ``case`` and ``decision`` (keep-m0, keep-adapted, flag); other lines of an audit log
    have no such decision and are passed over.
    """
    found: dict[str, float] = {}
    for number, text in enumerate(Path(path).read_text().splitlines(), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise BadInput(f"line {number} of {path} is not JSON ({error})") from error
        if isinstance(row, Mapping) and {"case", "decision"} <= set(row) and isinstance(row["decision"], str):
            found[str(row["case"])] = _change(row["decision"], number, path)
    if not found:
        raise BadInput(f"{path} holds no review; expected lines such as {{'case': 'c1', 'decision': 'keep-m0'}}")
    return found


def _change(decision: str, number: int, path: str | Path) -> float:
    word = decision.lower().replace("_", "-").replace(" ", "-").removeprefix("keep-")
    if word in _HELPED:
        return 1.0
    if word in _HURT:
        return -1.0
    if word.startswith("flag"):
        return 0.0
    raise BadInput(f"line {number} of {path}: a review is keep-m0, keep-adapted or flag, got {decision!r}")
