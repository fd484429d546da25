"""Intensity views against independent computations in NumPy and SciPy, and on pictures that a person can check."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import ndimage

from casewise.adapt.views import views_of
from casewise.adapt.views.transforms import blurred

PICTURE = np.random.default_rng(0).gamma(2.0, size=(1, 2, 20, 24)).astype(np.float32)


def seen(spec, picture=PICTURE, **more):
    (view,) = views_of(spec, **more)
    return view.apply(torch.as_tensor(picture)).numpy()


def per_channel(change, picture=PICTURE):
    return np.stack([change(picture[:, c]) for c in range(picture.shape[1])], 1)


def z_scored_like(changed, channel):
    return (changed - changed.mean()) / changed.std() * channel.std() + channel.mean()


def unit(channel):
    return (channel - channel.min()) / (channel.max() - channel.min())


@pytest.mark.parametrize("power", [0.8, 1.4, 2.0])
def test_gamma_is_a_power_of_the_picture_scaled_to_0_1_then_z_scored_again(power):
    expected = per_channel(lambda x: z_scored_like(unit(x) ** power, x))
    np.testing.assert_allclose(seen(f"gamma({power})"), expected, rtol=1e-4, atol=1e-4)


def test_gamma_of_a_photograph_keeps_its_range():
    expected = per_channel(lambda x: unit(x) ** 1.4 * (x.max() - x.min()) + x.min())
    np.testing.assert_allclose(seen("gamma(1.4,range)"), expected, rtol=1e-4, atol=1e-4)


def test_contrast_shift_and_grey_world():
    np.testing.assert_allclose(
        seen("contrast(1.4)"), per_channel(lambda x: x.mean() + 1.4 * (x - x.mean())), rtol=1e-4, atol=1e-4
    )
    clipped = per_channel(lambda x: np.clip(x.mean() + 1.4 * (x - x.mean()), x.min(), x.max()))
    np.testing.assert_allclose(seen("contrast(1.4,range)"), clipped, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(seen("shift(0.1)"), per_channel(lambda x: x + 0.1 * x.std()), rtol=1e-4, atol=1e-4)
    grey = seen("grey-world")
    np.testing.assert_allclose(grey.mean((0, 2, 3)), np.full(2, PICTURE.mean()), rtol=1e-4)


@pytest.mark.parametrize("sigma", [0.7, 1.5, 4.0])
def test_the_blur_is_scipys_with_three_sigma_and_repeated_borders(sigma):
    flat = PICTURE[0, 0]
    reach = max(1, round(3 * sigma)) / sigma
    expected = ndimage.gaussian_filter(flat, sigma, mode="nearest", truncate=reach)
    np.testing.assert_allclose(blurred(torch.as_tensor(flat), sigma).numpy(), expected, rtol=1e-4, atol=1e-4)


def test_bias_and_sharpen_are_made_of_blurs():
    blur = {sigma: blurred(torch.as_tensor(PICTURE), sigma).numpy() for sigma in (1.5, 30)}
    sharp = PICTURE + (PICTURE - blur[1.5])
    np.testing.assert_allclose(seen("sharpen"), sharp, rtol=1e-4, atol=1e-4)
    flat = per_channel(lambda x: x, PICTURE - blur[30])
    expected = np.stack([z_scored_like(flat[:, c], PICTURE[:, c]) for c in range(2)], 1)
    np.testing.assert_allclose(seen("bias(30)"), expected, rtol=1e-3, atol=1e-3)


def test_clip_and_stretch_use_percentiles():
    low, high = 1.0, 99.0
    clipped = per_channel(lambda x: z_scored_like(np.clip(x, *np.percentile(x, (0.5, 98))), x))
    np.testing.assert_allclose(seen("clip"), clipped, rtol=1e-3, atol=1e-3)

    def stretched(x):
        a, b = np.percentile(x, (low, high))
        return np.clip((x - a) / (b - a) * (x.max() - x.min()) + x.min(), x.min(), x.max())

    np.testing.assert_allclose(seen("stretch"), per_channel(stretched), rtol=1e-3, atol=1e-3)


def test_noise_has_the_spread_that_is_asked_for_and_the_same_field_every_time():
    large = np.random.default_rng(1).normal(size=(1, 1, 100, 100)).astype(np.float32) * 3
    added = seen("noise(0.05)", large) - large
    assert added.std() == pytest.approx(0.05 * large.std(), rel=0.05)
    assert not np.array_equal(seen("noise(0.05,7)", large), seen("noise(0.05)", large))
