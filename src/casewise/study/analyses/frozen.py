"""A design frozen elsewhere and run once here: only cut-points may be refitted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from casewise.core.records import Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.render.tables import Column, rows_of, table
from casewise.study.finding import Finding, Section, rows
from casewise.study.statistics.resample import RESAMPLES, clusters_of, paired_interval
from casewise.study.study import Study
from casewise.study.trajectories import mean_or_nan, same_cases


def section(study: Study) -> Section:
    """tab:app-frozen-p158: the design was fixed elsewhere, only the cut-points were refitted here."""
    columns = (
        Column("method", "Method", text=True),
        Column("metric", study.metric, 4),
        Column("ha", "HA"),
        Column("ba", "BA"),
        Column("steps", "Steps", 2),
        Column("cut", f"HA − {study.retrospective} [95 %]", signed=True, interval=("low", "high")),
        Column("relative", "relative (%)", 0, percent=True),
        Column("n", "n"),
    )
    if study.extras.frozen is None:
        reason = "needs the policy whose design was frozen, to prove that only cut-points changed; give --frozen POLICY"
        return Section("frozen", "Frozen design", missing={"frozen-design test (tab:app-frozen-p158)": reason})
    differing = frozen_differences(study.extras.frozen, study.policy)
    found = frozen_design(study.methods, router=study.ours, reference=study.retrospective)
    named = found.table.assign(method=[study.title(name) for name in found.table["method"]])
    made = table("frozen", "Frozen design", columns, rows_of(named, columns), paper="tab:app-frozen-p158")
    lead = (
        f"This is not a frozen design: also changed are {', '.join(differing)}."
        if differing
        else "Only the cut-points differ from the frozen design."
    )
    return Section("frozen", "Frozen design", lead, (made,), (), (found,), found.notes)


_REFITTED = ("cut_low", "cut_high")


_MEANS = {"metric": "metric", "ha": "ha", "ba": "ba", "steps": "deployed", "coverage": "delta"}


def frozen_differences(original: Policy, refit: Policy) -> list[str]:
    """What else than cut-points differs between two policies; empty when the design was frozen (E14)."""
    found = [name for name in ("controller", "steps") if getattr(original, name) != getattr(refit, name)]
    before, after = (_design(policy.options) for policy in (original, refit))
    found += [f"options.{name}" for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    return found


def _design(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _REFITTED}


def frozen_design(
    methods: Mapping[str, pd.DataFrame],
    *,
    router: str,
    reference: str,
    original: Policy | None = None,
    refit: Policy | None = None,
    resamples: int = RESAMPLES,
    seed: int = RESAMPLING_SEED,
) -> Finding:
    """Every method's row, and the router's HA cut against the reference, absolute and relative (O1, O2).

    relative = 1 - HA_router / HA_reference. With both policies given, what was not frozen is named.
    """
    left, right = same_cases(methods[router], methods[reference])
    cut = paired_interval(left["ha"], right["ha"], clusters=clusters_of(left), resamples=resamples, seed=seed)
    before, after = mean_or_nan(right["ha"]), mean_or_nan(left["ha"])
    relative = 1 - after / before if before > 0 else float("nan")
    records = []
    for name, frame in methods.items():
        means = {column: mean_or_nan(frame[source]) for column, source in _MEANS.items()}
        retained = int((~frame["rolled_back"].astype(bool)).sum())
        records.append({"method": name, "n": len(frame), **means, "retained": retained})
    table = rows(
        records,
        ("method", "n", "metric", "ha", "ba", "steps", "retained", "coverage", "cut", "low", "high", "relative"),
    )
    for column, value in (("cut", cut.estimate), ("low", cut.low), ("high", cut.high), ("relative", relative)):
        table[column] = [value if name == router else float("nan") for name in table["method"]]
    changed = [] if original is None or refit is None else frozen_differences(original, refit)
    made = {"router": router, "reference": reference, "changed": changed, "resamples": resamples, "seed": seed}
    return Finding("frozen", table, len(left), "E14, O1, O2", made, tuple(f"not frozen: {name}" for name in changed))
