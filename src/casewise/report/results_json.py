"""results.json: every number at full precision under stable keys (docs/reference/results-json.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from casewise.core.strict_json import json_text
from casewise.study.finding import Finding, Section

SCHEMA = 1


def plain(value: Any) -> Any:
    """JSON types; what is undefined (NaN) becomes null, infinities become strings."""
    if isinstance(value, pd.DataFrame):
        return [plain(row) for row in value.to_dict("records")]
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray | list | tuple | set | frozenset | pd.Series):
        return [plain(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def finding_plain(finding: Finding) -> dict[str, Any]:
    """One finding: what it is, on how many cases, how it was made, and its rows."""
    return {
        "n": finding.n,
        "spec": finding.spec,
        "made": plain(finding.made),
        "notes": list(finding.notes),
        "reason": finding.reason,
        "rows": plain(finding.table),
    }


def findings_of(sections: Iterable[Section]) -> dict[str, dict[str, Any]]:
    """Findings by their stable key."""
    return {finding.name: finding_plain(finding) for section in sections for finding in section.findings}


def write_results(path: Path, content: Mapping[str, Any]) -> None:
    """Strict JSON: no NaN, keys in the order in which they were made."""
    path.write_text(json_text(plain(content), indent=1) + "\n", encoding="utf-8")
