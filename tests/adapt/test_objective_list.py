"""The list of objectives, and objectives from elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.episode import Episode
from casewise.adapt.objective import Objective
from casewise.adapt.objectives import FORMS, OBJECTIVES, objective_of
from casewise.adapt.objectives.eata import Eata, EataFisher
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.proposers.live import run_episode
from casewise.adapt.views import views_of
from casewise.core.errors import BadInput, UnknownName


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_is_frozen_says_what_it_is_and_has_a_formula(name):
    made = OBJECTIVES.build(name)
    assert isinstance(made, Objective)
    assert made == OBJECTIVES.build(name)
    assert repr(made).startswith(type(made).__name__ + "(")
    assert ":math:" in type(made).__doc__ or ".. math::" in type(made).__doc__
    with pytest.raises(AttributeError):
        made.learning_rate = 1


def test_names_options_and_objects():
    assert objective_of("tent") == Tent()
    assert objective_of("eata", margin=0.3) == Eata(margin=0.3)
    assert objective_of(Tent()) == Tent()
    with pytest.raises(UnknownName, match="Did you mean 'tent'"):
        objective_of("tnt")


@pytest.mark.parametrize("name", FORMS)
def test_another_form_is_there_by_name_and_differs_from_the_first(name):
    made = objective_of(name)
    assert isinstance(made, Objective)
    assert made != objective_of(name.rpartition("-")[0])


def test_an_objective_from_a_package_of_the_users(tmp_path: Path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from casewise.adapt.objectives.tent import Tent\n"
        "class Own(Tent): ...\n"
        "def made(rate=1.0): return Tent(rate)\n"
        "ready = Tent(2.0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert type(objective_of("mine:Own", learning_rate=0.1)).__name__ == "Own"
    assert objective_of("mine:made", rate=3.0) == Tent(3.0)
    assert objective_of("mine:ready") == Tent(2.0)
    with pytest.raises(BadInput, match=r"no objective at 'mine:Other'.*an address is 'package\.module:Name'"):
        objective_of("mine:Other")
    with pytest.raises(BadInput, match="no objective at 'nowhere:Name'"):
        objective_of("nowhere:Name")
    sys.modules.pop("mine")


def test_eata_leaves_everything_where_it_is_when_no_slice_is_confident(unet, slices):
    made = run_episode(unet, slices, Eata(margin=0.0), steps=2, learning_rate=0.1)
    assert [d["kept"] for d in made.diagnostics] == [0.0, 0.0]
    assert made.signals[2]["delta"] == 0
    assert made.signals[1]["gradient_norm"] is None


def test_eata_counts_the_slices_below_its_margin(unet, slices):
    with Episode(unet, slices, Adaptation(Tent(), steps=0, signals=("drop",))) as episode:
        entropies = episode.record.entropies["entropy_0"].mean((1, 2))
    below, above = sorted(float(value) for value in entropies)[1:3]
    margin = (below + above) / 2  # far from both thresholds, because micro-batches may round differently
    assert above - below > 1e-4
    made = run_episode(unet, slices, Eata(margin=margin), steps=1, max_slices=2)
    assert made.diagnostics[0]["kept"] == pytest.approx(2 / 5)


def test_a_heavy_fisher_anchor_holds_the_parameters(unet, slices):
    options = {"steps": 5, "learning_rate": 1e-3, "keep_parameters": True}

    def distance(**more):
        made = run_episode(unet, slices, EataFisher(margin=2.0, redundancy=2.0, **more), **options)
        return sum(((v - made.parameters[0][n]) ** 2).sum() for n, v in made.parameters[5].items())

    assert 0 < distance(anchor_weight=2e3) < distance(anchor_weight=0.0)


def test_the_redundancy_filter_turns_down_what_looks_like_what_was_kept(unet, slices):
    made = run_episode(unet, slices, EataFisher(margin=2.0), steps=2)
    assert made.diagnostics[0]["kept"] == 1.0
    assert made.diagnostics[1]["kept"] < 0.5


def _network() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 1)]
    return torch.nn.Sequential(*layers)


def test_the_method_of_the_documentation_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "own-method.md"
    code = page.read_text(encoding="utf-8").split("# my_method.py\n")[2].partition("```")[0]
    (tmp_path / "my_method.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    images = torch.randn(2, 1, 16, 16)
    named = run_episode(_network(), images, "my_method:my_adapt", steps=2, learning_rate=0.5)
    assert len(named.masks) == 3
    assert named.signals[2]["msp"] != named.signals[0]["msp"]


def test_a_function_with_other_arguments_is_refused_in_a_sentence() -> None:
    def wrong(network: object, image: object, labels: object) -> None:
        """A method of another library."""

    def forgets(subject: object) -> None:
        """Returns no update."""

    images = torch.randn(1, 1, 16, 16)
    with pytest.raises(BadInput, match=r"got wrong\(network, image, labels\)"):
        run_episode(_network(), images, wrong, steps=1)
    with pytest.raises(BadInput, match="must return a function that makes one update, got NoneType"):
        run_episode(_network(), images, forgets, steps=1)
    with pytest.raises(BadInput, match="got int"):
        run_episode(_network(), images, 3, steps=1)


def test_a_set_of_views_that_is_nearly_right_is_suggested() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'mri'\\? Known: light, mri, ct"):
        views_of("mr")
