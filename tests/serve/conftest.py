"""A real service on 127.0.0.1, around a small U-Net with fixed random weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import uvicorn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones.checkpoints import write_safetensors
from casewise.adapt.model import Model
from casewise.core.records import Policy
from casewise.deployment import Deployment
from casewise.judge.monitors.watch import Watching
from casewise.serve.access import ServiceSettings
from casewise.serve.server import server

HOW = Adaptation(objective="tent", learning_rate=0.05, steps=1, min_area=4)
FIXED = Policy("fixed-k", "fixed-k", {"step": 1}, 1)
SOURCE_ONLY = Policy("m0", "m0", {}, 0)


@dataclass(frozen=True)
class Running:
    """A service that listens."""

    uvicorn: uvicorn.Server
    deployment: Deployment
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, trust_env=False)


@pytest.fixture(scope="session")
def volumes_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """One channel, slices as a batch."""
    from casewise.adapt.networks import PlainUNet

    torch.set_num_threads(1)
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("w") / "PlainUNet.safetensors"
    write_safetensors(path, PlainUNet().state_dict())
    return Model("casewise.adapt.networks:PlainUNet", weights=path)


@pytest.fixture(scope="session")
def pictures_model() -> Model:
    """Three channels."""
    return Model("worlds.streets:street_network")


@contextmanager
def listening(deployment: Deployment, **options: Any) -> Iterator[Running]:
    """A service in a thread of its own, on a free port."""
    settings = ServiceSettings(**{"port": 0, **options})
    service = server(deployment, settings)
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    while not service.started:
        assert thread.is_alive(), "the service did not start"
        time.sleep(0.01)
    try:
        yield Running(service, deployment, service.servers[0].sockets[0].getsockname()[1])
    finally:
        service.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


Serving = Callable[..., Any]


@pytest.fixture(scope="session")
def serving(volumes_model: Model) -> Serving:
    """``with serving(policy=..., places=..., ...) as running:`` a service with settings of its own."""

    def make(policy: Policy = FIXED, model: Model = volumes_model, **options: Any) -> Any:
        own = {key: options.pop(key) for key in ("contract", "watch", "max_ram", "certificate") if key in options}
        if "watch" in own:
            own["watch"] = Watching(own["watch"])
        deployment = Deployment(model, policy, {"": HOW}, **own)
        deployment.check()
        return listening(deployment, **options)

    return make


@pytest.fixture(scope="session")
def service(serving: Serving) -> Iterator[Running]:
    """The usual service, shared by tests that leave it as it was."""
    with serving() as running:
        yield running


def scan(seed: int) -> np.ndarray:
    """(channel, slices, rows, columns) of float32."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(1, 2, 16, 16)).cumsum(2).cumsum(3).astype(np.float32)


@pytest.fixture(scope="session")
def scans() -> list[np.ndarray]:
    """Six small scans."""
    return [scan(seed) for seed in range(6)]
