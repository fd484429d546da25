from __future__ import annotations

import pytest
import torch

from casewise.adapt.augmentations import IDENTITY, WEAK_VIEWS, LightView, block_shuffle, light_view, light_views
from casewise.adapt.objectives.grata import Style, sampled_style
from casewise.core.errors import BadInput

SLICES = (3, 2, 8, 12)
WINDOW = (1, 2, 5, 8, 8)


def picture(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", [SLICES, WINDOW])
@pytest.mark.parametrize("flips", [(), (-1,), (-2,), (-2, -1)])
@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_geometry_is_inverted_exactly(shape, flips, turns):
    view, image = LightView(flips=flips, quarter_turns=turns), picture(shape)
    assert torch.equal(view.invert(view.apply(image)), image)


def test_the_identity_returns_the_same_tensor():
    image = picture(SLICES)
    assert IDENTITY.apply(image) is image
    assert IDENTITY.invert(image) is image


def test_weak_views_are_six_different_pictures():
    image = picture((1, 1, 6, 6))
    seen = {view.apply(image).numpy().tobytes() for view in WEAK_VIEWS}
    assert len(seen) == 6


def test_the_through_plane_axis_is_never_turned():
    window = torch.arange(3.0).reshape(1, 1, 3, 1, 1).expand(1, 1, 3, 4, 4)
    for view in WEAK_VIEWS:
        assert torch.equal(view.apply(window), window)


def test_a_view_is_data_and_gives_the_same_tensor_twice():
    view, image = light_view(generator(3)), picture(SLICES)
    assert view == light_view(generator(3))
    assert torch.equal(view.apply(image), view.apply(image))
    assert not torch.equal(view.apply(image), light_view(generator(4)).apply(image))


def test_light_views_stay_within_what_the_paper_states():
    views = light_views(range(500))
    brightness = [view.brightness for view in views]
    noise = [view.noise for view in views]
    assert 0.9 <= min(brightness) < 0.91
    assert 1.09 < max(brightness) <= 1.1
    assert 0 <= min(noise) < 0.002
    assert 0.048 < max(noise) <= 0.05
    for axis in (-2, -1):
        assert 0.4 < sum(axis in view.flips for view in views) / 500 < 0.6


def test_noise_does_not_touch_the_global_random_state():
    before = torch.random.get_rng_state()
    light_view(generator()).apply(picture(SLICES))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_axis_out_of_the_plane_is_refused():
    with pytest.raises(BadInput, match=r"-2 \(rows\) or -1 \(columns\), got \(-3,\)"):
        LightView(flips=(-3,))


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (1, 2, 8, 8, 8), (1, 1, 3, 8, 8)])
def test_block_shuffle_moves_whole_blocks_and_loses_nothing(shape):
    image = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    shuffled = block_shuffle(image, generator())
    assert shuffled.shape == image.shape
    assert torch.equal(shuffled.flatten().sort().values, image.flatten().sort().values)
    assert not torch.equal(shuffled, image)
    steps = shuffled[..., 1::2] - shuffled[..., 0::2]  # blocks are two wide: neighbors inside stay neighbors
    assert torch.equal(steps, torch.ones_like(steps))


def test_block_shuffle_permutes_each_sample_on_its_own():
    image = torch.arange(64.0).reshape(1, 1, 8, 8).expand(2, 1, 8, 8)
    first, second = block_shuffle(image, generator())
    assert not torch.equal(first, second)


def test_block_shuffle_keeps_the_size_of_sides_that_four_does_not_divide():
    assert block_shuffle(picture((2, 1, 10, 13)), generator()).shape == (2, 1, 10, 13)


def neutral(shape: tuple[int, int], **changes: torch.Tensor) -> Style:
    values = {"brightness": torch.ones(shape), "contrast": torch.ones(shape), "gamma": torch.ones(shape)}
    values |= {"noise": torch.zeros(shape[0], 1), "blur": torch.zeros(shape)}
    return Style(**(values | changes))


@pytest.mark.parametrize("shape", [SLICES, WINDOW])
def test_a_neutral_style_changes_nothing(shape):
    image = picture(shape)
    assert torch.equal(neutral(shape[:2]).apply(image), image)


def test_blur_of_a_constant_is_that_constant_and_blur_of_a_point_is_a_gaussian():
    constant = torch.full((1, 1, 9, 9), 3.0)
    blur = torch.ones(1, 1)
    assert torch.allclose(neutral((1, 1), blur=blur).apply(constant), constant)
    point = torch.zeros(1, 1, 21, 21)
    point[0, 0, 10, 10] = 1
    blurred = neutral((1, 1), blur=blur).apply(point)[0, 0]
    assert blurred.sum() == pytest.approx(1, abs=1e-5)
    assert blurred[10, 11] / blurred[10, 10] == pytest.approx(torch.tensor(-0.5).exp().item(), rel=1e-4)


def test_gamma_gives_mean_and_spread_back_only_when_asked():
    image = picture((1, 1, 16, 16))
    gamma = torch.full((1, 1), 1.5)
    kept = neutral((1, 1), gamma=gamma).apply(image)
    assert kept.mean() == pytest.approx(image.mean().item(), abs=1e-5)
    assert kept.std() == pytest.approx(image.std().item(), rel=1e-4)
    lost = Style(**{**vars(neutral((1, 1), gamma=gamma)), "retain_statistics": False}).apply(image)
    assert abs(lost.mean() - image.mean()) > 0.05


def test_the_official_style_ends_in_the_unit_range():
    styled = sampled_style(picture(SLICES), generator(), rescale=True).apply(picture(SLICES))
    assert torch.allclose(styled.amin((1, 2, 3)), torch.zeros(3), atol=1e-6)
    assert torch.allclose(styled.amax((1, 2, 3)), torch.ones(3), atol=1e-5)


def test_the_official_blur_draws_each_channel_again():
    many = torch.zeros(4000, 1, 1, 1)
    ours = (sampled_style(many, generator()).blur > 0).float().mean().item()
    official = (sampled_style(many, generator(), blur_by_channel=True).blur > 0).float().mean().item()
    assert ours == pytest.approx(0.5, abs=0.03)
    assert official == pytest.approx(0.25, abs=0.03)
