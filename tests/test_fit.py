"""The front door: fit, predict, save and load, in Python and on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from html import unescape
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from miniature_nnunet import write_model, write_scans
from worlds.commands import typed
from worlds.discs import disc, eroding_model

import casewise
from casewise.adapt.backbones.module import Module
from casewise.adapt.networks import phantom_cardiac
from casewise.adapt.snapshot import fingerprint
from casewise.adapt.tuned_weights import read_tuned_folder
from casewise.core.durable import file_lock
from casewise.core.errors import BadInput, Mismatch, Refused, TooFewCases, UnknownName
from casewise.core.records import Case
from casewise.data.phantom import cardiac_cohort
from casewise.deployment import Deployment
from casewise.deployment.saved import DEPLOYMENT, is_deployment
from casewise.fit import labelled_cases
from casewise.judge.certificates.split import split_for_promise
from casewise.judge.policy import READY, judge_of
from casewise.learn.tuning import Tuning
from casewise.measure.measures import measure
from casewise.measure.metrics.overlap import dice
from casewise.run.prediction_folder import verify_predictions

torch.set_num_threads(1)
SHORT = Tuning(updates=3, batch=2)


def hearts(count: int, split: str = "calibration") -> tuple[list[np.ndarray], list[np.ndarray]]:
    cohort = cardiac_cohort("B", count, split=split)
    return [cohort.case(one).image for one in cohort.ids], [cohort.label(one) for one in cohort.ids]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    images, labels = hearts(6)
    model = phantom_cardiac()
    out = tmp_path_factory.mktemp("fit") / "deployment"
    steps: list[str] = []
    deployment = casewise.fit(
        model, images, labels, patients=[f"p{number // 1}" for number in range(6)], out=out, views="light",
        tuning=SHORT, jobs=1, on_progress=lambda step, done, total: steps.append(step),
        measures=[measure("lv", "volume(left_ventricle)")],
    )  # fmt: skip
    return model, deployment, out, steps


def test_fit_leaves_one_folder_with_a_page(fitted):
    _, deployment, out, steps = fitted
    assert is_deployment(out)
    assert set(steps) >= {"learn", "propose"}
    names = {path.name for path in out.iterdir()}
    assert {"deployment.json", "policy.json", "fit.html", "fit.json", "tuned", "archive"} <= names
    text = deployment.summary()
    assert "6 labelled cases of 6 patients" in text
    assert f"casewise predict -i IN -o OUT -m {out}" in text
    assert len(text.splitlines()) <= 16
    assert "<script" not in (out / "fit.html").read_text()


def test_patients_that_are_named_after_a_fit_need_a_folder_of_their_own(fitted):
    """A deployment that counted cases as patients is not continued with the right number."""
    model, _, out, _ = fitted
    images, labels = hearts(6)
    with pytest.raises(Mismatch, match=r"other options \(cases and patients\); .* choose another folder"):
        casewise.fit(model, images, labels, patients=list("aabcde"), out=out, views="light", tuning=SHORT, jobs=1)


def test_a_result_says_what_was_decided(fitted):
    model, deployment, _, _ = fitted
    image = hearts(1, "new")[0][0]
    before = fingerprint(model.network)
    result = deployment.predict(image)
    assert result.mask.shape == result.source_mask.shape == image.shape[1:]
    assert result.reason == result.decision.reason != ""
    assert result.flagged in (True, False)
    assert result.status == "done"
    assert fingerprint(model.network) == before


def test_a_deployment_is_saved_and_loaded(fitted, tmp_path):
    model, deployment, _, _ = fitted
    image = hearts(1, "new")[0][0]
    deployment.save(tmp_path / "copy")
    loaded = casewise.load(tmp_path / "copy", model=model)
    assert np.array_equal(loaded.predict(image).mask, deployment.predict(image).mask)
    assert loaded.predict(image).decision == deployment.predict(image).decision
    with pytest.raises(BadInput, match="network in memory"):
        casewise.load(tmp_path / "copy")
    other = phantom_cardiac()
    with torch.no_grad():
        next(other.network.parameters()).add_(1)
    with pytest.raises(Mismatch, match="fitted on model"):
        casewise.load(tmp_path / "copy", model=replace(other))
    (tmp_path / "copy" / "policy.json").write_text("{}")
    with pytest.raises(Mismatch, match=r"policy\.json"):
        casewise.load(tmp_path / "copy", model=model)


def test_the_line_that_fit_prints_for_a_network_in_memory_runs(tmp_path):
    images, labels = hearts(6)
    network = phantom_cardiac().network
    with pytest.raises(BadInput, match="got phantom_cardiac; call it to get the network"):
        casewise.fit(phantom_cardiac, images, labels)
    with pytest.raises(BadInput, match="call it to get the network"):
        casewise.fit(type(network), images, labels)
    made = casewise.fit(network, images, labels, out=tmp_path / "fitted", views="light", learn=False)
    printed = next(line for line in made.summary().splitlines() if "casewise.load(" in line)
    names = {"casewise": casewise, "network": network, "image": images[0]}
    result = eval(printed[printed.index("casewise.load(") :], names)
    assert np.array_equal(result.mask, made.predict(images[0]).mask)


def test_the_same_call_resumes_and_another_is_refused(fitted):
    model, deployment, out, _ = fitted
    images, labels = hearts(6)
    patients = [f"p{number}" for number in range(6)]
    again = casewise.fit(model, images, labels, patients=patients, out=out, views="light", tuning=SHORT, jobs=1)
    assert again.policy == deployment.policy
    assert again.measures == deployment.measures  # declared once, kept by the folder
    assert "measures of the earlier fit are kept: lv" in again.summary()
    with pytest.raises(Mismatch, match=r"started with other options \(views"):
        casewise.fit(model, images, labels, patients=patients, out=out, views="mri", tuning=SHORT, jobs=1)


def test_a_deployment_remembers_its_measures(fitted, tmp_path):
    model, deployment, _, _ = fitted
    assert deployment.measures.patients == {"lv": 6}
    image = hearts(1, "new")[0][0]
    deployment.save(tmp_path / "copy")
    for one in (deployment, casewise.load(tmp_path / "copy", model=model)):
        found = one.predict(image)
        lv = found.measures["lv"]
        number = next(value for value, name in model.labels.items() if name == "left ventricle")
        assert lv["value"] == found.volumes.get(number, 0) == (found.mask == number).sum()
        assert lv["low"] is None
        assert "6 labelled patients" in lv["why"]
    with pytest.raises(BadInput, match="no label is called 'spleen'"):
        casewise.fit(model, *hearts(5), measures=[measure("s", "volume(spleen)")])


def test_a_second_fit_into_the_same_folder_is_refused_while_the_first_one_runs(tmp_path):
    images, labels = hearts(5)
    with file_lock(tmp_path / "lock"), pytest.raises(Refused, match="another fit writes to"):
        casewise.fit(phantom_cardiac(), images, labels, out=tmp_path, views="light", learn=False, jobs=1)


def test_three_patients_are_too_few_to_learn_and_that_is_reported():
    images, labels = hearts(5)
    deployment = casewise.fit(
        phantom_cardiac(), images, labels, patients=["a", "a", "b", "b", "c"], views="light", jobs=1
    )
    assert "nothing was learned" in deployment.summary()


def test_a_promise_that_needs_more_patients_is_refused_at_once_and_leaves_nothing(tmp_path):
    images, labels = hearts(6)
    with pytest.raises(TooFewCases, match=r"promise 0\.5, the smallest with 6"):
        casewise.fit(phantom_cardiac(), images, labels, patients=list("abcdef"), promise=0.1, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert len(split_for_promise("abcdefghij", 0.17).learning) == 5


def test_fit_reports_the_cases_before_it_starts_and_does_not_time_resumed_folds(fitted):
    model, _, out, _ = fitted
    said, steps = [], []
    images, labels = hearts(6)
    casewise.fit(
        model, images, labels, patients=[f"p{number}" for number in range(6)], out=out, views="light", tuning=SHORT,
        jobs=1, on_note=said.append, on_progress=lambda step, done, total: steps.append(step),
    )  # fmt: skip
    assert said[0] == "6 labelled cases of 6 patients"
    assert said[-1] == "steps: learn, propose, learn from half, propose from half, compare"
    assert not {"learn", "learn from half"} & set(steps)


@pytest.mark.parametrize(
    ("images", "labels", "patients", "said"),
    [
        ([np.zeros((1, 2, 8, 8))], [np.zeros((2, 8, 9))], None, "has shape"),
        ([np.zeros((1, 2, 8, 8))], [], None, "1 images and 0 labels"),
        ([np.zeros((1, 2, 8, 8))], [np.zeros((2, 8, 8))], ["a", "b"], "1 cases and 2 patients"),
        ([np.zeros((1, 2, 8, 8))], [np.zeros((2, 8, 8))], {"x": "a"}, "no patient is given for case-0000"),
    ],
)
def test_images_labels_and_patients_must_fit_together(images, labels, patients, said, tmp_path):
    with pytest.raises(BadInput, match=said):
        labelled_cases(phantom_cardiac(), images, labels, patients, keep=tmp_path)


def test_a_label_that_lies_elsewhere_is_refused_before_anything_is_learned(tmp_path):
    there = np.diag([1.0, 1.0, 2.0, 1.0])
    off = there.copy()
    off[:3, 3] = 50
    for name, (image, label) in zip("abcd", zip(*hearts(4), strict=True), strict=True):
        for place, values, affine in (("images", image[0], there), ("labels", label, off if name == "b" else there)):
            (tmp_path / place).mkdir(exist_ok=True)
            volume = nibabel.Nifti1Image(np.asarray(values, np.float32).transpose(2, 1, 0), affine)
            nibabel.save(volume, tmp_path / place / f"{name}.nii.gz")
    with pytest.raises(BadInput, match="50"):
        casewise.fit(phantom_cardiac(), tmp_path / "images", tmp_path / "labels", out=tmp_path / "out", jobs=1)
    assert not (tmp_path / "out" / "tuned").exists()


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ({"views": "mr"}, "mri"),
        ({"propose": ["views:mr"]}, "mri"),
        ({"propose": ["x=tentt"]}, "tent"),
        ({"promise": 0.5, "loss": "harm"}, "harmed"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_is_learned(wrong, meant, tmp_path):
    with pytest.raises(UnknownName, match=f"Did you mean '{meant}'"):
        casewise.fit(phantom_cardiac(), *hearts(6), out=tmp_path / "out", jobs=1, **wrong)
    assert not (tmp_path / "out").exists()


def test_links_are_followed_and_one_to_a_missing_file_is_refused_before_anything_is_learned(tmp_path):
    images, labels = (tmp_path / name for name in ("images", "labels"))
    for folder in (images, labels):
        folder.mkdir()
    for name, image, label in zip("ab", *hearts(2), strict=True):
        write_image(labels / f"{name}.nii.gz", label.astype(np.uint8))
        write_image((images if name == "a" else tmp_path) / f"{name}.nii.gz", image[0])
    (images / "b.nii.gz").symlink_to(tmp_path / "b.nii.gz")
    cases, _ = labelled_cases(phantom_cardiac(), images, labels, None, keep=tmp_path / "kept")
    assert [one.id for one in cases] == ["a", "b"]
    (tmp_path / "b.nii.gz").unlink()
    with pytest.raises(BadInput, match=r"b\.nii\.gz is a link to a missing file"):
        labelled_cases(phantom_cardiac(), images, labels, None, keep=tmp_path / "kept")


def test_two_commands_from_labelled_scans_to_masks(tmp_path):
    """casewise fit, then casewise predict, on a miniature nnU-Net."""
    write_model(tmp_path / "model")
    names = write_scans(tmp_path / "holdout", range(6), shift=0.4)
    write_scans(tmp_path / "new", range(20, 22), shift=0.4)
    table = "case,cluster\n" + "".join(f"{name},p{k // 1}\n" for k, name in enumerate(names))
    (tmp_path / "holdout" / "cases.csv").write_text(table)
    holdout, out = tmp_path / "holdout", tmp_path / "deployment"
    measures = tmp_path / "measures.toml"
    measures.write_text('[measures]\nall = "volume(1) + volume(2)"\nef = "1 - volume(1, ES) / volume(1, ED)"\n')
    said = _run(
        "fit", "-m", tmp_path / "model", "-i", holdout / "images", "-l", holdout / "labels", "-o", out, "-j", "1",
        "--measures", measures,
    )  # fmt: skip
    assert "Next: casewise predict" in said
    assert "all: no interval, because 6 patients had a value" in said
    assert "Clinical measures" in (out / "fit.html").read_text()
    for old, new in (("case_020", "q_ED"), ("case_021", "q_ES")):
        (tmp_path / "new" / "images" / f"{old}_0000.nii.gz").rename(tmp_path / "new" / "images" / f"{new}_0000.nii.gz")
    masks = tmp_path / "masks"
    said = _run("predict", "-i", tmp_path / "new" / "images", "-o", masks, "-m", out)
    assert "2 masks" in said
    assert sorted(path.name for path in masks.glob("*.nii.gz")) == ["q_ED.nii.gz", "q_ES.nii.gz"]
    ed, es = (json.loads((masks / "casewise" / f"q_{scan}.json").read_text()) for scan in ("ED", "ES"))
    assert ed["measures"]["ef"] == es["measures"]["ef"]  # one value for the patient, at both scans
    assert ed["measures"]["ef"]["value"] == pytest.approx(1 - es["volumes"]["1"] / ed["volumes"]["1"], abs=1e-3)
    assert ed["measures"]["all"]["value"] == pytest.approx(sum(ed["volumes"].values()), abs=1e-3)
    assert "ef 0." in (masks / "report.html").read_text() or "ef -" in (masks / "report.html").read_text()
    assert not verify_predictions(masks)  # the log knows that the entries were completed
    assert json.loads((out / DEPLOYMENT).read_text())["model"]["spec"] == str((tmp_path / "model").resolve())


def _run(*words: object) -> str:
    found = typed(*words)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_a_moved_model_is_found_where_it_is_said_to_be(tmp_path):
    write_model(tmp_path / "model")
    casewise.Deployment(tmp_path / "model").save(tmp_path / "plain")
    Path(tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(BadInput, match="--model-at"):
        casewise.load(tmp_path / "plain")
    assert casewise.load(tmp_path / "plain", model=tmp_path / "moved").backbone.classes == 3


DISCS = [disc(number, 2, 24) for number in range(14)]
QUICK = Tuning(updates=12, batch=4, learning_rate=0.1, augmentation="none")


@pytest.fixture(scope="module")
def promised(tmp_path_factory):
    """A deployment with a promise: tuning helps every disc, so the patients set aside certify it."""
    images, labels = [image for image, _ in DISCS], [label for _, label in DISCS]
    return casewise.fit(
        eroding_model(), images, labels, patients=[f"p{number:02d}" for number in range(14)], views="", tuning=QUICK,
        promise=0.2, out=tmp_path_factory.mktemp("promise") / "deployment", jobs=1,
    )  # fmt: skip


def test_a_promise_is_issued_on_patients_who_took_no_part_in_learning(promised):
    folder = promised.folder
    learned, aside = (set(json.loads((folder / name / "manifest.json").read_text())["cases"]) for name in FOLDERS)
    assert (len(learned), len(aside)) == (10, 4)
    assert not learned & aside
    tuned = json.loads((folder / "tuned" / "folds.json").read_text())
    taught = {patient for fold in tuned["folds"] for patient in (*fold["trained_on"], *fold["left_out"])}
    assert not taught & {f"p{int(name[-4:]):02d}" for name in aside}
    assert promised.certificate is not None
    assert promised.certificate.alpha == 0.2
    assert f"Promised: {promised.certificate.statement}" in promised.summary()
    assert promised.certificate.statement in unescape((folder / "fit.html").read_text())
    again = casewise.load(folder, model=eroding_model())
    assert again.certificate == promised.certificate


def test_the_patients_of_a_promise_take_no_part_in_choices_flags_and_limits_of_appearance(promised):
    """Whatever their images and labels are, the policy is that of a fit without them; only the certificate differs."""
    learned = [
        int(name[-4:]) for name in json.loads((promised.folder / "archive" / "manifest.json").read_text())["cases"]
    ]
    alone = casewise.fit(
        eroding_model(), [DISCS[k][0] for k in learned], [DISCS[k][1] for k in learned],
        patients=[f"p{k:02d}" for k in learned], views="", tuning=QUICK, jobs=1, learning_curve=False,
    )  # fmt: skip
    first, second = alone.policy, promised.policy
    assert {**first.options, "cut_high": 0} == {**second.options, "cut_high": 0}
    assert (first.controller, first.flag, first.cleanup) == (second.controller, second.flag, second.cleanup)
    assert first.appearance["patients"] == second.appearance["patients"]


def test_nothing_is_recorded_for_a_promise_if_m0_is_kept(tmp_path):
    images, labels = [image for image, _ in DISCS[:8]], [label for _, label in DISCS[:8]]
    kept = casewise.fit(
        eroding_model(), images, labels, patients=list("abcdefgh"), promise=0.3, views="light", learn=False, jobs=1,
        out=tmp_path / "out",
    )  # fmt: skip
    assert "Promised: nothing: every case gets M0" in kept.summary()
    assert not (tmp_path / "out" / "held-out").exists()


FOLDERS = ("archive", "held-out")


def test_a_promise_about_views_and_tuned_weights_holds_for_the_deployment_that_is_read_again(tmp_path):
    """Where several ladders are read, the policy names the folder of the weights, which changes when it is saved."""
    images, labels = [image for image, _ in DISCS], [label for _, label in DISCS]
    made = casewise.fit(
        eroding_model(), images, labels, patients=[f"p{number:02d}" for number in range(14)], views="mirror",
        tuning=QUICK, promise=0.2, out=tmp_path / "deployment", jobs=1, learning_curve=False,
    )  # fmt: skip
    assert made.certificate is not None
    assert len(made.policy.ladders) == 2
    for folder in (tmp_path / "deployment", made.save(tmp_path / "copy")):
        again = casewise.load(folder, model=eroding_model())
        assert again.certificate == made.certificate
        image, label = disc(99, 2, 24)
        new = again.predict(image)
        assert dice(new.mask, label) > dice(new.source_mask, label) + 0.1


def test_a_promise_is_printed_only_where_it_holds(promised, tmp_path):
    """A new disc is covered; a labelled disc is not, and a folder unlike the labelled one is not either."""
    image, label = disc(99, 2, 24)
    new = promised.predict(image)
    assert not new.notes
    assert dice(new.mask, label) > dice(new.source_mask, label) + 0.1
    for number in range(14):
        assert any("no certificate covers it" in note for note in promised.predict(DISCS[number][0]).notes)
    folders = {
        "new": [disc(number, 2, 24)[0] for number in (50, 51, 52)],
        "mixed": [disc(60, 2, 24)[0], DISCS[0][0]],
        "known": [DISCS[0][0], DISCS[1][0]],
        "unlike": [np.random.default_rng(number).normal(size=(1, 24, 24)).astype(np.float32) for number in (1, 2, 3)],
    }
    said = {}
    for name, images in folders.items():
        for number, image in enumerate(images):
            write_image(tmp_path / name / f"{name}{number}.nii.gz", image)
        found = promised.predict_folder(tmp_path / name, tmp_path / f"{name}-masks", overlays=False)
        page = unescape(found.page.read_text())
        said[name] = found.promise
        assert (promised.certificate.statement in page) == (found.promise is not None), name
        entries = [json.loads(file.read_text()) for file in sorted((found.page.parent / "casewise").glob("*.json"))]
        covered = [not entry["certificate"]["void"] for entry in entries]
        assert covered == {"new": [True] * 3, "mixed": [True, False], "known": [False] * 2, "unlike": [False] * 3}[name]
    assert [name for name, promise in said.items() if promise] == ["new", "mixed"]
    assert any("1 of 2 cases" in line for line in promised.predict_folder(
        tmp_path / "mixed", tmp_path / "mixed-masks", resume=True, overlays=False).warnings)  # fmt: skip


def test_a_labelled_patient_among_new_cases_is_outside_every_promise(promised, tmp_path):
    for number in range(2):
        write_image(tmp_path / "later" / f"later{number}.nii.gz", disc(70 + number, 2, 24)[0])
    (tmp_path / "cases.csv").write_text("case,cluster\nlater0,p00\nlater1,p99\n")
    found = promised.predict_folder(
        tmp_path / "later", tmp_path / "masks", groups=tmp_path / "cases.csv", overlays=False
    )
    entries = [json.loads((tmp_path / "masks" / "casewise" / f"later{number}.json").read_text()) for number in range(2)]
    assert [entry["certificate"]["void"] for entry in entries] == [True, False]
    assert any("p00" in note for note in entries[0]["notes"])
    assert any(line.startswith("1 of 2 cases") for line in found.warnings)
    assert "p00" in found.page.read_text()


def test_a_promise_is_refused_where_too_few_would_learn_to_adopt_anything():
    images, labels = [image for image, _ in DISCS[:8]], [label for _, label in DISCS[:8]]
    with pytest.raises(TooFewCases, match=r"9 labelled patients \(4 to certify it and 5 to learn and choose\), got 8"):
        casewise.fit(eroding_model(), images, labels, patients=list("abcdefgh"), promise=0.2, jobs=1)


def test_where_only_m0_is_unusual_the_chosen_mask_stays_and_is_flagged(promised):
    """Going back to a mask because that mask looks wrong would help nobody."""
    image, known = DISCS[-1][0], promised.policy.appearance
    column = next(place for place, name in enumerate(known["names"]) if name.startswith("share of label"))
    rows = [[*row[:column], row[column] + 50, *row[column + 1 :]] for row in known["patients"]]
    unusual = replace(promised.policy, appearance={**known, "patients": rows})
    plain = promised.predict(image)
    found = replace(promised, policy=unusual, certificate=None).predict(image)
    assert found.flagged
    assert any("the masks of this case are unlike" in note for note in found.notes)
    np.testing.assert_array_equal(found.mask, plain.mask)
    assert found.decision.action is plain.decision.action


def test_a_fixed_design_makes_only_its_own_candidates(promised):
    """Views would cost forward passes that nothing reads, unless a flag compares them."""
    labels = {**promised.policy.options, "ladders": ("tuned", "views"), "candidate": "tuned:2"}
    policy = replace(promised.policy, options=labels, controller="fixed-candidate")
    assert judge_of(replace(policy, flag={})).ladders == ("tuned",)
    assert judge_of(policy).flag is None or "views" in judge_of(policy).ladders


def write_image(path: Path, image: np.ndarray) -> None:
    path.parent.mkdir(exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(image.transpose(2, 1, 0), np.eye(4)), path)


def test_a_learning_curve_says_what_fewer_patients_gain(tmp_path):
    images, labels = [image for image, _ in DISCS[:6]], [label for _, label in DISCS[:6]]
    deployment = casewise.fit(eroding_model(), images, labels, views="", tuning=QUICK, out=tmp_path / "fit", jobs=1)
    curve = json.loads((tmp_path / "fit" / "fit.json").read_text())["learning_curve"]
    assert list(curve) == ["3", "4"]  # two folds of three patients, and three folds of two
    assert curve["3"].keys() == curve["4"].keys() == {"1", "average"}
    assert all(curve[few]["1"] > 0 for few in curve)  # tuning helps every disc
    said = f"learning from 3 and from 4: tuned weights {curve['3']['1']:+.4f} and {curve['4']['1']:+.4f}"
    assert said in deployment.summary()
    assert said in unescape((tmp_path / "fit" / "fit.html").read_text())


def test_a_class_that_no_label_holds_is_named(tmp_path):
    images, labels = hearts(5)
    bare = [np.where(label == 3, 0, label) for label in labels]
    told: list[str] = []
    casewise.fit(phantom_cardiac(), images, bare, learn=False, out=tmp_path, views="mirror(x)", on_note=told.append)
    assert [said.split(":")[0] for said in told if said.startswith("no label")] == ["no label holds right ventricle"]


def test_volumes_of_one_slice_have_their_pictures(tmp_path):
    images, labels = hearts(5)
    scans = tmp_path / "scans"
    for kind in ("images", "labels"):
        (scans / kind).mkdir(parents=True)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        for kind, values in (("images", image[0]), ("labels", label)):
            one = nibabel.Nifti1Image(values[len(values) // 2 :][:1].T.astype(np.float32), np.eye(4))
            nibabel.save(one, scans / kind / f"p{number}.nii.gz")
    casewise.fit(
        phantom_cardiac(), scans / "images", scans / "labels", learn=False, out=tmp_path / "d", views="mirror(x)"
    )
    assert (tmp_path / "d" / "fit.html").read_text().count("data:image") >= 3


def test_flags_that_cannot_be_calibrated_say_why(fitted):
    _, deployment, _, _ = fitted
    assert "no case is flagged: a lower bound" in deployment.summary()


def test_scenes_are_tuned_upright(tmp_path):
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 1), torch.nn.InstanceNorm2d(4, affine=True), torch.nn.Conv2d(4, 8, 1)
    )
    streets = Module(network, classes=8, dimensions=2, labels={0: "road", 1: "sky"}, ignore=255)
    images = [np.random.default_rng(seed).normal(size=(3, 12, 16)).astype(np.float32) for seed in range(5)]
    labels = [(image[0] > 0).astype(np.uint8) for image in images]
    short = Tuning(updates=1, batch=1)
    casewise.fit(streets, images, labels, views="light", tuning=short, out=tmp_path, learning_curve=False)
    tuned = read_tuned_folder(tmp_path / "tuned").folds[0].tuning
    assert tuned["augmentation"] == "upright"


def test_a_label_without_foreground_is_said_to_be_left_out_of_the_comparison(tmp_path):
    images, labels = [image for image, _ in DISCS[:6]], [label for _, label in DISCS[:5]]
    empty = [*labels, np.zeros_like(labels[0])]
    made = casewise.fit(eroding_model(), images, empty, views="mirror(x)", learn=False, out=tmp_path / "fit", jobs=1)
    assert "1 labelled case without foreground in the label: the comparison leaves them out" in made.summary()


def test_training_that_ends_in_nan_leaves_views_and_m0_and_says_so(tmp_path):
    images, labels = [image for image, _ in DISCS[:6]], [label for _, label in DISCS[:6]]
    wild = replace(QUICK, learning_rate=1e30)
    deployment = casewise.fit(
        eroding_model(), images, labels, views="mirror(x)", tuning=wild, out=tmp_path / "fit", jobs=1
    )
    notes = json.loads((tmp_path / "fit" / "fit.json").read_text())["notes"]
    assert [note for note in notes if "fold 0 was not learned" in note and "lower the learning rate" in note]
    assert "tuned" not in deployment.policy.ladders
    image, _ = DISCS[7]
    assert deployment.predict(image).status == "done"


@pytest.mark.parametrize(("ids", "asked"), [(["p1_ED", "p1_ES", "p2_ED"], True), (["x_1", "x_2", "x_3"], False)])
def test_scans_that_may_be_of_one_patient_are_named(ids, asked, tmp_path):
    images, labels = hearts(3)
    cases = [Case(name, image) for name, image in zip(ids, images, strict=True)]
    _, (said,) = labelled_cases(phantom_cardiac(), cases, labels, None, keep=tmp_path)
    assert "every case counts as one" in said
    assert ("are p1_ED and p1_ES one patient?" in said) is asked


def test_images_without_a_label_are_named_and_left_out(tmp_path):
    images, labels = hearts(3)
    for name, image, label in zip("abc", images, labels, strict=True):
        for place, values in (("images", image[0]), ("labels", label)):
            (tmp_path / place).mkdir(exist_ok=True)
            volume = nibabel.Nifti1Image(np.asarray(values, np.float32).transpose(2, 1, 0), np.eye(4))
            nibabel.save(volume, tmp_path / place / f"{name}.nii.gz")
    (tmp_path / "labels" / "b.nii.gz").unlink()
    found, said = labelled_cases(
        phantom_cardiac(), tmp_path / "images", tmp_path / "labels", None, keep=tmp_path / "keep"
    )
    assert [one.id for one in found] == ["a", "c"]
    assert "1 image left out, because no label has the same name: b" in said


def test_where_the_promise_fails_every_case_keeps_m0_and_the_page_says_so(tmp_path):
    """Learning helps the patients that learn and harms those that were set aside for the promise."""
    names = [f"p{number:02d}" for number in range(14)]
    aside, model = split_for_promise(names, 0.2).certifying, eroding_model()
    labels = [label for _, label in DISCS]
    for at in map(names.index, aside):
        labels[at] = Deployment(model, READY["m0"]).predict(DISCS[at][0]).mask  # M0 is right, each change is harm
    found = casewise.fit(
        model, [image for image, _ in DISCS], labels, patients=names, views="", tuning=QUICK, promise=0.2, jobs=1,
        out=tmp_path / "deployment",
    )  # fmt: skip
    assert (found.certificate, found.policy.controller, found.policy.flag) == (None, "m0", {})
    said = found.summary()
    assert "Deploys the model's own mask (m0)" in said
    assert "Promised: nothing: 4 labelled cases are enough for alpha >= 0.200, but they show too much harm" in said
    assert "The model’s own masks stay in use" in (found.folder / "fit.html").read_text()
    image = DISCS[0][0]
    assert (found.predict(image).mask == Deployment(model, READY["m0"]).predict(image).mask).all()
