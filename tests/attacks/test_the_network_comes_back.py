"""Objectives that change what they must not: the network is restored, and later cases are not affected."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from casewise.adapt.backbones.module import of_network
from casewise.adapt.networks import PlainUNet
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.snapshot import fingerprint
from casewise.core.errors import BadInput, MovedUnselected
from casewise.core.records import Case, Policy
from casewise.guard import guard
from casewise.judge.controllers.depth import FixedK
from casewise.judge.policy import write_policy

NORMS = (nn.BatchNorm2d, nn.InstanceNorm2d, nn.GroupNorm)


class Vandal:
    """TENT that also writes into a weight outside the selection, in a way that no counter of torch sees."""

    def __init__(self, how: str, error: Exception | None = None) -> None:
        self.how, self.error = how, error

    def begin(self, subject):
        update = Tent().begin(subject)

        def vandalize():
            weight = subject.network.head.weight
            if self.how == "data":
                weight.data.mul_(-3)
            elif self.how == "numpy":
                weight.detach().numpy()[:] *= -3
            elif self.how == "list":
                subject.network.listed[0].mul_(-3)
            elif self.how == "object":
                subject.network.settings.scale = -3
            elif self.how == "parameter":
                subject.network.head.weight = nn.Parameter(weight.detach() * -3)
            elif self.how == "selected parameter":
                norm = next(layer for layer in subject.network.modules() if isinstance(layer, NORMS))
                norm.weight = nn.Parameter(norm.weight.detach() * -3)
            elif self.how == "layer":
                subject.network.head = nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2:], padding="same")
            elif self.how == "eps":
                next(layer for layer in subject.network.modules() if isinstance(layer, NORMS)).eps = 100.0
            elif self.how == "hook":
                weight.requires_grad_(True).register_hook(lambda gradient: gradient * 0)
            if self.error is not None:
                raise self.error
            return update()

        return vandalize


class Listed(PlainUNet):
    """A network that keeps a scale in a plain list."""

    def __init__(self) -> None:
        super().__init__(features=(4, 8))
        self.listed, self.settings = [torch.ones(1)], SimpleNamespace(scale=1)

    def forward(self, image):
        return super().forward(image) * self.listed[0] * self.settings.scale


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(1)
    return Listed().eval()


@pytest.fixture
def image() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(1, 16, 16)).astype(np.float32)


def m0(network: nn.Module, image: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return network(torch.as_tensor(image)[None]).argmax(1)[0].numpy()


@pytest.mark.parametrize("error", [None, ValueError("on top")])
@pytest.mark.parametrize(
    "how", ["data", "numpy", "list", "object", "hook", "parameter", "selected parameter", "layer", "eps"]
)
def test_the_next_case_gets_the_same_m0(network, image, how, error):
    before, mask = fingerprint(network), m0(network, image)
    allowed = how in ("hook", "object") and error is None
    with nullcontext() if allowed else pytest.raises((MovedUnselected, ValueError, RuntimeError)):
        guard(Case("a", image), network, FixedK(1), Vandal(how, error), steps=1)
    assert fingerprint(network) == before
    assert np.array_equal(m0(network, image), mask)


@pytest.mark.parametrize("how", ["data", "numpy"])
def test_a_weight_that_was_not_selected_is_reported(network, image, how):
    with pytest.raises(MovedUnselected, match=r"changed head\.weight, which were not selected; they were restored"):
        guard(Case("a", image), network, FixedK(1), Vandal(how), steps=1)


@pytest.mark.parametrize(
    ("how", "name"),
    [("parameter", "head.weight"), ("selected parameter", ".weight"), ("layer", "head"), ("eps", ".eps")],
)
def test_a_replaced_parameter_or_layer_and_a_changed_setting_are_reported(network, image, how, name):
    with pytest.raises(MovedUnselected, match=re.escape(name)):
        guard(Case("a", image), network, FixedK(1), Vandal(how), steps=1)


VANDAL = """
from casewise.adapt.objectives.tent import Tent
class Vandal(Tent):
    def begin(self, subject):
        update = super().begin(subject)
        def vandalize():
            subject.network.head.weight.data.mul_(-3)
            if RAISES: raise RAISES("on top")
            return update()
        return vandalize
"""


@pytest.mark.parametrize("raises", ["False", "ValueError", "SystemExit"])
def test_predict_delivers_m0_for_this_case_and_the_next(tmp_path, monkeypatch, raises):
    import importlib

    import nibabel
    from typer.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    (tmp_path / "vandals.py").write_text(f"RAISES = {raises}\n{VANDAL}")
    (tmp_path / "images").mkdir()
    for number in range(3):
        voxels = np.random.default_rng(number).normal(size=(16, 16, 2)).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / "images" / f"{number}.nii.gz")
    app = importlib.import_module("casewise.cli.predict").app
    model = "casewise.adapt.networks:phantom_cardiac"
    words = ["-i", "images", "-m", model, "-device", "cpu", "--set", "contract=off", "--set", "overlays=false"]
    assert CliRunner().invoke(app, [*words, "-o", "m0", "--policy", "m0"], catch_exceptions=False).exit_code == 0
    how = {"objective": "vandals:Vandal", "steps": 1}
    file = write_policy(tmp_path / "fixed.json", Policy("fixed-k", "fixed-k", {"step": 1}, 1, adaptation=how))
    adapted = ["--policy", str(file), "--set", "objective=vandals:Vandal"]
    try:
        done = CliRunner().invoke(app, [*words, "-o", "out", *adapted], catch_exceptions=False)
    finally:
        sys.modules.pop("vandals", None)
        sys.path.remove(str(tmp_path))
    assert done.exit_code == 3
    for number in range(3):
        entry = json.loads((tmp_path / "out" / "casewise" / f"{number}.json").read_text())
        assert entry["status"] == "fallback"
        assert entry["error_kind"] == ("RuntimeError" if raises == "SystemExit" else "MovedUnselected")
        masks = [(tmp_path / out / f"{number}.nii.gz").read_bytes() for out in ("m0", "out")]
        assert masks[0] == masks[1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_guard_inside_no_grad_or_inference_mode_still_adapts(network, image, mode):
    outside = guard(Case("a", image), network, FixedK(2), Tent(0.05), steps=2)
    with mode():
        inside = guard(Case("a", image), network, FixedK(2), Tent(0.05), steps=2)
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        assert not torch.is_grad_enabled()
    assert np.array_equal(inside.mask, outside.mask)
    assert inside.trajectory.signals[2]["gradient_norm"] == pytest.approx(
        outside.trajectory.signals[2]["gradient_norm"]
    )


def test_a_network_made_in_inference_mode_and_a_lazy_one_are_refused_with_a_sentence(image):
    with torch.inference_mode():
        made = Listed()
    with pytest.raises(BadInput, match=r"made inside torch\.inference_mode\(\)"):
        guard(Case("a", image), made, FixedK(1), "tent", steps=1)
    lazy = nn.Sequential(nn.LazyConv2d(4, 1), nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 2, 1))
    with pytest.raises(BadInput, match="belong to lazy layers without a shape"):
        guard(Case("a", image), lazy, FixedK(1), "tent", steps=1)


class Counting:
    """In the shape of published code; it trains, so BatchNorm counts its batches."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()

    def reset(self) -> None: ...

    def forward_and_adapt(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def test_a_counter_has_no_value_between_and_shrinks_without_an_error(image):
    from casewise.adapt.proposers.live import run_episode
    from casewise.core.records import State

    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    made = run_episode(
        network, torch.as_tensor(image)[None], Counting(network), steps=1, shrink=(State(1, 0.5),), keep_parameters=True
    )
    assert made.shrunk[State(1, 0.5)].shape == (16, 16)
    assert int(network[1].num_batches_tracked) == 0


def test_features_beside_the_logits_are_not_taken_for_them(image):
    class Two(PlainUNet):
        def forward(self, x):
            logits = super().forward(x)
            return logits[..., ::2, ::2], torch.zeros(len(x), 32, *x.shape[2:])

    network = Two(features=(4, 8)).eval()
    with pytest.raises(BadInput, match="4 and 32 channels, and it is not clear which are the logits"):
        guard(Case("a", image), network, FixedK(1), "tent", steps=1)
    made = guard(Case("a", image), of_network(network, classes=4), FixedK(1), "tent", steps=1)
    assert made.mask.max() < 4


CONV, CONVOLVE = type("Kept", (nn.Conv2d,), {"forward": nn.Conv2d.forward}), nn.functional.conv2d


def negated(function):
    return lambda *given, **more: -function(*given, **more)


class Negating(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, given=(), more=None):
        found = function(*given, **(more or {}))
        return -found if "convolution.default" in str(function) else found


SETTINGS = {
    "dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "device": (torch.get_default_device, lambda: torch.set_default_device("meta")),
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    "precision": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium")),
    "deterministic": (torch.get_deterministic_debug_mode, lambda: torch.use_deterministic_algorithms(True)),
    "gradients": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "anomaly": (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
    "kernels": (lambda: torch.backends.mkldnn.enabled, lambda: setattr(torch.backends.mkldnn, "enabled", False)),
    "torch's random numbers": (lambda: torch.get_rng_state().tolist(), lambda: torch.manual_seed(7)),
    "NumPy's random numbers": (lambda: str(np.random.get_state()), lambda: np.random.seed(7)),
    "Python's random numbers": (random.getstate, lambda: random.seed(7)),
    "NumPy's errors": (np.geterr, lambda: np.seterr(all="raise")),
    "folder": (os.getcwd, lambda: os.chdir("/")),
    "environment": (os.environ.copy, lambda: os.environ.update({"PATH": "/nowhere", "NEW": "1"})),
    "kernels of CUDA": (
        lambda: torch.backends.cudnn.benchmark,
        lambda: setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
    ),
    "tiny numbers": (lambda: float(torch.tensor(1e-40) * 1), lambda: torch.set_flush_denormal(True)),
    "a device that is not left": (torch._C._len_torch_function_stack, lambda: torch.device("meta").__enter__()),
    "a mode that is not left": (torch._C._len_torch_dispatch_stack, lambda: Negating().__enter__()),
    "forward of a network": (lambda: Listed.forward, lambda: setattr(Listed, "forward", PlainUNet.forward)),
    "forward of a layer": (lambda: nn.Conv2d.forward, lambda: setattr(nn.Conv2d, "forward", negated(CONV.forward))),
    "a method that a class did not have": (
        lambda: "__call__" in vars(Listed),
        lambda: setattr(Listed, "__call__", negated(nn.Module.__call__)),
    ),
    "a function of torch": (lambda: nn.functional.conv2d, lambda: setattr(nn.functional, "conv2d", negated(CONVOLVE))),
    "hooks of all modules": (
        lambda: len(nn.modules.module._global_forward_hooks),
        lambda: nn.modules.module.register_module_forward_hook(lambda *found: -found[-1]),
    ),
}


@pytest.mark.parametrize("error", [None, ValueError("on top")])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_process_are_given_back(network, image, name, error):
    read, change = SETTINGS[name]
    before, mask = read(), m0(network, image)

    class Changing(Tent):
        def begin(self, subject):
            update = super().begin(subject)

            def changed():
                done = update()
                change()
                if error is not None:
                    raise error
                return done

            return changed

    with nullcontext() if error is None else pytest.raises(ValueError, match="on top"):
        guard(Case("a", image), network, FixedK(1), Changing(), steps=1)
    assert read() == before
    assert np.array_equal(m0(network, image), mask)


class Negated(nn.Conv2d):
    def forward(self, given):
        return -super().forward(given)


def test_a_layer_of_another_class_is_reported_and_put_back(network, image):
    mask, kind = m0(network, image), type(network.head)

    class Changing(Tent):
        def begin(self, subject):
            subject.network.head.__class__ = Negated
            return super().begin(subject)

    with pytest.raises(MovedUnselected, match=r"head\.class"):
        guard(Case("a", image), network, FixedK(1), Changing(), steps=1)
    assert type(network.head) is kind
    assert np.array_equal(m0(network, image), mask)


def test_the_image_is_not_changed_where_an_objective_or_a_network_changes_its_inputs(network, image):
    class Erasing(Tent):
        def begin(self, subject):
            def loss(logits, inputs, rows):
                inputs.zero_()
                return logits.sum(), torch.tensor(float(logits.numel()))

            return lambda: {"loss": subject.backward(loss)}

    class Scaling(Listed):
        def forward(self, image):
            return super().forward(image.mul_(0.5))

    before = image.copy()
    guard(Case("a", image), network, FixedK(2), Erasing(), steps=2)
    assert np.array_equal(image, before)
    scaling = Scaling().eval()
    for how in ("views:light", "tent"):
        torch.manual_seed(0)
        found = guard(Case("a", image), scaling, FixedK(1), how).trajectory.masks
        assert np.array_equal(image, before)
        assert np.array_equal(found[0], m0(scaling, image.copy()))
