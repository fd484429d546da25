"""A case's image as a batch for a bare network."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from casewise.adapt.proposers.live import prepare
from casewise.core.errors import BadInput
from casewise.core.records import Case

FLAT, DEEP = nn.Sequential(nn.Conv2d(2, 1, 1)), nn.Sequential(nn.Conv3d(2, 1, 1))


def as_batch(image, network):
    return prepare(Case("a", image), network).inputs


def test_a_volume_becomes_slices_for_a_flat_network():
    volume = np.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    batch = as_batch(volume, FLAT)
    assert batch.shape == (3, 2, 4, 5)
    assert np.array_equal(batch[1, 0], volume[0, 1])


def test_an_image_and_a_window_get_an_axis():
    assert as_batch(np.zeros((2, 4, 5)), FLAT).shape == (1, 2, 4, 5)
    assert as_batch(np.zeros((2, 3, 4, 5)), DEEP).shape == (1, 2, 3, 4, 5)


def test_an_image_without_channels_is_refused():
    with pytest.raises(
        BadInput, match=r"a 3-D network needs an image \(channel, slices, rows, columns\), got shape \(2, 4, 5\)"
    ):
        as_batch(np.zeros((2, 4, 5)), DEEP)
    with pytest.raises(BadInput, match=r"a 2-D network needs an image \(channel, rows, columns\), got shape \(4, 5\)"):
        as_batch(np.zeros((4, 5)), FLAT)
