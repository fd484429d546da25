"""A case's entry in a prediction folder: what was decided and why, and the hashes that let a later run trust it."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from casewise.core.durable import file_sha256, text_sha256
from casewise.core.records import DONE, Binding, Policy, Trajectory
from casewise.core.strict_json import json_text
from casewise.data.folders import CaseFiles
from casewise.run.outputs import Layout

SCHEMA = 1
PACKAGES = ("casewise", "numpy", "torch", "nnunetv2", "monai", "transformers", "nibabel", "SimpleITK")


def versions() -> dict[str, str]:
    """What made the output."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def run_key(binding: Binding, policy: Policy, options: Mapping[str, Any]) -> str:
    """sha256 over everything besides the image that the output depends on: an entry with another key is redone."""
    software = {name: version for name, version in versions().items() if name != "python"}
    plain = {"binding": asdict(binding), "policy": asdict(policy), "options": dict(options), "versions": software}
    return text_sha256(json_text(plain, sort_keys=True, default=str))


def input_hashes(files: CaseFiles) -> dict[str, str]:
    """sha256 of each image file by name; paths stay out of what is shared."""
    return {path.name: file_sha256(path) for path in files.images}


def is_complete(layout: Layout, files: CaseFiles, key: str) -> bool:
    """Whether a case need not be done again: same run, same inputs, and every output still what it was."""
    entry = read_entry(layout.entry(files.id))
    if entry is None or entry.get("status") != DONE or entry.get("key") != key:
        return False
    try:
        if entry["inputs"] != input_hashes(files):
            return False
        return all(file_sha256(layout.out / name) == digest for name, digest in entry["outputs"].items())
    except OSError:
        return False


def read_entry(path: Path) -> dict[str, Any] | None:
    """An entry, or None where there is none that can be read."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return entry if isinstance(entry, dict) else None


def as_json(entry: Mapping[str, Any]) -> bytes:
    """Strict JSON: what is not finite becomes null (a cut of null cuts nothing), keys are in order."""
    return (json_text(_finite(dict(entry)), indent=1, sort_keys=True) + "\n").encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_finite(item) for item in value]
    if hasattr(value, "item"):
        return _finite(value.item())
    return value


def signals_of(trajectory: Trajectory) -> dict[str, Any]:
    """Signals of every state by its name: "0", "1", "2~0.5"."""
    found: dict[str, Any] = {str(step): dict(signals) for step, signals in enumerate(trajectory.signals)}
    found.update({str(state): dict(signals) for state, signals in trajectory.shrunk_signals.items()})
    return found
