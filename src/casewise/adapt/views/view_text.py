"""The text of a view, such as ``gamma(1.4,range)``, from the fields of its dataclass."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar


class WrittenView:
    """Base of views whose text is their name with their fields; a default ``keep`` or ``seed`` is left out."""

    name: ClassVar[str]

    def __str__(self) -> str:
        values: list[Any] = []
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if one.name not in ("keep", "seed") or value != one.default:
                values.append(f"{value:g}" if isinstance(value, float) else value)
        return f"{self.name}({','.join(map(str, values))})"
