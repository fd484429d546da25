"""The small study, and its report."""

from __future__ import annotations

from worlds.studies import page, sources, study

__all__ = ["page", "sources", "study"]
