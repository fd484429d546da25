"""The tables of RESULTS.md, from the results.json of every study that ``real.py`` made; nothing is computed here.

python benchmarks/real_tables.py -o bench-real > tables.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_folders import print_small

SIGNALS = ("regions", "delta", "delta_foreground", "largest", "entropy", "msp", "entropy_on_d", "gradient_norm",
           "augmentation_disagreement")  # fmt: skip
STOPS = ("frag-stop", "tau-stop", "entropy-stop", "gradient-stop")


@dataclass(frozen=True)
class Study:
    """One report: which shift, arm and policy, and every number in it."""

    shift: str
    arm: str
    policy: str
    results: Mapping[str, Any]

    def rows(self, finding: str, **wanted: Any) -> list[dict[str, Any]]:
        """Rows of a finding whose cells have the wanted values; without intervals where too few stand behind them."""
        found = self.results["findings"].get(finding, {"rows": []})["rows"]
        few = any(said.startswith("FEW") for said in self.results.get("warnings", ()))
        unsure = {"low": None, "high": None} if few else {}
        return [{**row, **unsure} for row in found if all(row.get(name) == value for name, value in wanted.items())]

    def row(self, finding: str, **wanted: Any) -> dict[str, Any]:
        """The one row, or an empty one when the analysis did not run."""
        return next(iter(self.rows(finding, **wanted)), {})

    @property
    def horizon(self) -> str:
        """The method that runs every step."""
        return f"fixed-{self.results['provenance']['evaluation']['steps']}"

    @property
    def deployable(self) -> str:
        """The fixed budget that the calibration labels choose by the lowest HA."""
        return f"fixed-{self.row('budget.selection', rule='lowest HA').get('k_holdout', 0)}"


def studies(out: Path) -> Iterator[Study]:
    """Every report below the output folder, main arms first."""
    for file in sorted(out.glob("*/*/report-*/results.json")):
        policy = file.parent.name.removeprefix("report-")
        yield Study(file.parts[-4], file.parts[-3], policy, json.loads(file.read_text()))


def number(value: Any, form: str = ".4f") -> str:
    """A cell; what was not computed says so."""
    return "not run" if value is None else value if isinstance(value, str) else format(value, form)


def interval(row: Mapping[str, Any], form: str = "+.4f", name: str = "estimate") -> str:
    """estimate [low, high]."""
    if row.get(name) is None:
        return "undefined" if row else "not recorded"
    if row.get("low") is None:
        return f"{row[name]:{form}} [undefined]"
    return f"{row[name]:{form}} [{row['low']:{form}}, {row['high']:{form}}]"


def fixed_budget(study: Study) -> Sequence[str]:
    """What adaptation alone did."""
    last = study.row("helphurt", method=study.horizon)
    method = study.row("deployment.methods", method=study.horizon)
    change = study.row("deployment.intervals", id=f"{study.horizon}~m0:metric")
    first = study.row("budget.ladder", group="all", step=1)
    return (
        str(method.get("n")), number(study.row("deployment.methods", method="m0").get("metric")), interval(change),
        f"{last.get('hurt')} worse, {last.get('helped')} better", number(first.get("delta"), ".2e"),
        number(first.get("regions"), ".2f"), number(method.get("ha"), ".3f"), number(method.get("ba"), ".3f"),
    )  # fmt: skip


def router(study: Study) -> Sequence[str]:
    """What the router made of it."""
    mine, best = (study.row("deployment.methods", method=name) for name in ("router", study.deployable))
    random, share = study.row("controls.random", scope="all", quantity="ha"), study.row("controls.attribution")
    kept = study.row("helphurt", method="router")
    return (
        study.policy, number(study.row("deployment.methods", method=study.horizon).get("ha"), ".3f"),
        f"{number(best.get('ha'), '.3f')} ({study.deployable})", number(mine.get("ha"), ".3f"),
        interval(study.row("deployment.intervals", id=f"router~{study.horizon}:ha"), "+.3f"),
        f"{number(random.get('mean_exact'), '.3f')} ± {number(random.get('sd_chance'), '.3f')}, "
        f"p {number(random.get('p_draws_corrected'), '.3f')}",
        number(share.get("share"), ".0%"),
        interval(study.row("deployment.intervals", id="router~m0:metric")),
        f"{kept.get('helped')} helped, {kept.get('hurt')} hurt, {kept.get('rolled_back')} back",
        _holdout(study),
    )  # fmt: skip


def controllers(study: Study) -> Sequence[str]:
    """Metric minus M0 / HA / deployed steps: the horizon, the deployable budget, stop rules, the router."""
    source = study.row("deployment.methods", method="m0")["metric"]
    return [_controller(study, name, source) for name in (study.horizon, study.deployable, *STOPS, "router")]


def _controller(study: Study, name: str, source: float) -> str:
    row = study.row("deployment.methods", method=name)
    return f"{row['metric'] - source:+.4f} / {row['ha']:.3f} / {row['steps']:.2f}" if row else "not run"


def _holdout(study: Study) -> str:
    said = study.row("helphurt.net_helped")
    return f"{'go' if said.get('go') else 'no-go'} ({said.get('helped')}:{said.get('hurt')})" if said else "not run"


def association(study: Study) -> Sequence[str]:
    """Spearman of every signal with HA over cases and steps, case-clustered."""
    chosen = [study.row("association", kind="level", scope="all", signal=name) for name in SIGNALS]
    return [interval(row, "+.2f", "rho") for row in chosen]


def ladder(study: Study) -> Sequence[str]:
    """Metric / HA by step."""
    rows = study.rows("budget.ladder", group="all")
    return [" · ".join(f"{row['metric']:.4f} / {row['ha']:.3f}" for row in rows)]


def areas(study: Study) -> Sequence[str]:
    """HA of the fixed horizon and of the router by min_area."""
    found = study.rows("sweep.min_area", connectivity="face")
    sizes = sorted({row["min_area"] for row in found})
    cells = []
    for name in (study.horizon, "router"):
        by_size = {row["min_area"]: row for row in found if row["method"] == name}
        cells.append(" · ".join(f"{size}: {by_size[size]['ha']:.3f}" for size in sizes if size in by_size))
    return cells


def accounting(study: Study) -> Sequence[str]:
    """HA, BA, cases with regions, HA within them, coverage: the horizon, then the router."""
    cells = []
    for name in (study.horizon, "router"):
        row = study.row("accounting", method=name, bucket="all")
        within = number(row.get("ha_within"), ".3f") if row.get("scored") else "undefined (n=0)"
        cells.append(
            f"HA {number(row.get('ha'), '.3f')}, BA {number(row.get('ba'), '.3f')}, {row.get('scored')} with regions, "
            f"HA there {within}, coverage {number(row.get('coverage'), '.1e')}"
        )
    return cells


def calibration(study: Study) -> Sequence[str]:
    """HA of the router with 5, 10, 15 calibration patients (of all, once): mean over draws and its 95 % range."""
    rows = {row["cases"]: row for row in study.rows("sensitivity.calibration")}
    return [_spread(rows[n]) if n in rows else "not run" for n in (5, 10, 15)]


def _spread(row: Mapping[str, Any]) -> str:
    return f"{row['ha']:.3f}" + (" (all)" if row["draws"] == 1 else f" [{row['ha_low']:.3f}, {row['ha_high']:.3f}]")


TABLES: Mapping[str, tuple[Sequence[str], Callable[[Study], Sequence[str]], bool]] = {
    "What adaptation does": (
        ("n", "M0", "fixed horizon minus M0", "cases", "step-1 δ", "step-1 regions", "HA", "BA"), fixed_budget, True),
    "What the router does about it": (
        ("policy", "HA fixed horizon", "HA deployable budget", "HA router", "router minus horizon",
         "HA random at its quota", "due to quota", "router's metric minus M0", "kept", "holdout said"), router, False),
    "Controllers: metric minus M0 / HA / deployed steps": (
        ("fixed horizon", "deployable budget", *STOPS, "router"), controllers, True),
    "Does a signal predict HA? (Spearman, pooled over steps, clustered intervals)": (SIGNALS, association, True),
    "Ladder, metric / HA at steps 0, 1, ...": (("steps",), ladder, True),
    "min_area sweep, HA": (("fixed horizon", "router"), areas, True),
    "Edit accounting": (("fixed horizon", "router"), accounting, True),
    "Calibration sensitivity, HA of the router": (
        ("5 patients or sequences", "10", "15"), calibration, True),
}  # fmt: skip


def print_table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]], first: str = "shift, arm") -> None:
    """Markdown."""
    print(f"\n### {title}\n\n| {first} | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def print_certificates(out: Path) -> None:
    """What ``casewise certify`` could promise from the calibration cases."""
    rows = [certificate_row(file) for file in sorted(out.glob("*/*/certificate-*/certificate.json"))]
    names = ("promise", "clusters", "bound (crc) or p (ltt)", "cut", "kept before", "kept certified", "advice")
    print_table("Certificates from the calibration cases", names, rows)


def certificate_row(file: Path) -> Sequence[str]:
    """One certificate."""
    facts = json.loads(file.read_text())
    delta = "" if facts["delta"] is None else f", δ {facts['delta']}"
    kept = [facts["deployed"].get(when, {}).get("kept") for when in ("before", "certified")]
    cut = "none" if facts["cut"] is None else number(facts["cut"], ".3g")
    return (
        f"{file.parts[-4]}, {file.parts[-3]}", f"{facts['loss']} ≤ {facts['alpha']} ({facts['method']}{delta})",
        str(facts["units"]), number(facts["bound"], ".3f"), cut, *(number(share, ".0%") for share in kept),
        facts["advice"],
    )  # fmt: skip


def alone(study: Study, made: Sequence[Study]) -> bool:
    """Whether an arm was studied with one policy only."""
    return sum((study.shift, study.arm) == (other.shift, other.arm) for other in made) == 1


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, default=Path("bench-real"))
    out = parser.parse_args().out.resolve()
    print_small(out)
    made = list(studies(out))
    for title, (names, cells, paper_only) in TABLES.items():
        shown = [study for study in made if not paper_only or study.policy != "default" or alone(study, made)]
        if cells in (router, areas, accounting, calibration):
            shown = [study for study in shown if study.row("deployment.methods", method="router")]
        print_table(title, names, [(f"{study.shift}, {study.arm}", *cells(study)) for study in shown])
    print_certificates(out)


if __name__ == "__main__":
    main()
