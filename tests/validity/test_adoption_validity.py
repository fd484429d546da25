"""Designs without gain are seldom adopted, and the printed gain is not that of the best design by chance.

Worlds without any gain, patients of two scans each, all designs compared. Stated: at most one calibration in ten adopts
a design. In worlds with skewed losses or rare disasters this cannot be stated: their mean gain is 0, and no test with
few patients can see that. There the limit on hurt patients has to help, and the page says which share of disasters the
patients are compatible with.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from worlds.gains import SETTING, cohort, noise

from casewise.core.records import SOURCE, Observation, State
from casewise.judge.calibration.adoption import CHANCE, chance_of_best, hurt_share, unseen_sentence
from casewise.judge.calibration.design_comparison import Nested, _best, _row, compare_designs
from casewise.judge.calibration.designs import DESIGNS, Known
from casewise.judge.certificates.risk_control import clopper_pearson_upper
from casewise.judge.controllers.depth import FixedK
from casewise.judge.decide import Setting

RULES = {name: DESIGNS[name] for name in ("m0", "consensus", "highest-agreement", "medoid", "consensus-where-low")}


def adopted(patients, repetitions, designs, *, icc=0.5, tails="normal", spread=0.005, allowed_hurt=1.0):
    """Share of calibrations that adopt a design in a world without any gain; harm is not limited by default."""
    rng = np.random.default_rng([patients, int(10 * icc), len(tails)])
    taken = 0
    for _ in range(repetitions):
        known = cohort(rng, patients, icc=icc, tails=tails, spread=spread)
        taken += compare_designs(known, SETTING, designs, nested=False, allowed_hurt=allowed_hurt).chosen != "m0"
    return taken / repetitions


def allowed(repetitions, share=0.1):
    return share + 3 * np.sqrt(share * (1 - share) / repetitions)


@pytest.mark.parametrize(("patients", "tails"), [(5, "normal"), (10, "heavy")])
def test_nothing_is_adopted_where_nothing_gains(patients, tails):
    assert adopted(patients, 40, RULES, tails=tails) <= allowed(40)


@pytest.mark.slow
@pytest.mark.parametrize("icc", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("tails", ["normal", "heavy"])
@pytest.mark.parametrize("patients", [5, 10, 20, 40])
def test_all_designs_together_are_adopted_for_nothing_in_one_of_ten(patients, tails, icc):
    repetitions = {5: 300, 10: 150, 20: 60, 40: 30}[patients]
    assert adopted(patients, repetitions, None, icc=icc, tails=tails) <= allowed(repetitions)


def estimates(patients, gain, repetitions):
    """(naive gain, nested gain, true gain) of every adopted choice."""
    rng, found = np.random.default_rng([patients, int(1000 * gain)]), []
    for _ in range(repetitions):
        known = cohort(rng, patients, gain=gain)
        if compare_designs(known, SETTING, RULES, nested=False, allowed_hurt=1.0).chosen == "m0":
            continue
        made = compare_designs(known, SETTING, RULES, allowed_hurt=1.0)
        if made.chosen != "m0":
            true = {"consensus": gain, "highest-agreement": gain / 6}.get(made.chosen, 0.0)
            found.append((made.row(made.chosen).gain, made.nested.gain, true))
    return np.array(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patients", "gain", "most"), [(6, 0.01, 1.5), (10, 0.004, 2.5), (10, 0.01, 1.5), (20, 0.004, 2), (20, 0.01, 1.25)]
)
def test_the_nested_gain_is_not_that_of_the_winner(patients, gain, most):
    """A small one is too large on average, because M0 is kept where the estimate is not above 0; the page says so."""
    found = estimates(patients, gain, 200)
    naive, nested, true = found.mean(axis=0)
    error = found[:, 1].std(ddof=1) / np.sqrt(len(found))
    assert found[:, 1].min() > 0
    assert nested <= most * true + 3 * error
    assert nested < naive
    assert naive / true > 1.05


RUNGS = {"m0": lambda known, setting: FixedK(0)} | {f"d{k}": lambda known, setting, k=k: FixedK(k) for k in range(1, 9)}


def printed_estimates(patients, tails, between, repetitions):
    """(nested gain, true gain) of every adopted one of eight fixed candidates whose true gains vary by ``between``."""
    rng, found = np.random.default_rng([patients, len(tails), int(1e4 * between)]), []
    of = np.repeat(np.arange(patients), 2)
    for _ in range(repetitions):
        shared, own = (noise(rng, (n, 1), tails) + noise(rng, (n, 8), tails) for n in (patients, 2 * patients))
        true = between * rng.normal(size=8)
        metrics = 0.5 + true + 0.03 * (shared[of] + own) / 2
        known = [
            Known(
                f"c{k}",
                f"p{of[k]}",
                Observation(f"c{k}", None, [{"agreement": 0.9}] * 9),
                {SOURCE: 0.5} | worth,
                {},
                {},
            )
            for k, worth in enumerate({State(step): row[step - 1] for step in range(1, 9)} for row in metrics)
        ]
        if compare_designs(known, Setting(8, "8"), RUNGS, nested=False).chosen != "m0":
            made = compare_designs(known, Setting(8, "8"), RUNGS)
            found += [(made.nested.gain, true[int(made.chosen[1:]) - 1])] * (made.chosen != "m0")
    return np.array(found)


@pytest.mark.slow
@pytest.mark.parametrize("tails", ["normal", "heavy", "skewed"])
def test_a_printed_gain_is_right_where_designs_differ_and_too_large_where_they_hardly_do(tails):
    """Cases differ by .03. Why the page says when the estimate is too large."""
    sure, marginal = printed_estimates(10, tails, 0.015, 80), printed_estimates(10, tails, 0.004, 300)
    error = 3 * sure[:, 0].std() / np.sqrt(len(sure))
    assert abs(sure[:, 0].mean() - sure[:, 1].mean()) <= 0.25 * sure[:, 1].mean() + error
    assert marginal[:, 0].mean() > 1.5 * marginal[:, 1].mean()
    assert (
        "too large on average if the gains of single patients vary by more than this gain"
        in Nested(0.01, 10, {}).sentence()
    )


FIXED = ("consensus", "highest-agreement", "medoid", "settled", "tuned/1", "tuned/average", "consensus+largest")


def adopted_among_alike(patients, tails, repetitions, *, between=0.0, spread=0.005, rho=0.9):
    """Share of cohorts that adopt a design, and (true gain, lower bound) of each.

    The changes of the seven designs correlate by ``rho``, patients have one to five scans, and the true gains of the
    designs vary by ``between``. Harm is limited as by default.
    """
    rng, found = np.random.default_rng([patients, len(tails), int(1e4 * between)]), []
    for _ in range(repetitions):
        of = np.repeat(np.arange(patients), rng.integers(1, 6, patients))
        shared, own = (
            np.sqrt(rho) * noise(rng, (n, 1), tails) + np.sqrt(1 - rho) * noise(rng, (n, len(FIXED)), tails)
            for n in (patients, len(of))
        )
        true = between * rng.normal(size=len(FIXED))
        gains = spread * (np.sqrt(0.5) * shared[of] + np.sqrt(0.5) * own) + true
        ids = [f"p{number:03d}" for number in of]
        p = chance_of_best(gains, ids)
        rows = [_row(name, gains[:, k], ids, float(p[k]), 0.0, 0.1, CHANCE) for k, name in enumerate(FIXED)]
        chosen = _best([_row("m0", 0 * gains[:, 0], ids, 1.0, 0.0, 0.1, CHANCE), *rows])
        found += [(true[k], row.low) for k, row in enumerate(rows) if row.design == chosen]
    return len(found) / repetitions, np.array(found).reshape(-1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("tails", ["normal", "heavy"])
@pytest.mark.parametrize("patients", [5, 7, 10, 20, 40])
def test_designs_that_resemble_each_other_are_adopted_for_nothing_in_one_of_ten(patients, tails):
    assert adopted_among_alike(patients, tails, 600)[0] <= allowed(600)


@pytest.mark.slow
@pytest.mark.parametrize("patients", [6, 10, 20])
def test_the_lower_bound_beside_an_adopted_design_does_not_allow_for_the_choice(patients):
    """Why the page does not say "the gain is at least": the bound lies above the truth far more often than stated."""
    share, found = adopted_among_alike(patients, "normal", 400, between=0.004, spread=0.03, rho=0.5)
    assert share > 0
    assert (found[:, 0] < found[:, 1]).mean() > 0.5


@pytest.mark.parametrize("icc", [0.0, 0.9])
def test_the_share_of_hurt_patients_is_below_its_bound_as_often_as_stated(icc):
    rng, missed = np.random.default_rng(3), 0
    threshold = stats.norm.ppf(0.15) * np.sqrt((1 + icc) / 2)  # fifteen of a hundred patients are hurt
    for _ in range(300):
        shared, own = rng.normal(size=(10, 1)), rng.normal(size=(10, 2))
        change = (np.sqrt(icc) * shared + np.sqrt(1 - icc) * own) - threshold - 0.01
        missed += hurt_share(change.ravel(), np.repeat(np.arange(10), 2).tolist()).upper < 0.15
    assert missed / 300 <= allowed(300)


def test_the_limit_on_hurt_patients_keeps_skewed_losses_out():
    assert adopted(10, 60, RULES, tails="skewed", spread=0.03, allowed_hurt=0.1) <= allowed(60)


@pytest.mark.slow
@pytest.mark.parametrize("icc", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("patients", [5, 10, 20, 40])
def test_the_limit_on_hurt_patients_keeps_skewed_losses_out_everywhere(patients, icc):
    share = adopted(patients, 100, RULES, icc=icc, tails="skewed", spread=0.03, allowed_hurt=0.1)
    assert share <= allowed(100)


def test_rare_disasters_are_not_seen_by_any_test_so_nothing_is_promised_about_them():
    assert adopted(10, 40, RULES, tails="disasters", spread=0.03, allowed_hurt=0.1) > 0.2


@pytest.mark.parametrize("patients", [5, 10, 40])
def test_new_patients_lose_more_than_any_that_was_seen_as_seldom_as_stated(patients):
    """``unseen_sentence``: the share of new patients that lose more than the worst of these, confidence .9."""
    stated = clopper_pearson_upper(0, patients, 0.9)
    assert f"up to {stated:.0%} of new" in unseen_sentence(patients)
    rng = np.random.default_rng(patients)
    worst = np.sort(noise(rng, (2000, patients, 2), "disasters").mean(axis=2), axis=1)[:, 0]
    fresh = np.sort(noise(rng, (100_000, 2), "disasters").mean(axis=1))
    truth = np.searchsorted(fresh, worst) / len(fresh)
    assert (truth > stated).mean() <= allowed(2000)
