"""How many patients a certificate needs, which requests count as attempts, and what is written for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from worlds.candidates import views_archive
from worlds.cohorts import synthetic_archive

from casewise.archive.store import Archive, open_archive
from casewise.cli import app
from casewise.core.durable import write_json
from casewise.core.errors import BadInput, CasewiseError, Overlap
from casewise.core.records import Policy
from casewise.data.splits import count_patients
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.certificates.certificate import CERTIFIED_POLICY
from casewise.judge.certificates.certify import Certified, certify
from casewise.judge.certificates.evidence import LossTable
from casewise.judge.certificates.risk_control import conformal_setting, p_values, patients_needed, plan
from casewise.judge.ledger import CERTIFICATION, LEDGER
from casewise.judge.monitors.watch import calibration_numbers
from casewise.judge.outcomes import outcomes
from casewise.judge.policy import write_policy
from casewise.study.statistics.resample import cluster_numbers

ALPHAS = (0.01, 0.02, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 0.9)


def attempts(archive: Archive) -> int:
    log = archive.path / LEDGER
    return log.read_text().count(f'"{CERTIFICATION}"') if log.is_file() else 0


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_number_that_is_needed_is_the_smallest_that_certifies(alpha: float) -> None:
    def conformal(n: int) -> bool:
        return conformal_setting(LossTable(np.zeros((n, 1)), np.array([np.inf]), np.ones(1)), alpha) is not None

    def tested(n: int, level: float, kind: str) -> bool:
        return bool(p_values(np.zeros((n, 1)), alpha, kind=kind, delta=level, orders=25)[0] <= level + 1e-12)

    found = {patients_needed(alpha): conformal}
    assert all(certifies(n) and (n == 1 or not certifies(n - 1)) for n, certifies in found.items())
    for delta in (0.01, 0.05, 0.1, 0.3):
        for designs in (1, 2, 6):
            for kind in ("binomial", "betting"):
                level = delta / designs
                n = patients_needed(alpha, delta=delta, binary=kind == "binomial", designs=designs)
                assert all(tested(more, level, kind) for more in range(n, n + 4))
                assert n == 1 or not tested(n - 1, level, kind)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    place = tmp_path_factory.mktemp("router") / "fit"
    return calibrate(synthetic_archive(place, cases=24, harmful=0.3, prefix="fit", groups=()), "cardiac")


@pytest.mark.parametrize("scans", [1, 2])
@pytest.mark.parametrize("within", ["mean", "max"])
@pytest.mark.parametrize("loss", ["ha", "harmed"])
def test_certify_accepts_the_planned_number_and_names_it_below(
    loss: str, within: str, scans: int, router: Policy, tmp_path: Path
) -> None:
    planned = plan(0.3)
    binary = loss == "harmed" and (scans == 1 or within == "max")
    for method, needed in (("crc", planned.crc_cases), ("ltt", planned.ltt_cases if binary else planned.betting_cases)):
        for patients in (needed - 1, needed):
            archive = synthetic_archive(
                tmp_path / f"{method}{patients}", cases=scans * patients, per_cluster=scans, harmful=0.0,
                prefix=f"{method}{patients}", groups=(),
            )  # fmt: skip
            found, _ = certify(archive, router, loss=loss, alpha=0.3, method=method, within=within, force=True)
            assert (found.feasible, found.needed) == (patients == needed, needed)
            assert found.feasible or f"which needs at least {needed}. " in found.advice


def test_default_accepts_the_planned_number_and_names_it_below(tmp_path: Path) -> None:
    needed = plan(0.4, 0.2).default_cases
    for patients in (needed - 1, needed):
        archive = views_archive(tmp_path / str(patients), cases=patients, per_cluster=1, helpful=True)
        found, _ = certify(archive, "default", loss="harmed", alpha=0.4, delta=0.2, method="ltt")
        assert (found.feasible, found.needed) == (patients == needed, needed)
        assert found.feasible or f"needs at least {needed}, half of them to fit the designs" in found.advice


def test_several_policies_need_the_number_that_is_printed_for_them(tmp_path: Path) -> None:
    fit = views_archive(tmp_path / "fit", cases=12, prefix="fit", helpful=True)
    made = [calibrate(fit, name) for name in ("consensus", "medoid")]
    needed = plan(0.3, 0.1, designs=2).together_cases
    assert needed is not None
    for patients in (needed - 1, needed):
        archive = views_archive(tmp_path / str(patients), cases=patients, per_cluster=1, helpful=True)
        found, _ = certify(archive, made, loss="harmed", alpha=0.3, method="ltt", force=True)
        assert (found.feasible, found.needed) == (patients == needed, needed)
    words = ("certify", "--sample-size", "--alpha", "0.4", "--alpha", "0.3", "--policy", "a", "--policy", "b")
    said = CliRunner().invoke(app, words).output
    assert f"{needed} the same, to choose among your 2 policies" in said
    assert "a risk of at most 0.3" in said  # the smaller of the two levels needs more


def test_a_batch_of_which_few_cases_are_kept_needs_more_patients(router: Policy, tmp_path: Path) -> None:
    """No labelled case is harmed, so the harm cannot be the reason that is printed."""
    batch = synthetic_archive(tmp_path / "batch", cases=30, per_cluster=1, harmful=0.6, prefix="new", labelled=False)

    def kept(patients: int) -> Certified:
        place = tmp_path / str(patients)
        labelled = synthetic_archive(place, cases=patients, per_cluster=1, harmful=0.0, prefix=f"n{patients}")
        return certify(labelled, router, loss="harmed", alpha=0.1, among_kept=batch, force=True)

    few = kept(12).certificate
    assert not few.feasible
    assert few.needed > patients_needed(0.1)
    assert f"which needs at least {few.needed}. " in few.advice
    assert kept(few.needed).certificate.feasible
    assert not kept(few.needed - 1).certificate.feasible


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"method": "ltt", "delta": 2.0}, BadInput, "delta must lie strictly between 0 and 1"),
        ({"within": "median"}, BadInput, "joined by 'mean' or 'max'"),
        ({"alpha": 1.5}, BadInput, "alpha must lie between 0 and 1"),
        ({"method": "envelope"}, BadInput, "--method envelope works only with policy region-gate, got 'cardiac'"),
        ({"population": "scored"}, BadInput, "--set population works only with policy region-gate"),
        ({"evaluation": "own"}, Overlap, "share 12 cases"),
        ({"among_kept": "own"}, Overlap, "share 12 cases"),
        ({"policy": "region-gate", "loss": "surrogate", "population": "odd"}, BadInput, "population of a gate"),
        ({"policy": "region-gate", "loss": "surrogate", "within": "median"}, BadInput, "joined by 'mean' or 'max'"),
        ({"policy": "default"}, BadInput, "no candidate is a consensus .* run casewise calibrate first"),
    ],
)
def test_a_refused_question_is_no_attempt(
    options: dict[str, Any], error: type[CasewiseError], says: str, router: Policy, tmp_path: Path
) -> None:
    archive = synthetic_archive(tmp_path / "a", cases=12, harmful=0.3, prefix="own")
    asked = {"policy": router, "loss": "ha", "alpha": 0.3} | options
    asked |= {name: archive for name in ("evaluation", "among_kept") if name in options}
    with pytest.raises(error, match=says):
        certify(archive, **asked)
    assert attempts(archive) == 0
    certify(archive, router, loss="ha", alpha=0.3)
    certify(archive, router, loss="ha", alpha=0.3)
    assert attempts(archive) == 1  # once per question


def test_a_certificate_that_would_keep_nothing_is_none_and_an_earlier_policy_goes(tmp_path: Path) -> None:
    """Every case is harmed: the only cut that certifies keeps no new mask, and that is a promise about M0."""
    archive = synthetic_archive(tmp_path / "a", cases=30, harmful=1.0, per_cluster=1)
    write_policy(archive.path, calibrate(archive, "cardiac"))

    def run(loss: str, alpha: float) -> tuple[int, str]:
        words = ["certify", str(archive.path), "--loss", loss, "--alpha", str(alpha), "--set", "force=true"]
        done = CliRunner().invoke(app, words)
        return done.exit_code, done.output

    assert run("dice", 0.5)[0] == 0
    assert (archive.path / CERTIFIED_POLICY).is_file()
    code, said = run("harmed", 0.05)
    assert code == 1
    assert "are enough for alpha >= 0.033, but they show too much harm for alpha = 0.05" in said
    assert not (archive.path / CERTIFIED_POLICY).exists()


def test_calibrate_certify_study_and_monitor_count_the_same_patients(tmp_path: Path) -> None:
    """Some patients are not named, and one case without a patient is called like the patient of two others."""
    made = views_archive(tmp_path / "a", cases=12, per_cluster=2, helpful=True)
    named = {case: entry.cluster for case, entry in made.entries.items()}
    named |= {"case-0002": None, "case-0003": None, "case-0004": "case-0003", "case-0005": "case-0003"}
    for case, cluster in named.items():
        file = made.path / "cases" / case / "entry.json"
        write_json(file, {**made.entry(case).as_dict(), "cluster": cluster}, indent=None)
    archive = open_archive(made.path).seal()
    policy = calibrate(archive, "consensus")
    patients = count_patients(archive.entries.values())
    assert patients == 6
    found, _ = certify(archive, policy, loss="harmed", alpha=0.5, force=True)
    table = outcomes(archive)
    counts = (policy.preflight["clusters"], found.units, len(calibration_numbers(archive, policy)["agreement"]))
    assert (*counts, len(set(cluster_numbers(table)))) == (patients,) * 4
