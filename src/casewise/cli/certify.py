"""``casewise certify``: a bound on the harm that is really deployed; ``casewise plan``: how many labels that needs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from casewise.cli.printing import AS_JSON, answer
from casewise.core.brief import counted

if TYPE_CHECKING:
    from casewise.core.records import Policy
    from casewise.judge.certificates.certificate import Certificate

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from casewise.judge.certificates.risk_control import Plan


app = typer.Typer()

PAGE, CERTIFIED = "certificate.html", "policy-certified.json"
MOST_PLANNED = 10**12  # cases; the binomial distribution is exact up to here, and nobody has more


@app.command()
def certify(
    archive: Path = typer.Argument(help="Labelled calibration archive."),
    policy: list[str] = typer.Option(
        [],
        help="Policy file, archive folder, 'region-gate', or 'default': fit all designs on half of the patients "
        "or sequences and certify the best on the others. Several are certified together. Default: the archive's.",
    ),
    loss: list[str] = typer.Option(
        ["ha"], help="ha, harmed, dice, worse-voxels or surrogate; several with --method ltt."
    ),
    margin: float = typer.Option(0.0, help="harmed: only cases that lose more of the metric than this, e.g. 0.01."),
    alpha: list[float] = typer.Option([0.1], help="Promised risk; one for each loss."),
    delta: float = typer.Option(0.1, help="Chance that the promise may fail (ltt)."),
    method: str = typer.Option("crc", help="crc, ltt or envelope; inflated with --experimental."),
    p_value: str = typer.Option("auto", help="auto, betting, hoeffding-bentkus or binomial (ltt)."),
    grid: str | None = typer.Option(None, help="Search actions too (ltt): chains, holm or pareto."),
    low_mid: str = typer.Option("envelope", help="envelope, or fixed if the low/mid cut comes from other cases."),
    within: str = typer.Option("mean", help="Cases of one patient or sequence: their mean or their max."),
    population: str = typer.Option("all", help="Region gate: all cases, or only scored ones."),
    threshold: list[float] = typer.Option([], help="Fixed gate thresholds for --method inflated."),
    evaluation: Path | None = typer.Option(None, help="Labelled archive of other cases for the reliability diagram."),
    split: str | None = typer.Option(None, help="Use the archive's cases of this split; default: calibration."),
    experimental: bool = typer.Option(False, "--experimental", help="Allow inflated CRC."),
    among_kept: Path | None = typer.Option(
        None, help="Archive of the batch to deploy (no labels): bound the risk among the cases that it keeps."
    ),
    flag_below: float = typer.Option(None, help="--policy default: ask a person where the metric may lie below this."),
    at: float = typer.Option(0.9, help="--flag-below: chance that the lower bound of the metric holds."),
    consensus: str = typer.Option(None, help="--policy default: which candidate is the consensus of the others."),
    allowed_hurt: float = typer.Option(0.1, help="--policy default: share that the anchor of choose may hurt."),
    force: bool = typer.Option(False, "--force", help="Certify a policy that calibration called NO-GO."),
    out: Path | None = typer.Option(None, help="Folder for certificate.json, .html and the certified policy."),
    ladder: list[str] = typer.Option(
        [],
        help="Which ladder, where the archive holds several; repeat to read several together; default: the policy's.",
    ),
    as_json: bool = AS_JSON,
) -> None:
    """A bound on the harm that is really deployed, refused where it does not hold."""
    from casewise.cli.calibrate import in_view
    from casewise.core.errors import BadInput
    from casewise.core.records import CALIBRATION
    from casewise.judge.certificates.certify_gate import certify_gate
    from casewise.judge.certificates.certify_router import Promise, certify_router
    from casewise.judge.certificates.grid import certify_default, certify_designs, certify_grid
    from casewise.judge.certificates.kept import certify_kept
    from casewise.judge.controllers.about import about
    from casewise.judge.deciding import has_consensus
    from casewise.judge.policy import controller_kind

    place = out or archive
    _check_place(place)
    if method not in ("crc", "ltt", "envelope", "inflated"):
        raise BadInput(f"a method is crc, ltt, envelope or inflated, got {method!r}")
    if method == "inflated" and not experimental:
        raise BadInput("inflated CRC is experimental; add --experimental to use it")
    gate = method in ("envelope", "inflated") or loss == ["surrogate"]
    designs = [_policy(one, archive, gate=gate) for one in policy] or [_policy(None, archive, gate=gate)]
    chosen = designs[0]
    named = ladder or [*chosen.ladders] or ([chosen.ladder] if chosen.ladder else [])
    opened = in_view(archive, named)
    calibration = opened.marked(CALIBRATION) if split is None else opened.select(split=split)
    judged = None if evaluation is None else in_view(evaluation, named)
    if about(controller_kind(chosen)).gates:
        certificate, certified = certify_gate(
            calibration, chosen, loss=_gate_loss(loss, method), alpha=_one(alpha), population=population, within=within,
            thresholds=threshold, evaluation=judged, force=force,
        )  # fmt: skip
    else:
        alphas = tuple(alpha) if len(alpha) == len(loss) else tuple(alpha) * len(loss)
        asked = Promise(tuple(loss), alphas, delta if method == "ltt" else None, p_value, within, low_mid, margin)
        if among_kept is not None:
            batch = in_view(among_kept, named)
            certificate, certified = certify_kept(calibration, chosen, asked, batch, force=force)
        elif policy == ["default"] and chosen.binding is None and has_consensus(calibration, consensus):
            certificate, certified = certify_default(
                calibration,
                asked,
                force=force,
                flag_below=flag_below,
                at=at,
                consensus=consensus,
                allowed_hurt=allowed_hurt,
            )
        elif len(designs) > 1:
            certificate, certified = certify_designs(calibration, designs, asked, force=force)
        elif grid is not None:
            certificate, certified = certify_grid(calibration, chosen, asked, family=grid, force=force)
        else:
            certificate, certified = certify_router(calibration, chosen, asked, evaluation=judged, force=force)
    files = _written(place, certificate, certified)
    words = "\n".join([*(f"wrote {file}" for file in files), _summary(certificate)])
    answer(words, {"files": list(files), **asdict(certificate)}, as_json=as_json)
    raise typer.Exit(0 if certificate.feasible else 1)


def _policy(given: str | None, archive: Path, *, gate: bool) -> Policy:
    from casewise.judge.policy import READY, read_policy

    if given is None:
        return READY["region-gate"] if gate else read_policy(archive)
    return READY[given] if given in READY and not Path(given).exists() else read_policy(given)


def _gate_loss(loss: list[str], method: str) -> str:
    from casewise.core.errors import BadInput

    if loss == ["surrogate"] and method == "crc":
        return "surrogate"
    if loss == ["ha"] and method in ("envelope", "inflated"):
        return "envelope" if method == "envelope" else "deployed"
    raise BadInput(
        f"a region gate is certified by --loss surrogate (method crc) or --loss ha with --method envelope, "
        f"got loss {', '.join(loss)} and method {method}"
    )


def _one(alpha: list[float]) -> float:
    from casewise.core.errors import BadInput

    if len(alpha) != 1:
        raise BadInput(f"a region gate is certified for one alpha, got {alpha}")
    return alpha[0]


def _check_place(folder: Path) -> None:
    """Refuse to replace files that casewise did not write; an earlier certificate is replaced."""
    from casewise.core.errors import BadInput, CasewiseError, Refused
    from casewise.judge.certificates.certificate import CERTIFICATE, read_certificate

    there = [name for name in (CERTIFICATE, PAGE, CERTIFIED) if (folder / name).exists()]
    try:
        if there:
            read_certificate(folder / CERTIFICATE)
    except Refused:
        return  # one of casewise that a hand changed
    except CasewiseError:
        raise BadInput(
            f"{folder} holds {', '.join(there)} and no certificate of casewise, so this run would replace files of "
            "somebody else; choose another folder with --out"
        ) from None


def _written(folder: Path, certificate: Certificate, policy: Policy) -> tuple[Path, ...]:
    from casewise.judge.certificates.certificate import write_certificate
    from casewise.judge.policy import write_policy
    from casewise.report.certificate_page import certificate_page

    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PAGE
    page.write_text(certificate_page(certificate), encoding="utf-8")
    return write_certificate(folder, certificate), page, write_policy(folder / CERTIFIED, policy)


def _summary(certificate: Certificate) -> str:
    from casewise.judge.outcomes import judged_sentence

    c = certificate
    before, after = c.deployed["before"], c.deployed["certified"]
    numbers = "; ".join(f"{name} {before[name]:.4f} -> {after[name]:.4f}" for name in after if name in before)
    said = [c.advice] if c.cut is None else [c.statement, c.advice]
    said.append(f"population: {c.population}")
    if c.bound is not None:
        said.append(f"{'bound' if c.delta is None else 'p-value'} {c.bound:.4f} with n = {c.units}, kept {c.kept:.0%}")
    said.append(f"deployed on the calibration cases, before -> certified: {numbers}")
    if "judged" in before:
        said.append(judged_sentence(before["judged"]))
    return "\n".join([*said, *(f"! {warning}" for warning in c.warnings)])


@app.command()
def plan(
    alpha: float = typer.Option(0.1, help="Promised risk: at most this much harm."),
    delta: float = typer.Option(0.1, help="Chance that a high-probability promise may fail."),
    cases: int | None = typer.Option(
        None,
        "-n",
        "--cases",
        min=1,
        max=MOST_PLANNED,
        help="Labelled cases at hand; patients or sequences where these have several.",
    ),
    as_json: bool = AS_JSON,
) -> None:
    """How many labelled cases a certificate needs, and what the ones you have can buy."""
    from casewise.judge.certificates import risk_control as planning

    found = planning.plan(alpha, delta, cases)
    words = [
        f"To promise a risk of at most {alpha:g} you need at least",
        f"  {found.crc_cases:4d} labelled cases in expectation (CRC)",
        f"  {found.ltt_cases:4d} labelled cases with probability {1 - delta:g} (LTT), if none of them shows any loss",
        *(["\n" + _reach(found)] if found.cases is not None else []),
        f"\n  alpha   CRC   LTT (delta {delta:g})   LTT (delta 0.05)",
    ]
    for level in planning.PLANNED:
        row = (planning.plan(level, delta), planning.plan(level, 0.05))
        words.append(f"  {level:5.2f}  {row[0].crc_cases:4d}  {row[0].ltt_cases:15d}  {row[1].ltt_cases:16d}")
    words.append("\nA case here is an independent one: count patients or sequences, not scans or frames.")
    answer("\n".join(words), asdict(found), as_json=as_json)


def _reach(found: Plan) -> str:
    lines = [f"Your {counted(found.cases or 0, 'case')} can promise"]
    lines.append(f"  alpha >= {found.crc_alpha:.3f} in expectation (CRC)")
    lines.append(f"  alpha >= {found.ltt_alpha:.3f} with probability {1 - found.delta:g} (LTT), if none shows any loss")
    crc = "infeasible" if found.crc_budget is None else f"the kept cases may lose {found.crc_budget:.2f} in total"
    ltt = "infeasible" if found.ltt_budget is None else f"{found.ltt_budget} of {found.cases} kept cases may be harmed"
    return "\n".join([*lines, f"For alpha = {found.alpha:g}: CRC: {crc}; LTT: {ltt}."])
