"""The risk among the kept cases of a batch: at most alpha on average, in fifty worlds, for losses of both kinds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from worlds.cohorts import synthetic_archive

from casewise.core.errors import BadInput
from casewise.core.records import Action, Decision, State
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.certificates.certificate import outside_promise
from casewise.judge.certificates.certify_router import Promise
from casewise.judge.certificates.evidence import cluster_rows
from casewise.judge.certificates.selective_risk import certify_kept, selected
from casewise.report.certificate_page import certificate_page


def risk_among_kept(
    world: int, repetitions: int, *, binary: bool, naive: bool = False, alpha: float = 0.2
) -> tuple[float, float, float]:
    """(mean risk among the kept, its standard error, share kept) for one world: how harm grows with the score.

    Ties in every third world; in every second one the router's own cut, fitted on the calibration scores, closes first.
    """
    rng = np.random.default_rng(world)
    slope, base = rng.uniform(0.0, 0.8), rng.uniform(0.0, 0.2)
    n, m = int(rng.integers(15, 80)), int(rng.integers(5, 60))
    severity = rng.uniform(0.2, 1.0)
    ties = world % 3 == 0
    risks, shares = [], []
    for _ in range(repetitions):
        u = rng.random(n + m)
        u = np.round(u, 1) if ties else u
        harmed = rng.random(n + m) < base + slope * u
        loss = harmed * (1.0 if binary else rng.beta(1, 2, n + m) * severity)
        if naive:  # the largest cut whose average over ALL calibration cases is at most alpha
            cuts = np.unique(u[:n])
            average = (loss[:n, None] * (u[:n, None] <= cuts)).sum(axis=0) / n
            safe = cuts[average <= alpha]
            last = safe[-1] if len(safe) else None
        else:
            own = float(np.percentile(u[:n], 66.67)) if world % 2 else np.inf
            last = selected(u[:n], loss[:n], u[n:], alpha, below=own, binary=binary)
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
@pytest.mark.parametrize(("binary", "alpha"), [(True, 0.2), (False, 0.2), (False, 0.1), (False, 0.05)])
@pytest.mark.parametrize("world", range(50))
def test_the_kept_are_harmed_as_seldom_as_promised_in_fifty_worlds(world, binary, alpha):
    risk, error, _ = risk_among_kept(world, 2000, binary=binary, alpha=alpha)
    assert risk <= alpha + 3 * error


def test_something_is_kept_of_losses_in_between():
    shares = [risk_among_kept(world, 40, binary=False, alpha=0.1)[2] for world in range(0, 20, 2)]
    assert np.mean(shares) > 0.5


def kept_by_e_values(s, losses, stream, alpha):
    """The rule again, patient by patient and loss by loss, from the formula: e-values, then e-BH."""
    n, m = len(s), len(stream)

    def kept_at(t):
        return sum(one <= t for one in stream)

    def lost_at(t):
        return sum(loss for one, loss in zip(s, losses, strict=True) if one <= t)

    every = sorted({*s, *stream})
    rooms = [alpha * (n + 1) * kept_at(t) / m - lost_at(t) for t in every]
    tried = [1.0, *(room for room in rooms if 0 < room < 1)]  # between two of these only the denominator grows
    found = []
    for score in stream:
        each = []
        for loss in tried:
            reached = [t for t, room in zip(every, rooms, strict=True) if t >= score and room >= loss - 1e-9]
            each.append((n + 1) / (loss + lost_at(reached[-1])) if reached else 0.0)
        found.append(min(each))
    for k in range(m, 0, -1):
        kept = [one >= m / (alpha * k) - 1e-9 for one in found]
        if sum(kept) >= k:
            return kept
    return [False] * m


def test_the_rule_is_e_values_and_e_bh():
    rng, kept_some = np.random.default_rng(4), 0
    for run in range(200):
        n, m = int(rng.integers(4, 30)), int(rng.integers(1, 15))
        u = rng.random(n + m).round(1 if run % 2 else 6)
        loss = (rng.random(n) < 0.4 * u[:n]) * rng.beta(1, 2, n)
        last = selected(u[:n], loss, u[n:], 0.15)
        expected = kept_by_e_values(u[:n].tolist(), loss.tolist(), u[n:].tolist(), 0.15)
        assert [last is not None and one <= last for one in u[n:]] == expected
        kept_some += any(expected)
    assert 40 < kept_some < 200


def test_losses_that_only_happen_to_be_whole_are_not_called_binary():
    with pytest.raises(BadInput, match="binary=True needs losses of 0 or 1"):
        selected([1, 2, 3], [0, 0.5, 1], [1], 0.4, binary=True)


def test_an_average_over_all_is_no_promise_about_the_kept():
    broken = [risk_among_kept(world, 100, binary=True, naive=True) for world in range(10)]
    assert sum(risk > ALPHA + 3 * error for risk, error, _ in broken) >= 2


def test_patients_are_kept_whole():
    assert cluster_rows(np.array([1.0, 3.0, 2.0]), ["a", "a", "b"], "max").tolist() == [3.0, 2.0]


def test_a_batch_is_certified_and_its_policy_keeps_no_more(tmp_path):
    archive = synthetic_archive(tmp_path / "a", cases=80, harmful=0.3, per_cluster=1)
    batch = synthetic_archive(
        tmp_path / "b", cases=30, harmful=0.3, per_cluster=1, prefix="new", labelled=False, seed=5
    )
    policy = calibrate(archive, "cardiac")
    certificate, certified = certify_kept(archive, policy, Promise(("ha",), (0.3,)), batch, force=True)
    assert certificate.kind == "T9"
    assert certificate.details["form"] == "e-values"
    assert "Among the" in certificate.statement
    assert f"of these {len(batch.ids)} deployed patients" in certificate.statement
    assert certified.options["cut_high"] <= policy.options["cut_high"]


def test_harmed_or_not_is_conformal_selection_where_each_patient_has_one_scan(tmp_path):
    batch = synthetic_archive(tmp_path / "b", cases=30, per_cluster=1, prefix="new", labelled=False, seed=5)
    for per_cluster, form, who in ((1, "conformal selection", "that keep"), (2, "e-values", "all of whose cases keep")):
        archive = synthetic_archive(tmp_path / f"a{per_cluster}", cases=80, harmful=0.3, per_cluster=per_cluster)
        policy = calibrate(archive, "cardiac")
        certificate, _ = certify_kept(archive, policy, Promise(("harmed",), (0.3,)), batch, force=True)
        assert certificate.details["form"] == form
        assert who in certificate.statement


def test_a_case_that_is_not_of_the_batch_is_outside_the_promise(tmp_path):
    archive = synthetic_archive(tmp_path / "a", cases=80, harmful=0.3, per_cluster=1)
    batch = synthetic_archive(tmp_path / "b", cases=10, per_cluster=1, prefix="new", labelled=False, seed=5)
    certificate, _ = certify_kept(archive, calibrate(archive, "cardiac"), Promise(("ha",), (0.3,)), batch, force=True)
    known = {case: f"sha-{case}" for case in batch.ids}
    certificate = replace(certificate, details={**certificate.details, "batch_inputs": known})
    assert "sha-new-0000" not in certificate_page(certificate)  # a page is for people
    decision = Decision("new-0000", Action.KEEP, State(1), 1, "router", group="A")
    assert outside_promise(certificate, decision, "sha-new-0000") is None
    assert outside_promise(certificate, replace(decision, case_id="renamed"), "sha-new-0000") is None
    assert "not among them" in outside_promise(certificate, decision, "another image of the same name")
    assert "one batch of 10 cases" in outside_promise(certificate, replace(decision, case_id="later"), "sha-later")
    unhashed = replace(certificate, details={**certificate.details, "batch_inputs": dict.fromkeys(batch.ids)})
    assert outside_promise(unhashed, decision, "sha") is None
    assert "not among them" in outside_promise(unhashed, replace(decision, case_id="later"), "sha")
