"""The outcome of a comparison in words: headline, Markdown for a pull request, JUnit XML for a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from casewise.core.text import UNIT, pluralize
from casewise.judge.outcomes import judged_sentence
from casewise.measure.changes import label_name
from casewise.measure.measures import UNIT_SPACING
from casewise.measure.metrics import METRICS
from casewise.render.ink import POINT
from casewise.render.tables import interval, number

WORDS = {"accepted": "Accepted", "rejected": "Rejected", "undecided": "Not decided"}
_MARKS = {"accepted": "✅ accepted", "rejected": "❌ rejected", "undecided": "❔ not decided"}
_CHECK_MARKS = {"met": "✅", "broken": "❌", "undecided": "❔"}

Summary = Mapping[str, Any]


def headline(summary: Summary) -> str:
    """The verdict and its reason in one line, then how much changed; notes about the plan come first."""
    said = change_counts(summary)
    if summary["verdict"] not in WORDS:
        return said
    notes = "".join(f", but {note}" for note in summary["notes"])
    return f"{WORDS[summary['verdict']]}{notes}: {verdict_reason(summary)} {said}"


def verdict_reason(summary: Summary) -> str:
    """Return the reason for the verdict, in one sentence."""
    checks = summary["checks"]
    broken, undecided = (_with(checks, state) for state in ("broken", "undecided"))
    if broken:
        which = _first([f"{check['name']} on {check['scope']}" for check in broken])
        return f"{len(broken)} of {_criteria(len(checks))} {'is' if len(broken) == 1 else 'are'} broken ({which})."
    nobody = ", ".join(f"{check['name']} on {check['scope']}" for check in undecided if not check["patients"])
    if nobody:
        return f"there is no case to judge {nobody}; no criterion is broken."
    if undecided:
        few = pluralize(summary["summary"].get("labelled_clusters", summary["summary"]["clusters"]), *UNIT)
        return (
            f"{few} cannot decide {len(undecided)} of {_criteria(len(checks))}; "
            f"none is broken, so more labelled patients may show that the new masks are good enough."
        )
    return f"{'the criterion is met' if len(checks) == 1 else f'all {len(checks)} criteria are met'}."


def _first(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + ", ..." * (len(names) > most)


def _criteria(count: int) -> str:
    return pluralize(count, "criterion", "criteria")


def _with(checks: Iterable[Mapping[str, Any]], verdict: str) -> list[Mapping[str, Any]]:
    return [check for check in checks if check["verdict"] == verdict]


def change_counts(summary: Summary) -> str:
    """Return the number of changed cases and, with labels, of better and worse ones."""
    cohort = summary["summary"]
    said = f"{cohort['changed']} of {cohort['cases']} cases changed"
    if "helped" in cohort:
        said += f"; {cohort['helped']} became better, {cohort['hurt']} worse"
        if cohort["flips"]:
            said += f", and {cohort['flips']} fell below {cohort['good']:g}"
    elif cohort["warned"]:
        said += f"; {cohort['warned']} should be looked at"
    return f"{said}."


def worse_parts(summary: Summary, *, most: int = 3) -> str:
    """The labels, groups and sizes with the largest falls that are shown, in one sentence; if none is shown, the one
    that fell most, by a point more than all cases; empty if there is none."""
    cohort, names = summary["summary"], {int(key): name for key, name in summary.get("names", {}).items()}
    parts = [(label_name(row["label"], names), row.get("change")) for row in cohort["labels"]]
    for kind in ("group", "size"):
        parts += [(f"{kind} {row[kind]}", row.get("change")) for row in cohort.get(f"{kind}s", ())]
    fell = [(name, change) for name, change in parts if change and (change["estimate"] or 0) < 0]
    fell.sort(key=lambda one: one[1]["estimate"])
    shown = [one for one in fell if one[1]["shown"]]
    said = [f"{name} {plain_interval(change, signed=True)}" for name, change in (shown or fell)[:most]]
    if shown:
        return f"Largest losses: {', '.join(said)}."
    if not fell or fell[0][1]["estimate"] > min(cohort["change"]["estimate"], 0) - POINT:
        return ""
    return f"Largest loss: {said[0]}, {pluralize(fell[0][1]['clusters'], *UNIT)}; it is not statistically significant."


def check_lines(summary: Summary) -> list[str]:
    """One line for each broken criterion, for each cause that leaves others undecided, and for each that is met."""

    def lines_of(word: str, verdict: str) -> list[str]:
        found = _with(summary["checks"], verdict)
        return [f"{word} {check['name']} on {check['scope']}: {check['reason']}{_named(check)}" for check in found]

    lines = lines_of("FAIL", "broken")
    causes: dict[str, list[str]] = {}
    for check in _with(summary["checks"], "undecided"):
        causes.setdefault(_cause(check), []).append(f"{check['name']} on {check['scope']}")
    for cause, names in causes.items():
        which = names[0] if len(names) == 1 else f"{len(names)} criteria ({_first(names)})"
        lines.append(f"?    {which}: {cause}")
    return [*lines, *lines_of("ok  ", "met")]


def unseen_harm(summary: Summary) -> str:
    """Return the harm that so few patients cannot exclude: with n patients, a harm of up to 1 - 0.05 ** (1 / n) of all
    patients."""
    cohort = summary["summary"]
    patients = cohort.get("labelled_clusters", cohort["clusters"])
    return (
        f"With {pluralize(patients, 'patient')}, harm that occurred in none of them may still occur in up to "
        f"{100 * (1 - 0.05 ** (1 / max(patients, 1))):.0f} % of patients (95 % confidence)."
    )


def known_limits(summary: Summary) -> list[str]:
    """What the comparison cannot show, one sentence each."""
    cohort, plan = summary["summary"], summary["plan"]
    problems, rise = len(summary["problems"]), any(one["name"] == "max_error_rise" for one in summary["checks"])
    said = {
        "There are no labels, so this page does not show which of two masks is right.": "labelled" not in cohort,
        unseen_harm(summary): True,
        f"No {UNIT[0]} is named: each case counts as one {UNIT[0]}, so bounds are too narrow if {UNIT[1]} have several "
        "cases.": not cohort["named"],
        f"Volumes: {UNIT_SPACING}.": summary.get("unit_spacing"),
        f"{pluralize(problems, 'problem')} with pairs; these are not in the numbers.": problems,
        "A mean rise of the error of a measure does not show rare large errors.": rise,
        f"The numbers hold for {UNIT[1]} like these; other scanners, sites and diseases are not covered.": True,
        "The log lists only runs that used it. It cannot show whether somebody opened the new masks elsewhere.": plan,
    }
    return [sentence for sentence, holds in said.items() if holds]


def _cause(check: Mapping[str, Any]) -> str:
    """Return the reason why a criterion is undecided, without its numbers if there is one patient."""
    if check["patients"] == 1:
        return f"one {UNIT[0]} is not enough for a statement about others"
    reason: str = check["reason"]
    return reason.removeprefix(f"{check['says']}: ")


def _named(check: Mapping[str, Any], most: int = 5) -> str:
    """The cases that broke a criterion."""
    worst = check["worst"] if check["verdict"] == "broken" else ()
    more = f" and {len(worst) - most} more" if len(worst) > most else ""
    return f": {', '.join(worst[:most])}{more}" if worst else ""


def change_sentence(cohort: Mapping[str, Any]) -> str:
    """The metric before and now, with the interval of its change."""
    before, now = plain_number(cohort["metric_old"]), plain_number(cohort["metric_new"])
    change, metric = plain_interval(cohort["change"], signed=True), METRICS[cohort["metric"]].title
    return f"Mean {metric} {before} → {now}, change {change}"


def of_whom(counts: Mapping[str, Any], *, named: int) -> str:
    """Return the number of cases and, if patients are named, of patients."""
    cases = pluralize(counts["cases"], "case")
    if not named:
        return f"{cases} (no {UNIT[0]} is named: each case counts as one {UNIT[0]})"
    return f"{cases} of {pluralize(counts['clusters'], *UNIT)}"


def measure_lines(summary: Summary) -> list[str]:
    """One line for each declared measure, and one for its decisions that changed."""
    lines = []
    for row in summary["measures"]:
        crossings = row["crossings"]
        if row["name"].startswith("volume ") or row["change"] is None:
            continue
        words = [f"{row['name']}: change {plain_agreement(row['change'], row['unit'])}"]
        if row["error_new"] is not None:
            words.append(
                f"error {plain_agreement(row['error_old'], row['unit'])} -> "
                f"{plain_agreement(row['error_new'], row['unit'])}; closer to the label in {row['closer']}, "
                f"farther in {row['farther']} {UNIT[1]}"
            )
        if crossings:
            wrong = sum(one["right"] == "old" for one in crossings)
            known = f", {wrong} of them to the wrong side" if crossings[0]["right"] is not None else ""
            words.append(f"{pluralize(len(crossings), 'decision')} changed{known}")
        lines.append("; ".join(words))
    return lines


def plain_agreement(found: Mapping[str, Any], unit: str) -> str:
    """A Bland-Altman bias with its limits of agreement."""
    end = f" {unit}" if unit else ""
    bias = f"{short_number(found['bias'], signed=True)}{end}"
    if found["limit_low"] is None:
        return bias
    low, high = (short_number(found[name], signed=True) for name in ("limit_low", "limit_high"))
    return f"{bias} ({low} to {high})".replace("-", "−")


def short_number(value: float, *, signed: bool = False) -> str:
    """Three digits, or whole numbers from 100 on.

    >>> short_number(0.12345), short_number(-1543.2, signed=True)
    ('0.123', '-1,543')
    """
    sign = "+" if signed else ""
    return f"{value:{sign},.0f}" if abs(value) >= 100 else f"{value:{sign}.3g}"


def markdown_summary(summary: Summary, *, shown: int = 10) -> str:
    """The outcome for a pull request."""
    cohort = summary["summary"]
    lines = [f"### New against old: {_MARKS.get(summary['verdict'], 'compared')}", "", _cell(headline(summary)), ""]
    if "metric_old" in cohort:
        change = cohort["change"]
        lines += [
            f"{change_sentence(cohort)}; HA {plain_interval(cohort['ha'])} ({judged_sentence(cohort.get('judged'))}), "
            f"BA {plain_interval(cohort['ba'])}, worse-voxels {plain_interval(cohort['worse_voxels'])}. "
            f"Cases that became better {plain_interval(cohort['helped_share'])}, worse "
            f"{plain_interval(cohort['hurt_share'])}. {of_whom(change, named=cohort['named'])}.",
            "",
        ]
    if worse_parts(summary):
        lines += [_cell(worse_parts(summary)), ""]
    if summary["checks"]:
        lines += ["| | criterion | on | limit | observed | bound | patients |", "|---|---|---|---|---|---|---|"]
        for check in summary["checks"]:
            cells = [_CHECK_MARKS[check["verdict"]], f"`{check['name']}`", _cell(check["scope"])]
            observed = str(check["patients"]) if check["name"] == "patients" else plain_number(check["value"])
            values = [f"{check['limit']:g}", observed, plain_number(check["bound"])]
            lines.append(f"| {' | '.join([*cells, *values, str(check['patients'])])} |")
        not_met = [f"- {_cell(line[5:])}" for line in check_lines(summary) if not line.startswith("ok")]
        lines += ["", *not_met, "", unseen_harm(summary), ""]
    lines += _label_lines(cohort["labels"], summary.get("names", {}))
    measured = measure_lines(summary)
    lines += [f"- {_cell(line)}" for line in measured] + ([""] if measured else [])
    if summary["problems"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary["problems_by_kind"].items())
        lines += [f"**Problems: {kinds}.**", ""]
        lines += [f"- {_cell(problem['message'])}" for problem in summary["problems"][:shown]]
        if len(summary["problems"]) > shown:
            lines.append(f"- and {len(summary['problems']) - shown} more, in summary.json")
        lines.append("")
    worst = ", ".join(_cell(case_id) for case_id in summary["worst_first"][:shown])
    return "\n".join([*lines, f"Look first at: {worst}.", ""])


def _label_lines(labels: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[str]:
    scored = any("metric_old" in row for row in labels)
    head = ["label", "cases", "volume drift", "holes +/−", "pieces +/−"] + (["Dice old → new", "HA"] if scored else [])
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in labels:
        cells = [
            _cell(label_name(row["label"], {int(key): name for key, name in names.items()})),
            str(row["cases"]),
            plain_percent(row["drift"]),
            f"{row['holes_gained']} / {row['holes_lost']}",
            f"{row['components_gained']} / {row['components_lost']}",
        ]
        if scored:
            scores = f"{plain_number(row.get('metric_old'))} → {plain_number(row.get('metric_new'))}"
            cells += [scores, plain_interval(row.get("ha"))]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def junit_xml(summary: Summary, cases: Sequence[str]) -> str:
    """JUnit XML: a test for each criterion and for each case.

    A broken criterion is a failure, and so is every case that broke it. A criterion that cannot be decided is an error,
    and so is a pair with a problem that was not allowed.
    """
    tests = []
    broke: dict[str, list[str]] = {}
    for check in summary["checks"]:
        trouble = {"broken": ("failure", "rejected"), "undecided": ("error", "undecided")}.get(check["verdict"])
        name = f"{check['name']} on {check['scope']}"
        tests.append(_test("criteria", name, trouble and (*trouble, f"{check['reason']}{_named(check, most=10)}")))
        for case_id in check["worst"] if check["verdict"] == "broken" else ():
            broke.setdefault(case_id, []).append(f"broke {name}")
    wrong: dict[str, list[str]] = {}
    for problem in summary["problems"]:
        if not problem["allowed"]:
            wrong.setdefault(problem["case"], []).append(problem["message"])
    for case_id in sorted({*cases, *wrong, *broke}):
        kind, why, said = ("error", "problem", wrong) if case_id in wrong else ("failure", "rejected", broke)
        tests.append(_test("cases", case_id, (kind, why, "; ".join(said[case_id])) if case_id in said else None))
    failures, errors = (sum(f"<{kind} " in test for test in tests) for kind in ("failure", "error"))
    counts = f'tests="{len(tests)}" failures="{failures}" errors="{errors}" skipped="0"'
    suite = "\n".join([f'<testsuite name="casewise compare" {counts}>', *tests, "</testsuite>"])
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>\n{suite}\n</testsuites>\n'


def _test(group: str, name: str, trouble: tuple[str, str, str] | None) -> str:
    opening = f"<testcase classname={quoteattr(f'casewise.compare.{group}')} name={quoteattr(name)}"
    if trouble is None:
        return f"{opening}/>"
    kind, why, message = trouble
    return f"{opening}><{kind} type={quoteattr(why)} message={quoteattr(message)}>{escape(message)}</{kind}></testcase>"


def _cell(text: str) -> str:
    """Escape text so that it cannot end a table cell, begin markup or mention a user."""
    return "".join(f"\\{letter}" if letter in "\\|`*_[]<>@#" else letter for letter in " ".join(text.split()))


def plain_number(value: Any, *, signed: bool = False) -> str:
    """A number, or a dash where there is none."""
    return "—" if value is None else number(float(value), signed=signed)


def plain_interval(found: Mapping[str, Any] | None, *, signed: bool = False) -> str:
    """An estimate with its interval; one patient and equal values have none."""
    estimate = _estimate(found)
    if found is None or estimate is None:
        return "—"
    if found["low"] is None:
        why = f"one {UNIT[0]}" if found["clusters"] < 2 else "all values are equal"
        return f"{number(estimate, signed=signed)} ({why}: no interval)"
    return interval(estimate, float(found["low"]), float(found["high"]), signed=signed)


def plain_percent(found: Mapping[str, Any] | None) -> str:
    """A share in percent with its sign."""
    estimate = _estimate(found)
    return "—" if estimate is None else f"{100 * estimate:+.1f} %".replace("-", "−")


def _estimate(found: Mapping[str, Any] | None) -> float | None:
    """The estimate of an interval; None where it has none."""
    value = None if found is None else found["estimate"]
    return None if value is None or value != value else float(value)
