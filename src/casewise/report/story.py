"""The story in two sentences and a few key figures, said only as strongly as the intervals allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from casewise.render.cells import Estimate, number, text_of
from casewise.report.material import Material
from casewise.study.finding import Finding


@dataclass(frozen=True)
class Story:
    """What a reader who reads one sentence should know, and what the second sentence adds."""

    headline: str
    second: str


@dataclass(frozen=True)
class Key:
    """One key figure: a number, what it is, and its interval or n."""

    value: str
    what: str
    more: str
    tone: str = ""


def story(material: Material, attribution: Finding | None) -> Story:
    """How many cases were made worse while the mean did or did not move; what the policy did about it."""
    return Story(_headline(material), f"{_second(material)}{_attributed(attribution)}")


def _headline(material: Material) -> str:
    frame = material.uncontrolled
    n, worse = int(frame["change"].notna().sum()), int((frame["change"] < 0).sum())
    moved = material.interval(material.reference, "m0", "metric")
    mean = f"the mean {material.metric} {_moved(moved)}" if moved else f"the mean {material.metric} is undefined"
    if worse == 0:
        return f"Adaptation made none of {n} cases worse, and {mean}."
    joint = "while" if moved is None or not moved["shown"] else "and" if _fell(moved) else "although"
    return f"Adaptation made {worse} of {n} cases individually worse, {joint} {mean}."


def _fell(moved: Mapping[str, Any]) -> bool:
    return float(moved["estimate"]) < 0


def _moved(row: Mapping[str, Any]) -> str:
    """Equality is never claimed: what is not shown to differ "did not measurably move" (H7)."""
    if not row["shown"]:
        return "did not measurably move"
    return f"{'fell' if _fell(row) else 'rose'} by {number(abs(float(row['estimate'])))}"


def _second(material: Material) -> str:
    frame, before = material.router, float(material.uncontrolled["ha"].mean())
    after, back = float(frame["ha"].mean()), int(frame["rolled_back"].sum())
    worse = int((frame["change"] < 0).sum())
    name = material.title(material.ours)
    then = "no case is then worse" if worse == 0 else f"{worse} {'case is' if worse == 1 else 'cases are'} then worse"
    did = f"The {name} rolls {back} of {len(frame)} cases back to the source model; {then}"
    row = material.interval(material.ours, material.reference, "ha")
    if row is None:
        return f"{did}, and HA is {number(after)}."
    estimate = Estimate(float(row["estimate"]), float(row["low"]), float(row["high"]))
    return (
        f"{did}, and harmful accepted area goes from {number(before)} to {number(after)}: "
        f"{text_of(estimate, signed=True)} against {material.reference}, {verdict(row)}."
    )


def verdict(row: Mapping[str, Any]) -> str:
    """Whether a difference is shown: the interval excludes zero and the sign-flip test, exact at any n, rejects."""
    p = f"sign-flip p = {number(row['p_flip'])}"
    if row["shown"]:
        return f"an interval that excludes zero ({p})"
    if row["separated"]:
        return f"an interval that excludes zero, but {p} does not tell it from chance at 0.05, so nothing is shown"
    return f"an interval that contains zero ({p}), so no difference is shown"


def _attributed(attribution: Finding | None) -> str:
    if attribution is None:
        return ""
    row = attribution.table.iloc[0]
    share = float(row["share"])
    if share != share:
        return ""
    ranked = (
        "the ranking adds nothing to it"
        if share >= 1
        else f"the remaining {100 * (1 - share):.0f} % to which cases it chose"
    )
    quota = "its quotas alone (as many cases for each action, drawn at random)"
    return f" Of that cut, {100 * share:.0f} % is due to {quota}, {ranked}."


def keys(material: Material) -> list[Key]:
    """Made worse, change of the mean, HA without control, HA deployed, rolled back, updates."""
    frame, ours = material.uncontrolled, material.router
    n, worse = int(frame["change"].notna().sum()), int((frame["change"] < 0).sum())
    source = float(material.methods["m0"]["metric"].mean())
    kept = f"of {n} cases, {int((frame['change'] > 0).sum())} made better"
    return [
        Key(f"{worse}", f"cases made worse by {material.reference}", kept, "harm"),
        _key_of(
            material,
            material.reference,
            "m0",
            "metric",
            f"mean change of {material.metric} against M0 ({number(source)})",
        ),
        Key(number(frame["ha"].mean()), f"HA of {material.reference}", f"mean over {len(frame)} cases", "harm"),
        Key(number(ours["ha"].mean()), f"HA of the {material.title(material.ours)}", _versus(material), "ours"),
        Key(
            f"{int(ours['rolled_back'].sum())}", "cases rolled back to M0", f"of {len(ours)}; {_buckets(material)}", ""
        ),
        Key(
            number(ours["executed"].mean(), 2),
            "updates executed a case",
            f"{number(ours['deployed'].mean(), 2)} deployed; {material.reference} runs {material.evaluation.steps}",
        ),
    ]


def _key_of(material: Material, method: str, reference: str, quantity: str, what: str) -> Key:
    row = material.interval(method, reference, quantity)
    if row is None:
        return Key("not run", what, "")
    interval = f"[{number(row['low'], 4, signed=True)}, {number(row['high'], 4, signed=True)}], n = {int(row['n'])}"
    return Key(number(row["estimate"], 4, signed=True), what, interval)


def _versus(material: Material) -> str:
    row = material.interval(material.ours, material.deployable, "ha")
    if row is None:
        return f"as {material.deployable}"
    interval = f"[{number(row['low'], signed=True)}, {number(row['high'], signed=True)}]"
    return f"{number(row['estimate'], signed=True)} {interval} against {material.deployable} (deployable)"


def _buckets(material: Material) -> str:
    if not material.is_router:
        return "no buckets"
    counts = material.router["bucket"].value_counts()
    return ", ".join(f"{int(counts.get(name, 0))} {name}" for name in ("low", "mid", "hard"))
