"""Measures around a deployment: designs that worsen one are named, and new values have intervals where labels allow."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from casewise.core.records import SOURCE, Policy, State
from casewise.judge.calibration.designs import Deployed
from casewise.judge.policy import READY
from casewise.measure.measures import measure
from casewise.study.clinical import MeasuredCase
from casewise.study.deployed_measures import (
    DeployedMeasures,
    design_cases,
    design_mask,
    fit_report,
    measure_text,
)

EF = measure("ef", "100 * (volume(1, ED) - volume(1, ES)) / volume(1, ED)", unit="%", decision="< 40")
LV = measure("lv", "volume(1)", unit="ml")


def case(case_id, old, new, label, patient=None):
    volumes = {"old": {"1": old}, "new": {"1": new}, "label": {"1": label}}
    return MeasuredCase(case_id, patient, None, {side: of for side, of in volumes.items() if of["1"] is not None})


def patients(count, new=90.0):
    return [case(f"p{at}", 100, new - at, 100) for at in range(count)]


def test_an_interval_needs_nine_patients_and_is_the_largest_error_of_nine():
    few, enough = (DeployedMeasures.fitted([LV], patients(count), READY["m0"]) for count in (8, 9))
    assert few.half_widths == {"lv": None}
    assert enough.half_widths == {"lv": 18.0}
    new = [case("q", None, 80.0, None)]
    assert measure_text("lv", few.of_cases(new, {})["q"]["lv"]) == (
        "lv 80 ml (no interval: 8 labelled patients had a value, an interval at 90% needs 9)"
    )
    found = enough.of_cases(new, {})["q"]["lv"]
    assert (found["low"], found["high"], found["level"]) == (62.0, 98.0, 0.9)
    assert measure_text("lv", found) == "lv 80 ml (90% interval 62 to 98)"


def test_the_interval_of_a_patient_covers_as_often_as_it_says():
    """Two scans a patient, errors shared within a patient: the interval holds all of a new patient's values."""
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(400):
        shared, own = rng.normal(0, 3, 16), rng.normal(0, 1, (16, 2))
        made = [case(f"p{p}-{s}", 100, 100 + shared[p] + own[p, s], 100, f"p{p}") for p in range(16) for s in (0, 1)]
        half = DeployedMeasures.fitted([LV], made[:-2], READY["m0"]).half_widths["lv"]
        covered.append(all(abs(one.volumes["new"]["1"] - 100) <= half for one in made[-2:]))
    assert np.mean(covered) >= 0.9 - 3 * np.sqrt(0.09 / 400)


def test_a_patient_has_one_value_at_both_scans_and_one_bad_scan_costs_the_interval():
    ed_es = [case(f"p{at}_{scan}", v, v, v + at / 10) for at in range(9) for scan, v in (("ED", 100), ("ES", 50))]
    fitted = DeployedMeasures.fitted([EF], ed_es, READY["m0"])
    assert fitted.patients == {"ef": 9}
    new = [case("q_ED", None, 120.0, None), case("q_ES", None, 60.0, None), case("r_ED", None, 100.0, None)]
    found = fitted.of_cases(new, {})
    assert found["q_ED"] == found["q_ES"]
    assert found["q_ED"]["ef"]["value"] == 50.0
    assert found["q_ED"]["ef"]["low"] < 50 < found["q_ED"]["ef"]["high"]
    assert found["r_ED"]["ef"]["value"] is None
    assert "a scan of the patient is missing (ED, ES)" in found["r_ED"]["ef"]["why"]
    unlike = fitted.of_cases(new, {"q_ES": "this image is unlike the labelled ones"})["q_ED"]["ef"]
    assert (unlike["value"], unlike["low"]) == (50.0, None)
    assert "unlike" in unlike["why"]


def test_only_the_fitted_policy_has_intervals():
    fitted = DeployedMeasures.fitted([LV], patients(9), READY["m0"])
    other = Policy("fixed-k", "fixed-k", {"step": 1}, 1)
    assert fitted.no_interval(READY["m0"], "done", None) == ""
    assert "another policy" in fitted.no_interval(other, "done", None)
    assert "failed" in fitted.no_interval(READY["m0"], "fallback", None)
    assert fitted.no_interval(READY["m0"], "done", "outside the certificate: x") == "outside the certificate: x"
    assert DeployedMeasures.from_dict(fitted.as_dict()) == fitted


def test_a_design_that_improves_dice_and_worsens_a_measure_is_named_the_deployed_one_first():
    worse = [case(f"p{at}", 99, 90, 100) for at in range(10)]
    better = [case(f"p{at}", 90, 99, 100) for at in range(10)]
    fitted = DeployedMeasures.fitted([LV], worse, READY["m0"])
    cases = {"a": worse, "consensus": worse, "tuned": better, "weak": worse}
    report = fit_report(cases, {"a": 0.02, "consensus": 0.01, "tuned": 0.03, "weak": -0.01}, "consensus", fitted)
    assert [said.split(" ")[0] for said in report["warnings"]] == ["consensus", "a"]
    assert "lv moves away from the label in 10 and toward it in 0 of 10 patients" in report["warnings"][0]
    assert [row["design"] for row in report["rows"] if not row["worse"]] == ["tuned"]


def test_a_design_is_measured_on_the_mask_that_it_deploys():
    source = np.zeros((1, 8, 8), np.uint8)
    source[0, :2] = 1
    edit = source.copy()
    edit[0, 4, :3], edit[0, 7, :] = 1, 1  # two pieces: three voxels, eight voxels
    masks = {SOURCE: source, State(1): edit}
    archive = SimpleNamespace(
        entries={"c": SimpleNamespace(spacing_mm=None, cluster="p")},
        masks=lambda _: masks,
        label=lambda _: source,
    )
    made = {
        "m0": Deployed("c", "p", "0", False, 1, 1, None),
        "consensus": Deployed("c", "p", "1", False, 1, 1, None),
        "merge": Deployed("c", "p", "1", True, 1, 1, None, (0,)),
        "largest": Deployed("c", "p", "1", False, 1, 1, None, (), "largest(1)"),
    }
    found = design_cases(archive, {name: [one] for name, one in made.items()}, {1: "LV"})
    assert {name: one[0].volumes["new"]["lv"] for name, one in found.items()} == {
        "m0": 16, "consensus": 27, "merge": pytest.approx(19, abs=5), "largest": 16,
    }  # fmt: skip
    assert design_mask(made["merge"], masks.__getitem__).sum() in (19, 24)
