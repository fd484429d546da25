"""Freed memory stays where it was, results do not change, and one variable switches it off."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from casewise.run.local import SWITCH

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")

FREED = """
from pathlib import Path
import numpy as np
from casewise.run.local import keep_freed_memory

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024

done, before = keep_freed_memory(), resident()
block = np.ones(64 * 2**20, np.uint8)
del block
print(done, resident() - before)
"""

EPISODE = """
import hashlib, torch
from casewise.adapt.proposers.live import run_episode
from casewise.adapt.networks import PlainUNet
from casewise.adapt.objectives.tent import Tent
from casewise.run.local import keep_freed_memory

torch.set_num_threads(1)
keep_freed_memory()
torch.manual_seed(0)
network, image = PlainUNet(features=(8, 16)), torch.randn(3, 1, 64, 64)
made = run_episode(network, image, Tent(), steps=2, learning_rate=0.01, keep_parameters=True)
digest = hashlib.sha256(b"".join(mask.tobytes() for mask in made.masks))
for values in made.parameters[2].values():
    digest.update(values.tobytes())
print(digest.hexdigest())
"""


def said_by(script: str, **environment: str) -> list[str]:
    plain = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_") and key != SWITCH}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env={**plain, **environment}, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_freed_memory_stays_in_the_process() -> None:
    done, megabytes = said_by(FREED)
    assert done == "True"
    assert int(megabytes) >= 60


def test_a_variable_switches_it_off() -> None:
    done, megabytes = said_by(FREED, **{SWITCH: "0"})
    assert done == "False"
    assert int(megabytes) < 10


def test_settings_of_the_user_are_left_as_they_are() -> None:
    assert said_by(FREED, MALLOC_MMAP_MAX_="1000")[0] == "False"


@pytest.mark.slow
def test_an_episode_is_the_same_bit_for_bit() -> None:
    assert said_by(EPISODE) == said_by(EPISODE, **{SWITCH: "0"})
