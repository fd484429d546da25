"""Views through the whole pipeline of every kind of backbone: nnU-Net, Hugging Face, MONAI."""

from __future__ import annotations

import json
import shutil
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds.readings import readings_of
from worlds.tiny_models import write_segformer

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import load_backbone, pipeline_of
from casewise.adapt.backbones.checkpoints import write_safetensors
from casewise.adapt.backbones.merged import merged
from casewise.adapt.proposers import PreparedCase, proposer_of
from casewise.adapt.proposers.members import Members
from casewise.adapt.snapshot import fingerprint
from casewise.adapt.views import inverted, views_of
from casewise.core.errors import BadInput, Mismatch, NotFinite
from casewise.core.records import Case, Policy
from casewise.data.folders import list_cases
from casewise.judge.policy import check_binding

KINDS: dict[str, dict[str, Any]] = {
    "2-D": {"dimensions": 2},
    "3-D, two folds": {"dimensions": 3, "folds": (0, 1)},
    "regions": {"regions": True},
}


@pytest.fixture(autouse=True)
def third_party_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_nnunet_is_read_through_its_own_pipeline(options: dict[str, Any], model: Any, scans: Path) -> None:
    backbone = load_backbone(str(model(**options)), mirroring=False, step_size=1.0)
    case = backbone.read(list_cases(scans / "images", ending=backbone.ending)[0]).case
    prepared = backbone.prepare(case)
    before = fingerprint(backbone.network)
    how = Adaptation("views:mirror(x),gamma(1.3),scale(0.8)")
    made = readings_of(backbone, prepared, case, how)
    assert prepared.predict is not None
    assert np.array_equal(made.masks[0], prepared.predict())
    assert fingerprint(backbone.network) == before
    assert not any(signals.get("left_out") for signals in made.signals)
    pipeline = pipeline_of(prepared, backbone)
    again = pipeline.read(pipeline.whole, lambda maps: maps)
    assert np.array_equal(pipeline.mask(again), made.masks[0])  # the identity is exact
    twice = pipeline.read(pipeline.whole.flip(-1).flip(-1), lambda maps: maps.flip(-1).flip(-1))
    assert torch.equal(twice, again)


def test_mirrors_are_dropped_where_nnunet_averages_over_them_itself(model: Any, scans: Path) -> None:
    folder = str(model(dimensions=2))
    with_mirrors, without = (load_backbone(folder, mirroring=one) for one in (True, False))
    views = Adaptation("views:mirror(x),mirror(y),mirror(xy),gamma(1.3),gamma(1.3)+mirror(x)", mirrored_views=True)
    assert [str(view) for view in proposer_of(views).on(with_mirrors)] == ["gamma(1.3)"]
    assert views.horizon(with_mirrors) == 2
    assert views.horizon(without) == 6
    assert views.binding(with_mirrors) != views.binding(without)


def test_the_mean_over_mirrors_is_close_to_nnunets_own_mirroring(model: Any, scans: Path) -> None:
    folder = str(model(dimensions=2))
    with_mirrors, without = (load_backbone(folder, mirroring=one) for one in (True, False))
    case = without.read(list_cases(scans / "images", ending=without.ending)[0]).case
    made = readings_of(without, without.prepare(case), case, Adaptation("views:mirror(x),mirror(y),mirror(xy)"))
    own = with_mirrors.prepare(case).predict
    assert own is not None
    assert (made.masks[-1] != own()).mean() < 0.02  # nnU-Net averages logits, a consensus probabilities


FEW = "views:mirror(x),gamma(1.3),gamma(1.3)+mirror(xy),scale(0.8)"


@pytest.mark.parametrize("options", [{"dimensions": 2}, {"dimensions": 3, "folds": (0, 1)}], ids=str)
def test_unmirrored_views_are_those_of_a_model_without_mirroring_and_m0_keeps_it(
    options: dict[str, Any], model: Any, scans: Path
) -> None:
    """Independent computation: M0 from one load of the folder, the views from another, the mean by hand."""
    folder = str(model(**options))
    mirrored, plain = (load_backbone(folder, mirroring=one, step_size=1.0) for one in (True, False))
    case = mirrored.read(list_cases(scans / "images", ending=mirrored.ending)[0]).case
    made = readings_of(mirrored, mirrored.prepare(case), case, Adaptation(FEW))
    other = readings_of(plain, plain.prepare(case), case, Adaptation(FEW))
    assert made.rungs == other.rungs
    assert len(made.rungs) == 5
    own = mirrored.prepare(case).predict
    assert own is not None
    assert np.array_equal(made.masks[0], own())
    assert not np.array_equal(made.masks[0], other.masks[0])  # mirroring does something here
    for one, two in zip(made.masks[1:-1], other.masks[1:-1], strict=True):
        assert np.array_equal(one, two)
    whole, views = (pipeline_of(one.prepare(case), one) for one in (mirrored, plain))
    images = 2 ** options["dimensions"]  # M0 averages this number of predictions, which is its weight
    total = images * whole.source()[1]
    for view in views_of(FEW.removeprefix("views:")):
        total = total + views.read(view.apply(views.whole), lambda maps, view=view: inverted(view, maps))
    wanted, once = whole.mask(total / (images + 4)), whole.mask((total - (images - 1) * whole.source()[1]) / 5)
    assert (made.masks[-1] != wanted).mean() < 1e-4 < (made.masks[-1] != once).mean()  # to the last bit of a sum
    assert mirrored.predictor.use_mirroring


def test_a_view_that_breaks_leaves_nnunets_mirroring_on(
    model: Any, scans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = load_backbone(str(model(dimensions=2)), step_size=1.0)
    case = backbone.read(list_cases(scans / "images", ending=backbone.ending)[0]).case
    prepared = backbone.prepare(case)
    assert prepared.predict is not None
    before, weights = prepared.predict(), fingerprint(backbone.network)
    episode = proposer_of(Adaptation(FEW)).propose(PreparedCase(case, prepared), backbone)

    def broken(*inputs: object) -> None:
        raise RuntimeError("out of memory")

    with episode, monkeypatch.context() as patched:
        patched.setattr(backbone.predictor, "predict_logits_from_preprocessed_data", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            episode.advance()
    assert backbone.predictor.use_mirroring
    assert fingerprint(backbone.network) == weights
    assert np.array_equal(prepared.predict(), before)


@pytest.mark.parametrize("window", [1, 2])
def test_a_forward_that_breaks_in_a_sliding_window_says_its_own_error_and_leaves_no_thread(
    model: Any, scans: Path, window: int
) -> None:
    """nnU-Net's thread that hands out windows would wait for ever, and the process with it."""
    backbone = load_backbone(str(model(dimensions=2)), step_size=0.5)
    case = backbone.read(list_cases(scans / "images", ending=backbone.ending)[0]).case
    prepared, seen, threads = backbone.prepare(case), [], threading.active_count()
    assert prepared.predict is not None
    before = prepared.predict()

    def break_later(*_: object) -> None:
        seen.append(1)
        if len(seen) == window:
            raise NotFinite("no number")

    hook = backbone.predictor.network.register_forward_pre_hook(break_later)
    with pytest.raises(NotFinite, match="no number"):
        prepared.predict()
    hook.remove()
    assert len(seen) == window  # the remaining windows are skipped
    until = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == threads
    assert np.array_equal(prepared.predict(), before)


def test_mirrors_stay_where_views_are_read_unmirrored_and_a_policy_is_bound_to_that(model: Any, scans: Path) -> None:
    folder = str(model(dimensions=2))
    mirrored, plain = (load_backbone(folder, mirroring=one) for one in (True, False))
    with_it, without = Adaptation(FEW, mirrored_views=True), Adaptation(FEW)
    assert [str(view) for view in proposer_of(with_it).on(mirrored)] == ["gamma(1.3)", "scale(0.8)"]
    assert ",".join(map(str, proposer_of(without).on(mirrored))) == FEW.removeprefix("views:")
    assert without.binding(plain) == with_it.binding(plain)  # nothing to switch off
    case = mirrored.read(list_cases(scans / "images", ending=mirrored.ending)[0]).case
    drawn_for = proposer_of(replace(without, objective="views:random(8)")).propose(
        PreparedCase(case, mirrored.prepare(case)), mirrored
    )
    assert any("mirror" in reading.name for reading in drawn_for.passes)
    fitted = replace(with_it, objective="views:gamma(1.3)")  # the same views both ways
    policy = Policy("consensus", "fixed-k", {"step": 2}, 2, binding=fitted.binding(mirrored))
    check_binding(policy, fitted.binding(mirrored))
    with pytest.raises(Mismatch, match="source_weight"):
        check_binding(policy, replace(fitted, mirrored_views=False).binding(mirrored))
    for one in (with_it, without):
        plain = json.loads(json.dumps(one.as_plain()))
        assert Adaptation.from_plain(plain) == one


def test_a_backbone_that_cannot_read_without_its_mirroring_says_so(model: Any, scans: Path) -> None:
    backbone = load_backbone(str(model(dimensions=2)), step_size=1.0)
    case = backbone.read(list_cases(scans / "images", ending=backbone.ending)[0]).case
    prepared = backbone.prepare(case)
    assert prepared.pipeline is not None
    bare = replace(prepared, pipeline=replace(prepared.pipeline, unmirrored=None))
    with pytest.raises(
        BadInput, match=r"averages mirror images and cannot predict views without them; pass --set mirrored-views=true"
    ):
        proposer_of(Adaptation(FEW)).propose(PreparedCase(case, bare), backbone)
    with pytest.raises(BadInput, match=r"name others, or leave mirrored-views out"):
        Adaptation("views:mirror(x)", mirrored_views=True).horizon(backbone)


def test_hugging_face_is_read_at_the_pictures_own_size(tmp_path: Path) -> None:
    backbone = load_backbone(str(write_segformer(tmp_path, "road", "sky", "car")))
    case = Case("street", np.random.default_rng(0).integers(0, 255, (3, 40, 72)).astype(np.float32))
    made = readings_of(backbone, backbone.prepare(case), case, Adaptation("views:driving", foreground=False))
    assert all(mask.shape == (40, 72) for mask in made.masks)
    assert made.rungs[-1] == "mean"
    assert not any(signals.get("left_out") for signals in made.signals)
    prepared = backbone.prepare(case)
    assert prepared.forward is not None
    backbone.network.eval()
    with torch.inference_mode():
        expected = prepared.forward(prepared.inputs).argmax(1)[0].numpy()
    assert np.array_equal(made.masks[0], expected)


def test_monai_is_read_through_its_sliding_window(tmp_path: Path) -> None:
    import monai.networks.nets as nets

    arguments = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": [4, 8], "strides": [2]}
    torch.manual_seed(0)
    write_safetensors(tmp_path / "model.safetensors", nets.UNet(**arguments).state_dict())
    plain = {"network": "UNet", "arguments": arguments, "window": [8, 16, 16], "labels": {"1": "organ"}}
    (tmp_path / "network.json").write_text(json.dumps(plain))
    backbone = load_backbone(str(tmp_path))
    case = Case("one", np.random.default_rng(1).normal(size=(1, 9, 20, 18)).astype(np.float32))
    prepared = backbone.prepare(case)
    made = readings_of(backbone, prepared, case, Adaptation("views:mirror(xyz),gamma(1.4),rotate90(1)"))
    assert prepared.predict is not None
    assert np.array_equal(made.masks[0], prepared.predict())
    assert made.masks[-1].shape == (9, 20, 18)
    assert not any(signals.get("left_out") for signals in made.signals)


def test_the_folds_of_an_nnunet_are_members_and_their_mean_is_near_m0(model: Any, scans: Path) -> None:
    backbone = load_backbone(str(model(dimensions=3, folds=(0, 1))), mirroring=False, step_size=1.0)
    case = backbone.read(list_cases(scans / "images", ending=backbone.ending)[0]).case
    before = fingerprint(backbone.network)
    made = readings_of(backbone, backbone.prepare(case), case, Adaptation("members:folds"))
    assert made.rungs == ("fold-0", "fold-1", "mean")
    assert fingerprint(backbone.network) == before
    alone = load_backbone(str(model(dimensions=3, folds=(0, 1))), folds=(1,), mirroring=False, step_size=1.0)
    predict = alone.prepare(case).predict
    assert predict is not None
    assert np.array_equal(made.masks[2], predict())
    assert made.masks[-1].shape == made.masks[0].shape


def test_another_model_is_a_member_where_its_labels_agree(model: Any, scans: Path) -> None:
    backbone = load_backbone(str(model(dimensions=2)), mirroring=False)
    case = backbone.read(list_cases(scans / "images", ending=backbone.ending)[0]).case
    other = model(dimensions=3)
    how = Adaptation(f"members:{other}")
    made = readings_of(backbone, backbone.prepare(case), case, how)
    predict = load_backbone(str(other), mirroring=False).prepare(case).predict
    assert predict is not None
    assert np.array_equal(made.masks[1], predict())
    assert load_backbone(str(other)).fingerprint[:16] in how.binding(backbone).options["members"].values()
    with pytest.raises(Mismatch, match=r"member .* has (an)?other"):
        Adaptation(f"members:{model(regions=True)}").binding(backbone)
    with pytest.raises(BadInput, match="needs several folds"):
        Adaptation("members:folds").horizon(backbone)
    with pytest.raises(BadInput, match="name at least one member"):
        Adaptation("members:").horizon(backbone)


@pytest.mark.parametrize("mirroring", [True, False])
def test_a_member_is_mirrored_and_tiled_as_the_model_is(mirroring: bool, model: Any, scans: Path) -> None:
    backbone = load_backbone(str(model(dimensions=2)), mirroring=mirroring, step_size=1.0)
    (member,) = Members(Adaptation("tent"), str(model(dimensions=3))).on(backbone).values()
    assert (member.predictor.use_mirroring, member.predictor.tile_step_size) == (mirroring, 1.0)  # type: ignore[attr-defined]


def test_a_members_folder_may_hold_an_at_sign_and_name_its_checkpoint(model: Any, tmp_path: Path) -> None:
    backbone = load_backbone(str(model(dimensions=2)))
    folder = tmp_path / "heart@2026"
    shutil.copytree(model(dimensions=2), folder)
    (folder / "fold_0" / "checkpoint_final.pth").rename(folder / "fold_0" / "checkpoint_best.pth")
    named = f"{folder}@checkpoint_best.pth"
    assert list(Members(Adaptation("tent"), named).on(backbone)) == [named]
    with pytest.raises(BadInput, match=r"checkpoint_final\.pth"):
        Members(Adaptation("tent"), str(folder)).on(backbone)


def test_members_of_a_model_with_merged_classes_vote_in_the_networks_classes(model: Any, scans: Path) -> None:
    folds = {"mirroring": False, "step_size": 1.0}
    plain = load_backbone(str(model(dimensions=3, folds=(0, 1))), **folds)
    one, other = list(plain.labels.values())[1:3]
    whole = merged(plain, [f"both={one}+{other}"])
    case = plain.read(list_cases(scans / "images", ending=plain.ending)[0]).case
    for members in ("members:folds", f"members:{model(dimensions=2)}"):
        apart, together = (
            readings_of(backbone, backbone.prepare(case), case, Adaptation(members)) for backbone in (plain, whole)
        )
        for mask, joined in zip(apart.masks, together.masks, strict=True):
            assert np.array_equal(np.where(mask == 2, 1, mask), joined)
