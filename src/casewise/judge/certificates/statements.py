"""A certificate's sentences: the promise, the advice, the population."""

from __future__ import annotations

from collections.abc import Sequence

WHAT = {
    "ha": "the share of the changed area that made the segmentation worse (HA; a case that is rolled back counts 0)",
    "harmed": "the share of cases whose {metric} ends {margin}below that of the unadapted model{without}",
    "dice": "the {metric} lost against the unadapted model (gains count 0){without}",
    "worse-voxels": "the share of the changed voxels that became wrong (small pieces and swaps of classes count)",
    "surrogate": "the harmful accepted area as a share of the un-gated edit (a surrogate: not the deployed HA)",
    "envelope": "the share of the accepted area that made the segmentation worse (deployed HA of the gate)",
}


def promise(
    losses: Sequence[str],
    alphas: Sequence[float],
    delta: float | None,
    policy: str,
    metric: str,
    units: int,
    unit: str,
    margin: float = 0.0,
) -> str:
    """The statement of a certificate: a mean over new units, in expectation or with probability 1 - delta."""
    pairs = zip(losses, alphas, strict=True)
    words = {
        "metric": metric,
        "margin": f"more than {margin:g} " if margin else "",
        "without": ""
        if metric == "mIoU"
        else " (without foreground in the label: where more voxels became wrong than right)",
    }
    what = ", and ".join(f"{WHAT[name].format(**words)} is at most {alpha:g}" for name, alpha in pairs)
    whom = f"on average over new {unit}s like the {units} {unit}s that were used, and when policy '{policy}' decides"
    if delta is None:
        luck = f"It is an average over the choice of calibration {unit}s too: one certificate may be unlucky."
        return f"{whom[0].upper()}{whom[1:]}: {what}. {luck}"
    return f"With probability at least {1 - delta:g} over the calibration {unit}s, {whom}: {what}."


def refusal(alpha: float, units: int, floor: float, needed: int, unit: str) -> str:
    """Why nothing is certified, and how many would do; or that the harm is to blame, and not their number."""
    if units >= needed:
        return (
            f"Nothing is certified: {units} labelled {unit}s could support alpha >= {floor:.3f}, but the harm that "
            f"they show leaves no room for alpha = {alpha:g}. Every case is rolled back to M0. Choose a gentler "
            f"adaptation, a larger alpha, or gather more than {units} {unit}s."
        )
    return (
        f"Nothing is certified: {units} labelled {unit}s support alpha >= {floor:.3f}, asked was {alpha:g}. "
        f"Every case is rolled back to M0. At least {needed} labelled {unit}s are needed for alpha = {alpha:g}."
    )


def tightening(own: float, cut: float, kept: float) -> str:
    """What certification did to a router's rollback cut."""
    if kept == 0:
        return (
            "Certified, but only by keeping no calibration case: the observed harm leaves no room. "
            "In effect M0 is deployed; gather more labelled cases or choose a gentler adaptation."
        )
    if cut < own:
        return f"The rollback cut was tightened from {own:.4g} to {cut:.4g}."
    return f"The calibrated rollback cut {own:.4g} is certified as it is."


def population_of(cases: int, units: int, which: str = "") -> str:
    """Whom the promise is about: all labelled cases, none left out, unless ``which`` says so."""
    clustered = f" of {units} patients or sequences; the promise is per patient or sequence" if units < cases else ""
    return f"{cases} labelled calibration cases{which}{clustered}"


def unit_of(cases: int, units: int) -> str:
    """What n counts."""
    return "case" if units == cases else "patient"
