"""The list of objectives: adding one is a file and a line."""

from __future__ import annotations

from casewise.adapt.objectives.tent import Tent
from casewise.core.registry import Registry

OBJECTIVES: Registry[type] = Registry("objective", {"tent": Tent})
