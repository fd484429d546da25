"""The tests of the backbone again, with other versions of nnU-Net than that of constraints.txt (`make test-versions`).

Each version goes into a folder of its own, without its dependencies: torchvision, which newer ones pull in, cannot be
imported beside the CPU build of torch, and nothing that a prediction needs wants it. 2.2 is not among them: it does not
load under torch 2.13.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.versions]

VERSIONS = {"2.5.2": "0.3.1", "2.8.1": "0.4.4"}  # nnunetv2: dynamic-network-architectures
UNREACHABLE = ("from versions: none", "Connection", "connection", "Temporary failure in name resolution")


def install(folder: Path, *packages: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and any(words in done.stderr for words in UNREACHABLE):
        pytest.skip(f"the package index cannot be reached for {' '.join(packages)}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_the_backbone_is_the_same_with_another_nnunet(version: str, tmp_path: Path) -> None:
    install(tmp_path, f"nnunetv2=={version}", f"dynamic-network-architectures=={VERSIONS[version]}")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    asked = "import nnunetv2, importlib.metadata as m; print(nnunetv2.__path__[0], m.version('nnunetv2'))"
    seen = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
    assert seen.stdout.split() == [str(tmp_path / "nnunetv2"), version]
    contract = Path(__file__).with_name("test_nnunet_backbone.py")
    command = [sys.executable, "-m", "pytest", "-m", "not slow", str(contract)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=contract.parents[2])
    assert done.returncode == 0, done.stdout[-3000:]
