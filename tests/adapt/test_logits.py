"""Whatever a network returns, as logits at the resolution of the mask."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from casewise.adapt.logits import at_resolution, check_finite, labels, logits_of
from casewise.core.errors import BadInput, NotFinite

FINE, COARSE = torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 4, 4)


@pytest.mark.parametrize(
    "output",
    [
        FINE,
        (FINE, COARSE),
        [COARSE, FINE],
        {"out": FINE, "aux": COARSE},
        {"logits": FINE},
        SimpleNamespace(logits=FINE),
    ],
)
def test_the_finest_logits_are_found(output):
    assert logits_of(output) is FINE


def test_a_finer_map_of_features_is_not_taken_for_the_logits():
    features = torch.zeros(1, 64, 8, 8)
    assert logits_of((COARSE, features), classes=2) is COARSE
    assert logits_of((features, COARSE, FINE), classes=2) is FINE
    for classes in (None, 3):
        with pytest.raises(BadInput, match="tensors with 2 and 64 channels, and it is not clear which are the logits"):
            logits_of((COARSE, features), classes=classes)


def test_what_holds_no_logits_is_refused_with_a_way_out():
    with pytest.raises(BadInput, match=r"one of the keys .*got \['other'\]; pass forward="):
        logits_of({"other": FINE})
    with pytest.raises(BadInput, match="got str; pass forward="):
        logits_of("logits")


def test_low_resolution_logits_are_resized_as_segformers_pipeline_does():
    coarse = torch.randn(2, 3, 4, 4)
    expected = functional.interpolate(coarse, size=(16, 16), mode="bilinear", align_corners=False)
    assert torch.equal(at_resolution(coarse, (16, 16)), expected)
    assert at_resolution(coarse, (4, 4)) is coarse


def test_volumes_are_resized_in_three_axes():
    assert at_resolution(torch.zeros(1, 2, 2, 4, 4), (4, 8, 8)).shape == (1, 2, 4, 8, 8)
    with pytest.raises(BadInput, match="must return logits"):
        at_resolution(torch.zeros(1, 2, 4, 4), (2, 4, 4))


def test_softmax_labels_are_the_argmax():
    logits = torch.randn(2, 4, 3, 3)
    assert np.array_equal(labels(logits, "softmax"), logits.argmax(1).numpy())
    assert labels(logits, "softmax").dtype == np.uint8


def test_a_tie_goes_to_the_first_class_as_with_argmax():
    logits = torch.randint(0, 2, (3, 5, 32, 32)).float()
    assert np.array_equal(labels(logits, "softmax"), logits.argmax(1).numpy())


def test_sigmoid_labels_are_the_last_region_that_holds():
    logits = torch.tensor([[-1.0, 1.0, 1.0, -1.0], [-1.0, -1.0, 2.0, 3.0]]).view(1, 2, 1, 4)
    assert labels(logits, "sigmoid").tolist() == [[[0, 1, 2, 2]]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_logit_is_noticed(bad):
    logits = torch.zeros(1, 2, 3, 3)
    logits[0, 1, 2, 2] = bad
    with pytest.raises(NotFinite, match="1 of 18 logits are NaN or infinite here"):
        check_finite(logits, "here")


def test_large_logits_are_not_mistaken_for_infinite_ones():
    logits = torch.full((1, 2, 3, 3), 3e38)
    assert check_finite(logits, "here") is logits


@pytest.mark.parametrize("classes", [1, 2, 5, 19, 300])
def test_labels_are_the_argmax_and_of_equal_classes_the_first(classes):
    logits = torch.randint(-2, 3, (2, classes, 5, 7), generator=torch.Generator().manual_seed(classes)).float()
    found = labels(logits.requires_grad_(), "softmax")
    assert np.array_equal(found, np.argmax(logits.detach().numpy(), axis=1))
    assert found.dtype == (np.uint8 if classes < 256 else np.int16)
    assert not labels(-torch.full((1, classes, 2, 2), torch.inf), "softmax").any()
