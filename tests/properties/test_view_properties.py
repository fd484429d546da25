from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from casewise.adapt.augmentations import LightView, block_shuffle, light_view

SPACES = st.one_of(st.tuples(*[st.integers(1, 9)] * 2), st.tuples(*[st.integers(1, 6)] * 3))
SEEDS = st.integers(0, 2**32)
FLIPS = st.sets(st.sampled_from([-2, -1])).map(tuple)


def picture(space: tuple[int, ...], samples: int = 2) -> torch.Tensor:
    return torch.arange(float(samples * torch.Size(space).numel())).reshape(samples, 1, *space)


@given(space=SPACES, flips=FLIPS, turns=st.integers(-5, 5))
def test_every_geometry_is_inverted_exactly(space, flips, turns):
    view = LightView(flips=flips, quarter_turns=turns)
    assert torch.equal(view.invert(view.apply(picture(space))), picture(space))


@given(space=SPACES, seed=SEEDS)
def test_a_light_view_changes_no_more_than_brightness_and_noise_allow(space, seed):
    view = light_view(torch.Generator().manual_seed(seed))
    image = picture(space) / picture(space).numel()
    back = view.invert(view.apply(image))
    assert back.shape == image.shape
    assert (back - image).abs().max() <= 0.1 + 0.05 * 7  # seven standard deviations of the noise


@settings(deadline=None)
@given(space=SPACES, seed=SEEDS, blocks=st.integers(1, 4))
def test_a_shuffle_whose_blocks_fit_only_moves_voxels(space, seed, blocks):
    fitting = tuple(side // blocks * blocks if side >= blocks else side for side in space)
    shuffled = block_shuffle(picture(fitting), torch.Generator().manual_seed(seed), blocks=blocks)
    for before, after in zip(picture(fitting), shuffled, strict=True):
        assert torch.equal(before.flatten(), after.flatten().sort().values)
