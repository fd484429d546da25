"""The manifest of an archive: the origin of each ladder, and whether a run may continue it."""

from __future__ import annotations

import json
import platform
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from casewise.archive import layout
from casewise.core.durable import write_json
from casewise.core.errors import BadInput, Mismatch
from casewise.core.formats import json_text
from casewise.core.json_records import from_plain
from casewise.core.records import Binding


@dataclass(frozen=True)
class LadderFacts:
    """Facts of a ladder in the manifest."""

    binding: Binding
    steps: int
    configuration: Mapping[str, Any]


@dataclass(frozen=True)
class Sealed:
    """The hashes of a case and of its ladders."""

    sha256: str
    split: str | None = None
    ladders: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The fields of ``manifest.json``."""

    schema: int
    software: Mapping[str, str] = field(default_factory=dict)
    cases: Mapping[str, Sealed] = field(default_factory=dict)
    ladders: Mapping[str, LadderFacts] = field(default_factory=dict)
    binding: Binding | None = None
    steps: int = 0
    configuration: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class UsedSettings:
    """The settings in the configuration of a ladder that casewise computes with; others are only shown."""

    metric: str = "dice"
    min_area: int = 16
    foreground: bool = True
    ignore: int | None = None
    classes: tuple[int, ...] | None = None
    names: Mapping[str, str] | None = None
    adaptation: Mapping[str, Any] | None = None


def check_manifest(manifest: Mapping[str, Any], where: str) -> None:
    """Refuse a manifest with a field of another type than casewise writes."""
    again = "restore it or record again"
    from_plain(Manifest, manifest, where, again)
    for facts in (manifest, *manifest.get("ladders", {}).values()):
        said = facts.get("configuration", {})
        used = {name: said[name] for name in UsedSettings.__dataclass_fields__ if name in said}
        from_plain(UsedSettings, used, where, again)


def named_ladders(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the ladders; an archive with a single unnamed ladder has the empty name."""
    unnamed = ("",) if "binding" in manifest else ()
    return unnamed + tuple(manifest.get("ladders", {}))


def made_by(binding: Binding, steps: int, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of one ladder for the manifest."""
    if steps < 1:
        raise BadInput(f"an archive must have at least one step for each case, got {steps}")
    return {
        "binding": asdict(binding),
        "steps": steps,
        "configuration": json.loads(json_text(dict(configuration), default=_plain)),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise BadInput(f"a configuration must have plain JSON values, got {type(value).__name__}: {value!r}")


PACKAGES = ("casewise", "numpy", "scipy", "torch", "nnunetv2", "monai", "transformers")


def software(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """The versions of Python and of those packages that are installed."""
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def check_same(path: Path, there: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse to continue a ladder that was made in another way."""
    differing = Binding(**there["binding"]).differences(Binding(**asked["binding"]))
    differing += ["steps"] if there["steps"] != asked["steps"] else []
    differing += ["configuration"] if _compared(there) != _compared(asked) else []
    if differing:
        settings = "; ".join(_changed(_compared(there), _compared(asked)))
        raise Mismatch(
            f"{path} holds an archive that was made with another {', '.join(differing)}"
            f"{f' ({settings})' if settings else ''}; choose another folder, or repeat the first run's options "
            f"to continue it"
        )


def _changed(there: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[str]:
    """Return each setting that differs, with both values; nested settings are compared one by one."""
    for name in sorted({*there, *asked}):
        old, new = there.get(name), asked.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changed(old, new)
        elif old != new:
            yield f"{name} was {old!s:.60}, now {new!s:.60}"


def _compared(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that must be the same to continue a ladder.

    The name of the image folder is left out: the cases may have moved, and others may be added. For views and members,
    options of updates are left out, too.
    """
    configuration = facts["configuration"]
    unread = {"dataset"} | (OF_UPDATES if str(configuration.get("objective")).startswith(_READINGS) else set())
    return _without(configuration, unread)


def _without(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    kept = {name: value for name, value in settings.items() if name not in names}
    return {name: _without(value or {}, names) if name == "adaptation" else value for name, value in kept.items()}


_READINGS = ("views:", "running:", "members:", "tuned")
OF_UPDATES = {"learning_rate", "parameters", "steps", "modulation", "statistics", "shrink"}
"""Settings that views and members never read."""


_SHARED = ("metric", "min_area", "foreground", "ignore", "classes")
"""Settings that all ladders of an archive must share, because one table holds their numbers."""


def check_joins(path: Path, first: Mapping[str, Any], ladder: str, asked: Mapping[str, Any]) -> None:
    """Refuse a further ladder of another model, loader or measure than the first one's."""
    there, new = Binding(**first["binding"]), Binding(**asked["binding"])
    differing = [name for name in ("model", "loader", "measure") if getattr(there, name) != getattr(new, name)]
    differing += [name for name in _SHARED if first["configuration"].get(name) != asked["configuration"].get(name)]
    if differing:
        raise Mismatch(
            f"{path} was made with another {', '.join(differing)}, so ladder {ladder!r} cannot be added to it; "
            f"repeat the first run's options, or choose another folder"
        )


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the manifest atomically."""
    write_json(path / layout.MANIFEST, dict(manifest))
