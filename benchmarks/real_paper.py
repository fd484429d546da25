"""The paper's cardiac tables beside ours, from the studies that ``real.py`` made; nothing is computed here.

python benchmarks/real_paper.py -o bench-real > paper.md

Numbers under "paper" are quoted from it (M&Ms vendor B, n = 230, its own nnU-Net, EATA at 5e-4), to its precision.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from real_folders import print_small
from real_tables import Study, interval, number, print_table, studies

STILL = "eata-5e-4"  # makes no region: HA is 0, correlations are undefined
ARMS = {"EATA 5e-4": STILL, "EATA 2e-3": "eata-chosen", "TENT 5e-4": "tent"}
STEPS = range(1, 5)

LADDER = (".186 · .164 · .129 · .177", "2, then 3")  # tab:budget-sweep; the budget of the holdout, of the evaluation

METHODS = {  # tab:mnm: Dice / HA / deployed steps
    "M0": "0.849 / 0.000 / none",
    "fixed, best on the holdout": "0.850 / 0.164 / 2.00",
    "fixed, best in retrospect": "0.850 / 0.129 / 3.00",
    "fixed-4": "0.849 / 0.177 / 4.00",
    "FragStop": "0.850 / 0.115 / 3.43",
    "FragSubset": "0.850 / 0.109 / 3.43",
    "COQR router": "0.849 / 0.013 / 1.10",
    "MEMO": "0.841 / 0.311 / 4.00",
    "CoTTA": "0.849 / 0.097 / 4.00",
}

SIGNALS = {  # tab:app-clustered-ci: level; difference
    "regions": "0.597 [0.532, 0.657]; 0.455 [0.377, 0.527]",
    "delta": "0.516 [0.439, 0.585]; 0.347 [0.266, 0.421]",
    "gradient_norm": "0.146 [0.082, 0.206]; 0.035 [-0.031, 0.101]",
    "entropy": "0.032 [-0.069, 0.130]; -0.006 [-0.082, 0.073]",
    "msp": "-0.012 [-0.108, 0.087]; 0.017 [-0.060, 0.092]",
    "augmentation_disagreement": "0.264 [0.161, 0.362]; 0.051 [-0.037, 0.138]",
}

PER_STEP = {  # tab:app-perstep
    "regions": "0.527 · 0.560 · 0.675 · 0.603",
    "gradient_norm": "0.332 · 0.164 · 0.384 · 0.190",
}

AUROC = {  # tab:app-auroc: worse Dice; HA in the top tertile
    "regions": "0.434; 0.716 [0.65, 0.78]",
    "delta": "0.425; 0.692",
    "gradient_norm": "0.374 [0.30, 0.45]; 0.616 [0.54, 0.69]",
}

HELPED = {  # tab:helphurt
    "fixed-4": "41.3% (+0.007), 58.7% (-0.005), none, +0.000",
    "router": "23.5% (+0.001), 20.0% (-0.001), 56.5%, +0.000",
}

ACCOUNTS = {  # tab:app-accounting: HA, BA, cases with regions, HA within them, coverage
    "router": "0.013, 0.018, 17 of 230, 0.180, 3e-05",
    "router, mid (shrink)": "0.037, 0.091, 14 of 46, 0.123, 7e-05",
    "router, low": "0.025, 0.000, 3 of 54, 0.446, 5e-05",
    "fixed-1": "0.186, 0.234, 167 of 230, 0.256, 5.4e-04",
    "fixed-2": "0.164, 0.225, 144 of 230, 0.263, 4.6e-04",
    "fixed-3": "0.129, 0.159, 101 of 230, 0.294, 3.2e-04",
    "fixed-4": "0.177, 0.149, 132 of 230, 0.308, 3.3e-04",
}

SELECTORS = {  # tab:app-matched-mnm: Dice / HA, same actions and bucket sizes
    "deployed": "0.8489 / 0.0133",
    "augmentation_disagreement": "0.8490 / 0.0451",
    "entropy": "0.8496 / 0.0537",
    "msp": "0.8494 / 0.0567",
    "random": "0.8494 / 0.0605",
    "oracle HA": "0.8503 / 0.0023",
    "oracle metric": "0.8515 / 0.0217",
    "m0": "0.8489 / 0",
}

SENSITIVITY = {  # tab:app-calibsens
    5: "0.022 [0.004, 0.048]",
    10: "0.018 [0.008, 0.045]",
    15: "0.017 [0.010, 0.033]",
    20: "0.0133",
}

SURROGATE = {  # sec:supp-crc-op: risk on evaluation (and the deployed HA, where it is printed)
    "0.10": "0.018 (deployed 0.070)",
    "0.15": "0.018",
    "0.20": "0.193",
    "0.30": "0.233",
}

OBJECTIVES = {  # tab:newobj: rho(delta), rho(regions), V1, V2, V3, share that random makes
    "grata-1e-4": "0.362, 0.737, no, no, yes, 0.742",
    "grata-5e-4": "0.564, 0.719, no, no, yes, 0.720",
    "deyo": "0.475, 0.463, yes, no, yes, 0.694",
}


def method(study: Study, name: str) -> str:
    """Dice / HA / deployed steps of one method."""
    row = study.row("deployment.methods", method=name)
    return f"{row['metric']:.4f} / {row['ha']:.3f} / {row['steps']:.2f}" if row else "not run"


def methods(by_arm: Mapping[str, Study], study: Study) -> Mapping[str, str]:
    """The rows of the method table that one arm has."""
    retrospective = f"fixed-{study.row('budget.selection', rule='lowest HA').get('k_best', 0)}"
    return {
        "M0": method(study, "m0"),
        "fixed, best on the holdout": method(study, study.deployable),
        "fixed, best in retrospect": method(study, retrospective),
        "fixed-4": method(study, "fixed-4"),
        "FragStop": method(study, "frag-stop"),
        "COQR router": method(study, "router"),
    } | (_elsewhere(by_arm) if study.arm == "eata-chosen" else {})


def _elsewhere(by_arm: Mapping[str, Study]) -> Mapping[str, str]:
    """Methods with trajectories of their own."""
    found = {"FragSubset": ("eata-subset", "frag-stop"), "MEMO": ("memo", "fixed-4"), "CoTTA": ("cotta", "fixed-4")}
    return {name: method(by_arm[arm], row) for name, (arm, row) in found.items() if arm in by_arm}


def signal(study: Study, name: str) -> str:
    """Level; difference."""
    kinds = ("level", "difference")
    return "; ".join(interval(study.row("association", kind=k, scope="all", signal=name), ".2f", "rho") for k in kinds)


def per_step(study: Study, name: str) -> str:
    """Spearman at each step."""
    rows = [study.row("association.per_step", kind="level", scope="all", step=str(k), signal=name) for k in STEPS]
    return " · ".join("undefined" if row.get("rho") is None else f"{row['rho']:.2f}" for row in rows)


def auroc(study: Study, name: str) -> str:
    """Step-1 signal against a worse metric; against HA in the top tertile."""
    rows = [study.row("ranking.auroc", signal=name, target=target) for target in ("worse", "harm")]
    return "; ".join(interval(row, ".2f", "auroc") for row in rows)


def helped(study: Study, name: str) -> str:
    """helped (mean), hurt (mean), rolled back, mean over all."""
    row = study.row("helphurt", method=name)
    if not row:
        return "not run"
    shares = [f"{row[f'share_{side}']:.1%} ({number(row[f'mean_{side}'], '+.4f')})" for side in ("helped", "hurt")]
    return f"{shares[0]}, {shares[1]}, {row['share_rolled_back']:.1%}, {number(row['mean_change'], '+.4f')}"


def account(study: Study, name: str) -> str:
    """HA, BA, cases with regions, HA within them, coverage."""
    which, _, bucket = name.partition(", ")
    row = study.row("accounting", method=which, bucket=bucket.split(" ")[0] or "all")
    if not row:
        return "not run"
    within = number(row.get("ha_within"), ".3f") if row.get("scored") else "none"
    shares = ", ".join(number(row.get(name), ".3f") for name in ("ha", "ba"))  # a bucket may hold no case
    return f"{shares}, {row['scored']} of {row['n']}, {within}, {number(row.get('coverage'), '.1e')}"


def selector(study: Study, name: str) -> str:
    """Dice / HA of a ranking at the router's quotas."""
    row = study.row("controls.matched", scope="all", selector=name)
    return f"{row['metric']:.4f} / {row['ha']:.4f}" if row else "not recorded"


def sensitivity(study: Study, cases: int) -> str:
    """HA over draws of so many calibration cases; our patients have two volumes each, which are drawn together."""
    row = study.row("sensitivity.calibration", cases=cases // 2) if cases % 2 == 0 else {}
    if not row:
        return "not run"
    spread = "" if row.get("draws") == 1 else f" [{row['ha_low']:.3f}, {row['ha_high']:.3f}]"
    return f"{row['ha']:.3f}{spread}"


def objective(study: Study) -> str:
    """The criteria of tab:newobj."""
    row = study.rows("objectives")[0]
    share = "no cut" if row.get("share") is None else f"{row['share']:.3f}"
    verdicts = [{"held": "yes", "failed": "no"}.get(row[name], row[name]) for name in ("V1", "V2", "V3")]
    return ", ".join(number(row.get(name), ".3f") if row.get(name) is not None else "undefined"
                     for name in ("delta", "regions")) + f", {', '.join(verdicts)}, {share}"  # fmt: skip


def gate(out: Path, alpha: str) -> Sequence[str]:
    """What the region gate promises for the surrogate at alpha, its risk on the evaluation cases, and deployed HA."""
    file = out / "cardiac" / "eata-chosen" / f"certificate-gate-{alpha}" / "certificate.json"
    if not file.exists():
        return ("not run", "", "")
    facts = json.loads(file.read_text())
    if facts["cut"] is None:
        return ("infeasible", "", "")
    seen = next(point for point in facts["reliability"] if point["alpha"] == float(alpha))
    return tuple(number(value, ".3f") for value in (facts["bound"], seen["risk"], seen["deployed"]))


def beside(title: str, printed: Mapping[Any, str], arms: Sequence[Study], cell: Callable[[Study, Any], str]) -> None:
    """One table: a row for each row of the paper, then one column for each of our arms."""
    labels = {arm: label for label, arm in ARMS.items()}
    names = ("paper", *(labels[one.arm] + (", `default`" if one.policy == "default" else "") for one in arms))
    print_table(title, names, [(str(r), said, *(cell(s, r) for s in arms)) for r, said in printed.items()], first="")


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, default=Path("bench-real"))
    out = parser.parse_args().out.resolve()
    print_small(out)
    made = [study for study in studies(out) if study.shift == "cardiac"]
    ours = {study.arm: study for study in made if study.policy != "default"}
    newer = [study for study in made if study.policy == "default" and study.arm == "eata-chosen"]
    lacking = [arm for arm in ARMS.values() if arm not in ours]
    if not ours:
        print("\nNo study of cardiac arms: nothing to lay beside the paper's tables.")
        return
    if lacking:
        print(f"\nNot run: {', '.join(lacking)}; `benchmarks/real.py cardiac` runs every arm.")
    three = [ours[arm] for arm in ARMS.values() if arm in ours]
    moving = [study for study in three if study.arm != STILL]

    rows = [("paper", *LADDER)]
    for study in ours.values():
        chosen = study.row("budget.selection", rule="lowest HA")
        ladder = [study.row("budget.ladder", group="all", step=k)["ha"] for k in STEPS]
        best = f"{chosen['k_holdout']}, then {chosen['k_best']}"
        rows.append((f"ours, {study.arm}", " · ".join(f"{ha:.3f}".lstrip("0") for ha in ladder), best))
    print_table("HA of a fixed budget", ("K = 1, 2, 3, 4", "best on the holdout, in retrospect"), rows, first="")

    cells = {study.arm: methods(ours, study) for study in three}
    beside("Methods: Dice / HA / deployed steps", METHODS, three, lambda s, r: cells[s.arm].get(r, ""))
    beside("Signal and HA, Spearman over cases and steps: level; difference", SIGNALS, moving, signal)
    beside("The same within steps 1 · 2 · 3 · 4", PER_STEP, moving, per_step)
    beside("Step-1 signal as a ranker, AUROC: Dice worse; HA in the top tertile", AUROC, moving, auroc)
    beside("Helped (mean), hurt (mean), rolled back, mean change", HELPED, three, helped)
    beside("Accounting: HA, BA, cases with regions, HA within them, coverage", ACCOUNTS, moving, account)
    beside("Other rankings at the router's quotas: Dice / HA", SELECTORS, moving + newer, selector)
    beside(
        "HA of the router with fewer calibration cases (ours: whole patients, two volumes each)",
        SENSITIVITY,
        moving,
        sensitivity,
    )
    if "eata-chosen" in ours:
        print_table(
            "The region gate, certified for its surrogate (EATA 2e-3, cases with regions, as in the paper)",
            ("paper: risk on evaluation", "our bound", "our risk on evaluation", "HA really deployed there"),
            [(f"alpha {alpha}", said, *gate(out, alpha)) for alpha, said in SURROGATE.items()],
            first="",
        )
    print_table(
        "Other objectives: rho(delta), rho(regions), V1, V2, V3, share of the cut that random makes",
        ("paper", "ours"),
        [(arm, said, objective(ours[arm]) if arm in ours else "not run") for arm, said in OBJECTIVES.items()],
        first="",
    )


if __name__ == "__main__":
    main()
