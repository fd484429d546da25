"""Contract of every view: shape, determinism, unchanged inputs, inverse. A new view is tested automatically."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from casewise.adapt.views import SETS, VIEWS, Drawn, Identity, ViewChain, drawn, inverted, unmirrored, views_of
from casewise.core.errors import BadInput, UnknownName

EXACT = ("mirror(x)", "mirror(y)", "mirror(xy)", "rotate90(1)", "rotate90(2)", "rotate90(3)")


def inputs(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 0.5


def example(name):
    arguments = {"scale": "(0.75)", "gamma": "(1.4)", "contrast": "(1.2)", "shift": "(0.1)",
                 "random": "(2)", "turn": "(10,0.9)"}  # fmt: skip
    (view,) = views_of(f"{name}{arguments.get(name, '')}") or (Identity(),)
    return drawn([view], "case", 0)[0]


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("shape", [(1, 1, 16, 12), (3, 2, 16, 12), (1, 1, 5, 16, 12), (1, 2, 5, 16, 12)])
def test_a_view_is_deterministic_finite_and_leaves_the_inputs_alone(name, shape):
    whole = inputs(*shape)
    before, view = whole.clone(), example(name)
    seen = view.apply(whole)
    assert torch.equal(whole, before)
    assert torch.equal(view.apply(whole), seen)
    assert torch.isfinite(seen).all()
    assert seen.shape[:2] == whole.shape[:2]
    assert inverted(view, seen).shape == whole.shape
    assert hash(view) == hash(example(name))


@pytest.mark.parametrize("name", EXACT)
def test_mirrors_and_quarter_turns_come_back_exactly(name):
    (view,) = views_of(name)
    for whole in (inputs(2, 3, 7, 9), inputs(1, 2, 4, 7, 9)):
        assert not torch.equal(view.apply(whole), whole) or view.apply(whole).shape != whole.shape
        assert torch.equal(view.invert(view.apply(whole)), whole)


@pytest.mark.parametrize("view", ["scale(0.75)", "scale(1.25)", "turn(12,0.95)", "turn(-7,1.05)"])
def test_resampling_views_come_back_up_to_interpolation(view):
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, 48), torch.linspace(-1, 1, 64), indexing="ij")
    smooth = torch.exp(-3 * (rows**2 + columns**2))[None, None]
    (made,) = views_of(view)
    back = made.invert(made.apply(smooth))
    inside = (slice(None), slice(None), slice(10, 38), slice(12, 52))
    assert (back - smooth)[inside].abs().max() < 0.02


def test_a_turn_moves_what_is_on_the_right_upwards_or_downwards_and_back():
    picture = torch.zeros(1, 1, 41, 41)
    picture[0, 0, 20, 32] = 1
    (view,) = views_of("turn(15,1)")
    turned = view.apply(picture)
    row, column = np.unravel_index(int(turned.argmax()), (41, 41))
    assert (abs(row - 20), column) == (3, 32)  # 12 sin 15, 12 cos 15
    back = view.invert(turned)
    assert np.unravel_index(int(back.argmax()), (41, 41)) == (20, 32)


@pytest.mark.parametrize("spec", ["identity", "gamma(1)", "contrast(1)", "shift(0)", "turn(0,1)", "scale(1)"])
def test_the_identity_is_the_very_same_values(spec):
    whole = inputs(2, 1, 8, 8)
    for view in views_of(spec):
        assert view.apply(whole) is whole


@pytest.mark.parametrize("name", SETS)
def test_a_named_set_can_be_built_and_says_its_views(name):
    made = views_of(name)
    assert [str(view) for view in made] == [str(view) for view in views_of(",".join(map(str, made)))]
    assert len({str(view) for view in made}) == len(made) > 3


def test_views_are_named_chained_and_listed():
    first, second, third = views_of("gamma(1.4)+mirror(x), clip(1,99,range), random(3)")
    assert isinstance(first, ViewChain)
    assert str(first) == "gamma(1.4)+mirror(x)"
    assert (second.low, second.high, second.keep) == (1, 99, "range")
    assert third == Drawn(3)
    assert len(views_of("mirror(x),mirror(x)")) == 1


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("gama(1.4)", "no view or set of views is called 'gama'. Did you mean 'gamma'"),
        ("gamma()", "view gamma takes"),
        ("gamma(99)", "must be from 0.1 to 10, got 99"),
        ("mirror(q)", "must be x, y, z"),
        ("mri+mirror(x)", "is a set of views"),
        ("random(2)+mirror(x)", "cannot be chained"),
        ("no.such:view", "no view at 'no.such:view'"),
        ("gamma(1.4", "a view must be name or name"),
        ("", "name at least one view"),
    ],
)
def test_what_cannot_be_a_view_is_refused_with_a_sentence(spec, sentence):
    with pytest.raises((BadInput, UnknownName)) as caught:
        views_of(spec)
    assert sentence in str(caught.value)


def test_random_views_depend_on_seed_and_case_and_on_nothing_else():
    (some,) = views_of("random(4)")
    assert some.drawn("a", 0) == some.drawn("a", 0)
    assert some.drawn("a", 0) != some.drawn("b", 0)
    assert some.drawn("a", 0) != some.drawn("a", 1)
    assert some.drawn("a", 0)[:2] == Drawn(2).drawn("a", 0)


def test_mirrors_that_the_model_averages_over_anyway_are_not_read_again():
    views = views_of("mirror(x),gamma(1.4),gamma(1.4)+mirror(x),gamma(2)+mirror(y)")
    assert [str(view) for view in unmirrored(views, (-1,))] == ["gamma(1.4)", "gamma(2)+mirror(y)"]
    assert [str(view) for view in unmirrored(views, (-2, -1))] == ["gamma(1.4)", "gamma(2)"]
    assert unmirrored(views, ()) == views
