"""A design that was frozen elsewhere and run once here: only cut-points may be refitted."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from casewise.core.records import Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.render.tables import Column
from casewise.study.finding import INTERVAL, Finding, Section, not_run, show
from casewise.study.statistics.resample import RESAMPLES, cluster_numbers, paired_interval
from casewise.study.study import Study
from casewise.study.trajectories import mean_or_nan, same_cases

_REFITTED = ("cut_low", "cut_high")
_MEANS = {"metric": "metric", "ha": "ha", "ba": "ba", "steps": "deployed", "coverage": "delta"}


def section(study: Study) -> Section:
    """tab:app-frozen-p158."""
    if study.extras.frozen is None:
        reason = "needs the policy whose design was frozen, to show that only cut-points changed: --frozen POLICY"
        return not_run("frozen", "Frozen design", "frozen-design test (tab:app-frozen-p158)", reason)
    differing = frozen_differences(study.extras.frozen, study.policy)
    found = frozen_design(study.methods, router=study.ours, reference=study.retrospective, **study.bootstrap)
    heads: dict[str, str | Column] = {
        "cut": Column("cut", f"HA − {study.retrospective} [95 %]", signed=True, interval=INTERVAL),
        "relative": Column("relative", "relative (%)", 0, percent=True),
    }
    keys = "method metric ha ba steps cut relative n"
    made = show("frozen", "Frozen design", found, keys, heads=heads, paper="tab:app-frozen-p158")
    lead = (
        f"This is not a frozen design: also changed are {', '.join(differing)}."
        if differing
        else "Only the cut-points differ from the frozen design."
    )
    return Section("frozen", "Frozen design", lead, (made,), (), (found,))


def frozen_differences(original: Policy, refit: Policy) -> list[str]:
    """What differs between two policies apart from cut-points; empty if the design was frozen (E14)."""
    found = [name for name in ("controller", "steps") if getattr(original, name) != getattr(refit, name)]
    before, after = original.options, refit.options
    names = sorted({*before, *after} - {*_REFITTED})
    return found + [f"options.{name}" for name in names if before.get(name) != after.get(name)]


def frozen_design(
    methods: Mapping[str, pd.DataFrame],
    *,
    router: str,
    reference: str,
    resamples: int = RESAMPLES,
    seed: int = RESAMPLING_SEED,
) -> Finding:
    """The row of every method, and the HA reduction of the router, absolute and relative (O1, O2).

    relative = 1 - HA_router / HA_reference.
    """
    left, right = same_cases(methods[router], methods[reference])
    cut = paired_interval(left["ha"], right["ha"], clusters=cluster_numbers(left), resamples=resamples, seed=seed)
    before, after = mean_or_nan(right["ha"]), mean_or_nan(left["ha"])
    own = {"cut": cut.estimate, "low": cut.low, "high": cut.high}
    own["relative"] = 1 - after / before if before > 0 else float("nan")
    records = []
    for name, frame in methods.items():
        means = {column: mean_or_nan(frame[source]) for column, source in _MEANS.items()}
        retained = int((~frame["rolled_back"].astype(bool)).sum())
        more = own if name == router else dict.fromkeys(own, float("nan"))
        records.append({"method": name, "n": len(frame), **means, "retained": retained, **more})
    made = {"router": router, "reference": reference, "resamples": resamples, "seed": seed}
    return Finding("frozen", pd.DataFrame(records), len(left), "E14, O1, O2", made)
