"""The ladder of tuned weights: interpolated states, the average with M0, folds by patient, archives that prove it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from worlds.discs import cohort, tiny_backbone
from worlds.readings import readings_of

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.forward_episode import SharedSource
from casewise.adapt.proposers import PreparedCase, named_proposal, proposer_of
from casewise.adapt.snapshot import fingerprint
from casewise.adapt.tuned_weights import read_tuned_folder, temporary_weights
from casewise.archive.layout import ENTRY, read_json
from casewise.archive.store import create_archive
from casewise.archive.verify import verify
from casewise.core.durable import write_json
from casewise.core.errors import BadInput, Mismatch, UnsafeInput
from casewise.core.records import Case, State
from casewise.guard import guard
from casewise.judge.controllers import CONTROLLERS
from casewise.learn.folds import cross_fit
from casewise.learn.tuning import Tuning


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Five patients with a disc each, and weights that were tuned on them in two folds."""
    cases, labels, patients = cohort(5)
    folder = tmp_path_factory.mktemp("tuned")
    cross_fit(
        tiny_backbone(),
        cases,
        labels,
        patients,
        Tuning(updates=6, batch=2, learning_rate=3e-2),
        folder=folder,
        workers=1,
    )
    return cases, labels, folder


def candidates(case, folder, objective="tuned", model=None, **more):
    backbone = model or tiny_backbone()
    how = Adaptation(objective, tuned=str(folder), min_area=1, **more)
    return readings_of(backbone, backbone.prepare(case), case, how)


def predicted(weights, share, case):
    """Independent computation: put the weights in by hand."""
    backbone = tiny_backbone()
    with torch.no_grad():
        for name, parameter in backbone.network.named_parameters():
            if name in weights.values:
                parameter += share * (weights.values[name] - parameter)
        return backbone.network(backbone.prepare(case).inputs).softmax(1)


def test_states_are_interpolated_weights_and_the_average_of_predictions(fitted):
    cases, _, folder = fitted
    made = candidates(cases[0], folder)
    assert made.rungs == ("1/4", "1/2", "3/4", "1", "average")
    mean = read_tuned_folder(folder).mean
    for step, share in enumerate((0.0, 0.25, 0.5, 0.75, 1.0)):
        assert np.array_equal(made.masks[step], predicted(mean, share, cases[0]).argmax(1)[0])
    both = (predicted(mean, 0.0, cases[0]) + predicted(mean, 1.0, cases[0])) / 2
    assert np.array_equal(made.masks[5], both.argmax(1)[0])
    assert len({mask.tobytes() for mask in made.masks}) > 1, "tuning moved the masks"
    assert made.fold == "mean"
    assert made.trained_on == ("p0", "p1", "p2", "p3", "p4")


def test_some_states_are_enough(fitted):
    cases, _, folder = fitted
    whole, some = candidates(cases[0], folder), candidates(cases[0], folder, "tuned:1,average")
    assert some.rungs == ("1", "average")
    assert all(np.array_equal(whole.masks[k], some.masks[k - 3]) for k in (4, 5))
    assert candidates(cases[0], folder, "tuned:1").rungs == ("1",)
    for wrong in ("tuned:2", "tuned:1,1/2", "tuned:average", "tuned:1/2,average", "tuned:half", "tuned:0"):
        with pytest.raises(BadInput):
            _ = proposer_of(Adaptation(wrong, tuned=str(folder)))


def test_with_crossfit_nobody_sees_weights_of_their_own_patient(fitted):
    cases, _, folder = fitted
    for case in cases:
        made = candidates(case, folder, crossfit=True)
        own = read_tuned_folder(folder).without(case.cluster)
        assert made.fold == own.fold
        assert case.cluster not in made.trained_on
        assert np.array_equal(made.masks[4], predicted(own, 1.0, case).argmax(1)[0])
    assert candidates(Case("new", cases[0].image), folder, crossfit=True).fold == "mean"


def test_the_mean_of_predictions_instead_of_the_mean_of_weights(fitted):
    cases, _, folder = fitted
    made = candidates(cases[0], folder, ensemble=True)
    each = [predicted(one, 1.0, cases[0]) for one in read_tuned_folder(folder).folds]
    assert np.array_equal(made.masks[4], torch.stack(each).mean(0).argmax(1)[0])
    assert made.fold == "fold-0+fold-1"


def test_views_are_read_through_the_tuned_weights(fitted):
    cases, _, folder = fitted
    made = candidates(cases[0], folder, "tuned+views:mirror(x),gamma(1.4)")
    assert made.rungs == ("tuned", "mirror(x)", "gamma(1.4)", "mean")
    assert np.array_equal(made.masks[1], candidates(cases[0], folder).masks[4])
    backbone = tiny_backbone()
    with temporary_weights(backbone.network, read_tuned_folder(folder).mean):
        own = readings_of(backbone, backbone.prepare(cases[0]), cases[0], Adaptation("views:mirror(x),gamma(1.4)"))
    assert all(np.array_equal(a, b) for a, b in zip(made.masks[1:], own.masks, strict=True))
    with pytest.raises(BadInput, match="ensemble"):
        candidates(cases[0], folder, "tuned+views:mirror(x)", ensemble=True)


def test_the_network_is_restored_and_a_shared_m0_is_predicted_once(fitted):
    cases, _, folder = fitted
    backbone = tiny_backbone()
    before, ready = fingerprint(backbone.network), backbone.prepare(cases[0])
    calls = []
    backbone.network.head.register_forward_hook(lambda *_: calls.append(1))
    how = Adaptation("tuned:1", tuned=str(folder))
    readings_of(backbone, ready, cases[0], how, SharedSource(ready.pipeline))
    assert len(calls) == 2, "deploying the tuned mean costs one forward more than M0"
    assert fingerprint(backbone.network) == before


def test_a_step_is_shrunk_by_interpolating_weights(fitted):
    cases, _, folder = fitted
    backbone, mean = tiny_backbone(), read_tuned_folder(folder).mean
    how = Adaptation("tuned", tuned=str(folder), min_area=1)
    with proposer_of(how).propose(PreparedCase(cases[0], backbone.prepare(cases[0])), backbone) as episode:
        for _ in range(5):
            episode.advance()
        assert np.array_equal(episode.shrink(4, 0.6), predicted(mean, 0.4, cases[0]).argmax(1)[0])
        assert episode.shrink(4, 0.5) is episode.record.masks[2], "these weights were read already"
        half = (predicted(mean, 0.0, cases[0]) + predicted(mean, 0.4, cases[0])) / 2
        assert np.array_equal(episode.shrink(5, 0.6), half.argmax(1)[0])
        assert {*episode.trajectory.shrunk} == {State(4, 0.6), State(4, 0.5), State(5, 0.6)}
        with pytest.raises(BadInput, match="step 6"):
            episode.shrink(6, 0.5)
    recorded = candidates(cases[0], folder, shrink=(State(4, 0.6),))
    assert np.array_equal(recorded.shrunk[State(4, 0.6)], episode.trajectory.shrunk[State(4, 0.6)])


def test_a_controller_decides_on_it_live(fitted):
    cases, _, folder = fitted
    found = guard(
        cases[0],
        tiny_backbone(),
        CONTROLLERS.build("fixed-k", step=4),
        "tuned",
        steps=5,
        tuned=str(folder),
        min_area=1,
    )
    assert np.array_equal(found.mask, candidates(cases[0], folder).masks[4])


def test_a_failed_fold_leaves_m0_and_says_so(fitted, tmp_path):
    cases, _, folder = fitted
    broken = read_tuned_folder(folder).folds[1]
    read_tuned_folder(folder).folds[0].write(tmp_path / "fold-0.safetensors")
    write_json(tmp_path / "fold-1.failed.json", {"left_out": broken.left_out, "reason": "the loss was NaN"})
    case = next(case for case in cases if case.cluster in broken.left_out)
    made = candidates(case, tmp_path, crossfit=True)
    assert all(np.array_equal(mask, made.masks[0]) for mask in made.masks)
    assert "the loss was NaN" in made.left_out["1"]
    assert made.trained_on == ()


def test_weights_of_another_model_are_refused_and_weights_are_part_of_the_binding(fitted, tmp_path):
    cases, _, folder = fitted
    with pytest.raises(Mismatch, match="tuned weights belong to model"):
        candidates(cases[0], folder, model=tiny_backbone(norm="batch"))
    how, backbone = Adaptation("tuned", tuned=str(folder)), tiny_backbone()
    with pytest.raises(Mismatch):
        how.binding(tiny_backbone(norm="batch"))
    first, second = (replace(one, fold=f"fold-{k}") for k, one in enumerate(read_tuned_folder(folder).folds))
    first.write(tmp_path / "fold-0.safetensors")
    replace(second, values={n: v + 1 for n, v in second.values.items()}).write(tmp_path / "fold-1.safetensors")
    assert replace(how, tuned=str(tmp_path)).binding(backbone) != how.binding(backbone)
    assert replace(how, crossfit=True).binding(backbone) == how.binding(backbone), "recorded so, deployed otherwise"
    assert replace(how, ensemble=True).binding(backbone) != how.binding(backbone)
    with pytest.raises(BadInput, match="name their folder"):
        _ = proposer_of(Adaptation("tuned"))


def test_files_keep_how_it_was_made_but_never_crossfit(fitted):
    _, _, folder = fitted
    how = Adaptation("tuned", tuned=str(folder), crossfit=True)
    assert Adaptation.from_plain(how.as_plain()) == replace(how, crossfit=False)
    with pytest.raises(UnsafeInput, match="crossfit"):
        Adaptation.from_plain({**how.as_plain(), "crossfit": True})
    assert named_proposal("tuned+views:mri")[0] == "tuned+views-mri"


def recorded(path, fitted, **more):
    cases, labels, folder = fitted
    backbone, how = tiny_backbone(), Adaptation("tuned", tuned=str(folder), min_area=1, **more)
    archive = create_archive(
        path, binding=how.binding(backbone), steps=how.horizon(backbone), ladder="tuned",
        configuration={"objective": "tuned", "adaptation": how.as_plain()},
    )  # fmt: skip
    for case, label in zip(cases, labels, strict=True):
        archive = archive.add(case, readings_of(backbone, backbone.prepare(case), case, how), label)
    archive.seal()
    return archive


def test_an_archive_proves_that_no_case_met_weights_of_its_patient(fitted, tmp_path):
    honest = recorded(tmp_path / "honest", fitted, crossfit=True)
    assert verify(tmp_path / "honest") == []
    entry = next(iter(honest.entries.values()))
    assert entry.fold in ("fold-0", "fold-1")
    assert entry.trained_on
    recorded(tmp_path / "leaking", fitted)
    problems = verify(tmp_path / "leaking")
    assert len(problems) == 5
    assert "p0_0" in problems[0]
    assert "trained on its own patient" in problems[0]


def test_an_entry_that_hides_its_patients_is_noticed(fitted, tmp_path):
    recorded(tmp_path, fitted)
    file = tmp_path / "cases" / "p0_0" / "ladder-tuned" / ENTRY
    write_json(file, {**read_json(file), "trained_on": []})
    problems = [problem for problem in verify(tmp_path) if "p0_0" in problem]
    assert any("not the one that was sealed" in problem for problem in problems)
    assert any("are not recorded" in problem for problem in problems)
