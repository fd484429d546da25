"""Candidates that somebody else made: a function of the user's own, and masks in a folder."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import casewise
from casewise.adapt.adaptation import Adaptation
from casewise.adapt.networks import phantom_cardiac
from casewise.adapt.proposers import proposer_of
from casewise.adapt.proposers.live import record_case, run_episode
from casewise.adapt.snapshot import fingerprint
from casewise.core.errors import BadInput
from casewise.data.phantom import cardiac_cohort


def plain(network: nn.Module, image: Tensor) -> list[NDArray[np.uint8]]:
    """A method in the plainest form: one update by hand, then two masks; it leaves the network changed."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    made = []
    for _ in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(network(image).softmax(1).amax(1).mean())
        optimizer.step()
        made.append(network(image).argmax(1).numpy().astype(np.uint8))
    network.train()
    return made


def test_a_plain_function_is_a_method(unet, slices):
    before = fingerprint(unet)
    made = run_episode(unet, slices, plain, steps=2)
    assert made.steps == 2
    assert np.array_equal(made.masks[0], unet.eval()(slices).argmax(1).numpy())
    assert any(not np.array_equal(mask, made.masks[0]) for mask in made.masks[1:])
    assert fingerprint(unet) == before, "the function changed the network, which must come back"
    assert made.signals[1]["entropy"] is None, "a mask alone has no entropy"


def test_a_function_is_found_by_its_address_and_guarded(slices, unet, tmp_path, monkeypatch):
    (tmp_path / "my_masks.py").write_text("def my_adapt(network, image):\n    return [network(image).argmax(1)] * 4\n")
    monkeypatch.chdir(tmp_path)
    made = run_episode(unet, slices, "my_masks:my_adapt")
    assert all(np.array_equal(mask, made.masks[0]) for mask in made.masks)
    how = Adaptation("my_masks:my_adapt")
    assert not how.is_gradient
    assert how.binding(unet).objective == "my_masks:my_adapt"
    guarded = casewise.guard(slices[0].numpy(), unet, "frag-stop", objective="my_masks:my_adapt")
    assert guarded.mask.shape == (16, 16)


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ([np.zeros((5, 16, 16), int)], "returned 1 mask .* expected 2"),
        (None, "returned NoneType"),
        ([np.zeros((16, 16), int)] * 2, r"integer masks of shape \(5, 16, 16\), got int64 of shape \(16, 16\)"),
        ([np.full((5, 16, 16), 0.5)] * 2, "integer masks"),
        ([np.full((5, 16, 16), -1)] * 2, "classes 0 to 2"),
    ],
)
def test_masks_that_cannot_be_used_are_refused(unet, slices, returned, sentence):
    with pytest.raises(BadInput, match=sentence):
        run_episode(unet, slices, lambda network, image: returned, steps=2)


@pytest.mark.parametrize("objective", [3, object(), lambda: None, lambda a, b, c: None])
def test_an_object_that_is_no_method_is_refused_in_a_sentence(unet, slices, objective):
    with pytest.raises(BadInput, match=r"a method must be a function \(network, image\) .*own-method.md"):
        run_episode(unet, slices, objective)


def test_views_work_wherever_a_method_name_does(unet, slices):
    made = run_episode(unet, slices, "views:mirror(x),gamma(1.4)")
    assert made.rungs == ("mirror(x)", "gamma(1.4)", "mean")
    assert np.array_equal(made.masks[0], run_episode(unet, slices, "tent", steps=0).masks[0])
    guarded = casewise.guard(slices[0].numpy(), unet, "frag-stop", objective="views:photo")
    assert guarded.decision.state.step <= 7


def written(path: Path, mask: NDArray[np.uint8]) -> None:
    nibabel.save(nibabel.Nifti1Image(mask.T, np.eye(4)), path)


def test_masks_of_a_folder_are_candidates(tmp_path: Path) -> None:
    cohort, backbone = cardiac_cohort("B", 2, split="target"), phantom_cardiac()
    cases = [cohort.case(one) for one in cohort.ids]
    for number, case in enumerate(cases):
        for step in (1, 2):
            mask = np.full(case.image.shape[1:], step, np.uint8)
            np_place = tmp_path / "steps" / case.id
            np_place.mkdir(parents=True, exist_ok=True)
            written(np_place / f"step_{step}.nii.gz", mask)
        (tmp_path / "flat").mkdir(exist_ok=True)
        written(tmp_path / "flat" / f"{case.id}.nii.gz", np.full(case.image.shape[1:], number, np.uint8))
    made = record_case(cases[1], backbone, {"theirs": Adaptation(f"imported:{tmp_path / 'steps'}")})["theirs"]
    assert [int(mask.max()) for mask in made.masks[1:]] == [1, 2]
    flat = Adaptation(f"imported:{tmp_path / 'flat'}")
    assert record_case(cases[1], backbone, {"": flat})[""].masks[1].min() == 1
    assert proposer_of(flat).states(backbone) == 1
    (tmp_path / "steps" / cases[0].id / "step_2.nii.gz").unlink()
    with pytest.raises(BadInput, match=f"1 masks of case {cases[0].id}|2 masks of case"):
        record_case(cases[1], backbone, {"": Adaptation(f"imported:{tmp_path / 'steps'}")})
    with pytest.raises(BadInput, match="must name a folder with masks"):
        proposer_of(Adaptation("imported:nowhere"))
