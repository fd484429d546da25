"""casewise: better masks from an existing segmentation model on new data, with a bound on the harm.

Public names are imported when they are first used (PEP 562): ``import casewise`` is fast and does not import torch.
``__init__.pyi`` declares these names with their types for type checkers.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "1.0.0"

_HOME = {
    # the front door
    "Deployment": "casewise.deployment",
    "Model": "casewise.adapt.model",
    "fit": "casewise.fit",
    "bench": "casewise.bench",
    "load": "casewise.deployment.saved",
    "guard": "casewise.guard",
    "replay": "casewise.replay",
    "calibrate": "casewise.judge.calibration.calibrate",
    "certify": "casewise.judge.certificates.certify",
    # measure: two masks, three masks, or two folders of masks
    "compare": "casewise.study.compare",
    "fragmentation": "casewise.measure.signals.fragmentation",
    "harm": "casewise.measure.metrics.harm",
    "dice": "casewise.measure.metrics.overlap",
    "miou": "casewise.measure.metrics.overlap",
    "hd95": "casewise.measure.metrics.surface",
    "assd": "casewise.measure.metrics.surface",
    # adapt and decide
    "Adaptation": "casewise.adapt.adaptation",
    "run_episode": "casewise.adapt.proposers.live",
    "open_archive": "casewise.archive.store",
    "create_archive": "casewise.archive.store",
    "read_policy": "casewise.judge.policy",
    "write_policy": "casewise.judge.policy",
    "controller_of": "casewise.judge.policy",
    # records and errors
    "Case": "casewise.core.records",
    "Trajectory": "casewise.core.records",
    "State": "casewise.core.records",
    "Decision": "casewise.core.records",
    "Policy": "casewise.core.records",
    "CasewiseError": "casewise.core.errors",
    "BadInput": "casewise.core.errors",
}

__all__ = ["__version__", *sorted(_HOME)]


class _Package(ModuleType):
    """The package itself: where a file and the public function in it share a name, the function wins."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _HOME.get(name) == value.__name__:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name == "monai":  # a submodule that needs an optional library
        return importlib.import_module("casewise.monai")
    if name not in _HOME:
        raise AttributeError(f"casewise has no public name {name!r}; it has {', '.join(sorted(_HOME))}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return [*__all__, "monai"]
