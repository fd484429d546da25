"""Which parameters may move."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from casewise.adapt.parameters import select
from casewise.core.errors import NothingToAdapt

NORMS = {
    "BatchNorm1d": nn.BatchNorm1d(4),
    "BatchNorm2d": nn.BatchNorm2d(4),
    "BatchNorm3d": nn.BatchNorm3d(4),
    "InstanceNorm2d": nn.InstanceNorm2d(4, affine=True),
    "InstanceNorm3d": nn.InstanceNorm3d(4, affine=True),
    "GroupNorm": nn.GroupNorm(2, 4),
    "LayerNorm": nn.LayerNorm(4),
    "RMSNorm": nn.RMSNorm(4),
}


@pytest.mark.parametrize("name", NORMS)
def test_every_kind_of_norm_layer_is_found(name):
    network = nn.Sequential(nn.Conv2d(1, 4, 1), NORMS[name])
    assert set(select(network)) == ({"1.weight"} if name == "RMSNorm" else {"1.weight", "1.bias"})


def test_a_norm_layer_of_another_library_is_found_by_its_name():
    class LayerNorm2d(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    assert set(select(nn.Sequential(LayerNorm2d()))) == {"0.weight"}


def test_all_norm_leaves_convolutions_alone(unet):
    assert set(select(unet)) == {
        f"{part}.1.{kind}" for part in ("encoder", "bottom", "decoder") for kind in ("weight", "bias")
    }


def test_encoder_and_decoder_share_all_norm_between_them(unet):
    encoder, decoder = select(unet, "encoder-norm"), select(unet, "decoder-norm")
    assert set(decoder) == {"decoder.1.weight", "decoder.1.bias"}
    assert set(encoder) | set(decoder) == set(select(unet))
    assert not set(encoder) & set(decoder)


def test_names_patterns_and_all(unet):
    assert set(select(unet, "head.*,encoder.1.weight")) == {"head.weight", "head.bias", "encoder.1.weight"}
    assert set(select(unet, ["head.bias"])) == {"head.bias"}
    assert len(select(unet, "all")) == len(list(unet.parameters()))


def test_an_empty_selection_lists_the_layers_it_saw_and_why(make_unet):
    plain = make_unet(lambda n: nn.InstanceNorm2d(n))
    with pytest.raises(NothingToAdapt, match=r"encoder\.1 \(InstanceNorm2d, affine=False: it has no scale and shift\)"):
        select(plain)
    with pytest.raises(
        NothingToAdapt, match=r"'nothing\.\*' selects no parameter of SmallUNet; .*pass parameters='all'"
    ):
        select(plain, "nothing.*")


def test_a_network_without_norm_layers_says_none():
    with pytest.raises(NothingToAdapt, match="layers seen: none"):
        select(nn.Sequential(nn.Conv2d(1, 1, 1)))


def test_a_network_without_a_decoder_name_is_not_guessed_at():
    with pytest.raises(NothingToAdapt, match="cannot be found by name"):
        select(nn.Sequential(nn.BatchNorm2d(2)), "decoder-norm")


def test_a_shared_layer_counts_once():
    layer = nn.LayerNorm(4)
    assert set(select(nn.Sequential(layer, layer))) == {"0.weight", "0.bias"}


def test_nnunets_plain_network_is_told_apart_by_name():
    unets = pytest.importorskip("dynamic_network_architectures.architectures.unet")
    kinds = {"norm_op": nn.InstanceNorm2d, "norm_op_kwargs": {"affine": True}, "nonlin": nn.LeakyReLU}
    network = unets.PlainConvUNet(1, 2, [4, 8], nn.Conv2d, 3, [1, 2], 1, 3, 1, conv_bias=True, **kinds)
    assert all(name.startswith("encoder.") for name in select(network, "encoder-norm"))
    assert all(name.startswith("decoder.") for name in select(network, "decoder-norm"))
    assert len(select(network)) == len(select(network, "encoder-norm")) + len(select(network, "decoder-norm"))


@pytest.mark.slow
def test_segformer_b0_has_30_layer_norms_and_7168_parameters_in_its_encoder():
    """D1: the driving runs move the encoder's LayerNorms; the BatchNorm of the decode head is not updated."""
    transformers = pytest.importorskip("transformers")
    network = transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(num_labels=19)).eval()
    chosen = select(network, "encoder-norm")
    owners = {name.rpartition(".")[0] for name in chosen}
    modules = dict(network.named_modules())
    assert len(owners) == 30
    assert all(isinstance(modules[name], nn.LayerNorm) for name in owners)
    assert sum(parameter.numel() for parameter in chosen.values()) == 7168
    assert sum(p.numel() for p in select(network).values()) == 7168 + 512

    from casewise.adapt.objectives.tent import Tent
    from casewise.adapt.proposers.live import run_episode

    made = run_episode(
        network, torch.randn(1, 3, 64, 64), Tent(), steps=1, parameters="encoder-norm", keep_parameters=True
    )
    assert made.masks[1].shape == (64, 64)
    assert set(made.parameters[1]) == set(chosen)
    assert not any("decode_head" in name for name in made.parameters[1])
