"""Clients that mean no good, and clients that make mistakes: the service goes on answering the others."""

from __future__ import annotations

import base64
import copy
import gzip
import json
import random
import socket
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from casewise.serve import server as server_module

NAME = "casewise.adapt.networks-PlainUNet"
INFER = f"/v2/models/{NAME}/infer"
IMAGE = np.random.default_rng(0).normal(size=(1, 16, 16)).astype(np.float32)
REQUEST: dict[str, Any] = {
    "id": "1",
    "parameters": {"case_id": "a", "group": "site"},
    "inputs": [{"name": "image", "shape": [1, 16, 16], "datatype": "FP32", "data": IMAGE.ravel().tolist()}],
    "outputs": [{"name": "mask", "parameters": {"binary_data": False}}],
}


def half_sent(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(b"POST /segment HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
    return connection


def test_three_hundred_half_sent_headers_block_nobody(serving: Any) -> None:
    with serving() as running, ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(half_sent(running.port))
        with running.client() as client:
            assert client.get("/v2/health/ready").status_code == 200
            assert client.post(INFER, json=REQUEST).status_code == 200


def test_a_header_that_does_not_come_is_sent_away(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEADER_S", 0.3)
    with serving() as running, half_sent(running.port) as slow:
        assert slow.recv(64).startswith(b"HTTP/1.1 408")
        deadline = time.monotonic() + 30
        while server_module._Hurried.waiting and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not server_module._Hurried.waiting


def test_a_second_request_on_the_same_connection_has_its_header_time_too(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as running, socket.create_connection(("127.0.0.1", running.port), timeout=60) as connection:
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        answered = b""
        while not answered.endswith(b'{"live":true}'):
            answered += connection.recv(1024)
        monkeypatch.setattr(server_module, "HEADER_S", 0.3)
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: ")
        assert connection.recv(1024).startswith(b"HTTP/1.1 408")


def test_a_packed_body_is_refused_in_a_sentence(service: Any) -> None:
    with service.client() as client:
        for path in (INFER, "/segment"):
            answer = client.post(path, content=gzip.compress(b"0" * 10**6), headers={"content-encoding": "gzip"})
            assert answer.status_code == 415
            assert "the body is packed (gzip); send it as it is" in answer.json()["error"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parameters": {"steps": 9}}, "parameters holds 'steps'; known are case_id, group, binary_data_output"),
        ({"priority": 3}, "priority: Extra inputs are not permitted"),
        ({"outputs": [{"name": "mask", "parameters": {"classification": 3}}]}, "outputs.mask.parameters holds"),
        ({"inputs": [{**REQUEST["inputs"][0], "parameters": {"shared_memory": "x"}}]}, "inputs.image.parameters holds"),
    ],
)
def test_a_parameter_that_nobody_reads_is_refused(service: Any, change: dict[str, Any], said: str) -> None:
    with service.client() as client:
        answer = client.post(INFER, json={**REQUEST, **change})
    assert answer.status_code == 400
    assert said in answer.json()["error"]


def test_the_first_page_and_the_docs_answer_and_load_nothing_from_elsewhere(service: Any) -> None:
    with service.client() as client:
        for path in ("/", "/docs"):
            answer = client.get(path)
            assert answer.status_code == 200
            assert INFER.replace(NAME, "{model}") in answer.text
            assert "http://" not in answer.text
            assert "https://" not in answer.text


def test_the_token_opens_every_door_but_those_of_the_probes(serving: Any) -> None:
    with serving(token="secret") as running:
        for sent in ("", "Bearer", "Bearer wrong", "Basic secret", "Bearer secre", "bearer secret"):
            right = sent.lower().split() == ["bearer", "secret"]
            with running.client(authorization=sent) as client:
                assert client.get("/v2/health/live").status_code == 200
                for path in ("/", "/docs", "/openapi.json", "/metrics", "/v2"):
                    assert client.get(path).status_code == (200 if right else 401), path
                assert client.post(INFER, json=REQUEST).status_code == (200 if right else 401)


def test_a_browser_gives_the_token_as_a_password_and_other_sites_cannot_use_that(serving: Any) -> None:
    def basic(words: str) -> str:
        return f"Basic {base64.b64encode(words.encode()).decode()}"

    with serving(token="secret") as running:
        with running.client() as client:
            refused = client.get("/")
            assert refused.status_code == 401
            assert 'Basic realm="casewise: the token is the password"' in refused.headers["www-authenticate"]
        for sent, right in (("anyone:secret", True), (":secret", True), ("secret", False), ("secret:", False),
                            ("anyone:secret ", False), ("anyone:wrong", False)):  # fmt: skip
            with running.client(authorization=basic(sent)) as client:
                assert client.get("/").status_code == (200 if right else 401), sent
                assert client.post(INFER, json=REQUEST).status_code == (200 if right else 401), sent
        with running.client(authorization="Basic no-base64!") as client:
            assert client.get("/").status_code == 401
        elsewhere = {"authorization": basic("anyone:secret"), "origin": "http://127.0.0.1:1"}  # another page here
        with running.client(**elsewhere) as client:
            assert client.post(INFER, json=REQUEST).status_code == 403


def changed(request: Any, rng: random.Random) -> Any:
    """A request with one thing in it replaced, removed or doubled, at any depth."""
    plain = copy.deepcopy(request)
    at: Any = plain
    for _ in range(rng.randrange(4)):
        inner = list(at.values()) if isinstance(at, dict) else list(at)
        inside = [item for item in inner if isinstance(item, dict | list) and item]
        if not inside:
            break
        at = rng.choice(inside)
    key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
    strange = [None, -1, 0, 10**30, 1.5, "", "x" * 300, [], {}, [[[]]], True, "NaN", {"a": {"b": []}}, [1] * 50]
    what = rng.randrange(3)
    if what == 0:
        at[key] = rng.choice(strange)
    elif what == 1:
        del at[key]
    elif isinstance(at, list):
        at.append(at[key])
    else:
        at[f"{key}_more"] = at[key]
    return plain


def test_a_fuzzer_that_reaches_infer_finds_no_bug(service: Any) -> None:
    rng, statuses = random.Random(5), []
    with service.client() as client:
        for _ in range(120):
            asked = changed(REQUEST, rng)
            answer = client.post(INFER, content=json.dumps(asked), headers={"content-type": "application/json"})
            statuses.append(answer.status_code)
            assert answer.status_code in (200, 400, 422), (answer.status_code, answer.text[:300], str(asked)[:300])
            assert "error" in answer.json() or answer.status_code == 200
        assert client.post(INFER, json=REQUEST).status_code == 200
    assert statuses.count(200) >= 5
    assert statuses.count(400) >= 20
