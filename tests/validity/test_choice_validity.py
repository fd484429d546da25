"""Certificates for what is chosen among candidates: the bound is corrected for the choice of a design and for flags.

Worlds have ties in the size of the edit, patients with two cases that are alike, and few patients.
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from worlds.candidates import views_archive

from casewise.core.errors import BadInput, Overlap
from casewise.core.records import Policy
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.calibration.designs import DESIGNS
from casewise.judge.calibration.quality import fit_quality
from casewise.judge.certificates.certify_designs import (
    DesignEvidence,
    best_certified,
    certify_default,
    certify_designs,
    halves_of,
)
from casewise.judge.certificates.certify_router import Promise, certify_router, flagged_share
from casewise.judge.certificates.evidence import Evidence
from casewise.judge.certificates.risk_control import share_bound
from casewise.judge.certificates.selective_risk import certify_kept, kept_scores
from casewise.judge.ledger import LEDGER
from casewise.judge.policy import controller_of

ALPHA, DELTA, ALL = 0.3, 0.1, 6  # designs
KEEPING = Policy("design", "consensus", {"cut_high": np.inf}, 1)


def world(rng, patients):
    """Size of the edit and loss of two cases per patient under every design: (case,), (case, design)."""
    patient = np.repeat(rng.random(patients), 2)
    size = np.round(0.7 * patient + 0.3 * rng.random(2 * patients), 1)
    chance = np.repeat(0.05 + 0.56 * size[:, None], ALL, axis=1)  # kept whole, each design harms 0.33: too many
    return size, (rng.random(chance.shape) < chance).astype(float)


def true_risk(design, cut):
    size, loss = world(np.random.default_rng(99), 20_000)
    return float((loss[:, design] * (size < cut)).mean())


def chosen_by(rng, patients, *, naive):
    """(design, cut) of the best gain among what is certified; naively, among what looks safe."""
    size, loss = world(rng, patients)
    names = tuple(str(k) for k in range(2 * patients))
    clusters = tuple(str(k // 2) for k in range(2 * patients))
    gain = 0.05 - 0.1 * loss
    if naive:
        cuts = np.append(np.unique(size), np.inf)
        risks = {(d, c): (loss[:, d] * (size < c)).mean() for d in range(ALL) for c in cuts}
        safe = [at for at, risk in risks.items() if risk <= ALPHA]
        return max(safe, key=lambda at: (gain[:, at[0]] * (size < at[1])).sum() + at[1] * 1e-3)
    grid = []
    for design in range(ALL):
        own = {"harmed": loss[:, design], "gain": gain[:, design]}
        grid.append(DesignEvidence(KEEPING, Evidence(names, clusters, size, own, own, own)))
    found = best_certified(grid, Promise(("harmed",), (ALPHA,), DELTA), "hoeffding-bentkus")
    return None if found is None else (grid.index(found[0]), found[1])


def violated(patients, repetitions, *, naive=False):
    """(share of repetitions whose true risk is above alpha, share that certify something)."""
    known: dict[tuple[int, float], float] = {}
    broken = some = 0
    for seed in range(repetitions):
        at = chosen_by(np.random.default_rng([patients, seed]), patients, naive=naive)
        if at is not None:
            some += 1
            known[at] = known[at] if at in known else true_risk(*at)
            broken += known[at] > ALPHA
    return broken / repetitions, some / repetitions


def allowed(repetitions):
    return DELTA + 3 * np.sqrt(DELTA * (1 - DELTA) / repetitions)


def test_the_choice_of_a_design_is_corrected_for():
    share, some = violated(60, 40)
    assert share <= allowed(40)
    assert some > 0.5
    assert violated(60, 40, naive=True)[0] > allowed(40)  # the best of what looks safe is not


@pytest.mark.slow
@pytest.mark.parametrize("patients", [12, 25, 60, 150])
def test_the_choice_of_a_design_is_corrected_for_everywhere(patients):
    assert violated(patients, 2000)[0] <= allowed(2000)


def missed(patients, per_patient, true, repetitions):
    """Share of repetitions whose bound on the flagged lies below the truth; patients differ."""
    rng, below = np.random.default_rng([patients, per_patient]), 0
    for _ in range(repetitions):
        chance = rng.beta(2 * true, 2 * (1 - true), patients) if per_patient > 1 else np.full(patients, true)
        rows = rng.binomial(per_patient, chance)[:, None] / per_patient
        below += share_bound(rows, 1 - DELTA, binary=per_patient == 1) < true
    return below / repetitions


@pytest.mark.parametrize(("patients", "per_patient"), [(10, 1), (20, 3)])
def test_flags_are_as_few_as_promised(patients, per_patient):
    assert missed(patients, per_patient, 0.2, 100) <= allowed(100)


@pytest.mark.slow
@pytest.mark.parametrize("true", [0.02, 0.1, 0.25, 0.6])
@pytest.mark.parametrize(("patients", "per_patient"), [(6, 1), (10, 1), (40, 1), (8, 4), (20, 2), (60, 5)])
def test_flags_are_as_few_as_promised_everywhere(patients, per_patient, true):
    assert missed(patients, per_patient, true, 2000) <= allowed(2000)


def below_its_bound(patients, per_patient, carries, repetitions, level=0.8, few_poor=False):
    """How often the worst mask of a new patient's case lies below its lower bound, whichever mask is deployed.

    Agreement has ties, patients differ, and each case has three masks, of which a policy may deploy any.
    """
    below = []
    for seed in range(repetitions):
        rng = np.random.default_rng([patients, per_patient, seed])
        of = np.repeat(np.arange(patients + 1), per_patient)
        good = rng.beta(40, 2, patients + 1) if few_poor else rng.beta(8, 2, patients + 1)
        own = np.where(few_poor & (rng.random(patients + 1) < 0.05), 0.3, good)[of][:, None]
        metric = np.clip(own + rng.normal(0, 0.08, (len(of), 3)), 0, 1)
        said = own + rng.normal(0, 0.05, (len(of), 3)) if carries else rng.beta(8, 2, (len(of), 3))
        agreement = np.clip(np.round(said, 1), 0, 1)
        other = rng.normal(0, 0.05, (len(of), 3))  # a second signal, as good as the first one
        signals = {"agreement": agreement, "weighted_agreement": np.clip(said + other, 0, 1)}
        old, worst = of < patients, metric.argmin(axis=1)
        at = np.arange(len(of))
        fit = fit_quality(
            {name: values[at, worst][old] for name, values in signals.items()},
            metric[at, worst][old],
            of[old].tolist(),
            level=level,
            every=({name: values[old] for name, values in signals.items()}, metric[old]),
        )
        shown = signals[fit.quality.signal or "agreement"][~old]
        bounds = np.array([[fit.quality.of(value)[1] for value in row] for row in shown])
        below.append(float((metric[~old] < bounds).any(axis=1).mean()))
    return float(np.mean(below)), 3 * np.sqrt(level * (1 - level) / repetitions)


@pytest.mark.parametrize("few_poor", [False, True])
def test_a_lower_bound_holds_whichever_mask_is_deployed(few_poor):
    share, margin = below_its_bound(9, 2, True, 60, few_poor=few_poor)
    assert share <= 0.2 + margin


@pytest.mark.slow
@pytest.mark.parametrize("carries", [True, False])
@pytest.mark.parametrize("few_poor", [False, True])
@pytest.mark.parametrize(("patients", "per_patient"), [(4, 1), (9, 2), (30, 3)])
def test_a_lower_bound_holds_everywhere(patients, per_patient, carries, few_poor):
    share, margin = below_its_bound(patients, per_patient, carries, 1000, few_poor=few_poor)
    assert share <= 0.2 + margin


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return views_archive(tmp_path_factory.mktemp("choice") / "a", cases=44, per_cluster=1)


@pytest.fixture
def archive(recorded):
    """The archive without the looks of other tests."""
    (recorded.path / LEDGER).unlink(missing_ok=True)
    return recorded


def test_all_designs_are_fitted_on_one_half_and_certified_on_the_other(archive, tmp_path):
    asked = Promise(("worse-voxels",), (0.6,), 0.2)
    certificate, certified = certify_default(archive, asked)
    assert certificate.feasible
    assert certificate.details["designs"] == [name for name in DESIGNS if name != "m0"]
    assert certificate.cases == 22
    assert "fitted on 22 cases and tested on 22 others" in certificate.advice
    assert set(certified.calibration_cases) == set(archive.ids)  # the policy was fitted on both halves
    fit, test = halves_of(archive)
    flagged = [calibrate(fit, name, flag_below=0.3, confidence=0.8) for name in ("consensus", "medoid")]
    certificate, _ = certify_designs(test, flagged, asked, halved=True)
    assert "are flagged for a person" in certificate.statement
    assert "With probability at least 0.8, at most" in certificate.statement
    with pytest.raises(BadInput, match="the choice must be certified, too: add --method ltt"):
        certify_default(archive, Promise(("ha",), (0.5,)))


def test_what_labels_chose_is_not_certified_with_the_same_labels(archive):
    for design in ("default", "choose"):
        made = calibrate(archive, design, allowed_hurt=1.0)
        with pytest.raises(Overlap):
            certify_router(archive, made, Promise(("ha",), (0.5,)))


def test_flags_fitted_on_the_same_patients_are_not_promised(archive):
    made = calibrate(archive, "consensus", flag_below=0.3, confidence=0.8)
    certificate, _ = certify_router(archive, made, Promise(("worse-voxels",), (0.7,)))
    said = "The share of flagged cases is not promised, because the flag was fitted on these patients."
    assert said in certificate.statement
    share, most = flagged_share(archive, made, delta=0.1)
    assert share < most


def test_harm_among_the_kept_of_a_policy_that_chooses(archive, tmp_path):
    batch = views_archive(tmp_path / "batch", cases=20, per_cluster=1, labelled=False, prefix="new", seed=7)
    made = calibrate(archive, "consensus")
    certificate, certified = certify_kept(archive, made, Promise(("worse-voxels",), (0.6,)), batch)
    assert certificate.kind == "T9"
    assert certificate.details["kept_in_batch"] > 0
    held = [case for case in batch.ids if not _decided(batch, certified, case).rolled_back]
    assert len(held) == certificate.details["kept_in_batch"]


def test_what_a_policy_leaves_at_m0_is_not_among_the_kept(archive):
    """Else cases without any edit would dilute the harm of the others."""
    made = calibrate(archive, "consensus-where-low")
    low = Policy(**{**vars(made), "options": {**made.options, "threshold": 0.8}})
    scores = kept_scores(archive, low, archive.ids)
    stayed = [_decided(archive, low, case).rolled_back for case in archive.ids]
    assert [score == np.inf for score in scores] == stayed
    assert 0 < sum(stayed) < len(stayed)


def _decided(archive, policy, case):
    from casewise.judge.decide import replay_case

    return replay_case(archive, controller_of(policy), case)


def test_the_command_line_passes_every_option_on(archive, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    import casewise.judge.certificates.certify_designs as module
    from casewise.cli import app

    seen = {}

    def spy(given, asked, **options):
        seen.update(options, asked=asked, cases=len(given.ids))
        return certify_router(archive, calibrate(archive, "consensus"), Promise(("worse-voxels",), (0.7,)))

    for place in (module, importlib.import_module("casewise.judge.certificates.certify")):
        monkeypatch.setattr(place, "certify_default", spy, raising=False)
    said = ["--policy", "default", "--method", "ltt", "--loss", "harmed", "--margin", "0.01", "--alpha", "0.4"]
    said += ["--delta", "0.2", "--set", "consensus=6", "--out", str(tmp_path / "o")]
    result = CliRunner().invoke(app, ["certify", str(archive.path), *said])
    assert result.exit_code == 0, result.output
    assert seen["asked"] == Promise(("harmed",), (0.4,), 0.2, margin=0.01)
    assert {name: seen[name] for name in ("consensus", "force", "cases")} == {
        "consensus": "6", "force": False, "cases": 44,
    }  # fmt: skip
