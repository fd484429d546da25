"""Load a real service with a bounded client: every answer compared, memory and latency watched.

``python benchmarks/load_service.py --requests 1000`` starts ``casewise serve`` in a process of its own with random
weights, sends small images from a few threads and prints one JSON line. It exits with 1 if any answer was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import nibabel
import numpy as np
import torch

FACTORY = "casewise.adapt.networks:PlainUNet"
WARM = 100  # requests before memory is read for the first time


def main() -> int:
    """Run the load and print what came of it."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--requests", type=int, default=1000)
    arguments.add_argument("--clients", type=int, default=4)
    arguments.add_argument("--side", type=int, default=16)
    asked = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as (process, url):
        found = load(url, process.pid, asked.requests, asked.clients, asked.side)
        process.send_signal(signal.SIGTERM)
        found["exit_code"] = process.wait(60)
    print(json.dumps(found))
    return int(found["wrong"] > 0 or found["exit_code"] != 0)


@contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """``casewise serve`` on a free port."""
    from casewise.adapt.adaptation import Adaptation
    from casewise.adapt.backbones.checkpoints import write_safetensors
    from casewise.adapt.networks import PlainUNet
    from casewise.core.records import Policy
    from casewise.judge.policy import write_policy

    torch.manual_seed(3)
    write_safetensors(folder / "w.safetensors", PlainUNet().state_dict())
    tent = Adaptation(objective="tent", steps=1, learning_rate=0.05)
    write_policy(folder / "policy.json", Policy("fixed-k", "fixed-k", {"step": 1}, 1, adaptation=tent.as_plain()))
    port = free_port()
    command = [
        sys.executable, "-m", "casewise", "serve", "-m", FACTORY, "--weights", str(folder / "w.safetensors"),
        "--policy", str(folder / "policy.json"), "-device", "cpu", "--port", str(port), "--set", "places=16",
        "--set", "timeout=0",
    ]  # fmt: skip
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(process, url)
        yield process, url
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_until_ready(process: subprocess.Popen[bytes], url: str, patience_s: float = 180.0) -> None:
    """Until /health/ready answers 200."""
    for _ in range(int(patience_s / 0.1)):
        if process.poll() is not None:
            raise RuntimeError(f"the service ended with code {process.returncode}")
        try:
            if httpx.get(f"{url}/health/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise RuntimeError("the service was not ready in time")


def load(url: str, pid: int, requests: int, clients: int, side: int) -> dict[str, Any]:
    """Send ``requests`` images, ten different ones in turn, and compare each answer with the first of its kind."""
    rng = np.random.default_rng(0)
    images = [rng.normal(size=(1, side, side)).cumsum(1).cumsum(2).astype("<f4") for _ in range(10)]
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as client:
        path = "/segment"
        before = fingerprint(client)
        truths = [client.post(path, **message(image)).content for image in images]
        masks = [mask_bytes(truth) for truth in truths]
        seconds, wrong, resident = [], 0, [0, 0]
        with ThreadPoolExecutor(clients) as threads:
            for start in range(0, requests, WARM):
                numbers = range(start, min(start + WARM, requests))
                for spent, right in threads.map(lambda i: one(client, path, images[i % 10], masks[i % 10]), numbers):
                    seconds.append(spent)
                    wrong += not right
                resident[min(start, 1)] = resident_kib(pid)
        return {
            "requests": requests,
            "clients": clients,
            "different_answers": len(set(masks)),
            "wrong": wrong,
            "weights_unchanged": fingerprint(client) == before,
            "p50_ms": round(1000 * float(np.percentile(seconds, 50)), 1),
            "p95_ms": round(1000 * float(np.percentile(seconds, 95)), 1),
            "resident_kib_after_warm_up": resident[0],
            "resident_kib_at_end": resident[1] or resident[0],
        }


def message(image: Any) -> dict[str, Any]:
    """A NIfTI file of one slice."""
    return {"content": nibabel.Nifti1Image(image.T, np.eye(4)).to_bytes()}


def mask_bytes(content: bytes) -> bytes:
    """The voxels of the mask; its header may hold times."""
    return np.asarray(nibabel.Nifti1Image.from_bytes(content).dataobj).tobytes()


def one(client: httpx.Client, path: str, image: Any, mask: bytes) -> tuple[float, bool]:
    """Seconds of one request, and whether its answer is the known one."""
    began = time.perf_counter()
    answer = client.post(path, **message(image))
    spent = time.perf_counter() - began
    return spent, answer.status_code == 200 and mask_bytes(answer.content) == mask


def fingerprint(client: httpx.Client) -> str:
    """sha256 of the weights as the service sees them now."""
    return str(client.get("/model").json()["fingerprint"])


def resident_kib(pid: int) -> int:
    """Memory of a process, from /proc."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


if __name__ == "__main__":
    sys.exit(main())
