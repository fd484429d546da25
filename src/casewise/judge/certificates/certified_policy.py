"""The policy that a certificate holds for: never looser than the one that was certified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from casewise.core.records import Binding, Policy


def certified_policy(policy: Policy, cut: float | None) -> Policy:
    """cut_high = min(own, certified), for each group too; M0 where nothing was certified (2.1)."""
    name = f"{policy.name}-certified"
    if cut is None:
        return replace(policy, name=name, controller="m0", options={}, groups={})
    groups = {group: _tightened(more, cut) for group, more in policy.groups.items()}
    return replace(policy, name=name, options=_tightened(policy.options, cut), groups=groups)


def certified_gate(policy: Policy, threshold: float | None, min_area: int, binding: Binding) -> Policy:
    """The region gate with its certified threshold; M0 where nothing was certified."""
    name = f"{policy.name}-certified"
    if threshold is None:
        return replace(policy, name=name, controller="m0", options={}, binding=binding)
    options = {**policy.options, "threshold": threshold, "min_area": min_area}
    return replace(policy, name=name, options=options, binding=binding)


def _tightened(options: Mapping[str, Any], cut: float) -> dict[str, Any]:
    if "cut_high" not in options:
        return dict(options)
    high = min(float(options["cut_high"]), cut)
    return {**options, "cut_high": high, "cut_low": min(float(options.get("cut_low", high)), high)}
