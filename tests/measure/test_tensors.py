"""torch tensors are measured where they are; only the changed voxels leave the device."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from casewise import BadInput, dice, fragmentation, harm, hd95

torch = pytest.importorskip("torch")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def triple(shape: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [(random.random(shape) < 0.3).astype(np.uint8) * 2 for _ in range(3)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(9, 11), (4, 9, 11)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("foreground", [True, False])
def test_tensors_and_arrays_give_the_same(device, shape, dtype, foreground):
    tensors = [torch.from_numpy(mask).to(device, dtype) for mask in triple(shape)]
    arrays = [tensor.cpu().numpy() for tensor in tensors]
    options = {"min_area": 2, "foreground": foreground, "spacing_mm": (2.0,) * len(shape)}
    assert fragmentation(*tensors[:2], **options) == fragmentation(*arrays[:2], **options)
    there, here = harm(*tensors, **options), harm(*arrays, **options)
    assert (there.ha, there.ba, there.voxel_harm) == (here.ha, here.ba, here.voxel_harm)
    assert there.rows() == here.rows() != []
    assert dice(*tensors[:2]) == dice(*arrays[:2])
    assert hd95(*tensors[:2]) == hd95(*arrays[:2])


def test_tensors_and_arrays_mix():
    source, adapted, label = triple((5, 6, 7))
    mixed = harm(torch.from_numpy(source), adapted, torch.from_numpy(label), min_area=1)
    assert mixed.ha == harm(source, adapted, label, min_area=1).ha


def test_strided_tensors_and_gradients_do_not_matter():
    source, adapted, _ = triple((6, 8))
    turned = [torch.from_numpy(mask.T.copy()).T for mask in (source, adapted)]
    assert not turned[0].is_contiguous()
    assert fragmentation(*turned, min_area=1) == fragmentation(source, adapted, min_area=1)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (torch.zeros(3, 4), "of type torch.float32; take the argmax"),
        (torch.full((3, 4), float("nan")), "with NaN in it"),
        (torch.full((3, 4), -2), "got -2 in adapted"),
        (torch.zeros(4, dtype=torch.uint8), r"of shape \(4,\)"),
        (torch.zeros(1, 1, 3, 4, dtype=torch.uint8), "without batch or channel axis"),
    ],
)
def test_tensors_that_cannot_be_used_are_refused(bad, sentence):
    with pytest.raises(BadInput, match=sentence):
        fragmentation(torch.zeros(3, 4, dtype=torch.uint8), bad)


def test_only_changed_voxels_leave_the_device(monkeypatch):
    sizes = []
    arrive = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: sizes.append(tensor.numel()) or arrive(tensor))
    source = torch.zeros(20, 64, 64, dtype=torch.uint8)
    adapted = source.clone()
    adapted[3, 10:15, 10:15] = 1
    assert harm(source, adapted, source).area == 25
    assert sizes
    assert max(sizes) == 25


def test_measuring_arrays_imports_no_torch():
    script = (
        "import sys, numpy, casewise;"
        "a = numpy.zeros((4, 4), int); casewise.harm(a, a + 1, a); casewise.hd95(a + 1, a + 1);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
