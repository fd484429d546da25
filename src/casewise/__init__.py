"""casewise: decide, case by case, whether a segmentation model should keep a new mask.

Public names are imported when first used, so ``import casewise`` costs nothing and pulls in no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

# Two functions share their names with their modules; imported here, the functions win. Both files are light (no torch).
from casewise.guard import guard
from casewise.replay import replay

__version__ = "0.2.0"

_HOME = {
    # measure: two masks, three masks, two folders' worth of them
    "compare": "casewise.study.comparison",
    "fragmentation": "casewise.measure.signals.fragmentation",
    "harm": "casewise.measure.metrics.harm",
    "dice": "casewise.measure.metrics.overlap",
    "miou": "casewise.measure.metrics.overlap",
    "hd95": "casewise.measure.metrics.surface",
    "assd": "casewise.measure.metrics.surface",
    "surface_dice": "casewise.measure.metrics.surface",
    "boundary_iou": "casewise.measure.metrics.surface",
    "surface_gaps": "casewise.measure.metrics.surface",
    # adapt and decide
    "Adaptation": "casewise.adapt.adaptation",
    "run_episode": "casewise.adapt.episode",
    "Deployment": "casewise.deployment",
    "Model": "casewise.deployment",
    "open_archive": "casewise.archive.store",
    "create_archive": "casewise.archive.store",
    "calibrate": "casewise.judge.calibration.fit",
    "read_policy": "casewise.judge.policy",
    "write_policy": "casewise.judge.policy",
    "controller_of": "casewise.judge.policy",
    # words
    "Case": "casewise.core.records",
    "Trajectory": "casewise.core.records",
    "State": "casewise.core.records",
    "Decision": "casewise.core.records",
    "Policy": "casewise.core.records",
    "CasewiseError": "casewise.core.errors",
    "BadInput": "casewise.core.errors",
}

__all__ = ["__version__", "guard", "replay", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"casewise has no public name {name!r}; it has {', '.join(sorted(_HOME))}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
