"""``casewise certify``: a bound on the harm of the deployed masks, and the number of labels that it needs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from casewise.cli.options import NnUNetStyle, grouped, setting
from casewise.cli.printing import AS_JSON, answer
from casewise.core.text import pluralize

if TYPE_CHECKING:
    from casewise.core.records import Policy
    from casewise.judge.certificates.certificate import Certificate
    from casewise.judge.certificates.risk_control import SampleSize

app = typer.Typer()

MOST_PLANNED = 10**12  # cases; the binomial distribution is exact up to here, and nobody has more


@app.command(cls=NnUNetStyle)
@grouped
def certify(
    archive: Path = typer.Argument(None, help="Archive of labelled calibration cases; not needed with --sample-size."),
    policy: list[str] = typer.Option(
        [],
        help="Policy file, archive folder, region-gate, or 'default': fit all designs on half of the patients and "
        "certify the best on the others. Repeat to certify several together. If not given: the archive's policy.",
    ),
    loss: list[str] = typer.Option(["ha"], help="Loss to bound: {losses} or surrogate; several with --method ltt."),
    margin: float = typer.Option(
        0.0, help="harmed: a case is harmed if its metric falls by more than this, such as 0.01."
    ),
    alpha: list[float] = typer.Option([0.1], help="Largest allowed risk; one for each loss."),
    delta: float = typer.Option(0.1, help="ltt: probability that the bound may fail."),
    method: str = typer.Option(
        "crc", help="Method of the bound: crc (mean risk), ltt (high probability) or envelope (region gate)."
    ),
    among_kept: Path | None = typer.Option(
        None, help="Archive of the new cases (no labels): bound the risk among those that are kept."
    ),
    out: Path | None = typer.Option(
        None, "-o", "--out", help="Folder for certificate.json, .html and the certified policy."
    ),
    ladder: list[str] = typer.Option(
        [], help="Method to use, if the archive has several; repeat for several; default: that of the policy."
    ),
    sample_size: bool = typer.Option(
        False, "--sample-size", help="Print how many labelled patients the bound needs; certify nothing."
    ),
    cases: int | None = setting(
        None, min=1, max=MOST_PLANNED, help="--sample-size: number of labelled patients that you have."
    ),
    low_mid: str = setting("envelope", help="envelope, or fixed if other cases fitted the cut between low and mid."),
    within: str = setting("mean", help="How cases of one patient are combined: mean or max."),
    population: str = setting("all", help="Region gate: all cases, or only scored ones (cases with a changed region)."),
    evaluation: Path | None = setting(None, help="Labelled archive of other cases for the reliability diagram."),
    split: str | None = setting(None, help="Use the archive's cases of this split; default: calibration."),
    consensus: str = setting(None, help="--policy default: name of the candidate that combines the others."),
    force: bool = setting(False, help="Certify a policy that calibration advised against (NO-GO)."),
    as_json: bool = AS_JSON,
) -> None:
    """Compute an upper bound on the harm of the masks that a policy deploys, and write a certificate.

    Example:

        casewise certify archive --loss harmed --alpha 0.1

    Losses: ha is the share of the changed area that became worse; harmed, the share of cases whose metric falls by more
    than --margin; dice, the mean fall of Dice; worse-voxels, the share of changed voxels that became wrong; surrogate
    (policy region-gate only), the accepted area that became worse, divided by the whole changed area.

    The command refuses where the bound would not be valid. --sample-size prints how many labelled patients a bound
    needs; with --set cases=N, the smallest risk that N patients can show. Exit code 1: nothing can be certified.
    """
    from casewise.core.errors import BadInput
    from casewise.judge.certificates import certify as certification

    if sample_size:
        _sample_size(min(alpha), delta, cases, len(policy), as_json=as_json)
        return
    if archive is None:
        raise BadInput("name the labelled calibration archive: casewise certify ARCHIVE (or use --sample-size)")
    place = out or archive
    _check_place(place)
    certificate, certified = certification.certify(
        archive, policy, loss=loss, alpha=alpha, delta=delta, method=method, margin=margin,
        low_mid=low_mid, within=within, population=population, evaluation=evaluation,
        split=split, among_kept=among_kept, consensus=consensus, force=force, ladders=ladder,
    )  # fmt: skip
    files = _written(place, certificate, certified)
    words = "\n".join([*(f"wrote {file}" for file in files), _summary(certificate)])
    answer(words, {"files": list(files), **asdict(certificate)}, as_json=as_json)
    raise typer.Exit(0 if certificate.feasible else 1)


def _check_place(folder: Path) -> None:
    """Refuse to replace files that casewise did not write; an earlier certificate is replaced."""
    from casewise.core.errors import BadInput, CasewiseError, Refused
    from casewise.judge.certificates.certificate import (
        CERTIFICATE,
        CERTIFICATE_PAGE,
        CERTIFIED_POLICY,
        read_certificate,
    )

    there = [name for name in (CERTIFICATE, CERTIFICATE_PAGE, CERTIFIED_POLICY) if (folder / name).exists()]
    try:
        if there:
            read_certificate(folder / CERTIFICATE)
    except Refused:
        return  # a file of casewise that somebody edited
    except CasewiseError:
        raise BadInput(
            f"{folder} has {', '.join(there)} that casewise did not write, and this run would replace them; "
            f"choose another folder with --out"
        ) from None


def _written(folder: Path, certificate: Certificate, policy: Policy) -> tuple[Path, ...]:
    from casewise.core.durable import sweep, write_durably
    from casewise.judge.certificates.certificate import CERTIFICATE_PAGE, CERTIFIED_POLICY, write_certificate
    from casewise.judge.policy import write_policy
    from casewise.report.certificate_page import certificate_page

    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    page, chosen = folder / CERTIFICATE_PAGE, folder / CERTIFIED_POLICY
    page.unlink(missing_ok=True)  # a certificate without a page is incomplete
    file = write_certificate(folder, certificate)  # first: the next run needs it to replace the other files
    if certificate.feasible:
        write_policy(chosen, policy)
    else:  # nothing is certified: a certified policy of an earlier run is removed
        chosen.unlink(missing_ok=True)
    write_durably(page, certificate_page(certificate).encode())
    return (file, page, chosen) if certificate.feasible else (file, page)


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


def _sample_size(alpha: float, delta: float, cases: int | None, designs: int, *, as_json: bool) -> None:
    """Print the number of labelled cases that a certificate needs, and the risks that the available ones can
    certify."""
    from casewise.judge.certificates import risk_control as planning

    found = planning.plan(alpha, delta, cases, designs)
    together = (
        f"  {found.together_cases or 0:4d} the same, to choose among your {designs} policies (--policy A --policy B)"
    )
    words = [
        f"To promise a risk of at most {alpha:g} you need at least this many labelled patients (not scans or frames):",
        f"  {found.crc_cases:4d} for the mean risk (--method crc), if none is harmed",
        f"  {found.ltt_cases:4d} with probability {1 - delta:g} (--method ltt, loss harmed, one case each or --set "
        "within=max), if none is",
        f"  {found.betting_cases:4d} the same for other losses, or with several cases each",
        *([together] if found.together_cases else []),
        f"  {found.default_cases:4d} with probability {1 - delta:g}, if the labels also choose the design "
        "(--policy default: one half fits, the other tests)",
        *(["\n" + _reach(found)] if found.cases is not None else []),
        f"\n  alpha   crc   ltt, harmed (delta {delta:g})   ltt, harmed (delta 0.05)",
    ]
    for level in planning.PLANNED:
        row = (planning.plan(level, delta), planning.plan(level, 0.05))
        words.append(f"  {level:5.2f}  {row[0].crc_cases:4d}  {row[0].ltt_cases:23d}  {row[1].ltt_cases:24d}")
    answer("\n".join(words), asdict(found), as_json=as_json)


def _reach(found: SampleSize) -> str:
    lines = [f"Your {pluralize(found.cases or 0, 'patient')} can promise"]
    lines.append(f"  alpha >= {found.crc_alpha:.3f} for the mean risk (--method crc), if none is harmed")
    lines.append(
        f"  alpha >= {found.ltt_alpha:.3f} with probability {1 - found.delta:g} (--method ltt, loss harmed), if none is"
    )
    crc = "not possible" if found.crc_budget is None else f"their losses may add up to {found.crc_budget:.2f}"
    ltt = "not possible" if found.ltt_budget is None else f"{found.ltt_budget} of {found.cases} may be harmed"
    return "\n".join([*lines, f"For alpha = {found.alpha:g}: crc: {crc}; ltt: {ltt}."])
