"""Certificates for what choose, merge and the consensus deploy: refused on labels that fitted them, valid otherwise."""

from __future__ import annotations

import numpy as np
import pytest
from worlds.candidates import views_archive

from casewise.core.errors import Overlap, TooFewCases
from casewise.core.records import SOURCE
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.certificates.certify_designs import certify_default
from casewise.judge.certificates.certify_router import Promise, certify_router
from casewise.judge.certificates.evidence import deployed_numbers, rollback_table, router_evidence
from casewise.measure.metrics.harm import harm
from casewise.replay import replay

HARMED = Promise(("harmed",), (0.3,), margin=0.01)


@pytest.fixture(scope="module")
def fitting(tmp_path_factory):
    return views_archive(tmp_path_factory.mktemp("fit") / "a", cases=16, prefix="fit", seed=1)


@pytest.fixture(scope="module")
def certifying(tmp_path_factory):
    return views_archive(tmp_path_factory.mktemp("certify") / "a", cases=40, prefix="new", seed=2)


def test_what_is_certified_is_what_replay_deploys(fitting, certifying):
    policy = calibrate(fitting, "choose")
    evidence = router_evidence(certifying, policy, overlap=False, margin=0.01)
    for place, decision in enumerate(replay(certifying, policy)):
        masks, label = certifying.masks(decision.case_id), certifying.label(decision.case_id)
        found = harm(masks[SOURCE], masks[decision.state], label, min_area=4)
        assert evidence.ids[place] == decision.case_id
        assert evidence.own["ha"][place] == pytest.approx(found.ha)
        assert evidence.values[place] == pytest.approx(decision.value)


def test_a_certified_cut_sends_large_edits_back(fitting, certifying):
    for design in ("choose", "merge"):
        policy = calibrate(fitting, design)
        certificate, certified = certify_router(certifying, policy, HARMED, force=True)
        assert certificate.units == 20
        if certificate.cut is None:
            assert certified.controller == "m0"
            continue
        assert certified.options["cut_high"] == pytest.approx(certificate.cut)
        decisions = replay(certifying, certified)
        assert all(one.value < certificate.cut for one in decisions if not one.rolled_back)
        assert deployed_numbers(certifying, certified, margin=0.01)["harmed"] <= 0.3


def test_a_design_that_hurts_the_cases_that_fit_it_takes_no_part_in_the_choice(tmp_path):
    misled = views_archive(tmp_path / "wrong", misled=True)
    asked = Promise(("harmed",), (0.9,), delta=0.5, margin=0.01)
    certificate, _ = certify_default(misled, asked)
    assert "consensus" not in certificate.details["designs"]
    assert ": consensus" in certificate.advice
    forced, _ = certify_default(misled, asked, force=True)
    assert "consensus" in forced.details["designs"]
    assert "left out" not in forced.advice


def test_labels_that_fitted_a_design_cannot_certify_it(tmp_path):
    fitting = views_archive(tmp_path / "a", cases=16, prefix="fit", seed=1)
    certificate, _ = certify_router(fitting, calibrate(fitting, "consensus"), HARMED, force=True)
    assert certificate.units == 8
    flagging = calibrate(
        fitting, "consensus", flag_below=0.7, confidence=0.8
    )  # the flag is fitted, what is deployed is not
    assert certify_router(fitting, flagging, HARMED, force=True)[0].bound == certificate.bound
    for design in ("choose", "merge", "consensus-where-low"):
        with pytest.raises(Overlap, match=r"share .* or let certify split them: casewise certify ARCHIVE"):
            certify_router(fitting, calibrate(fitting, design), HARMED, force=True)


def test_halves_that_are_too_small_are_refused_with_their_size(tmp_path):
    few = views_archive(tmp_path / "few", cases=8, per_cluster=2)  # two of each patient, so four in the half that fits
    with pytest.raises(TooFewCases, match=r"at least 4, and 5 cases in the first half, got 4 with 4 cases"):
        certify_default(few, Promise(("harmed",), (0.3,), delta=0.1))


def test_the_best_of_several_designs_cannot_be_certified_on_the_labels_that_chose_it(fitting):
    made = calibrate(fitting, "default", allowed_hurt=1.0)
    if made.controller != "m0":
        with pytest.raises(Overlap):
            certify_router(fitting, made, HARMED, force=True)


def realised(clusters: int, draws: int, alpha: float) -> float:
    """Mean harm that is really deployed on a new cluster, by CRC over the size of edits, with ties and twins."""
    rng, paid = np.random.default_rng(3), []
    from casewise.judge.certificates.risk_control import conformal_setting

    for _ in range(draws):
        of = np.repeat(np.arange(clusters + 1), rng.integers(1, 4, clusters + 1))
        edit = np.round(rng.beta(1, 4, clusters + 1)[of] + rng.uniform(0, 0.1, len(of)), 1)
        hurt = (rng.random(len(of)) < 0.1 + 0.6 * edit).astype(float)
        old = of < clusters
        table = rollback_table(edit[old], hurt[old], clusters=tuple(map(str, of[old])), within="mean")
        at = conformal_setting(table, alpha)
        cut = -np.inf if at is None else float(table.settings[at])
        new = np.flatnonzero(~old)
        paid.append(float((hurt[new] * (edit[new] < cut)).mean()))
    return float(np.mean(paid))


@pytest.mark.parametrize(("clusters", "alpha"), [(9, 0.2), (20, 0.1), (4, 0.1)])
def test_the_promise_holds_with_ties_clusters_and_few_of_them(clusters, alpha):
    draws = 600
    assert realised(clusters, draws, alpha) <= alpha + 3 * np.sqrt(alpha * (1 - alpha) / draws)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2, 0.3])
@pytest.mark.parametrize("clusters", [4, 9, 20, 40])
def test_the_promise_holds_everywhere(clusters, alpha):
    draws = 2000
    assert realised(clusters, draws, alpha) <= alpha + 3 * np.sqrt(alpha * (1 - alpha) / draws)
