"""Worst first, without a label: no output, M0 after a failure, flagged cases, then by quality, else by risk."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from casewise.serve.review_cases import ReviewCase

TIERS = {"failed": 0, "fallback": 1}
RANKED = ("delta_foreground", "delta", "regions")
"""Signals to rank by, the first that every case has: shares before counts, so that image size does not decide (S4)."""


def position(case: ReviewCase) -> float | None:
    r"""Where the routing value lies between the policy's cut-points: 0 at cut_low, 1 and more is rolled back (E6).

    .. math:: r = (u - c_{low}) / (c_{high} - c_{low})
    """
    if case.value is None or case.cut_low is None or case.cut_high is None or case.cut_high <= case.cut_low:
        return None
    return (case.value - case.cut_low) / (case.cut_high - case.cut_low)


def risks(cases: Iterable[ReviewCase]) -> dict[str, float | None]:
    """A number by case id, higher is riskier; None where nothing was measured.

    One minus the lower bound of the quality where every case with a mask has one. Else the position between the
    cut-points where every measured case has one, so that groups with cut-points of their own compare; else
    the share of the cohort whose edit is smaller.
    """
    cases = list(cases)
    if cases and all(case.quality_low is not None for case in cases if case.status not in TIERS):
        return {case.id: None if case.quality_low is None else 1 - case.quality_low for case in cases}
    measured = [case for case in cases if case.signals]
    places = {case.id: position(case) for case in measured}
    if measured and all(place is not None for place in places.values()):
        return {case.id: places.get(case.id) for case in cases}
    return {case.id: rank for case, rank in zip(cases, _ranks(cases), strict=True)}


def worst_first(cases: Mapping[str, ReviewCase]) -> list[str]:
    """Case ids in the order in which a person should look at them."""
    found = risks(cases.values())

    def key(case_id: str) -> tuple[int, bool, float, str]:
        risk = found[case_id]
        tier = TIERS.get(cases[case_id].status, 2 if cases[case_id].flagged else 3)
        return tier, risk is None, -(risk or 0.0), case_id

    return sorted(cases, key=key)


def _ranks(cases: list[ReviewCase]) -> list[float | None]:
    for name in RANKED:
        values = [case.signals.get(name) for case in cases]
        if all(value is not None for value, case in zip(values, cases, strict=True) if case.signals) and any(
            value is not None for value in values
        ):
            break
    known = sorted(value for value in values if value is not None)
    return [None if value is None else bisect_left(known, value) / len(known) for value in values]
