"""What ships as a default, chosen on some shifts and scored on another; and the picture of the real-data page.

    python benchmarks/real_across.py --data DATA -o OUT [--picture FILE.svg]      after real_shifts.py; prints Markdown

A shift that is left out takes every archive of its cohort along (both seeds, with and without mirroring), because they
share patients.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from real_consensus import SETTLED, places_of
from real_folders import SPLITS, print_small
from real_ladders import HOME, Shift, shifts

from casewise.adapt.views import views_of
from casewise.archive.store import open_archive
from casewise.judge.calibration.designs import mean_low
from casewise.judge.calibration.quality import fit_quality
from casewise.judge.calibration.view_selection import ReadCase, chosen_views, read_case
from casewise.judge.ledger import unlock
from casewise.judge.outcomes import POINT
from casewise.study.benchmark.method_scores import POOR

LEVELS, ALLOWED = (0.8, 0.9, 0.95), (0.05, 0.1, 0.2)
SHIPPED_RULE, SHIPPED_SETTLED, SHIPPED_SOFTENING = (0.9, 0.1), 0.985, 0.02
SOFTENINGS = (0.005, 0.02, 0.05, 0.1)
Told = Mapping[str, Any]  # what real_shifts.py wrote about one shift


def table(names: Sequence[str], rows: Iterator[Sequence[str]]) -> None:
    """Markdown."""
    print(f"\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def left_out(told: Mapping[str, Told], cohorts: Mapping[str, str]) -> Iterator[tuple[str, list[Told], list[str]]]:
    """(cohort, what the others say, names of the archives that it is scored on)."""
    for cohort in dict.fromkeys(cohorts[name] for name in told):
        others = [found for name, found in told.items() if cohorts[name] != cohort]
        yield cohort, others, [name for name in told if cohorts[name] == cohort]


# ---- the rule of `--policy default` ----


def rule_taken(kept: Told, rule: tuple[float, float]) -> str:
    """The design that the calibration cases choose: the largest lower bound of gain at the allowed harm, else M0."""
    level, allowed = rule
    best, taken = 0.0, "m0"
    for name, pairs in kept["calibration"].items():
        if name == "m0":
            continue
        gains = np.array([gain for _, gain in pairs])
        low = mean_low(gains, [cluster for cluster, _ in pairs], level=level)[1]
        if low > best and helps(gains) and (gains < -POINT).mean() <= allowed + 1e-9:
            best, taken = low, name
    return taken


def helps(gains: np.ndarray) -> bool:
    return bool((gains > 0).sum() > (gains < 0).sum())


WAYS = ("as shipped", "one standard error", "choose first")
"""Ways to read "at the wanted harm", declared before they were scored.

With one standard error, a design may hurt more calibration cases than allowed by as much as chance makes of it (the
square root of n p (1 - p)). Choose first: `choose`, whose anchor and departures pass bounds of their own, wherever its
cross-fitted row does not speak against it (a gain in the mean, more helped than hurt, harm within one standard error);
elsewhere as shipped. Another way replaces the shipped one only if it gains most elsewhere (at no more than 10 % hurt)
whichever cohort is left out, gains more there in the mean, and hurts in no cohort over five points more of the cases.
"""


def way_taken(kept: Told, way: str) -> str:
    """The design that the calibration cases choose in one of the ways."""
    level, allowed = SHIPPED_RULE
    if way == "as shipped":
        return rule_taken(kept, SHIPPED_RULE)
    amount = len(kept["calibration"]["m0"])
    slack = allowed + float(np.sqrt(allowed * (1 - allowed) / amount))
    if way == "one standard error":
        return rule_taken(kept, (level, slack))
    gains = np.array([gain for _, gain in kept["calibration"]["choose"]])
    safe = gains.mean() > 0 and helps(gains) and (gains < -POINT).mean() <= slack + 1e-9
    return "choose" if safe else rule_taken(kept, SHIPPED_RULE)


def ways(told: Mapping[str, Told], cohorts: Mapping[str, str]) -> Iterator[Sequence[str]]:
    """Each way on each ladder; the way that gained most elsewhere is marked."""

    def scored(kept: Told, way: str) -> tuple[float, float]:
        gains = np.array(list(kept["development"][way_taken(kept, way)].values()))
        return float(gains.mean()), float((gains < -POINT).mean())

    every: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for cohort, others, own in left_out(told, cohorts):
        seen = {way: np.mean([scored(kept, way) for one in others for kept in one["designs"].values()], axis=0)
                for way in WAYS}  # fmt: skip
        fit = [way for way in WAYS if seen[way][1] <= 0.1] or list(WAYS)
        best = max(fit, key=lambda way: round(float(seen[way][0]), 6))
        mine: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for name in own:
            for ladder, kept in told[name]["designs"].items():
                cells = []
                for way in WAYS:
                    mine[way].append(scored(kept, way))
                    cells.append(f"{way_taken(kept, way)} {mine[way][-1][0]:+.4f}; {mine[way][-1][1]:.0%}")
                yield (f"{name}, {ladder}", best, *cells)
        for way in WAYS:
            every[way] += mine[way]
        yield (f"**{cohort}**", best, *(_cell(mine[way]) for way in WAYS))
    yield ("**all**", "", *(_cell(every[way]) for way in WAYS))


def _cell(pairs: Sequence[tuple[float, float]]) -> str:
    gain, hurt = np.mean(pairs, axis=0)
    return f"{gain:+.4f}; {hurt:.1%}"


def deployed_by(found: Told, rule: tuple[float, float]) -> tuple[float, float]:
    """(gain, share hurt by more than a point) on development, over the ladders of views of one archive."""
    gains = [np.array(list(kept["development"][rule_taken(kept, rule)].values())) for kept in found["designs"].values()]
    return float(np.mean([one.mean() for one in gains])), float(np.mean([(one < -POINT).mean() for one in gains]))


def rules(told: Mapping[str, Told], cohorts: Mapping[str, str]) -> Iterator[Sequence[str]]:
    """Level and allowed harm of the criterion: by the largest mean gain elsewhere at no more than 10 % hurt."""
    grid = [(level, allowed) for level in LEVELS for allowed in ALLOWED]
    for _, others, own in left_out(told, cohorts):
        scores = {}
        for rule in grid:
            seen = [deployed_by(found, rule) for found in others]
            scores[rule] = (np.mean([gain for gain, _ in seen]), np.mean([hurt for _, hurt in seen]))
        fit = [rule for rule in grid if scores[rule][1] <= 0.1] or grid
        best = max(fit, key=lambda rule: (round(float(scores[rule][0]), 6), rule[0], -rule[1]))
        for name in own:
            cells = [f"{gain:+.4f}; {hurt:.0%}" for gain, hurt in (deployed_by(told[name], rule)
                                                                    for rule in (best, SHIPPED_RULE))]  # fmt: skip
            taken = ", ".join(f"{ladder} {rule_taken(kept, SHIPPED_RULE)}"
                              for ladder, kept in told[name]["designs"].items())  # fmt: skip
            yield (name, f"level {best[0]}, at most {best[1]:.0%} hurt", *cells, taken)


def designs(told: Mapping[str, Told], cohorts: Mapping[str, str]) -> Iterator[Sequence[str]]:
    """One design for everybody, without asking the calibration cases: the one that gained most elsewhere."""
    for _, others, own in left_out(told, cohorts):
        every = [kept for found in others for kept in found["designs"].values()]
        names = [name for name in every[0]["development"] if name != "best fixed"]
        best = max(names, key=lambda name: np.mean([np.mean(list(one["development"][name].values())) for one in every]))
        for name in own:
            for ladder, kept in told[name]["designs"].items():
                gains = np.array(list(kept["development"][best].values()))
                asked = np.array(list(kept["development"][rule_taken(kept, SHIPPED_RULE)].values()))
                yield (
                    f"{name}, {ladder}", best, f"{gains.mean():+.4f}; {(gains < -POINT).mean():.0%}",
                    f"{asked.mean():+.4f}; {(asked < -POINT).mean():.0%}",
                )  # fmt: skip


# ---- constants ----


def settling(told: Mapping[str, Told], cohorts: Mapping[str, str]) -> Iterator[Sequence[str]]:
    """When reading stops: the cheapest threshold that keeps 90 % of the gain elsewhere."""

    def point(curve: Told, at: float) -> tuple[float, float, float]:
        read, whole = np.array(curve[str(at)], float), np.array(curve["1.01"], float)
        return 1 - read[:, 0].sum() / whole[:, 0].sum(), float(read[:, 1].mean()), float(whole[:, 1].mean())

    for _, others, own in left_out(told, cohorts):
        gaining = [one for found in others for one in found["curves"].values() if point(one, SETTLED[0])[2] > 0.002]
        kept = [at for at in SETTLED if all(point(one, at)[1] >= 0.9 * point(one, at)[2] for one in gaining)]
        best = min(kept, default=SETTLED[-1])
        for name in own:
            for which, curve in told[name]["curves"].items():
                cells = [f"saves {saved:.0%}; {gain:+.4f} of {whole:+.4f}"
                         for saved, gain, whole in (point(curve, at) for at in (best, SHIPPED_SETTLED))]  # fmt: skip
                yield (f"{name}, {which}", str(best), *cells)


def flags(told: Mapping[str, Told], cohorts: Mapping[str, str]) -> Iterator[Sequence[str]]:
    """The softening of the quality: the one that finds most poor cases elsewhere with fewest flags."""

    def found(kept: Told, softening: float) -> tuple[int, int, int, int]:
        agreement, metric = (np.array(kept[name], float) for name in ("agreement", "metric"))
        clusters = np.array(kept["cluster"])
        flagged = np.zeros(len(metric), bool)
        for name in np.unique(clusters):
            own = clusters == name
            fit = fit_quality(agreement[~own], metric[~own], clusters[~own].tolist(), softening=softening)
            flagged[own] = [low is None or low[1] < POOR for low in map(fit.quality.of, agreement[own])]
        poor = metric < POOR
        return int((flagged & poor).sum()), int(poor.sum()), int(flagged.sum()), len(metric)

    def worth(kept: Told, softening: float) -> float:
        hit, poor, flagged, cases = found(kept, softening)
        return hit / max(poor, 1) - (flagged - hit) / max(cases - poor, 1)

    def usable(one: Told) -> list[Told]:
        return [kept for kept in one.get("quality", {}).values() if np.mean(np.array(kept["metric"]) < POOR) < 0.9]

    for _, others, own in left_out(told, cohorts):
        every = [kept for one in others for kept in usable(one)]
        best = max(SOFTENINGS, key=lambda one: round(float(np.mean([worth(kept, one) for kept in every])), 4))
        for name in own:
            for kept in usable(told[name])[:1]:
                cells = ["{} of {} poor among {} of {}".format(*found(kept, one)) for one in (best, SHIPPED_SOFTENING)]
                yield (name, str(best), *cells)


def sets(known: Mapping[str, Shift], out: Path) -> Iterator[Sequence[str]]:
    """The set `photo`: views chosen on fundus, scored on polyps, and the other way round."""

    def cases(name: str) -> list[ReadCase]:
        both = [open_archive(known[name].archive(out, split)).on("photo") for split in SPLITS]
        both[1] = unlock(both[1].locked(), purpose="benchmarks/real_across.py: the set photo, left out")
        return [read_case(archive, case_id) for archive in both for case_id in archive.ids]

    there = [name for name in known if "photo" in known[name].ladders and known[name].archive(out, SPLITS[1]).exists()]
    read = {name: cases(name) for name in there}
    for cohort in dict.fromkeys(known[name].cohort for name in there):
        elsewhere = [case for name in there if known[name].cohort != cohort for case in read[name]]
        if not elsewhere:
            continue
        chosen = chosen_views(elsewhere)
        for name in (one for one in there if known[one].cohort == cohort):
            names = read[name][0].names
            shipped = places_of(names, [str(view) for view in views_of("photo")])
            gains = [
                np.array([case.consensus(which) - case.source for case in read[name]])
                for which in (chosen.places, shipped, tuple(range(1, len(names) + 1)))
            ]
            yield (name, ", ".join(chosen.names) or "M0 alone",
                   *(f"{one.mean():+.4f}; {(one < -POINT).mean():.0%}" for one in gains))  # fmt: skip


# ---- the picture ----

INK = {"gradient": "#9aa0a6", "views": "#1a73e8", "judged": "#188038"}
LEGEND = {
    "gradient": "gradient updates (TENT, last step)",
    "views": "consensus of views",
    "judged": "what `--policy default` takes",
}
GREY = 'fill="#5f6368"'
WIDTH, LEFT, RIGHT, TOP, STEP = 860, 250, 130, 58, 62
LOW, HIGH = -0.08, 0.125
TITLES = {
    "hearts": "Hearts, mirroring off",
    "hearts-mirrored": "Hearts, nnU-Net as it comes",
    "driving": "Fog and night driving",
    "fundus-0": "Optic disc and cup, seed 0",
    "fundus-1": "Optic disc and cup, seed 1",
    "polyps-0": "Polyps, seed 0",
    "polyps-1": "Polyps, seed 1",
}


def picture(told: Mapping[str, Told]) -> str:
    """Gain with its interval for each shift: gradient updates, the consensus, and what calibration takes."""
    height = TOP + STEP * len(told) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" ',
        f'font-size="13"><rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{WIDTH - RIGHT + 12}" y="24" {GREY}>hurt by &gt; .01</text>',
    ]
    for k, (kind, words) in enumerate(LEGEND.items()):
        parts.append(f'<circle cx="{20 + k * 245}" cy="20" r="5" fill="{INK[kind]}"/>')
        parts.append(f'<text x="{30 + k * 245}" y="24">{words}</text>')
    for value in np.arange(-8, 13, 4) / 100:
        x = _place(value)
        line = 'stroke="#3c4043" stroke-width="1.5"' if value == 0 else 'stroke="#e0e0e0"'
        parts.append(f'<line x1="{x}" x2="{x}" y1="{TOP - 14}" y2="{height - 34}" {line}/>')
        parts.append(f'<text x="{x}" y="{height - 19}" text-anchor="middle" {GREY}>{value:+.2f}</text>')
    for k, (name, found) in enumerate(told.items()):
        parts += _shift(name, found, TOP + k * STEP)
    said = "change of Dice (driving: mIoU) against M0, 95 % by patient or sequence; rings: single sequences"
    parts.append(f'<text x="12" y="{height - 4}" {GREY}>{said}</text></svg>')
    return "\n".join(parts) + "\n"


def _place(gain: float) -> float:
    return round(LEFT + (min(max(gain, LOW), HIGH) - LOW) / (HIGH - LOW) * (WIDTH - LEFT - RIGHT), 1)


def _shift(name: str, found: Told, y: int) -> Iterator[str]:
    amount = int(found["rows"]["M0"]["n"])
    yield f'<text x="12" y="{y + 16}" font-weight="bold">{TITLES.get(name, name)}</text>'
    yield f'<text x="12" y="{y + 33}" {GREY}>M0 {found["source"]:.3f}, n = {amount}</text>'
    for j, (kind, line) in enumerate(_lines(found)):
        if line is not None:
            at, ink = y + 6 + j * 16, INK[kind]
            if line["low"] is not None:
                low, high = (_place(line[part]) for part in ("low", "high"))
                yield f'<line x1="{low}" x2="{high}" y1="{at}" y2="{at}" stroke="{ink}" stroke-width="2"/>'
            for mean in line.get("means", {}).values():  # too few sequences for an interval: a ring for each
                yield f'<circle cx="{_place(mean)}" cy="{at}" r="4" fill="none" stroke="{ink}" stroke-width="1.5"/>'
            yield f'<circle cx="{_place(line["gain"])}" cy="{at}" r="5" fill="{ink}"/>'
            yield f'<text x="{WIDTH - RIGHT + 12}" y="{at + 4}" fill="{ink}">{line["hurt"]} of {line["n"]}</text>'


def _lines(found: Told) -> Iterator[tuple[str, Told | None]]:
    """The three lines of a shift; None where nothing was recorded."""
    rows, ladder = found["rows"], next(iter(found["designs"]))
    yield "gradient", rows.get("tent: fixed-4")
    yield "views", rows.get(f"{ladder}: set `{ladder}`, uniform", rows.get(f"{ladder}: mean of all"))
    taken = rule_taken(found["designs"][ladder], SHIPPED_RULE)
    shipped = next((row for name, row in rows.items() if name.startswith(f"{ladder}: `--policy default`")), None)
    named = {"m0": "M0", "consensus": f"{ladder}: mean of all"}.get(taken, f"{ladder}: {taken}, fitted on calibration")
    yield "judged", shipped or rows.get(named, rows.get(f"{ladder}: {taken}"))


def main() -> None:
    """Print what holds where it was not chosen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="folder of the source models; default: weights beside DATA")
    parser.add_argument("-o", "--out", type=Path, default=Path("bench-real"))
    parser.add_argument("--picture", type=Path, help="where the SVG goes")
    options = parser.parse_args()
    sys.path.insert(0, str(HOME.parent))
    out = options.out.resolve()
    known = shifts((options.weights or options.data.resolve().parent / "weights").resolve(), out)
    files = {name: out / "tables" / f"{name}.json" for name in known}
    told = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    print_small(out)
    if options.picture is not None:
        options.picture.write_text(picture(told))
    cohorts = {name: shift.cohort for name, shift in known.items()}
    if len({cohorts[name] for name in told}) < 2:
        print(f"\nOnly {', '.join(told) or 'nothing'} was told: nothing can be left out, so there are no tables.")
        return
    print("\nThe criterion of `--policy default`; gain on development and share hurt by more than .01:")
    table(("left out", "criterion chosen elsewhere", "with it", "as shipped (.9, 10 %)", "taken as shipped"),
          rules(told, cohorts))  # fmt: skip
    print("\nWays to read the wanted harm; design taken, gain, share hurt by more than .01:")
    table(("left out, views", "way that gained most elsewhere", *WAYS), ways(told, cohorts))
    print("\nOne design for everybody instead (no calibration labels of the new shift):")
    table(("left out, views", "design that gained most elsewhere", "gain; hurt", "calibrated there, as shipped"),
          designs(told, cohorts))  # fmt: skip
    print("\nWhen the sequential consensus stops:")
    table(("left out, views", "threshold chosen elsewhere", "with it", "as shipped (.985)"), settling(told, cohorts))
    print("\nFlags below .7 at level .9, softening of the quality:")
    table(("left out", "softening chosen elsewhere", "with it", "as shipped (.02)"), flags(told, cohorts))
    print("\nThe set `photo`, uniform consensus, all cases:")
    table(("left out", "views chosen elsewhere", "with them", "as shipped", "all that were recorded"), sets(known, out))


if __name__ == "__main__":
    main()
