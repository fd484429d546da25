"""Updates that are smaller after risky edits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from casewise.adapt.modulation import MODES, Modulated
from casewise.adapt.objectives.cotta import Cotta
from casewise.adapt.objectives.eata import Eata
from casewise.adapt.objectives.grata import Grata
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.proposers.live import run_episode
from casewise.core.errors import BadInput, DegenerateStatistic, NothingToAdapt
from casewise.measure.signals.risk import RiskStatistics

CARDIAC = RiskStatistics(0.70, 0.78, 0.00028, 0.00020)  # F5
CALM = RiskStatistics(1e6, 1.0, 1e6, 1.0)  # every edit is far below the mean: r << 0
WILD = RiskStatistics(-1e6, 1.0, -1e6, 1.0)  # r >> 0


def steps_of(unet, slices, objective, **options):
    return run_episode(
        unet, slices, objective, steps=2, learning_rate=0.02, keep_parameters=True, min_area=2, **options
    )


def moved(made, step):
    return {n for n, v in made.parameters[step].items() if not np.array_equal(v, made.parameters[step - 1][n])}


def test_risk_is_the_mean_of_two_z_scores():
    assert CARDIAC.risk(0.0, 0.0) == pytest.approx(-1.149, abs=5e-4)  # R1
    assert CARDIAC.risk(2.0, 5e-4) == pytest.approx(1.38, abs=5e-3)


@pytest.mark.parametrize("mode", ["anchor-weight", "combo", "loss-switch"])
def test_a_mode_that_weighs_an_anchor_needs_one(mode):
    with pytest.raises(BadInput, match=f"{mode} weighs an anchor .* Tent has none; use the objective eata"):
        Modulated(Tent(), mode, CARDIAC)


def test_statistics_without_spread_are_refused():
    with pytest.raises(DegenerateStatistic, match="sigma 0 for regions and 1 for delta"):
        RiskStatistics(1.0, 0, 0.0, 1)


def test_a_signal_that_is_missing_is_named():
    with pytest.raises(BadInput, match="not computable"):
        Modulated(Eata(), "combo", CARDIAC).risk_after({"regions": None, "delta": 0.0})


@pytest.mark.parametrize("risk", [-3.0, 0.0, 0.5, 9.0])
def test_the_weights_of_d8(risk):
    combo = Modulated(Eata(), "combo", CARDIAC)
    assert combo.entropy_weight_at(risk) == pytest.approx(np.clip(math.exp(-0.7 * risk), 0.1, 1))
    assert combo.anchor_weight_at(risk) == pytest.approx(np.clip(math.exp(0.7 * risk), 1, 4))
    subset = Modulated(Eata(), "param-subset", CARDIAC, beta=99, largest_anchor_weight=99)
    assert (subset.entropy_weight_at(risk), subset.anchor_weight_at(risk)) == (1.0, None)
    switch = Modulated(Eata(), "loss-switch", CARDIAC)
    assert (switch.entropy_weight_at(risk), switch.anchor_weight_at(risk)) == ((0, 1) if risk > 0 else (1, 0))


def test_param_subset_moves_the_decoder_alone_when_risk_is_high(unet, slices):
    wild = steps_of(unet, slices, Modulated(Tent(), "param-subset", WILD))
    calm = steps_of(unet, slices, Modulated(Tent(), "param-subset", CALM))
    plain = steps_of(unet, slices, Tent())
    assert moved(wild, 1) == {"decoder.1.weight", "decoder.1.bias"}
    assert moved(calm, 1) == set(plain.parameters[0])
    assert all(np.array_equal(calm.parameters[2][n], plain.parameters[2][n]) for n in plain.parameters[2])


def test_the_risk_of_the_step_before_governs(unet, slices):
    """Update 1 reads r_0, which is negative whatever the case; update 2 reads the edit of step 1 (D9)."""
    statistics = RiskStatistics(0.1, 1.0, 1e-6, 1.0)
    made = run_episode(
        unet,
        slices,
        Modulated(Tent(), "param-subset", statistics),
        steps=2,
        learning_rate=0.1,
        keep_parameters=True,
        min_area=1,
    )
    assert made.diagnostics[0]["risk"] < 0
    assert made.diagnostics[1]["risk"] == pytest.approx(
        statistics.risk(made.signals[1]["regions"], made.signals[1]["delta"])
    )
    assert made.diagnostics[1]["risk"] > 0
    assert moved(made, 1) == set(made.parameters[0])
    assert moved(made, 2) == {"decoder.1.weight", "decoder.1.bias"}


def test_the_anchor_alone_leaves_the_source_where_it_is(unet, slices):
    made = steps_of(unet, slices, Modulated(Eata(margin=10), "loss-switch", WILD))
    assert not moved(made, 1)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_runs_and_reports_its_risk(unet, slices, mode):
    made = steps_of(unet, slices, Modulated(Eata(margin=10), mode, CARDIAC))
    assert made.diagnostics[0]["risk"] == pytest.approx(CARDIAC.risk(0.0, 0.0))
    assert f"mode='{mode}'" in made.made_by


def test_a_heavier_anchor_keeps_nearer_to_the_source(unet, slices):
    def distance(statistics):
        made = run_episode(
            unet,
            slices,
            Modulated(Eata(margin=10), "anchor-weight", statistics, largest_anchor_weight=1e4),
            steps=4,
            learning_rate=0.02,
            keep_parameters=True,
        )
        return sum(np.square(v - made.parameters[0][n]).sum() for n, v in made.parameters[4].items())

    assert distance(WILD) < distance(CALM)


def test_what_cannot_be_modulated_is_refused(unet, slices):
    with pytest.raises(BadInput, match=r"a modulation must be one of param-subset, .*got 'louder'"):
        Modulated(Tent(), "louder", CARDIAC)
    with pytest.raises(BadInput, match="got str"):
        Modulated("tent", "combo", CARDIAC)
    with pytest.raises(NothingToAdapt, match="param-subset needs selected parameters in a decoder"):
        steps_of(unet, slices, Modulated(Tent(), "param-subset", CALM), parameters="encoder-norm")


def test_a_modulated_objective_keeps_its_learning_rate():
    assert Modulated(Eata(learning_rate=0.25), "combo", CARDIAC).learning_rate == 0.25


@pytest.mark.parametrize("objective", [Grata(), Cotta()])
def test_a_weight_that_no_term_would_feel_is_refused(objective):
    with pytest.raises(BadInput, match=r"weighs an entropy term, which .* does not have; use the objective eata"):
        Modulated(objective, "entropy-weight", RiskStatistics(1.0, 1.0, 0.1, 0.1))
    Modulated(objective, "param-subset", RiskStatistics(1.0, 1.0, 0.1, 0.1))
