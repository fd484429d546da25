"""A stream: weights and the state of the objective go from case to case; M0 and the network do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Prepared
from casewise.adapt.objectives.cotta import Cotta
from casewise.adapt.objectives.eata import EataFisher
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.proposers.live import record_case, run_episode
from casewise.adapt.snapshot import fingerprint
from casewise.adapt.stream import CaseStream
from casewise.archive.store import open_archive
from casewise.core.errors import BadInput, Mismatch, NotFinite
from casewise.core.records import Case
from casewise.run.local import LocalEngine
from casewise.run.record_folder import RecordCase, record_folder

RATE = 0.05


def images(count=3):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 1, 16, 16, generator=generator) for _ in range(count)]


def streamed(network, how, pictures):
    with CaseStream(network, how) as stream:
        return [
            record_case(
                Case(f"c{k}", image.transpose(0, 1).numpy()), network, {"": how}, Prepared(image), {"": stream}
            )[""]
            for k, image in enumerate(pictures)
        ]


def test_tent_over_a_stream_is_tent_that_is_never_reset(unet):
    """Independent computation: the published loop, one Adam over all images, M_k predicted after the update."""
    pictures, how = images(), Adaptation(Tent(), RATE, steps=2, reset="stream")
    before = fingerprint(unet)
    made = streamed(unet, how, pictures)
    assert fingerprint(unet) == before
    unet.eval()
    source = [unet(image).argmax(1).numpy() for image in pictures]
    moving = [p for m in unet.modules() if isinstance(m, nn.InstanceNorm2d) for p in m.parameters()]
    optimizer = torch.optim.Adam(moving, lr=RATE)
    for image, m0, one in zip(pictures, source, made, strict=True):
        assert np.array_equal(one.masks[0], m0), "M0 is the source's"
        for step in (1, 2):
            optimizer.zero_grad()
            logs = unet(image).log_softmax(1)
            torch.autograd.backward(-(logs.exp() * logs).sum(1).mean())
            optimizer.step()
            assert np.array_equal(one.masks[step], unet(image).argmax(1).numpy())


def test_the_first_case_is_that_of_an_episode_and_the_others_are_not(unet):
    pictures = images()
    for objective in (Cotta(), EataFisher(margin=5.0, redundancy=2.0), Tent()):
        how = Adaptation(objective, RATE, steps=2, reset="stream")
        carried = streamed(unet, how, pictures)
        alone = [
            run_episode(unet, image, replace(how, reset="case"), case_id=f"c{k}") for k, image in enumerate(pictures)
        ]
        assert all(np.array_equal(a, b) for a, b in zip(carried[0].masks, alone[0].masks, strict=True))
        assert carried[2].signals[1]["entropy"] != alone[2].signals[1]["entropy"]


def test_batch_statistics_do_not_reach_m0(make_unet):
    network, pictures = make_unet(nn.BatchNorm2d), images()
    made = streamed(network, Adaptation(Tent(), RATE, steps=1, batch_statistics="batch", reset="stream"), pictures)
    network.eval()
    for image, one in zip(pictures, made, strict=True):
        assert np.array_equal(one.masks[0], network(image).argmax(1).numpy())


class PublishedTent(nn.Module):
    """TENT in the form of its repository: it takes the running statistics away from the network for good."""

    def __init__(self, model):
        super().__init__()
        self.model = model.train()
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def forward(self, image):
        with torch.enable_grad():
            logits = self.model(image)
            self.optimizer.zero_grad()
            torch.autograd.backward(-(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean())
            self.optimizer.step()
        return logits

    def reset(self):
        pass


def test_published_code_that_rebuilds_the_network_reaches_no_m0_of_a_stream(make_unet):
    network, pictures = make_unet(nn.BatchNorm2d), images()
    before = fingerprint(network)
    made = streamed(network, Adaptation(PublishedTent, steps=1, reset="stream"), pictures)
    assert fingerprint(network) == before
    network.eval()
    source = [network(image).argmax(1).numpy() for image in pictures]
    adapts = PublishedTent(network)
    for image, m0, one in zip(pictures, source, made, strict=True):
        assert np.array_equal(one.masks[0], m0), "M0 is the source's"
        adapts(image)
        network.eval()
        assert np.array_equal(one.masks[1], network(image).argmax(1).numpy()), "the stream goes on as its author means"
        network.train()


def test_after_a_case_that_failed_the_stream_starts_from_the_source(unet):
    pictures = images()
    how, before = Adaptation(Tent(), RATE, steps=1, reset="stream"), fingerprint(unet)
    with CaseStream(unet, how) as stream:
        made = []
        for k, image in enumerate([pictures[0], torch.full_like(pictures[1], torch.nan), pictures[2]]):
            case = Case(f"c{k}", image.transpose(0, 1).numpy())
            try:
                made.append(record_case(case, unet, {"": how}, Prepared(image), {"": stream})[""])
            except NotFinite:
                assert fingerprint(unet) == before, "given back at once"
    alone = run_episode(unet, pictures[2], replace(how, reset="case"), case_id="c2")
    assert np.array_equal(made[1].masks[1], alone.masks[1])


def test_a_stream_is_refused_where_there_is_none(unet, slices):
    with pytest.raises(BadInput, match="cannot be made for a single case"):
        record_case(Case("a", slices.transpose(0, 1).numpy()), unet, {"": Adaptation("tent", reset="stream")})
    with pytest.raises(BadInput, match="makes no updates"):
        CaseStream(unet, Adaptation("views:light", reset="stream"))


def recorded(network, path, pictures, how, engine=None, names=None, other=None):
    from casewise.adapt.backbones.module import as_backbone

    names = names or [f"c{k}" for k in range(len(pictures))]
    cases = {name: Case(name, image.transpose(0, 1).numpy()) for name, image in zip(names, pictures, strict=True)}
    work = RecordCase(as_backbone(network), {"": how} if other is None else {"a": how, "b": other}, cases)
    archive, results = record_folder(work, engine or LocalEngine(), path)
    return archive, results


def test_an_archive_knows_the_order_and_continues_after_an_interruption(unet, tmp_path):
    pictures, how = images(), Adaptation("tent", RATE, steps=1, reset="stream", min_area=1)
    before = fingerprint(unet)
    list(recorded(unet, tmp_path / "whole", pictures, how)[1])
    whole = open_archive(tmp_path / "whole")
    assert whole.configuration["order"] == ["c0", "c1", "c2"]
    assert whole.binding.options["reset"] == "stream"
    results = recorded(unet, tmp_path / "parts", pictures, how)[1]
    next(results)
    results.close()  # as after a killed run
    assert fingerprint(unet) == before
    list(recorded(unet, tmp_path / "parts", pictures, how)[1])
    parts = open_archive(tmp_path / "parts")
    for case_id in whole.ids:
        for one, other in zip(whole.trajectory(case_id).masks, parts.trajectory(case_id).masks, strict=True):
            assert np.array_equal(one, other), "carried weights are those of the whole stream"
    assert fingerprint(unet) == before
    with pytest.raises(Mismatch, match="order"):
        recorded(unet, tmp_path / "parts", pictures, how, names=["c1", "c0", "c2"])


def test_a_stream_runs_alone_in_one_process(unet, tmp_path):
    how = Adaptation("tent", reset="stream", steps=1)
    with pytest.raises(BadInput, match="one process"):
        recorded(unet, tmp_path / "a", images(), how, LocalEngine(jobs=2))
    with pytest.raises(BadInput, match="recorded alone"):
        recorded(unet, tmp_path / "b", images(), how, other=Adaptation("views:light"))
