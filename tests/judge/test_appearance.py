"""What images look like: the numbers, the limits for one image, and the test for a folder."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from worlds.streets import driving_cohort

from casewise.adapt.backbones import Pipeline, Prepared, appearance_inputs
from casewise.adapt.networks import phantom_cardiac
from casewise.core.errors import BadInput
from casewise.data.phantom import cardiac_cohort
from casewise.data.splits import Cohort
from casewise.judge.appearance import (
    Appearance,
    KnownAppearance,
    _distances,
    appearance_numbers,
    folder_differs,
    known_appearance,
    outside,
)


def looks(cohort: Cohort) -> list[Appearance]:
    """The cases of a cohort, z-scored as most models prepare them; of colors the first channel."""
    found = []
    for case in cohort:
        image = case.image[:1]
        prepared = (image - image.mean()) / image.std()
        found.append(Appearance(case.id, appearance_numbers(prepared[None], image=image, spacing_mm=case.spacing_mm)))
    return found


def hearts(count: int, run: int = 0) -> list[Appearance]:
    return looks(cardiac_cohort("A", count, split="calibration", run=run))


def drawn(generator: np.random.Generator, name: str, patient: str, middle: float = 0.0) -> Appearance:
    return Appearance(name, {f"intensity {k}": float(v) for k, v in enumerate(generator.normal(middle, 1, 5))}, patient)


def test_the_numbers_of_a_ramp_can_be_checked_by_hand() -> None:
    ramp = np.tile(np.arange(5.0), (1, 1, 4, 1))
    found = appearance_numbers(ramp, spacing_mm=(1.0, np.e))
    sd = np.sqrt(2)
    assert found["intensity mean of channel 0"] == 2.0
    assert found["intensity deviation of channel 0"] == pytest.approx(sd, abs=1e-6)
    assert found["intensity quantile 0.5 of channel 0"] == 0.0
    assert found["intensity quantile 0.75 of channel 0"] == pytest.approx(1 / sd, abs=1e-6)
    assert found["texture of channel 0"] == pytest.approx(1 / sd, abs=1e-6)
    assert found["spacing of axis 1"] == 1.0


def test_labels_of_m0_are_counted_and_an_absent_one_has_no_brightness() -> None:
    image = np.zeros((1, 2, 2))
    image[0, 0] = 2.0
    mask = np.array([[1, 1], [0, 0]])
    found = appearance_numbers(image[None], image=image, source=mask, labels=(1, 2))
    assert found["share of label 1"] == pytest.approx(np.log10(0.5001), abs=1e-6)
    assert found["brightness of label 1"] == 1.0
    assert found["share of label 2"] == -4.0
    assert "brightness of label 2" not in found


def test_a_constant_channel_and_a_broken_spacing_give_no_infinite_number() -> None:
    found = appearance_numbers(np.ones((1, 1, 3, 3)), spacing_mm=(0.0, 1.0))
    assert found == {
        "intensity mean of channel 0": 1.0,
        "intensity deviation of channel 0": 0.0,
        "spacing of axis 1": 0,
    }
    with pytest.raises(BadInput, match=r"\(n, channel, \*space\)"):
        appearance_numbers(np.ones((3, 3)))


def test_quantiles_do_not_depend_on_the_scale_of_an_image() -> None:
    generator = np.random.default_rng(0)
    image = generator.gamma(2.0, size=(1, 1, 30, 30))
    one, other = appearance_numbers(image), appearance_numbers(image * 7 + 3)
    same = [name for name in one if "quantile" in name or "texture" in name]
    assert same
    assert all(one[name] == pytest.approx(other[name], abs=1e-5) for name in same)


def test_a_prepared_case_becomes_an_array_of_the_whole_case() -> None:
    inputs, whole = torch.zeros(4, 1, 2, 2), torch.ones(1, 1, 3, 3, dtype=torch.bfloat16)
    backbone = phantom_cardiac()
    case = next(iter(cardiac_cohort("A", 1, split="calibration")))

    def array(prepared: Prepared) -> np.ndarray:
        return np.asarray(appearance_inputs(case, prepared, np.zeros(1), backbone)["inputs"])

    assert array(Prepared(inputs)).shape == (4, 1, 2, 2)
    pipeline = Pipeline(whole, None, None, None, torch.nn.Identity())  # type: ignore[arg-type]
    found = array(Prepared(inputs, pipeline=pipeline))
    assert found.dtype == np.float32
    assert found.shape == (1, 1, 3, 3)
    assert array(backbone.prepare(case)).shape[1] == case.image.shape[0]


def test_hearts_fit_hearts_and_photographs_do_not() -> None:
    known = known_appearance(hearts(8))
    assert not any(outside(one, known) for one in hearts(8, run=1))
    photos = looks(driving_cohort("clear", 8, split="calibration"))
    assert sum(bool(outside(one, known)) for one in photos) >= 6  # eight patients leave wide limits
    p, sentence = folder_differs(photos, known)
    assert p < 0.01
    assert "p = " in sentence
    assert folder_differs(hearts(8, run=2), known)[0] > 0.05


def test_another_modality_is_named_first() -> None:
    generator = np.random.default_rng(0)
    plain = [drawn(generator, f"c{n}", f"p{n}") for n in range(6)]
    images = np.arange(16.0).reshape(1, 1, 4, 4)
    mr, ct = (appearance_numbers(images, modality=name).keys() - appearance_numbers(images) for name in ("MR", "CT"))
    known = known_appearance([replace(one, numbers={**one.numbers, **dict.fromkeys(mr, 1.0)}) for one in plain])
    assert known.names == known_appearance(plain).names
    other = replace(plain[0], numbers={**plain[0].numbers, **dict.fromkeys(ct, 1.0)})
    assert outside(other, known, image_only=True)[0] == "its modality is CT, the labelled images are MR"
    assert outside(plain[0], known) == []


def test_a_low_agreement_is_unlike_calibration_and_a_high_one_is_not() -> None:
    generator = np.random.default_rng(0)
    plain = [drawn(generator, f"c{n}", f"p{n}") for n in range(10)]
    known = known_appearance([one.with_agreement(0.9 + 0.01 * (n % 3)) for n, one in enumerate(plain)])
    assert outside(plain[0].with_agreement(0.99), known) == []
    said = outside(plain[0].with_agreement(0.5), known)
    assert said[0].startswith("agreement of the candidate masks is 0.5;")
    assert outside(plain[0].with_agreement(0.5), known, image_only=True) == []  # the mask failed, not the image
    assert outside(plain[0].with_agreement(None), known) == []


def test_the_numbers_that_lie_outside_are_named_farthest_first() -> None:
    generator = np.random.default_rng(0)
    known = known_appearance([drawn(generator, f"c{n}", f"p{n}") for n in range(10)])
    odd = Appearance("x", {"intensity 0": 0.0, "intensity 1": 50.0, "intensity 2": 500.0})
    said = outside(odd, known)
    assert [sentence.split(" is ")[0] for sentence in said] == ["intensity 2", "intensity 1"]
    assert "10 labelled patients" in said[0]


def test_many_scans_of_one_patient_are_one_patient() -> None:
    generator = np.random.default_rng(0)
    cases = [drawn(generator, f"c{n}", f"p{n % 3}") for n in range(30)]
    known = known_appearance(cases)
    assert len(known.patients) == 3
    one_patient = [drawn(generator, f"n{n}", "new", middle=40.0) for n in range(50)]
    assert folder_differs(one_patient, known)[0] == 0.25  # one of four exchanges, however many scans there are


def test_distances_agree_with_a_second_computation() -> None:
    rows = np.random.default_rng(0).normal(size=(6, 3)) * [1, 10, 100]
    found = _distances(rows, ["a", "b", "c"])
    for place in range(6):
        others = np.delete(rows, place, axis=0)
        again = np.abs(rows[place] - others.mean(axis=0)) / (others.std(axis=0, ddof=1) * np.sqrt(1 + 1 / 5))
        assert found[place] == pytest.approx(again)


def test_two_patients_say_nothing_about_one_image() -> None:
    generator = np.random.default_rng(0)
    known = known_appearance([drawn(generator, f"c{n}", f"p{n}") for n in range(2)])
    assert outside(drawn(generator, "x", "x", middle=1e6), known) == []


def test_agreement_joins_the_numbers_where_it_is_known() -> None:
    one = Appearance("a", {"x": 1.0})
    assert one.with_agreement(None) is one
    assert one.with_agreement(0.9).numbers == {"x": 1.0, "agreement": 0.9}


def test_what_is_known_survives_json_and_refuses_nonsense() -> None:
    generator = np.random.default_rng(0)
    known = known_appearance([drawn(generator, f"c{n}", f"p{n}") for n in range(4)])
    assert KnownAppearance.from_plain(json.loads(json.dumps(asdict(known)))) == known
    with pytest.raises(BadInput, match="names"):
        KnownAppearance.from_plain({})
    with pytest.raises(BadInput, match="finite"):
        replace(known, patients=(("evil",) * 5, known.patients[0]))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="one value for each"):
        replace(known, names=known.names[1:])
    with pytest.raises(BadInput, match="at least 2"):
        known_appearance([drawn(generator, "c", "p")])
    with pytest.raises(BadInput, match="without cases"):
        folder_differs([], known)
    with pytest.raises(BadInput, match="none of the numbers"):
        folder_differs([Appearance("a", {"other": 1.0})], known)
