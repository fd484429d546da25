"""Choosing views: exact scores of any subset, the useful view found, and an honest estimate where nothing is useful."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import pytest
from typer.testing import CliRunner

from casewise.adapt.consensus import Ballots
from casewise.archive.store import create_archive
from casewise.cli import app
from casewise.core.errors import BadInput, TooFewCases
from casewise.core.records import Binding, Case, State, Trajectory
from casewise.judge.calibration.view_selection import chosen_views, read_case
from casewise.measure.metrics.overlap import dice, miou

torch = pytest.importorskip("torch")
BINDING = Binding("model", "views", "loader", "measure")
NAMES = ("good", "bad", "same", "mean")


def a_case(rng, good):
    """M0 misses half of a square; one view sees it, one sees nonsense, one sees what M0 sees."""
    label = np.zeros((16, 16), np.int64)
    label[4:12, 4:12] = 1
    source = label.copy()
    source[4:12, 8:12] = 0
    nonsense = source.copy()
    nonsense[0:3] = 1
    seen = [source, label if good else nonsense, nonsense, source]
    strength = [0.6, 0.95, 0.9, 0.6]
    shares = []
    for mask, sure in zip(seen, strength, strict=True):
        yes = np.where(mask == 1, sure, 1 - sure) + rng.uniform(-0.02, 0.02, mask.shape)
        shares.append(torch.as_tensor(np.stack([1 - yes, yes])[None].astype(np.float32)))
    return label, shares


def an_archive(path, good=True, cases=6, metric="dice", names=lambda number: NAMES):
    configuration = {"metric": metric, "min_area": 1, "foreground": True}
    archive = create_archive(path, binding=BINDING, steps=4, configuration=configuration, ladder="views")
    for number in range(cases):
        label, shares = a_case(np.random.default_rng(number), good)
        ballots = Ballots("softmax")
        masks = [share.argmax(1)[0].numpy().astype(np.uint8) for share in shares]
        for share, mask in zip(shares, masks, strict=True):
            ballots.add(share, mask)
        masks.append(torch.stack(shares).mean(0).argmax(1)[0].numpy().astype(np.uint8))
        changed = np.any([mask != masks[0] for mask in masks], axis=0)
        signals = tuple({"delta": 0.0} for _ in masks)
        made = Trajectory(
            f"case-{number}", tuple(masks), signals, rungs=names(number), ballots=ballots.on(np.flatnonzero(changed))
        )
        archive.add(Case(f"case-{number}", np.zeros((1, 16, 16)), cluster=f"patient-{number // 2}"), made, label)
    return archive.seal()


def test_m0_counts_in_a_mean_as_often_as_it_was_recorded_to(tmp_path):
    """The good view (.95) outvotes M0 (.6 for background) where both count once, not where M0 counts eight times."""
    case = read_case(an_archive(tmp_path), "case-0")
    assert case.consensus((1,)) > case.source + 0.1
    assert replace(case, source_weight=8.0).consensus((1,)) == case.source
    for weight in (1.0, 4.0):
        shares = case.ballots.astype(float)
        wanted = (weight * shares[0] + shares[1] + shares[2]) / (weight + 2)
        assert np.array_equal(replace(case, source_weight=weight).mean((0, 1, 2)), wanted.argmax(0))
        assert np.array_equal(replace(case, source_weight=weight).mean((1, 2)), (shares[1] + shares[2]).argmax(0))


@pytest.mark.parametrize("metric", ["dice", "miou"])
def test_every_subset_scores_what_its_mask_scores(tmp_path, metric):
    archive = an_archive(tmp_path, metric=metric)
    score = dice if metric == "dice" else miou
    for case_id in archive.ids:
        case, label = read_case(archive, case_id), archive.label(case_id)
        assert case.source == pytest.approx(score(archive.mask(case_id, State(0)), label))
        for place in (1, 2, 3):
            assert case.value(case.masks[place]) == pytest.approx(score(archive.mask(case_id, State(place)), label))
        assert case.consensus((1, 2, 3)) == pytest.approx(score(archive.mask(case_id, State(4)), label))


def test_the_useful_view_is_chosen_and_the_estimate_is_of_clusters_left_out(tmp_path):
    archive = an_archive(tmp_path)
    cases = [read_case(archive, case_id) for case_id in archive.ids]
    found = chosen_views(cases)
    assert found.names == ("good", "same")  # as good as alone, and the larger set is taken
    assert found.proposal == "views:good,same"
    assert found.left_out == pytest.approx(found.in_sample)
    assert found.left_out > 0.3 > found.everything


def gains_of(table):
    """Cases whose consensus gains what a table says: {cluster: {set of places: gain}}."""

    @dataclass(frozen=True)
    class Told:
        id: str
        cluster: str
        names: tuple[str, ...] = ("a", "b", "c")
        ballots: tuple[int, ...] = (0, 0, 0, 0)
        source: float = 0.5

        def consensus(self, places):
            return 0.5 + {frozenset(): 0.0, **table[self.cluster]}[frozenset(places)]

    return [Told(f"case-{name}", name) for name in table]


def test_the_largest_set_within_one_standard_error_of_the_best_is_chosen():
    """Every set of one size gains alike here, so that the size alone is chosen; the numbers are by hand."""

    def sizes(*gains):
        subsets = [frozenset(one) for size in (1, 2, 3) for one in combinations((1, 2, 3), size)]
        return {subset: gains[len(subset) - 1] for subset in subsets}

    def chosen(table, **options):
        return len(chosen_views(gains_of(table), **options).places)

    # means .04, .03, .01; behind the best by .03, -.02, .02 (mean .01, error .015) and by .03 each (error 0)
    table = {"p": sizes(0.05, 0.02, 0.02), "q": sizes(0.02, 0.04, -0.01), "r": sizes(0.05, 0.03, 0.02)}
    assert chosen(table) == 2
    assert chosen(table, slack=0.0) == 1
    assert chosen(table, slack=0.6) == 1
    assert chosen(table, most=1) == 1
    surely = {"p": sizes(0.05, 0.03, 0.05), "q": sizes(0.02, 0.00, 0.02), "r": sizes(0.04, 0.02, 0.01)}
    assert chosen(surely) == 3  # .00, .00, .03: mean .01, error .01; that two are surely worse does not matter
    losing = {"p": sizes(-0.05, 0.02, 0.02), "q": sizes(0.02, -0.04, -0.03), "r": sizes(-0.05, 0.0, 0.0)}
    assert chosen(losing) == 0


def test_the_estimate_leaves_a_cluster_out_of_the_choice_of_the_size_too():
    """One patient alone makes the large set look good: without that patient it is not chosen, and he is judged so."""
    subsets = [frozenset(one) for size in (1, 2, 3) for one in combinations((1, 2, 3), size)]
    others = {subset: {1: 0.02, 2: 0.0, 3: -0.02}[len(subset)] for subset in subsets}
    lucky = {subset: {1: 0.01, 2: 0.0, 3: 0.5}[len(subset)] for subset in subsets}
    found = chosen_views(gains_of({"lucky": lucky, "p": others, "q": others, "r": others, "s": others}))
    assert len(found.places) == 3
    assert found.in_sample == pytest.approx((0.5 - 4 * 0.02) / 5)
    assert found.left_out == pytest.approx((0.01 - 4 * 0.02) / 5)
    assert found.hurt == pytest.approx(0.8)


def test_nothing_useful_gives_nothing(tmp_path):
    archive = an_archive(tmp_path, good=False)
    found = chosen_views([read_case(archive, case_id) for case_id in archive.ids])
    assert found.names == ()
    assert found.left_out == 0
    done = CliRunner().invoke(app, ["calibrate", str(tmp_path), "--choose-views"])
    assert done.exit_code == 1
    assert "keep M0" in done.output


def test_the_command_prints_a_proposal(tmp_path):
    an_archive(tmp_path)
    done = CliRunner().invoke(app, ["calibrate", str(tmp_path), "--choose-views", "--ladder", "views"])
    assert done.exit_code == 0, done.output
    assert "6 cases of 3 clusters, 3 views" in done.output
    assert "--propose 'views:good,same'" in done.output
    told = json.loads(
        CliRunner().invoke(app, ["calibrate", str(tmp_path), "--choose-views", "--ladder", "views", "--json"]).stdout
    )
    assert (told["proposal"], told["cases"], told["clusters"]) == ("views:good,same", 6, 3)


def test_too_few_clusters_are_refused(tmp_path):
    archive = an_archive(tmp_path, cases=4)
    with pytest.raises(TooFewCases, match="three clusters"):
        chosen_views([read_case(archive, case_id) for case_id in archive.ids])


def test_random_views_are_set_aside_where_two_fixed_ones_remain(tmp_path):
    archive = an_archive(tmp_path / "fixed")
    cases = [read_case(archive, case_id) for case_id in archive.ids]
    mixed = [replace(case, names=("good", f"drawn-{case.id}", "same")) for case in cases]
    found, among_all = chosen_views(mixed), chosen_views(cases)
    assert (found.names, found.places, found.set_aside) == (("good", "same"), (1, 3), 1)
    assert found.everything == among_all.everything  # what was recorded, the random one included
    assert among_all.set_aside == 0
    useful = chosen_views([replace(case, names=(f"drawn-{case.id}", "bad", "same")) for case in cases])
    assert "good" not in useful.names
    assert not {1} & set(useful.places)
    few = [replace(case, names=(f"drawn-{case.id}", f"again-{case.id}", "same")) for case in cases]
    with pytest.raises(BadInput, match=r"2 of 3 views differ from case to case .* record two fixed views or more"):
        chosen_views(few)
    with pytest.raises(BadInput, match="different numbers of views"):
        chosen_views([replace(cases[0], names=("good",)), *cases[1:]])


def test_the_command_says_that_random_views_were_set_aside(tmp_path):
    an_archive(tmp_path, names=lambda number: ("good", f"turn({number})", "same", "mean"))
    done = CliRunner().invoke(app, ["calibrate", str(tmp_path), "--choose-views", "--ladder", "views"])
    assert done.exit_code == 0, done.output
    assert "1 random view set aside: drawn anew for each case" in done.output
    assert "--propose 'views:good,same'" in done.output
