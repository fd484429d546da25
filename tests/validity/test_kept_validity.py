"""The risk among the kept cases of a batch: at most alpha on average, in fifty worlds, for losses of both kinds."""

from __future__ import annotations

import numpy as np
import pytest
from worlds.cohorts import synthetic_archive

from casewise.judge.calibration.fit import calibrate
from casewise.judge.certificates.certify_router import Promise
from casewise.judge.certificates.kept import by_patient, certify_kept, selected


def risk_among_kept(world: int, repetitions: int, *, binary: bool, naive: bool = False) -> tuple[float, float, float]:
    """(mean risk among the kept, its standard error, share kept) for one world: how harm grows with the score."""
    rng = np.random.default_rng(world)
    slope, base = rng.uniform(0.0, 0.8), rng.uniform(0.0, 0.2)
    n, m = int(rng.integers(15, 80)), int(rng.integers(5, 60))
    severity = rng.uniform(0.2, 1.0)
    ties = world % 3 == 0
    risks, shares = [], []
    for run in range(repetitions):
        u = rng.random(n + m)
        u = np.round(u, 1) if ties else u
        harmed = rng.random(n + m) < base + slope * u
        loss = harmed * (1.0 if binary else rng.beta(1, 2, n + m) * severity)
        if naive:  # the largest cut whose average over ALL calibration cases is at most alpha
            cuts = np.unique(u[:n])
            average = (loss[:n, None] * (u[:n, None] <= cuts)).sum(axis=0) / n
            safe = cuts[average <= ALPHA]
            last = safe[-1] if len(safe) else None
        else:
            last = selected(u[:n], loss[:n], u[n:], ALPHA, seed=run)
        kept = u[n:] <= last if last is not None else np.zeros(m, bool)
        risks.append(loss[n:][kept].mean() if kept.any() else 0.0)
        shares.append(kept.mean())
    return float(np.mean(risks)), float(np.std(risks) / np.sqrt(repetitions)), float(np.mean(shares))


ALPHA = 0.2


@pytest.mark.parametrize("binary", [True, False])
def test_the_kept_are_harmed_as_seldom_as_promised(binary):
    for world in range(8):
        risk, error, _ = risk_among_kept(world, 150, binary=binary)
        assert risk <= ALPHA + 3 * error


@pytest.mark.slow
@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("world", range(50))
def test_in_fifty_worlds(world, binary):
    risk, error, _ = risk_among_kept(world, 2000, binary=binary)
    assert risk <= ALPHA + 3 * error


def test_an_average_over_all_is_no_promise_about_the_kept():
    broken = [risk_among_kept(world, 100, binary=True, naive=True) for world in range(10)]
    assert sum(risk > ALPHA + 3 * error for risk, error, _ in broken) >= 2


def test_patients_are_kept_whole():
    assert by_patient(np.array([1.0, 3.0, 2.0]), ["a", "a", "b"], np.max).tolist() == [3.0, 2.0]


def test_a_batch_is_certified_and_its_policy_keeps_no_more(tmp_path):
    archive = synthetic_archive(tmp_path / "a", cases=80, harmful=0.3, per_cluster=1)
    batch = synthetic_archive(
        tmp_path / "b", cases=30, harmful=0.3, per_cluster=1, prefix="new", labelled=False, seed=5
    )
    policy = calibrate(archive, "cardiac")
    certificate, certified = certify_kept(archive, policy, Promise(("ha",), (0.3,)), batch, force=True)
    assert certificate.kind == "T9"
    assert "Among the" in certificate.statement
    assert f"of these {len(batch.ids)} deployed patients" in certificate.statement
    assert certified.options["cut_high"] <= policy.options["cut_high"]
