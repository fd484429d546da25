"""``casewise serve`` as a process: the lines it prints, the answer it gives, and a SIGTERM that finishes the work."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner

from casewise.cli import app
from casewise.core.errors import BadInput

PHANTOM = "casewise.adapt.networks:phantom_cardiac"


def test_no_policy_is_no_service() -> None:
    result = CliRunner().invoke(app, ["serve", "-m", PHANTOM])
    assert isinstance(result.exception, BadInput)
    assert "there is no policy" in str(result.exception)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.slow
def test_a_sigterm_finishes_accepted_requests_and_exits_with_0(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "casewise", "serve", "-m", PHANTOM, "--policy", "m0", "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CASEWISE_TOKEN": "secret"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(1200):
            try:
                httpx.get(f"{url}/health/ready", trust_env=False).raise_for_status()
                break
            except httpx.TransportError:
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.1)
        assert httpx.get(f"{url}/model", trust_env=False).status_code == 401
        image = np.arange(256, dtype=np.float32).reshape(16, 16, 1) % 7
        body = nibabel.Nifti1Image(image, np.eye(4)).to_bytes()
        head = "POST /segment HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:-1])
            key = {"Authorization": "Bearer secret"}
            while httpx.get(f"{url}/health/ready", headers=key, trust_env=False).json()["taken"] != 1:
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            connection.sendall(body[-1:])
            assert connection.recv(64).startswith(b"HTTP/1.1 200")
        assert process.wait(60) == 0
        assert "secret" not in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
